//! Elements of arrays: what NumPy calls them, and which dtype of safetensors they are.

use forebay_io::{Error, ErrorKind, Result};

use super::literal::Literal;
use crate::safetensors::Dtype;

/// Dtypes that NumPy has, by the letter and the bytes of its name.
const NATIVE: [(Dtype, &str); 13] = [
    (Dtype::Bool, "b1"),
    (Dtype::U8, "u1"),
    (Dtype::I8, "i1"),
    (Dtype::U16, "u2"),
    (Dtype::I16, "i2"),
    (Dtype::F16, "f2"),
    (Dtype::U32, "u4"),
    (Dtype::I32, "i4"),
    (Dtype::F32, "f4"),
    (Dtype::U64, "u8"),
    (Dtype::I64, "i8"),
    (Dtype::F64, "f8"),
    (Dtype::C64, "c8"),
];
/// Dtypes that NumPy doesn't have, by the name that `ml_dtypes` gives them.
const NAMED: [(Dtype, &str, &str); 6] = [
    (Dtype::Bf16, "bfloat16", "u2"),
    (Dtype::F8E4M3, "float8_e4m3fn", "u1"),
    (Dtype::F8E5M2, "float8_e5m2", "u1"),
    (Dtype::F8E8M0, "float8_e8m0fnu", "u1"),
    (Dtype::F8E4M3Fnuz, "float8_e4m3fnuz", "u1"),
    (Dtype::F8E5M2Fnuz, "float8_e5m2fnuz", "u1"),
];

/// Type and byte order of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// What they are.
    pub dtype: Dtype,
    /// The most significant byte comes first. Elements of one byte have no order.
    pub big_endian: bool,
}

impl Element {
    /// All dtypes that can be written.
    pub const DTYPES: [Dtype; NATIVE.len() + NAMED.len()] = {
        let mut dtypes = [Dtype::Bool; NATIVE.len() + NAMED.len()];
        let mut index = 0;
        while index < NATIVE.len() {
            dtypes[index] = NATIVE[index].0;
            index += 1;
        }
        while index < NATIVE.len() + NAMED.len() {
            dtypes[index] = NAMED[index - NATIVE.len()].0;
            index += 1;
        }
        dtypes
    };

    /// The element of a dtype, the least significant byte first.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] for a dtype of less than a byte.
    pub fn of(dtype: Dtype) -> Result<Self> {
        if Self::DTYPES.contains(&dtype) {
            return Ok(Self { dtype, big_endian: false });
        }
        let text = format!("{} has no place in a .npy file", dtype.name());
        Err(Error::new(ErrorKind::Unsupported, text).hint("keep it in safetensors"))
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        self.dtype.bits() / 8
    }

    /// Bytes that are to be turned around together, of a complex number its parts; 1 for none.
    pub fn swapped_bytes(self) -> usize {
        match self.dtype {
            _ if !self.big_endian => 1,
            Dtype::C64 => 4,
            dtype => usize::try_from(dtype.bits() / 8).unwrap_or(1),
        }
    }

    /// The `descr` of a header.
    pub(super) fn descr(self) -> String {
        let named = NAMED.iter().find(|(dtype, _, _)| *dtype == self.dtype);
        if let Some((_, name, field)) = named {
            return format!("[('{name}', '{}{field}')]", self.order());
        }
        let native = NATIVE.iter().find(|(dtype, _)| *dtype == self.dtype);
        format!("'{}{}'", self.order(), native.map_or("", |(_, name)| name))
    }

    fn order(self) -> char {
        match (self.bytes(), self.big_endian) {
            (1, _) => '|',
            (_, true) => '>',
            (_, false) => '<',
        }
    }

    /// Reads the `descr` of a header.
    pub(super) fn parse(descr: &Literal) -> Result<Self> {
        match descr {
            Literal::Text(code) => Self::native(code),
            Literal::List(fields) => Self::named(fields),
            _ => Err(unknown("a dtype that is neither text nor a structure", NO_HINT)),
        }
    }

