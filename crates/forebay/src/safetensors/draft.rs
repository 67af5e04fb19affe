//! Headers to be written: which tensor goes where, and the bytes that say so.
//!
//! # Invariants
//!
//! - The length of a header is known before any checksum is: those have a fixed number of digits.
//! - The data section begins at a multiple of 4096, behind at least eight spaces; tensors are in the
//!   reference's order, widest dtype first, so that each begins at a multiple of its own width.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use forebay_io::{Error, ErrorKind, Result};
use serde_json::json;

use super::Dtype;
use super::checksum::{DIGITS, digits};
use super::header::{
    CHECKSUM_KEY, CHECKSUM_PREFIX, DATA_ALIGNMENT, HEADER_BYTES_MAX, LENGTH_BYTES, METADATA_NAME,
    PADDING_MIN, TensorInfo, header_checksum,
};

/// What is to be said of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorSpec<'a> {
    /// Its name.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its extents.
    pub shape: &'a [u64],
}

/// A header that lacks only the checksums. See the [module documentation](self).
#[derive(Clone, Debug)]
pub struct Draft {
    tensors: Vec<TensorInfo>,
    order: Vec<usize>,
    metadata: Option<BTreeMap<String, String>>,
    has_checksums: bool,
    data_start: u64,
}

impl Draft {
    /// Places tensors in a file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] for a name that is there twice or is the metadata's, a shape
    /// whose bytes can't be counted, or a header longer than the format allows.
    pub fn new(
        specs: &[TensorSpec<'_>],
        metadata: Option<&BTreeMap<String, String>>,
        has_checksums: bool,
    ) -> Result<Self> {
        let mut order: Vec<usize> = (0..specs.len()).collect();
        order.sort_by(|&left, &right| {
            let (left, right) = (&specs[left], &specs[right]);
            right.dtype.cmp(&left.dtype).then_with(|| left.name.cmp(right.name))
        });
        refuse_names(specs)?;
        let mut tensors = Vec::with_capacity(specs.len());
        let mut start = 0_u64;
        for &TensorSpec { name, dtype, shape } in order.iter().map(|&index| &specs[index]) {
            let named = |error: Error| invalid(format!("the tensor {name:?}: {error}"));
            let end = start.checked_add(dtype.bytes_of(shape).map_err(named)?);
            let end = end.filter(|end| i64::try_from(*end).is_ok());
            let end = end.ok_or_else(|| invalid("the tensors are more than a file can have"))?;
            tensors.push(TensorInfo {
                name: name.to_owned(),
                dtype,
                shape: shape.to_vec(),
                start,
                end,
            });
            start = end;
        }
        let metadata = metadata.cloned().map(|mut metadata| {
            metadata.remove(CHECKSUM_KEY);
            metadata
        });
        let mut draft = Self { tensors, order, metadata, has_checksums, data_start: 0 };
        let json = draft.json(&vec![0; draft.tensors.len()]);
        let least = (LENGTH_BYTES + json.len() + PADDING_MIN) as u64;
        draft.data_start = least.next_multiple_of(DATA_ALIGNMENT);
        let header = draft.data_start - LENGTH_BYTES as u64;
        if header > HEADER_BYTES_MAX {
            let text = format!(
                "the header of these tensors takes {header} bytes, the format allows \
                 {HEADER_BYTES_MAX}"
            );
            return Err(invalid(text).hint("save to several files"));
        }
        Ok(draft)
    }

    /// The tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// For each of them, its index in the specs.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Whether the file is to have checksums.
    pub fn has_checksums(&self) -> bool {
        self.has_checksums
    }

    /// The file offset of the data section: how long [`Self::to_bytes`] is.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.data_start + self.tensors.last().map_or(0, |tensor| tensor.end)
    }

    /// The header's bytes, from the beginning of the file to the data section. `checksums` are those
    /// of the tensors, in their order; they don't matter if the file is to have none.
    pub fn to_bytes(&self, checksums: &[u32]) -> Vec<u8> {
        let length = self.data_start - LENGTH_BYTES as u64;
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(self.json(checksums).as_bytes());
        let padding = self.data_start - bytes.len() as u64;
        bytes.extend((0..padding).map(|_| b' '));
        if self.has_checksums {
            let own = digits(header_checksum(&bytes));
            let start = LENGTH_BYTES + CHECKSUM_PREFIX.len();
            bytes[start..start + DIGITS].copy_from_slice(own.as_bytes());
        }
        bytes
    }

    /// The JSON, with zeros in place of the header's own checksum.
    fn json(&self, checksums: &[u32]) -> String {
        let mut text = String::with_capacity(self.tensors.len() * 128);
        text.push('{');
        if self.has_checksums {
            text.push_str(CHECKSUM_PREFIX.trim_start_matches('{'));
            text.push_str(&digits(0));
            for &checksum in checksums {
                text.push(' ');
                text.push_str(&digits(checksum));
            }
            text.push('"');
            for (name, value) in self.metadata.iter().flatten() {
                let _ = write!(text, ",{}:{}", json!(name), json!(value));
            }
            text.push('}');
        } else if let Some(metadata) = &self.metadata {
            let _ = write!(text, "{}:{}", json!(METADATA_NAME), json!(metadata));
        }
        for TensorInfo { name, dtype, shape, start, end } in &self.tensors {
            let comma = if text.len() > 1 { "," } else { "" };
            let fields =
                json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [start, end] });
            let _ = write!(text, "{comma}{}:{fields}", json!(name));
        }
        text.push('}');
        text
    }
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

