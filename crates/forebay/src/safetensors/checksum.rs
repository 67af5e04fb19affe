//! Checksums as digits in a header.

/// Digits of a checksum.
pub(super) const DIGITS: usize = 8;

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
    use super::*;

    #[test]
    fn digits_are_read_as_they_are_written_and_no_other_way() {
        assert_eq!(digits(0x00ab_1234), "00ab1234");
        assert_eq!(from_digits("00ab1234"), Some(0x00ab_1234));
        for text in ["00AB1234", "0ab1234", "+0ab1234", "00ab123g", ""] {
            assert_eq!(from_digits(text), None, "{text}");
        }
    }
}
