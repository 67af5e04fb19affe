//! Checksums of parts of tensors, put together to those of tensors.

use crc_fast::{CrcAlgorithm, checksum, checksum_combine};

use crate::safetensors::{crc32c, crc32c_combine};

/// The CRC-32 of zip archives.
const ZIP: CrcAlgorithm = CrcAlgorithm::Crc32IsoHdlc;

/// Checksums of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Checksums {
    pub(super) crc32c: u32,
    /// Zip's CRC-32; 0 if it isn't asked for.
    pub(super) zip: u32,
}

impl Checksums {
    pub(super) fn of(bytes: &[u8], with_zip: bool) -> Self {
        let zip = if with_zip { narrow(checksum(ZIP, bytes)) } else { 0 };
        Self { crc32c: crc32c(bytes), zip }
    }

    /// Those of bytes and the `tail_bytes` bytes behind them.
    fn followed_by(self, tail: Self, tail_bytes: u64) -> Self {
        Self {
            crc32c: crc32c_combine(self.crc32c, tail.crc32c, tail_bytes),
            zip: narrow(checksum_combine(ZIP, self.zip.into(), tail.zip.into(), tail_bytes)),
        }
    }
}

/// The checksums of a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sum {
    pub(super) tensor: usize,
    /// Where in the tensor it begins.
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) checksums: Checksums,
}

/// The checksums of `count` tensors from those of their parts, which are in any order.
pub(super) fn combined(mut sums: Vec<Sum>, count: usize) -> Vec<Checksums> {
    sums.sort_unstable_by_key(|sum| (sum.tensor, sum.start));
    let mut whole = vec![Checksums::of(&[], false); count];
    for Sum { tensor, start, length, checksums } in sums {
        let before = whole[tensor];
        whole[tensor] = if start == 0 { checksums } else { before.followed_by(checksums, length) };
    }
    whole
}

fn narrow(checksum: u64) -> u32 {
    u32::try_from(checksum & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_any_order_have_the_checksums_of_the_whole() {
        let bytes: Vec<u8> = (0..100_u8).collect();
        let sum = |tensor, range: std::ops::Range<usize>| Sum {
            tensor,
            start: range.start as u64,
            length: range.len() as u64,
            checksums: Checksums::of(&bytes[range], true),
        };
        let found = combined(vec![sum(2, 70..100), sum(0, 0..100), sum(2, 0..70)], 3);
        let whole = Checksums::of(&bytes, true);
        assert_eq!(found, [whole, Checksums::of(&[], true), whole]);
        // The check values of both, by which implementations are told to be right.
        let known = Checksums::of(b"123456789", true);
        assert_eq!((known.crc32c, known.zip), (0xE306_9283, 0xCBF4_3926));
    }
}