    fn native(code: &str) -> Result<Self> {
        let (big_endian, name) = split(code);
        let found = NATIVE.iter().find(|(_, native)| *native == name);
        let dtype = found.map(|(dtype, _)| *dtype).ok_or_else(|| match name.chars().next() {
            Some('O') => unknown("Python objects, which are never unpickled", NO_HINT),
            Some('V') => unknown(
                &format!("{code:?}, which doesn't say what its bytes are"),
                "bfloat16 is read as [('bfloat16', '<u2')]: view the array so before saving it",
            ),
            _ => unknown(&format!("{code:?}, which is no dtype of a tensor"), NO_HINT),
        })?;
        Ok(Self { dtype, big_endian })
    }

    /// A structure of one field that is named by its dtype.
    fn named(fields: &[Literal]) -> Result<Self> {
        let structure = || unknown("a structure, which is no dtype of a tensor", NO_HINT);
        let [Literal::Tuple(field)] = fields else { return Err(structure()) };
        let [Literal::Text(name), Literal::Text(code)] = &field[..] else {
            return Err(structure());
        };
        let (big_endian, unsigned) = split(code);
        let found = NAMED.iter().find(|(_, named, field)| named == name && *field == unsigned);
        let dtype = found.map(|(dtype, _, _)| *dtype).ok_or_else(structure)?;
        Ok(Self { dtype, big_endian })
    }
}

const NO_HINT: &str = "";

/// Whether the most significant byte comes first, and the rest of a code such as `<f4`.
fn split(code: &str) -> (bool, &str) {
    match code.strip_prefix('>') {
        // One byte is the same in any order.
        Some(name) => (!name.ends_with('1'), name),
        None => (false, code.strip_prefix(['<', '|', '=']).unwrap_or(code)),
    }
}

fn unknown(what: &str, hint: &str) -> Error {
    let error = Error::new(ErrorKind::Unsupported, format!("the array has {what}:"));
    if hint.is_empty() { error } else { error.hint(hint) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Element> {
        Element::parse(&Literal::parse(text).unwrap())
    }

    #[test]
    fn each_dtype_has_a_descr_that_leads_back_to_it() {
        for dtype in Element::DTYPES {
            let element = Element::of(dtype).unwrap();
            assert_eq!(parse(&element.descr()).unwrap(), element);
        }
        assert_eq!(Element::of(Dtype::Bf16).unwrap().descr(), "[('bfloat16', '<u2')]");
        assert_eq!(Element::of(Dtype::U8).unwrap().descr(), "'|u1'");
    }

    #[test]
    fn the_order_of_bytes_is_seen() {
        assert!(parse("'>f4'").unwrap().big_endian);
        assert!(!parse("'>u1'").unwrap().big_endian);
        assert!(!parse("'=f4'").unwrap().big_endian);
        assert!(parse("[('bfloat16', '>u2')]").unwrap().big_endian);
        assert_eq!(parse("'>c8'").unwrap().swapped_bytes(), 4);
        assert_eq!(parse("'>f8'").unwrap().swapped_bytes(), 8);
    }

    #[test]
    fn what_is_no_tensor_is_refused() {
        for text in [
            "'|O'",
            "'<U4'",
            "'|S3'",
            "'<M8[ns]'",
            "'<c16'",
            "'<f16'",
            "'|V2'",
            "''",
            "'<'",
            "[('x', '<f4')]",
            "[('bfloat16', '<u4')]",
            "[('bfloat16', '<u2', (3,))]",
            "[('bfloat16', '<u2'), ('b', '<u2')]",
            "[]",
            "('<f4', (2,))",
            "True",
        ] {
            assert_eq!(parse(text).unwrap_err().kind(), ErrorKind::Unsupported, "{text}");
        }
    }
}
