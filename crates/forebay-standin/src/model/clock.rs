//! Who has waited for whom: vector clocks of streams and of the host, and the uses of memory that
//! they don't order.
//!
//! A stream's clock says how many tasks of each stream come before its next one. The host, all of
//! its threads together, is one more clock: it learns by synchronising, by asking an event that
//! turns out to be done, and by running a host function; whatever is enqueued later comes after
//! what it knew then.

use std::collections::BTreeMap;
use std::ops::Range;

/// Uses kept. Those that the host has seen to be over are dropped before.
const USES_MAX: usize = 1 << 14;

/// How many tasks of each stream, by its number, come before something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(BTreeMap<u32, u64>);

impl Clock {
    /// Comes after all that `other` comes after.
    pub(crate) fn join(&mut self, other: &Self) {
        for (stream, count) in &other.0 {
            let mine = self.0.entry(*stream).or_default();
            *mine = (*mine).max(*count);
        }
    }

    fn covers(&self, stream: u32, count: u64) -> bool {
        self.0.get(&stream).is_some_and(|mine| *mine >= count)
    }

    /// The next task of a stream: it comes after what this clock says, and the clock after it.
    pub(crate) fn advance(&mut self, stream: u32) {
        *self.0.entry(stream).or_default() += 1;
    }

    fn count_of(&self, stream: u32) -> u64 {
        self.0.get(&stream).copied().unwrap_or(0)
    }
}

/// A task's use of memory.
#[derive(Clone, Debug)]
struct Use {
    bytes: Range<usize>,
    writes: bool,
    stream: u32,
    count: u64,
    what: &'static str,
}

/// See the [module documentation](self).
#[derive(Default)]
pub(crate) struct Order {
    host: Clock,
    uses: Vec<Use>,
}

impl Order {
    /// The host has seen that everything before `clock` is over.
    pub(crate) fn seen(&mut self, clock: &Clock) {
        self.host.join(clock);
        let host = &self.host;
        self.uses.retain(|other| !host.covers(other.stream, other.count));
    }

    /// Nothing that is under way will disturb anybody.
    pub(crate) fn forget(&mut self) {
        self.uses.clear();
    }

    pub(crate) fn host(&self) -> &Clock {
        &self.host
    }

    /// Takes note that the newest task of `stream`, with `clock`, uses memory; what it isn't
    /// ordered with, in words.
    pub(crate) fn note(
        &mut self,
        bytes: Range<usize>,
        writes: bool,
        what: &'static str,
        (stream, clock): (u32, &Clock),
    ) -> Option<String> {
        let found = self.conflict(&bytes, writes, clock).map(|other| {
            format!(
                "{what} on stream {stream} isn't ordered after {} on {}",
                other.what, other.stream
            )
        });
        if self.uses.len() < USES_MAX {
            let count = clock.count_of(stream);
            self.uses.push(Use { bytes, writes, stream, count, what });
        }
        found
    }

    /// What the host would disturb, or be disturbed by, in using memory now.
    pub(crate) fn host_conflict(&self, bytes: &Range<usize>, writes: bool) -> Option<String> {
        let other = self.conflict(bytes, writes, &self.host)?;
        Some(format!("{} on stream {} may not be over", other.what, other.stream))
    }

    fn conflict(&self, bytes: &Range<usize>, writes: bool, clock: &Clock) -> Option<&Use> {
        self.uses.iter().find(|other| {
            other.bytes.start < bytes.end
                && bytes.start < other.bytes.end
                && (writes || other.writes)
                && !clock.covers(other.stream, other.count)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(clock: &mut Clock, stream: u32) -> (u32, Clock) {
        clock.advance(stream);
        (stream, clock.clone())
    }

    #[test]
    fn uses_of_two_streams_conflict_unless_one_waits_for_the_other() {
        let (mut first, mut second) = (Clock::default(), Clock::default());
        let mut order = Order::default();
        let (stream, clock) = task(&mut first, 1);
        assert_eq!(order.note(0..10, true, "a kernel", (stream, &clock)), None);
        let (stream, clock) = task(&mut second, 2);
        assert_eq!(order.note(10..20, false, "a copy", (stream, &clock)), None);
        let (stream, clock) = task(&mut second, 2);
        assert!(order.note(9..20, false, "a copy", (stream, &clock)).is_some());
        second.join(&first);
        let (stream, clock) = task(&mut second, 2);
        assert_eq!(order.note(0..20, false, "a copy", (stream, &clock)), None);
        // Two that read don't disturb each other; one that writes disturbs those that read.
        let (stream, clock) = task(&mut first, 1);
        assert_eq!(order.note(0..20, false, "a kernel", (stream, &clock)), None);
        let (stream, clock) = task(&mut first, 1);
        assert!(order.note(15..16, true, "a kernel", (stream, &clock)).is_some());
    }

    #[test]
    fn what_the_host_has_seen_disturbs_nobody() {
        let mut clock = Clock::default();
        let mut order = Order::default();
        let (stream, at) = task(&mut clock, 1);
        order.note(0..10, true, "a kernel", (stream, &at));
        assert!(order.host_conflict(&(0..1), false).is_some());
        assert!(order.host_conflict(&(10..11), true).is_none());
        order.seen(&clock);
        assert!(order.host_conflict(&(0..1), true).is_none());
        let mut other = order.host().clone();
        let (stream, at) = task(&mut other, 2);
        assert_eq!(order.note(0..10, true, "a copy", (stream, &at)), None);
    }
}
