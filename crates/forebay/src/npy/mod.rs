//! The `.npy` format of NumPy: headers read and written, and names of tensors as names of files.
//!
//! Versions 1 to 3 are read; the lowest that holds the header is written. The header is a literal of
//! Python, read here without Python (`literal`), so nothing in it is ever run. After
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.
//!
//! NumPy has no dtype for bfloat16 and the floats of 8 bits. They are written as a structure of one
//! unsigned field that has the dtype's name, `[('bfloat16', '<u2')]`: NumPy reads it without any
//! other package, `.view(ml_dtypes.bfloat16)` makes it what it is, and it is told apart when it is
//! read here. A dtype of less than a byte isn't written.
//!
//! # Invariants
//!
//! - Nothing is allocated by a number in a file before that is checked against the file's length.
//! - What is accepted says where exactly the file's bytes are: header and array are all of it.
//! - [`file_name`] never gives a name that leads out of a directory, and [`tensor_name`] undoes it.
//!
//! Moving the bytes is in [`convert`](crate::convert).

mod element;
mod literal;
mod name;

use std::fmt;
use std::io::Read;
use std::path::Path;

use forebay_io::{Error, ErrorKind, Result};

use crate::safetensors::{Dtype, open_file};
pub use element::Element;
use literal::Literal;
pub use name::{file_name, tensor_name};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Magic, two bytes of version, and the shorter field of the header's length.
const PREFIX_BYTES_MIN: usize = 10;
/// NumPy pads so that the array begins at a multiple of this (`ARRAY_ALIGN`).
const ALIGNMENT: usize = 64;
/// Longest header that is read. A structure of thousands of fields, which isn't a tensor, has more.
const HEADER_BYTES_MAX: usize = 1 << 20;
/// Most dimensions of a NumPy array (`NPY_MAXDIMS` of NumPy 2).
const DIMENSIONS_MAX: usize = 64;

/// What a `.npy` file says of its array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type and byte order of the elements.
    pub element: Element,
    /// The first index runs fastest.
    pub fortran_order: bool,
    /// Extents of the dimensions.
    pub shape: Vec<u64>,
    /// Where the array begins, in bytes from the beginning of the file.
    pub data_start: u64,
}

impl Header {
    /// Reads the header of a file, and holds it against the file's length.
    ///
    /// # Errors
    ///
    /// What opening or reading met; [`ErrorKind::ShortFile`] with both sizes for a file that ends
    /// before its array does; [`ErrorKind::Unsupported`] for an array that isn't a tensor's;
    /// [`ErrorKind::InvalidInput`] for what isn't a `.npy` file.
    pub fn read(path: &Path) -> Result<Self> {
        let at = |error: Error| error.path(path);
        let failed = |error| Error::from_io(error, "cannot read").path(path);
        let file = open_file(path).map_err(at)?;
        let facts = file.metadata().map_err(failed)?;
        let mut start = Vec::new();
        let most = MAGIC.len() + 6 + HEADER_BYTES_MAX;
        let mut file = file.take(most as u64);
        // Most headers are short; one that isn't takes a second read.
        file.by_ref().take(4096).read_to_end(&mut start).map_err(failed)?;
        if prefix(&start).is_ok_and(|(first, length)| first + length > start.len()) {
            file.read_to_end(&mut start).map_err(failed)?;
        }
        Self::parse(&start, facts.len()).map_err(at)
    }

    /// Reads a header from the first bytes of a file of `file_bytes`.
    ///
    /// # Errors
    ///
    /// As for [`Self::read`].
    ///
    /// # Examples
    ///
    /// ```
    /// use forebay::npy::Header;
    /// use forebay::safetensors::Dtype;
    ///
    /// let bytes = Header::to_bytes(Dtype::F32, &[2, 3])?;
    /// let header = Header::parse(&bytes, bytes.len() as u64 + 24)?;
    /// assert_eq!(header.shape, [2, 3]);
    /// assert_eq!(header.array_bytes(), 24);
    /// # Ok::<(), forebay_io::Error>(())
    /// ```
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self> {
        let (first, length) = prefix(bytes)?;
        let Some(text) = bytes.get(first..first + length) else {
            let text = format!("the header has {length} bytes, the file fewer:");
            return Err(Error::new(ErrorKind::ShortFile, text));
        };
        let text = match bytes[6] {
            3 => std::str::from_utf8(text)
                .map_err(|_| invalid("the header is not UTF-8"))?
                .to_owned(),
            // Latin-1, of which each byte is the code point.
            _ => text.iter().copied().map(char::from).collect(),
        };
        let (element, fortran_order, shape) = fields(&text)?;
        let data_start = (first + length) as u64;
        let header = Self { element, fortran_order, shape, data_start };
        let count = header.shape.iter().try_fold(1_u64, |count, extent| count.checked_mul(*extent));
        let array = count.and_then(|count| count.checked_mul(header.element.bytes()));
        let end = array.and_then(|array| array.checked_add(data_start));
        let Some(end) = end else {
            let text = format!("shape {:?} has more bytes than a file can", header.shape);
            return Err(invalid(text));
        };
        if end > file_bytes {
            let (wanted, found) = (end - data_start, file_bytes.saturating_sub(data_start));
            let text = format!("the array has {wanted} bytes, the file {found} after its header:");
            return Err(Error::new(ErrorKind::ShortFile, text).bytes(wanted, found));
        }
        if end < file_bytes {
            let text = format!("{} bytes follow the array", file_bytes - end);
            return Err(invalid(text).hint("a file of several arrays is not read"));
        }
        Ok(header)
    }

