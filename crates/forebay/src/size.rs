//! Numbers of bytes as people write them.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// A number of bytes, read from text: `4096`, `64K`, `1.5MiB`. `1K` and `1KiB` are 1024 bytes, `1KB`
/// is 1000, as `dd` has it.
///
/// ```
/// use forebay::ByteSize;
///
/// assert_eq!("1.5MiB".parse::<ByteSize>()?.0, 1_572_864);
/// assert_eq!("2KB".parse::<ByteSize>()?.0, 2000);
/// assert_eq!(ByteSize(1 << 20).to_string(), "1 MiB");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ByteSize(pub u64);

/// Units from the smallest up, each 1024 (or 1000) of the one before.
const UNITS: &str = "kmgtp";

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unreadable = || format!("{text:?} is not a size such as 4096, 64k or 1MiB");
        let number_end = text.find(|char: char| !char.is_ascii_digit() && char != '.');
        let (number, unit) = text.split_at(number_end.unwrap_or(text.len()));
        let factor = factor_of(&unit.trim().to_ascii_lowercase()).ok_or_else(unreadable)?;
        let whole = number.split_once('.').map_or(number, |(whole, _)| whole);
        // "1.5" is 1 and "0.5".
        let fraction: f64 =
            format!("0{}", &number[whole.len()..]).parse().map_err(|_| unreadable())?;
        let whole: u64 = whole.parse().map_err(|_| unreadable())?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "less than one factor, and never negative"
        )]
        let rest = (fraction * factor as f64).round() as u64;
        let bytes = whole.checked_mul(factor).and_then(|bytes| bytes.checked_add(rest));
        bytes.map(Self).ok_or_else(unreadable)
    }
}

fn factor_of(unit: &str) -> Option<u64> {
    let mut letters = unit.chars();
    let Some(letter) = letters.next() else { return Some(1) };
    if unit == "b" {
        return Some(1);
    }
    let power = u32::try_from(UNITS.find(letter)? + 1).ok()?;
    match letters.as_str() {
        "" | "ib" => Some(1024_u64.pow(power)),
        "b" => Some(1000_u64.pow(power)),
        _ => None,
    }
}

impl fmt::Display for ByteSize {
    /// In the largest binary unit of which there is at least one, with one decimal at the most.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let steps = (self.0.max(1).ilog2() / 10).min(5);
        let unit = 1_u64 << (10 * steps);
        #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
        let amount = self.0 as f64 / unit as f64;
        let decimals = usize::from(!self.0.is_multiple_of(unit));
        write!(f, "{amount:.decimals$} {}", names[steps as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("7b", 7),
            ("64K", 64 << 10),
            ("2 MiB", 2 << 20),
            ("1g", 1 << 30),
            ("1kb", 1000),
            ("0.5T", 1 << 39),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_its_text() {
        for text in ["", "K", "1.5.5G", "-1", "1X", "1kibb", "99999999T", ".", "1e9", "½"] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (3 << 30, "3 GiB"),
            (5 << 50, "5 PiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }
}
