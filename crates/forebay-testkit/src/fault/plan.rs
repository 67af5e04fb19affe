//! What goes wrong, and when.

use std::time::Duration;

use forebay_io::engine::{Command, Transfer};

use crate::random::Random;

/// Which of the transfers in a rule's scope it hits, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// This one only.
    Nth(u64),
    /// This one and all after it.
    From(u64),
    /// Each one whose number is a multiple of this.
    Every(u64),
    /// One in so many, by the plan's seed.
    OneIn(u64),
}

/// Which transfers a rule counts and hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All of them.
    All,
    /// Reads.
    Reads,
    /// Writes.
    Writes,
    /// Reads and writes.
    Moves,
    /// Reads and writes on descriptors opened with `O_DIRECT`.
    Direct,
    /// Reads and writes through the page cache.
    Buffered,
    /// `fsync(2)` and `fdatasync(2)`.
    Syncs,
    /// `fallocate(2)`.
    Allocations,
}

/// Where a short transfer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// At a multiple of 4096 bytes from its start, so that a direct transfer can go on from there.
    Aligned,
    /// At any byte.
    Ragged,
}

/// What happens to a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It isn't done and fails with this `errno`.
    Error(i32),
    /// A part of it is done, at least one byte (for [`Cut::Aligned`]: 4096) and not all. A transfer
    /// too small to be cut is done in full.
    Short(Cut),
    /// It isn't done and reports zero bytes.
    Zero,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    pub(super) when: When,
    pub(super) scope: Scope,
    pub(super) fault: Fault,
}

/// What an engine does wrong. Its `Debug` text is all that it takes to make it again.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    pub(super) seed: u64,
    pub(super) rules: Vec<Rule>,
    pub(super) late: Option<(u64, Duration)>,
    pub(super) reordered: bool,
    pub(super) full: Option<(u64, u64)>,
}

impl FaultPlan {
    /// Nothing goes wrong; `seed` is for what is added by chance.
    pub fn new(seed: u64) -> Self {
        Self { seed, rules: Vec::new(), late: None, reordered: false, full: None }
    }

    /// A plan that a careful caller gets its bytes through: short transfers, EINTR, EAGAIN, late and
    /// reordered completions, full queues, in a mixture that depends on `seed`.
    pub fn survivable(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut often = || 3 + random.below(8);
        let plan = Self::new(seed)
            .fail(When::OneIn(often()), Scope::All, libc::EINTR)
            .fail(When::OneIn(often()), Scope::Moves, libc::EAGAIN)
            .shorten(When::OneIn(often()), Scope::Direct, Cut::Aligned)
            .shorten(When::OneIn(often()), Scope::Buffered, Cut::Ragged)
            .late(often(), Duration::from_millis(3))
            .full_queues(often(), 2);
        if seed.is_multiple_of(2) { plan.reordered() } else { plan }
    }

    /// Adds a rule. The first rule that hits a transfer decides what happens to it.
    #[must_use]
    pub fn rule(mut self, when: When, scope: Scope, fault: Fault) -> Self {
        self.rules.push(Rule { when, scope, fault });
        self
    }

    /// Transfers fail with `code`, an `errno`.
    #[must_use]
    pub fn fail(self, when: When, scope: Scope, code: i32) -> Self {
        self.rule(when, scope, Fault::Error(code))
    }

    /// Transfers are cut short.
    #[must_use]
    pub fn shorten(self, when: When, scope: Scope, cut: Cut) -> Self {
        self.rule(when, scope, Fault::Short(cut))
    }

    /// Direct transfers are refused with `code`, as by a file system that takes `O_DIRECT` at open
    /// only.
    #[must_use]
    pub fn refuse_direct(self, code: i32) -> Self {
        self.fail(When::Every(1), Scope::Direct, code)
    }

    /// One in `one_in` completions is held back for up to `delay`, so that others overtake it.
    #[must_use]
    pub fn late(mut self, one_in: u64, delay: Duration) -> Self {
        self.late = Some((one_in, delay));
        self
    }

    /// Completions that are reaped together come in a random order.
    #[must_use]
    pub fn reordered(mut self) -> Self {
        self.reordered = true;
        self
    }

    /// Of `every` submissions in a row, the last `full_count` take nothing if anything is in flight,
    /// else a single transfer.
    #[must_use]
    pub fn full_queues(mut self, every: u64, full_count: u64) -> Self {
        self.full = Some((every.max(1), full_count.min(every.max(1) - 1)));
        self
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }
}

impl Rule {
    /// It hits the `number`-th transfer in its scope.
    pub(super) fn hits(&self, number: u64, seed: u64) -> bool {
        match self.when {
            When::Nth(hit) => number == hit,
            When::From(first) => number >= first,
            When::Every(every) => every > 0 && number.is_multiple_of(every),
            // By number and not by a running sequence: the same whatever was refused in between.
            When::OneIn(count) => {
                let own = u64::from(self.scope as u8) ^ (count << 8);
                Random::new(seed ^ own ^ number.wrapping_mul(0x9e37_79b9)).one_in(count)
            }
        }
    }
}

impl Scope {
    /// The transfer is in it.
    pub(super) fn holds(self, transfer: &Transfer) -> bool {
        let moves = matches!(transfer.command, Command::Read | Command::Write);
        match self {
            Self::All => true,
            Self::Reads => transfer.command == Command::Read,
            Self::Writes => transfer.command == Command::Write,
            Self::Moves => moves,
            Self::Direct => moves && !transfer.buffered,
            Self::Buffered => moves && transfer.buffered,
            Self::Syncs => matches!(transfer.command, Command::Sync { .. }),
            Self::Allocations => matches!(transfer.command, Command::Allocate { .. }),
        }
    }
}