    /// The beginning of a file with an array in C order, up to its first element.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] for a dtype that NumPy can't be given, or too many dimensions.
    pub fn to_bytes(dtype: Dtype, shape: &[u64]) -> Result<Vec<u8>> {
        let element = Element::of(dtype)?;
        if shape.len() > DIMENSIONS_MAX {
            let text = format!("{} dimensions, and NumPy has {DIMENSIONS_MAX}", shape.len());
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let extents: Vec<String> = shape.iter().map(u64::to_string).collect();
        let extents = match &extents[..] {
            [one] => format!("({one},)"),
            all => format!("({})", all.join(", ")),
        };
        let descr = element.descr();
        let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {extents}, }}");
        // 64 extents of 20 digits stay far below what two bytes of length can say.
        let end = (PREFIX_BYTES_MIN + text.len() + 1).next_multiple_of(ALIGNMENT);
        let length = u16::try_from(end - PREFIX_BYTES_MIN)
            .map_err(|_| invalid("the header is longer than its version allows"))?;
        let mut bytes = Vec::with_capacity(end);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&[1, 0]);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
        bytes.resize(end - 1, b' ');
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// The bytes of the array.
    pub fn array_bytes(&self) -> u64 {
        // The product was checked when the header was read.
        self.shape.iter().product::<u64>() * self.element.bytes()
    }
}

