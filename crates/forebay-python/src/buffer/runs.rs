//! Arrays whose items aren't all next to each other: the runs of memory that hold their values in C
//! order, such as the rows of a slice of a matrix.
//!
//! Each run becomes a part of a request, so an array is moved in place where its runs are worth a
//! transfer each; where they are too short or too many, a copy is the better way, and the caller's to
//! make. Pure arithmetic.

/// Shortest run that is moved by itself: a page, the least that direct I/O moves.
const RUN_BYTES_MIN: usize = 4096;
/// Most runs of an array, so that a request stays small beside what it moves.
const RUNS_MAX: usize = 1 << 16;

/// Runs of equal length, in C order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Runs {
    /// Bytes of each.
    pub(super) length: usize,
    /// Where each starts, in bytes from the array's first item.
    pub(super) starts: Vec<isize>,
}

/// How an array's items lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// One behind the other in C order.
    Contiguous,
    /// In runs that can be moved.
    InRuns(Runs),
    /// In this many runs of this many bytes, which is too many or too few.
    Scattered { count: usize, length: usize },
}

/// The layout of `shape` items of `item_bytes` each, whose neighbours in each dimension are
/// `strides` bytes apart. `None` if the two don't fit together.
pub(super) fn layout_of(shape: &[usize], strides: &[i64], item_bytes: usize) -> Option<Layout> {
    if shape.len() != strides.len() {
        return None;
    }
    if shape.contains(&0) || item_bytes == 0 {
        return Some(Layout::Contiguous);
    }
    // The stride of a dimension of one item is never used, whatever it says.
    let mut outer: Vec<(usize, i64)> = shape
        .iter()
        .copied()
        .zip(strides.iter().copied())
        .filter(|(extent, _)| *extent != 1)
        .collect();
    let mut length = item_bytes;
    while let Some((extent, stride)) = outer.last().copied() {
        if u64::try_from(stride) != Ok(length as u64) {
            break;
        }
        length = length.checked_mul(extent)?;
        outer.pop();
    }
    if outer.is_empty() {
        return Some(Layout::Contiguous);
    }
    let count = outer.iter().try_fold(1usize, |count, (extent, _)| count.checked_mul(*extent))?;
    if count > RUNS_MAX || length < RUN_BYTES_MIN {
        return Some(Layout::Scattered { count, length });
    }
    let mut starts = vec![0isize];
    for (extent, stride) in outer {
        let stride = isize::try_from(stride).ok()?;
        let mut next = Vec::with_capacity(starts.len() * extent);
        for start in starts {
            for index in 0..extent {
                next.push(start.checked_add(isize::try_from(index).ok()?.checked_mul(stride)?)?);
            }
        }
        starts = next;
    }
    Some(Layout::InRuns(Runs { length, starts }))
}

impl Runs {
    /// Whether some byte is in more than one run.
    pub(super) fn overlap(&self) -> bool {
        let mut starts = self.starts.clone();
        starts.sort_unstable();
        starts.windows(2).any(|pair| pair[0].abs_diff(pair[1]) < self.length)
    }

    /// The first byte, and the one behind the last, from the array's first item.
    pub(super) fn reach(&self) -> (isize, isize) {
        let first = self.starts.iter().copied().min().unwrap_or(0);
        let last = self.starts.iter().copied().max().unwrap_or(0);
        (first, last.saturating_add_unsigned(self.length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: i64 = 10_000;

    fn runs(shape: &[usize], strides: &[i64], item_bytes: usize) -> Runs {
        match layout_of(shape, strides, item_bytes) {
            Some(Layout::InRuns(runs)) => runs,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn rows_of_a_slice_are_runs_in_order() {
        let found = runs(&[3, 2048], &[ROW, 2], 2);
        assert_eq!(found, Runs { length: 4096, starts: vec![0, 10_000, 20_000] });
        assert_eq!(found.reach(), (0, 24_096));
        assert!(!found.overlap());
        // Planes of whole rows, a dimension of one item between, the rows backwards.
        let found = runs(&[2, 1, 2, 1024], &[50_000, 7, -ROW, 4], 4);
        assert_eq!(found.starts, [0, -10_000, 50_000, 40_000]);
        assert_eq!(found.reach(), (-10_000, 54_096));
    }

    #[test]
    fn contiguous_arrays_are_told_whatever_unused_strides_say() {
        for (shape, strides) in [
            (vec![], vec![]),
            (vec![5], vec![4]),
            (vec![1, 5, 1], vec![-3, 4, 99]),
            (vec![2, 3], vec![12, 4]),
            (vec![0, 3], vec![1, 1]),
        ] {
            assert_eq!(layout_of(&shape, &strides, 4), Some(Layout::Contiguous), "{shape:?}");
        }
        assert_eq!(layout_of(&[2], &[4, 4], 4), None);
    }

    #[test]
    fn what_is_too_short_or_too_many_is_not_taken_apart() {
        assert_eq!(
            layout_of(&[100, 100], &[4, 400], 4),
            Some(Layout::Scattered { count: 10_000, length: 4 })
        );
        let many = RUNS_MAX + 1;
        assert_eq!(
            layout_of(&[many, 4096], &[ROW, 1], 1),
            Some(Layout::Scattered { count: many, length: 4096 })
        );
        assert_eq!(layout_of(&[usize::MAX, 2, 4096], &[ROW, ROW, 1], 1), None);
        assert_eq!(layout_of(&[3, 4096], &[i64::MAX, 1], 1), None);
    }

    #[test]
    fn rows_that_share_bytes_are_found() {
        assert!(runs(&[3, 4096], &[0, 1], 1).overlap());
        assert!(runs(&[3, 4096], &[4095, 1], 1).overlap());
        assert!(runs(&[2, 2, 4096], &[8192, 8192, 1], 1).overlap());
        assert!(!runs(&[3, 4096], &[4097, 1], 1).overlap());
    }
}
