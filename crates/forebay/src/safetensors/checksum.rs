//! CRC32C: of bytes, of pieces put together, and as the digits in a header.

use crc_fast::{CrcAlgorithm, checksum, checksum_combine};

/// The variant of iSCSI (RFC 3720), for which processors have an instruction.
const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// Digits of a checksum.
pub(super) const DIGITS: usize = 8;

/// The CRC32C of bytes.
///
/// # Examples
///
/// ```
/// assert_eq!(forebay::safetensors::crc32c(b"123456789"), 0xE306_9283);
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

/// The digits of a checksum.
pub(super) fn digits(checksum: u32) -> String {
    format!("{checksum:08x}")
}

/// The checksum that digits stand for, if they are as [`digits`] writes them.
pub(super) fn from_digits(text: &str) -> Option<u32> {
    let checksum = u32::from_str_radix(text, 16).ok()?;
    (digits(checksum) == text).then_some(checksum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn digits_are_read_as_they_are_written_and_no_other_way() {
        assert_eq!(digits(0x00ab_1234), "00ab1234");
        assert_eq!(from_digits("00ab1234"), Some(0x00ab_1234));
        for text in ["00AB1234", "0ab1234", "+0ab1234", "00ab123g", ""] {
            assert_eq!(from_digits(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn the_checksum_of_parts_is_that_of_the_whole(bytes: Vec<u8>, cut: prop::sample::Index) {
            let (head, tail) = bytes.split_at(cut.index(bytes.len() + 1));
            let combined = crc32c_combine(crc32c(head), crc32c(tail), tail.len() as u64);
            prop_assert_eq!(combined, crc32c(&bytes));
        }
    }
}
