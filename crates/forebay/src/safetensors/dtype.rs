//! The dtypes of the format: their names, their widths, their order.

use std::fmt;
use std::str::FromStr;

use forebay_io::{Error, ErrorKind};
use serde::Deserialize;

macro_rules! dtypes {
    ($($(#[$doc:meta])+ $variant:ident = $name:literal, $bits:literal;)+) => {
        /// The type of a tensor's elements. Those of wider alignment are greater: the order of
        /// tensors in a file is by descending dtype, so that each begins at a multiple of its width.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
        pub enum Dtype {
            $($(#[$doc])+ #[serde(rename = $name)] $variant,)+
        }

        impl Dtype {
            /// Every dtype, in ascending order.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Its name in a file.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Bits of one element.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)+ }
            }
        }
    };
}

dtypes! {
    /// True or false, a byte.
    Bool = "BOOL", 8;
    /// Four bits of floating point, E2M1 (OCP microscaling formats 1.0).
    F4 = "F4", 4;
    /// Six bits of floating point, E2M3 (OCP microscaling formats 1.0).
    F6E2M3 = "F6_E2M3", 6;
    /// Six bits of floating point, E3M2 (OCP microscaling formats 1.0).
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// Eight bits of floating point, E5M2 (arXiv 2209.05433).
    F8E5M2 = "F8_E5M2", 8;
    /// Eight bits of floating point, E4M3 (arXiv 2209.05433).
    F8E4M3 = "F8_E4M3", 8;
    /// Eight bits of exponent (OCP microscaling formats 1.0).
    F8E8M0 = "F8_E8M0", 8;
    /// Eight bits of floating point, E4M3 without infinities and negative zero (arXiv 2206.02915).
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// Eight bits of floating point, E5M2 without infinities and negative zero (arXiv 2206.02915).
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed, two bytes.
    I16 = "I16", 16;
    /// Unsigned, two bytes.
    U16 = "U16", 16;
    /// Half precision.
    F16 = "F16", 16;
    /// The upper half of single precision.
    Bf16 = "BF16", 16;
    /// Signed, four bytes.
    I32 = "I32", 32;
    /// Unsigned, four bytes.
    U32 = "U32", 32;
    /// Single precision.
    F32 = "F32", 32;
    /// Complex of two single-precision parts.
    C64 = "C64", 64;
    /// Double precision.
    F64 = "F64", 64;
    /// Signed, eight bytes.
    I64 = "I64", 64;
    /// Unsigned, eight bytes.
    U64 = "U64", 64;
}

impl Dtype {
    /// What the address of a tensor is to be a multiple of, in bytes.
    pub fn alignment(self) -> u64 {
        (self.bits() / 8).max(1)
    }

    /// Bytes of a tensor of this shape.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] where that is no whole number of bytes, or more than can be
    /// counted.
    pub fn bytes_of(self, shape: &[u64]) -> Result<u64, Error> {
        let elements = shape.iter().try_fold(1_u64, |count, &extent| count.checked_mul(extent));
        let bits = elements.and_then(|elements| elements.checked_mul(self.bits()));
        let invalid = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        match bits {
            None => invalid(format!("the bytes of {self} of shape {shape:?} can't be counted")),
            Some(bits) if bits % 8 != 0 => {
                invalid(format!("{self} of shape {shape:?} isn't a whole number of bytes"))
            }
            Some(bits) => Ok(bits / 8),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("dtype {name:?} isn't one of the format"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_widths_and_order_are_those_of_the_reference() {
        for pair in Dtype::ALL.windows(2) {
            let [left, right] = [pair[0], pair[1]].map(reference);
            assert!(pair[0] < pair[1] && left < right, "{} {}", pair[0], pair[1]);
        }
        for &dtype in Dtype::ALL {
            assert_eq!(dtype.bits(), reference(dtype).bitsize() as u64);
            assert_eq!(dtype.name().parse::<Dtype>().unwrap(), dtype);
        }
        assert_eq!("f32".parse::<Dtype>().unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    fn reference(dtype: Dtype) -> safetensors::Dtype {
        serde_json::from_value(dtype.name().into()).unwrap()
    }

    #[test]
    fn bytes_are_counted_or_refused() {
        assert_eq!(Dtype::F4.bytes_of(&[3, 2]).unwrap(), 3);
        assert_eq!(Dtype::F6E2M3.bytes_of(&[4]).unwrap(), 3);
        assert_eq!(Dtype::Bf16.bytes_of(&[]).unwrap(), 2);
        assert_eq!(Dtype::I64.bytes_of(&[0, 5]).unwrap(), 0);
        assert!(Dtype::F4.bytes_of(&[3]).is_err());
        assert!(Dtype::U8.bytes_of(&[1 << 40, 1 << 40]).is_err());
        assert!(Dtype::F64.bytes_of(&[1 << 60]).is_err());
    }
}
