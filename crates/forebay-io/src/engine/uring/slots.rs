//! Numbered slots, each free or taken: of a table that the kernel holds, or of transfers in flight.

/// Which slots of a table are free. The slot given back last is taken first: it is in the cache.
#[derive(Debug)]
pub(super) struct Slots {
    free: Vec<u32>,
    count: u32,
}

impl Slots {
    /// `count` slots, all free.
    pub(super) fn new(count: u32) -> Self {
        Self { free: (0..count).rev().collect(), count }
    }

    /// How many there are, free or taken.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Takes a free slot, if there is one.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives a taken slot back.
    pub(super) fn give(&mut self, slot: u32) {
        debug_assert!(slot < self.count && !self.free.contains(&slot), "slot {slot} isn't taken");
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_taken_once_until_it_is_given_back() {
        let mut slots = Slots::new(3);
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(0), Some(1), Some(2)]);
        assert_eq!(slots.take(), None);
        slots.give(1);
        assert_eq!([slots.take(), slots.take()], [Some(1), None]);
    }
}
