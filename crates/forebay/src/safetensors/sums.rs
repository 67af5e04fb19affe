//! Checking loaded bytes: the checksums of pieces, put together for each tensor.

use std::collections::HashMap;

use forebay_io::{Error, ErrorKind, Result, crc32c, crc32c_combine};

use super::header::{Header, TensorInfo};
use super::source::OpenedFile;

/// The checksum of the bytes that a piece has of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sum {
    tensor: usize,
    start: u64,
    bytes: u64,
    checksum: u32,
}

/// The checksums of all that a piece, at a file offset, has of tensors.
pub(super) fn sums_of(header: &Header, offset: u64, bytes: &[u8]) -> Vec<Sum> {
    let tensors = header.tensors();
    let before = usize::try_from(header.data_start().saturating_sub(offset)).ok();
    let bytes = before.and_then(|before| bytes.get(before..)).unwrap_or_default();
    let start = offset.saturating_sub(header.data_start());
    let end = start + bytes.len() as u64;
    let first = tensors.partition_point(|tensor| tensor.end <= start);
    let mut sums = Vec::new();
    for (tensor, info) in tensors.iter().enumerate().skip(first) {
        if info.start >= end {
            break;
        }
        let (from, to) = (info.start.max(start), info.end.min(end));
        let own = usize::try_from(from - start).ok().zip(usize::try_from(to - start).ok());
        let own = own.and_then(|(from, to)| bytes.get(from..to)).unwrap_or_default();
        if !own.is_empty() {
            sums.push(Sum { tensor, start: from, bytes: to - from, checksum: crc32c(own) });
        }
    }
    sums
}

/// The checksums of a file's tensors, as far as their bytes were seen.
#[derive(Debug, Default)]
pub(super) struct Checked(HashMap<usize, Vec<Sum>>);

impl Checked {
    /// Takes the sums of a piece, in any order.
    pub(super) fn add(&mut self, sums: Vec<Sum>) {
        for sum in sums {
            self.0.entry(sum.tensor).or_default().push(sum);
        }
    }

    /// The checksum of a tensor; `None` unless all its bytes were seen.
    pub(super) fn checksum(&mut self, index: usize, info: &TensorInfo) -> Option<u32> {
        let mut sums = self.0.remove(&index).unwrap_or_default();
        sums.sort_by_key(|sum| sum.start);
        let (mut position, mut checksum) = (info.start, crc32c(&[]));
        for sum in sums {
            if sum.start != position {
                return None;
            }
            checksum = if position == info.start {
                sum.checksum
            } else {
                crc32c_combine(checksum, sum.checksum, sum.bytes)
            };
            position += sum.bytes;
        }
        (position == info.end).then_some(checksum)
    }

    /// Fails unless a tensor's bytes were all seen and match its checksum.
    pub(super) fn check(&mut self, file: &OpenedFile, index: usize) -> Result<()> {
        let info = &file.header.tensors()[index];
        let Some(wanted) = file.header.checksum(&info.name) else { return Ok(()) };
        match self.checksum(index, info) {
            Some(found) if found == wanted => Ok(()),
            found => Err(differs(file, info, wanted, found)),
        }
    }
}

fn differs(file: &OpenedFile, info: &TensorInfo, wanted: u32, found: Option<u32>) -> Error {
    let found = found.map_or("of fewer bytes".to_owned(), |found| format!("{found:08x}"));
    let text = format!(
        "the tensor {:?} isn't what was saved: its checksum is {found}, not {wanted:08x}; its {} \
         bytes were changed or damaged, in",
        info.name,
        info.bytes()
    );
    Error::new(ErrorKind::Mismatch, text)
        .path(&file.path)
        .offset(file.header.data_start() + info.start)
        .hint("restore the file, or load without verification to see what is left")
}
