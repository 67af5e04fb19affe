//! CRC32C of what a checkpoint holds, in pieces that are computed apart and joined.

use std::ops::Range;

use crate::safetensors::{crc32c, crc32c_combine};

/// Bytes of a shard that have a checksum of their own, but for the last of it.
pub const PIECE_BYTES: u64 = 16 << 20;
/// The same, of memory.
pub(super) const PIECE_LENGTH: usize = 16 << 20;

/// How many pieces a file of so many bytes has.
pub(super) fn piece_count(bytes: u64) -> u64 {
    bytes.div_ceil(PIECE_BYTES)
}

/// Where bytes `start..end` of a file are in memory that holds it from `base` on.
pub(super) fn in_memory(start: u64, end: u64, base: u64) -> Range<usize> {
    // More than memory can have isn't in it: the range is out of bounds then.
    let place = |at: u64| usize::try_from(at - base).unwrap_or(usize::MAX);
    place(start)..place(end)
}

/// A checksum as a manifest has it.
pub(super) fn hex(checksum: u32) -> String {
    format!("{checksum:08x}")
}

/// Reads what [`hex`] writes, and nothing else.
pub(super) fn parse_hex(text: &str) -> Option<u32> {
    let checksum = u32::from_str_radix(text, 16).ok()?;
    (hex(checksum) == text).then_some(checksum)
}

/// A run of bytes of a file and their checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) checksum: u32,
}

/// Checksums of the runs that bytes at `start` of a file are cut into at `cuts`, which rise, and at
/// the bounds of pieces.
pub(super) fn runs_of(start: u64, bytes: &[u8], cuts: impl Iterator<Item = u64>) -> Vec<Run> {
    let end = start + bytes.len() as u64;
    let mut runs = Vec::new();
    let mut at = start;
    let mut add = |to: u64, at: &mut u64| {
        while *at < to {
            let next = to.min((*at / PIECE_BYTES + 1) * PIECE_BYTES);
            let checksum = crc32c(&bytes[in_memory(*at, next, start)]);
            runs.push(Run { start: *at, end: next, checksum });
            *at = next;
        }
    };
    for cut in cuts.filter(|cut| (start..end).contains(cut)) {
        add(cut, &mut at);
    }
    add(end, &mut at);
    runs
}

/// The checksum of bytes `start..end`, of which `runs` are in order and end where it does; `None`
/// where some are missing.
pub(super) fn joined(runs: &[Run], start: u64, end: u64) -> Option<u32> {
    let first = runs.partition_point(|run| run.end <= start);
    let mut at = start;
    let mut checksum = 0;
    for run in &runs[first..] {
        if at == end {
            break;
        }
        if run.start != at || run.end > end {
            return None;
        }
        checksum = if at == start {
            run.checksum
        } else {
            crc32c_combine(checksum, run.checksum, run.end - run.start)
        };
        at = run.end;
    }
    (at == end).then_some(checksum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_eight_lower_case_digits_are_a_checksum() {
        assert_eq!(parse_hex("0000002a"), Some(42));
        for text in ["2a", "0000002A", "+000002a", "0000002a ", "", "00000000000"] {
            assert_eq!(parse_hex(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn runs_join_to_the_checksum_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            before in 0..2000_u64,
            mut cuts in prop::collection::vec(0..4000_u64, 0..6),
        ) {
            // Around the bound of two pieces.
            let start = PIECE_BYTES - before;
            cuts.sort_unstable();
            let cuts: Vec<u64> = cuts.iter().map(|cut| PIECE_BYTES - 2000 + cut).collect();
            let end = start + bytes.len() as u64;
            let runs = runs_of(start, &bytes, cuts.iter().copied());
            prop_assert_eq!(joined(&runs, start, end), Some(crc32c(&bytes)));
            for pair in cuts.windows(2).filter(|pair| start <= pair[0] && pair[1] <= end) {
                let part = &bytes[in_memory(pair[0], pair[1], start)];
                prop_assert_eq!(joined(&runs, pair[0], pair[1]), Some(crc32c(part)));
            }
            prop_assert_eq!(joined(&runs, start, end + 1), None);
            for run in runs {
                prop_assert_eq!(run.start / PIECE_BYTES, (run.end - 1) / PIECE_BYTES);
            }
        }
    }
}
