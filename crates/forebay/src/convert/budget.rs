//! How the memory of a conversion is divided.

use forebay_io::{Error, ErrorKind, Result};

/// Chunks begin and end at this, so that their stores go straight to the drive.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Least memory of a conversion: two chunks that are long enough for a drive, and staging.
const BUDGET_BYTES_MIN: u64 = 16 << 20;
/// With this much, four chunks are under way.
const FOUR_CHUNKS_BYTES_MIN: u64 = 64 << 20;
/// Longest chunk. Longer ones aren't faster, and make Ctrl-C wait.
const CHUNK_BYTES_MAX: u64 = 32 << 20;
/// Most staging memory, the default of handles.
const STAGING_BYTES_MAX: u64 = 8 << 20;
/// What the pool rounds up when small pieces share a region, at most.
const ROUNDING_BYTES: u64 = 4 << 20;

/// How the memory of a conversion is divided. See [`Budget::divide`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    pub(super) total_bytes: u64,
    /// Bytes of a chunk, whole pages. Its memory is one page longer.
    pub(super) chunk_bytes: u64,
    /// Chunks under way at a time.
    pub(super) chunk_count: u64,
    /// For the handle's staging blocks.
    pub(super) staging_bytes: u64,
}

impl Budget {
    /// Divides a number of bytes so that chunks, staging and rounding don't exceed it.
    pub(super) fn divide(total_bytes: u64) -> Result<Self> {
        if total_bytes < BUDGET_BYTES_MIN {
            let text = format!("a budget of {total_bytes} bytes, and at least {BUDGET_BYTES_MIN}");
            return Err(Error::new(ErrorKind::InvalidInput, format!("{text} are needed")));
        }
        let staging_bytes = (total_bytes / 8).min(STAGING_BYTES_MAX);
        let chunk_count = if total_bytes < FOUR_CHUNKS_BYTES_MIN { 2 } else { 4 };
        let left = total_bytes - staging_bytes - ROUNDING_BYTES;
        let chunk_bytes = (left / chunk_count - PAGE_BYTES).min(CHUNK_BYTES_MAX);
        let chunk_bytes = chunk_bytes / PAGE_BYTES * PAGE_BYTES;
        Ok(Self { total_bytes, chunk_bytes, chunk_count, staging_bytes })
    }

    /// The most that is left for anything else before the chunks are there.
    pub(super) fn whole_bytes(self) -> u64 {
        self.total_bytes - self.staging_bytes - ROUNDING_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_never_exceed_the_whole() {
        for total in [16 << 20, (16 << 20) + 1, (64 << 20) - 1, 64 << 20, 1 << 30, 1 << 40] {
            let budget = Budget::divide(total).unwrap();
            let chunks = budget.chunk_count * (budget.chunk_bytes + PAGE_BYTES);
            assert!(chunks + budget.staging_bytes + ROUNDING_BYTES <= total, "{budget:?}");
            assert!(budget.chunk_bytes >= 1 << 20, "{budget:?}");
            assert_eq!(budget.chunk_bytes % PAGE_BYTES, 0);
        }
    }

    #[test]
    fn too_little_is_refused_with_the_numbers() {
        let error = Budget::divide((16 << 20) - 1).unwrap_err().to_string();
        assert!(error.contains("16777215") && error.contains("16777216"), "{error}");
    }
}