fn refuse_names(specs: &[TensorSpec<'_>]) -> Result<()> {
    let mut names: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
    names.sort_unstable();
    if let Some([name, _]) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(invalid(format!("two tensors have the name {name:?}")));
    }
    if names.binary_search(&METADATA_NAME).is_ok() {
        return Err(invalid(format!("{METADATA_NAME} can't be the name of a tensor")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{ChecksumState, Header};
    use super::*;

    fn specs() -> [TensorSpec<'static>; 3] {
        [
            TensorSpec { name: "b \"quoted\" \u{1F600}", dtype: Dtype::U8, shape: &[3] },
            TensorSpec { name: "c", dtype: Dtype::F64, shape: &[0, 5] },
            TensorSpec { name: "", dtype: Dtype::F64, shape: &[] },
        ]
    }

    fn metadata() -> BTreeMap<String, String> {
        [("forebay.crc32c", "somebody else's"), ("a", "\"\n"), ("\u{0}", "")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    #[test]
    fn a_header_is_read_as_it_was_drafted() {
        let mut wanted = metadata();
        wanted.remove(CHECKSUM_KEY);
        for has_checksums in [true, false] {
            let draft = Draft::new(&specs(), Some(&metadata()), has_checksums).unwrap();
            let bytes = draft.to_bytes(&[1, 2, 0xffff_ffff]);
            assert_eq!((bytes.len() as u64, draft.data_start()), (4096, 4096));
            let header = Header::parse(&bytes, draft.file_bytes()).unwrap();
            assert_eq!(header.tensors(), draft.tensors());
            assert_eq!(header.metadata(), Some(&wanted));
            let names: Vec<_> = header.tensors().iter().map(|tensor| &*tensor.name).collect();
            assert_eq!(names, ["", "c", specs()[0].name]);
            assert_eq!(draft.order(), [2, 1, 0]);
            let (state, checksum) = if has_checksums {
                (ChecksumState::Ours, Some(0xffff_ffff))
            } else {
                (ChecksumState::Absent, None)
            };
            assert_eq!(header.checksums(), state);
            assert_eq!(header.checksum(specs()[0].name), checksum);
        }
    }

    #[test]
    fn the_padding_is_at_least_eight_spaces_whatever_the_length_of_the_rest() {
        let mut lengths = Vec::new();
        for length in 0..4200 {
            let name = "n".repeat(length);
            let spec = TensorSpec { name: &name, dtype: Dtype::Bool, shape: &[1] };
            let draft = Draft::new(&[spec], None, true).unwrap();
            let bytes = draft.to_bytes(&[7]);
            assert!(bytes.len().is_multiple_of(4096));
            assert!(bytes.ends_with(b"        "), "{length}");
            assert_eq!(Header::parse(&bytes, draft.file_bytes()).unwrap().checksum(&name), Some(7));
            lengths.push(bytes.len());
        }
        lengths.dedup();
        assert_eq!(lengths, [4096, 8192]);
    }

    #[test]
    fn names_that_cannot_be_told_apart_are_refused() {
        let spec = |name| TensorSpec { name, dtype: Dtype::U8, shape: &[1] };
        for names in [["a", "a"], ["a", METADATA_NAME]] {
            let error = Draft::new(&names.map(spec), None, true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{names:?}");
        }
    }

    #[test]
    fn every_changed_bit_of_a_header_is_noticed() {
        let draft = Draft::new(&specs(), Some(&metadata()), true).unwrap();
        let bytes = draft.to_bytes(&[1, 2, 3]);
        Header::parse(&bytes, draft.file_bytes()).unwrap();
        for position in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[position] ^= 1 << bit;
                let parsed = Header::parse(&changed, draft.file_bytes());
                assert!(parsed.is_err(), "bit {bit} of byte {position}");
            }
        }
    }

    #[test]
    fn a_missing_checksum_is_refused_by_the_name_of_its_tensor() {
        let draft = Draft::new(&specs(), None, true).unwrap();
        let mut bytes = draft.to_bytes(&[1, 2]);
        bytes.resize(4096, b' ');
        let error = Header::parse(&bytes, draft.file_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("no checksum of the tensor \"b \\\"quoted"), "{error}");
    }

    #[test]
    fn a_header_that_another_library_wrote_with_our_metadata_is_not_taken_for_ours() {
        let draft = Draft::new(&specs(), Some(&metadata()), true).unwrap();
        let ours = draft.to_bytes(&[1, 2, 3]);
        let text = std::str::from_utf8(&ours[8..]).unwrap().trim_end();
        let mut theirs = (text.len().next_multiple_of(8) as u64).to_le_bytes().to_vec();
        theirs.extend(text.as_bytes());
        theirs.resize(8 + text.len().next_multiple_of(8), b' ');
        let header = Header::parse(&theirs, theirs.len() as u64 + 11).unwrap();
        assert_eq!(header.checksums(), ChecksumState::Stale);
        assert_eq!(header.checksum("c"), None);
        assert_eq!(header.metadata().unwrap().len(), 2);
    }
}
