//! Free extents of the shared regions: best fit, coalescing, exact accounting. No system calls.
//!
//! A *space* is a region seen as the offsets `0..length`. Offsets are aligned, not addresses, so
//! a space must start at a multiple of the largest alignment asked for. Neighbouring free extents
//! of a space are always one extent.

use std::collections::{BTreeMap, BTreeSet};

/// A piece of a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) space: u64,
    pub(crate) offset: usize,
    pub(crate) length: usize,
}

/// The free extents of any number of spaces.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    spaces: BTreeMap<u64, usize>,
    /// (space, offset) → length, to find neighbours.
    by_place: BTreeMap<(u64, usize), usize>,
    /// (length, space, offset), to find the best fit.
    by_length: BTreeSet<(usize, u64, usize)>,
}

impl Extents {
    /// Adds a space, all of it free.
    pub(crate) fn add_space(&mut self, space: u64, length: usize) {
        self.spaces.insert(space, length);
        self.insert(Extent { space, offset: 0, length });
    }

    /// Removes a space that is all free; `false` if it isn't, or isn't known.
    pub(crate) fn remove_space(&mut self, space: u64) -> bool {
        let Some(&length) = self.spaces.get(&space) else {
            return false;
        };
        let whole = Extent { space, offset: 0, length };
        if self.by_place.get(&(space, 0)) != Some(&length) {
            return false;
        }
        self.remove(whole);
        self.spaces.remove(&space);
        true
    }

    /// Takes the smallest free extent in which `length` bytes at a multiple of `alignment` fit;
    /// of equals, the one in the oldest space, so that younger ones empty.
    pub(crate) fn allocate(&mut self, length: usize, alignment: usize) -> Option<Extent> {
        let (free, start) =
            self.by_length.range((length, 0, 0)..).find_map(|&(free_length, space, offset)| {
                let start = offset.checked_next_multiple_of(alignment)?;
                let end = start.checked_add(length)?;
                (end <= offset + free_length)
                    .then_some((Extent { space, offset, length: free_length }, start))
            })?;
        self.remove(free);
        let end = start + length;
        self.insert(Extent { length: start - free.offset, ..free });
        self.insert(Extent { offset: end, length: free.offset + free.length - end, ..free });
        Some(Extent { space: free.space, offset: start, length })
    }

    /// Gives an extent back; `true` when its whole space is free now.
    pub(crate) fn release(&mut self, extent: Extent) -> bool {
        let Extent { space, mut offset, mut length } = extent;
        let before = self.by_place.range((space, 0)..(space, offset)).next_back();
        if let Some((&(_, start), &size)) = before {
            debug_assert!(start + size <= offset, "extent {extent:?} was free already");
            if start + size == offset {
                self.remove(Extent { space, offset: start, length: size });
                offset = start;
                length += size;
            }
        }
        if let Some(&size) = self.by_place.get(&(space, offset + length)) {
            self.remove(Extent { space, offset: offset + length, length: size });
            length += size;
        }
        self.insert(Extent { space, offset, length });
        self.spaces.get(&space) == Some(&length)
    }

    fn insert(&mut self, extent: Extent) {
        if extent.length > 0 {
            self.by_place.insert((extent.space, extent.offset), extent.length);
            self.by_length.insert((extent.length, extent.space, extent.offset));
        }
    }

    fn remove(&mut self, extent: Extent) {
        self.by_place.remove(&(extent.space, extent.offset));
        self.by_length.remove(&(extent.length, extent.space, extent.offset));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPACE: usize = 1 << 16;

    impl Extents {
        fn free_bytes(&self) -> usize {
            let by_place: usize = self.by_place.values().sum();
            let by_length: usize = self.by_length.iter().map(|&(length, _, _)| length).sum();
            assert_eq!(by_place, by_length);
            assert_eq!(self.by_place.len(), self.by_length.len());
            by_place
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Allocate { length: usize, alignment: usize },
        Release(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (1usize..200, 6u32..15).prop_map(|(units, power)| Step::Allocate {
                length: units * 64,
                alignment: 1 << power,
            }),
            2 => any::<prop::sample::Index>().prop_map(Step::Release),
        ]
    }

    /// Whether `length` bytes at `alignment` fit beside `live`, found by trying every place.
    fn fits(live: &[Extent], spaces: u64, length: usize, alignment: usize) -> bool {
        (0..spaces).any(|space| {
            (0..SPACE).step_by(alignment).any(|start| {
                start + length <= SPACE
                    && live
                        .iter()
                        .filter(|e| e.space == space)
                        .all(|e| start + length <= e.offset || e.offset + e.length <= start)
            })
        })
    }

    proptest! {
        #[test]
        fn live_extents_are_aligned_apart_and_all_accounted_for(
            spaces in 1u64..4,
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let mut extents = Extents::default();
            for space in 0..spaces {
                extents.add_space(space, SPACE);
            }
            let total = usize::try_from(spaces).unwrap() * SPACE;
            let mut live: Vec<Extent> = Vec::new();
            for step in steps {
                match step {
                    Step::Allocate { length, alignment } => {
                        let could = fits(&live, spaces, length, alignment);
                        let got = extents.allocate(length, alignment);
                        prop_assert_eq!(got.is_some(), could, "{} at {}", length, alignment);
                        let Some(got) = got else { continue };
                        prop_assert_eq!(got.length, length);
                        prop_assert_eq!(got.offset % alignment, 0);
                        prop_assert!(got.offset + got.length <= SPACE);
                        for other in live.iter().filter(|other| other.space == got.space) {
                            prop_assert!(
                                got.offset + got.length <= other.offset
                                    || other.offset + other.length <= got.offset,
                                "{:?} overlaps {:?}", got, other
                            );
                        }
                        live.push(got);
                    }
                    Step::Release(index) if !live.is_empty() => {
                        let gone = live.swap_remove(index.index(live.len()));
                        let empty = extents.release(gone);
                        prop_assert_eq!(empty, live.iter().all(|e| e.space != gone.space));
                    }
                    Step::Release(_) => {}
                }
                let used: usize = live.iter().map(|extent| extent.length).sum();
                prop_assert_eq!(extents.free_bytes() + used, total);
            }
            for extent in live.drain(..) {
                extents.release(extent);
            }
            prop_assert_eq!(extents.by_place.len(), usize::try_from(spaces).unwrap());
            for space in 0..spaces {
                prop_assert!(extents.remove_space(space));
            }
            prop_assert_eq!(extents.free_bytes(), 0);
        }
    }

    #[test]
    fn the_smallest_extent_that_fits_is_taken() {
        let mut extents = Extents::default();
        extents.add_space(1, 4096);
        extents.add_space(2, 1024);
        let got = extents.allocate(512, 64).unwrap();
        assert_eq!(got, Extent { space: 2, offset: 0, length: 512 });
        assert_eq!(extents.allocate(2048, 64).unwrap().space, 1);
        assert_eq!(extents.allocate(4096, 64), None);
        assert_eq!(extents.allocate(usize::MAX - 63, 64), None);
        assert!(!extents.remove_space(2));
        assert!(extents.release(got));
        assert!(extents.remove_space(2));
        assert!(!extents.remove_space(2));
    }
}
