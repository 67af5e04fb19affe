//! Regions without buffers, kept for the next request that they fit.
//!
//! A region fits a request that it is long enough and aligned for, if at most one part in
//! [`WASTE_SHARE`] of the request is left over; the shortest that fits is taken, of equals the one
//! kept last, whose pages are the likeliest to be in caches. The one kept first is let go first.
//! What is let go is dropped by who asked, since that makes system calls and wants no lock held.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::region::Region;

/// A kept region may be longer than a request by one part in this many: what a batch of slightly
/// differing shards differs by, for little memory that is mapped and not used.
const WASTE_SHARE: usize = 8;

/// The kept regions of a pool.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// From the one kept first to the one kept last.
    by_age: BTreeMap<u64, Region>,
    /// (length, age), to find the best fit.
    by_length: BTreeSet<(usize, Reverse<u64>)>,
    next_age: u64,
    bytes: usize,
}

impl Kept {
    /// The lengths of the kept regions, summed.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps a region, if `limit_bytes` allow, and returns what isn't kept (any more).
    pub(super) fn put(&mut self, region: Region, limit_bytes: usize) -> Vec<Region> {
        let length = region.length();
        let Some(room) = limit_bytes.checked_sub(length) else {
            return vec![region];
        };
        let gone = self.let_go(self.bytes.saturating_sub(room));
        self.by_length.insert((length, Reverse(self.next_age)));
        self.by_age.insert(self.next_age, region);
        self.next_age += 1;
        self.bytes += length;
        gone
    }

    /// A region for `length` bytes at a multiple of `alignment`.
    pub(super) fn take(&mut self, length: usize, alignment: usize) -> Option<Region> {
        self.take_between(length, length.saturating_add(length / WASTE_SHARE), alignment)
    }

    /// A region of exactly `length` bytes at a multiple of `alignment`.
    pub(super) fn take_exactly(&mut self, length: usize, alignment: usize) -> Option<Region> {
        self.take_between(length, length, alignment)
    }

    fn take_between(&mut self, least: usize, most: usize, alignment: usize) -> Option<Region> {
        let fits = (least, Reverse(u64::MAX))..=(most, Reverse(0));
        let age = self.by_length.range(fits).find_map(|&(_, Reverse(age))| {
            let start = self.by_age.get(&age)?.start()?;
            start.addr().get().is_multiple_of(alignment).then_some(age)
        })?;
        self.remove(age)
    }

    /// Lets regions go, the one kept first at first, until that is `bytes` or all.
    pub(super) fn let_go(&mut self, bytes: usize) -> Vec<Region> {
        let kept = self.bytes;
        let mut gone = Vec::new();
        while kept - self.bytes < bytes {
            let Some((&age, _)) = self.by_age.first_key_value() else { break };
            gone.extend(self.remove(age));
        }
        gone
    }

    fn remove(&mut self, age: u64) -> Option<Region> {
        let region = self.by_age.remove(&age)?;
        self.by_length.remove(&(region.length(), Reverse(age)));
        self.bytes -= region.length();
        Some(region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PoolOptions;

    const PAGE: usize = 4096;

    fn region(pages: usize) -> Region {
        let options = PoolOptions { lock: false, ..PoolOptions::default() };
        Region::map(pages * PAGE, PAGE, &options).unwrap()
    }

    fn ids(regions: &[Region]) -> Vec<u64> {
        regions.iter().map(Region::id).collect()
    }

    #[test]
    fn the_shortest_that_fits_is_taken_and_of_equals_the_last_kept() {
        let mut kept = Kept::default();
        let mut numbers = Vec::new();
        for pages in [72, 64, 73, 65, 64] {
            let region = region(pages);
            numbers.push(region.id());
            assert!(kept.put(region, usize::MAX).is_empty());
        }
        let mut take = |pages: usize| kept.take(pages * PAGE, 64).map(|region| region.id());
        assert_eq!(take(64), Some(numbers[4]));
        assert_eq!(take(64), Some(numbers[1]));
        assert_eq!(take(64), Some(numbers[3]));
        assert_eq!(take(64), Some(numbers[0]), "72 pages are an eighth more than 64");
        assert_eq!(take(64), None, "73 are more than that");
        assert_eq!(take(74), None, "it is too short");
        assert!(kept.take_exactly(72 * PAGE, 64).is_none());
        assert!(kept.take(73 * PAGE, 1 << 46).is_none(), "it isn't aligned");
        assert_eq!(kept.bytes(), 73 * PAGE);
        assert_eq!(kept.take_exactly(73 * PAGE, 64).unwrap().id(), numbers[2]);
        assert_eq!((kept.bytes(), kept.by_age.len(), kept.by_length.len()), (0, 0, 0));
    }

    #[test]
    fn the_first_kept_goes_first_and_no_more_than_must() {
        let mut kept = Kept::default();
        let regions = [4, 2, 3, 1].map(region);
        let numbers = ids(&regions);
        for region in regions {
            assert!(kept.put(region, 10 * PAGE).is_empty());
        }
        assert_eq!(kept.put(region(11), 10 * PAGE).len(), 1, "it is longer than the limit");
        assert_eq!(kept.bytes(), 10 * PAGE);
        assert_eq!(ids(&kept.put(region(5), 10 * PAGE)), numbers[..2]);
        assert_eq!(kept.bytes(), 9 * PAGE);
        assert_eq!(ids(&kept.let_go(1)), numbers[2..3]);
        assert!(kept.let_go(0).is_empty());
        assert_eq!(kept.let_go(usize::MAX).len(), 2);
        assert_eq!((kept.bytes(), kept.by_age.len(), kept.by_length.len()), (0, 0, 0));
    }
}