/// Where the header's text begins, and its length, from the first bytes of a file.
fn prefix(bytes: &[u8]) -> Result<(usize, usize)> {
    if bytes.len() < PREFIX_BYTES_MIN || !bytes.starts_with(MAGIC) {
        return Err(invalid("this is not a .npy file, by its first bytes"));
    }
    let (first, length) = match (bytes[6], &bytes[8..]) {
        (1, [low, high, ..]) => (10, usize::from(u16::from_le_bytes([*low, *high]))),
        (2 | 3, [a, b, c, d, ..]) => (12, u32::from_le_bytes([*a, *b, *c, *d]) as usize),
        (version, _) => {
            let text = format!("version {version} of .npy is not known:");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
    };
    if length > HEADER_BYTES_MAX {
        let text = format!("a header of {length} bytes, of which {HEADER_BYTES_MAX} are read");
        return Err(invalid(text));
    }
    Ok((first, length))
}

/// The three entries of the header, and no others.
fn fields(text: &str) -> Result<(Element, bool, Vec<u64>)> {
    let Literal::Dict(entries) = Literal::parse(text)? else {
        return Err(invalid("the header is no dictionary"));
    };
    let (mut element, mut fortran, mut shape) = (None, None, None);
    for (key, value) in entries {
        let doubled = match (key.as_str(), value) {
            ("descr", value) => element.replace(Element::parse(&value)?).is_some(),
            ("fortran_order", Literal::Bool(value)) => fortran.replace(value).is_some(),
            ("shape", Literal::Tuple(extents)) => shape.replace(extents_of(extents)?).is_some(),
            (key, _) => return Err(invalid(format!("the header's {key:?} can't be read"))),
        };
        if doubled {
            return Err(invalid(format!("the header has {key:?} twice")));
        }
    }
    match (element, fortran, shape) {
        (Some(element), Some(fortran), Some(shape)) => Ok((element, fortran, shape)),
        _ => Err(invalid("the header lacks descr, fortran_order or shape")),
    }
}

fn extents_of(extents: Vec<Literal>) -> Result<Vec<u64>> {
    if extents.len() > DIMENSIONS_MAX {
        return Err(invalid(format!("{} dimensions", extents.len())));
    }
    let extents = extents.into_iter().map(|extent| match extent {
        Literal::Integer(extent) => Ok(extent),
        _ => Err(invalid("an extent of the shape is no number")),
    });
    extents.collect()
}

/// What isn't as it should be; the name of the file comes behind it.
fn invalid(text: impl fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{text}:"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A file of version 1 with a header as given, and no padding.
    fn file(header: &str) -> Vec<u8> {
        let length = u16::try_from(header.len()).unwrap();
        [&MAGIC[..], &[1, 0], &length.to_le_bytes(), header.as_bytes()].concat()
    }

    fn read(header: &str, array_bytes: u64) -> Result<Header> {
        let bytes = file(header);
        Header::parse(&bytes, bytes.len() as u64 + array_bytes)
    }

    #[test]
    fn what_numpy_writes_is_read() {
        for (header, array_bytes, shape, fortran) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (), }   \n", 4, &[][..], false),
            ("{'descr': '|b1', 'fortran_order': True, 'shape': (3,), }\n", 3, &[3], true),
            ("{'descr': '>i8', 'fortran_order': False, 'shape': (0, 5), }\n", 0, &[0, 5], false),
            // Python 2 wrote the L of its long numbers.
            ("{'shape': (2L, 3L), 'fortran_order': False, 'descr': \"<f2\"}", 12, &[2, 3], false),
        ] {
            let found = read(header, array_bytes).unwrap();
            assert_eq!((&found.shape[..], found.fortran_order), (shape, fortran), "{header}");
            assert_eq!(found.array_bytes(), array_bytes, "{header}");
        }
    }

    #[test]
    fn later_versions_are_read() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n";
        for version in [2, 3] {
            let length = u32::try_from(header.len()).unwrap().to_le_bytes();
            let bytes = [&MAGIC[..], &[version, 0], &length, header.as_bytes()].concat();
            let found = Header::parse(&bytes, bytes.len() as u64 + 4).unwrap();
            assert_eq!(found.data_start, bytes.len() as u64);
        }
        let bytes = [&MAGIC[..], &[4, 0], &[0; 8]].concat();
        let error = Header::parse(&bytes, 100).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn what_is_no_header_is_refused_with_its_reason() {
        for (header, words) in [
            ("{'descr': '<f4', 'shape': (1,)}", "lacks"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': 1}", "shape"),
            ("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "fortran_order"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': ('a',)}", "extent"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "header"),
            ("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}", "twice"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': 1}", "\"x\""),
            ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "objects"),
            ("exec('x')", "header"),
            ("{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", "more"),
        ] {
            let error = read(header, 8).unwrap_err().to_string();
            assert!(error.contains(words), "{words} in {error}");
        }
    }

    #[test]
    fn a_file_is_exactly_its_header_and_array() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }\n";
        let error = read(header, 11).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ShortFile);
        assert_eq!((error.wanted_bytes(), error.done_bytes()), (Some(12), Some(11)));
        assert!(read(header, 13).unwrap_err().to_string().contains("1 bytes follow"));
        assert!(read(header, 12).is_ok());
    }

    #[test]
    fn a_long_header_is_read_in_a_second_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.npy");
        let padding = " ".repeat(20_000);
        let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': (), {padding}}}\n");
        let mut bytes = file(&text);
        bytes.extend_from_slice(&[0; 4]);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(Header::read(&path).unwrap().data_start, bytes.len() as u64 - 4);
        std::fs::write(&path, &bytes[..9000]).unwrap();
        assert_eq!(Header::read(&path).unwrap_err().kind(), ErrorKind::ShortFile);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            dtype in 0..Element::DTYPES.len(), shape in prop::collection::vec(0_u64..1000, 0..5),
        ) {
            let dtype = Element::DTYPES[dtype];
            let bytes = Header::to_bytes(dtype, &shape).unwrap();
            prop_assert_eq!(bytes.len() % ALIGNMENT, 0);
            let array = shape.iter().product::<u64>() * Element::of(dtype).unwrap().bytes();
            let header = Header::parse(&bytes, bytes.len() as u64 + array).unwrap();
            prop_assert_eq!(header.element.dtype, dtype);
            prop_assert_eq!(&header.shape, &shape);
            prop_assert!(!header.fortran_order);
            prop_assert_eq!(header.data_start, bytes.len() as u64);
        }

        #[test]
        fn any_bytes_are_read_or_refused(text in "[ -~\\n]{0,80}", more in 0_u64..100) {
            let bytes = file(&text);
            let file_bytes = bytes.len() as u64 + more;
            if let Ok(header) = Header::parse(&bytes, file_bytes) {
                prop_assert_eq!(header.data_start + header.array_bytes(), file_bytes);
            }
        }
    }
}
