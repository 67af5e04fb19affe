//! CRC32C: of bytes, and of pieces put together. Pure.

use crc_fast::{CrcAlgorithm, checksum, checksum_combine};

/// The variant of iSCSI (RFC 3720), for which processors have an instruction.
const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// The CRC32C of bytes.
///
/// # Examples
///
/// ```
/// assert_eq!(forebay_io::crc32c(b"123456789"), 0xE306_9283);
/// ```
pub fn crc32c(bytes: &[u8]) -> u32 {
    narrow(checksum(ALGORITHM, bytes))
}

/// The CRC32C of bytes whose first part has the CRC32C `head`, and whose last `tail_bytes` bytes
/// have `tail`.
pub fn crc32c_combine(head: u32, tail: u32, tail_bytes: u64) -> u32 {
    narrow(checksum_combine(ALGORITHM, head.into(), tail.into(), tail_bytes))
}

fn narrow(checksum: u64) -> u32 {
    u32::try_from(checksum & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_checksum_of_parts_is_that_of_the_whole(bytes: Vec<u8>, cut: prop::sample::Index) {
            let (head, tail) = bytes.split_at(cut.index(bytes.len() + 1));
            let combined = crc32c_combine(crc32c(head), crc32c(tail), tail.len() as u64);
            prop_assert_eq!(combined, crc32c(&bytes));
        }
    }
}
