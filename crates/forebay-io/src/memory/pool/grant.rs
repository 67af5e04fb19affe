//! What a request gets under the lock: part of a shared region, a kept region, or the right to map
//! one; and the count of all that.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Pool, total_bytes};
use crate::error::Result;
use crate::memory::buffer::{Place, PoolBuffer};
use crate::memory::extents::Extents;
use crate::memory::kept::Kept;
use crate::memory::options::PoolStats;
use crate::memory::region::{HUGE_PAGE_BYTES, Locking, Region};
use crate::memory::{ALIGNMENT_MIN, limits};

/// The length of a region that small buffers share: one huge page.
const SHARED_BYTES: usize = HUGE_PAGE_BYTES;

/// The longest buffer that shares a region; a longer one would leave less than half of it.
const SMALL_BYTES_MAX: usize = SHARED_BYTES / 2;

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) stats: PoolStats,
    extents: Extents,
    shared: BTreeMap<u64, SharedRegion>,
    pub(super) kept: Kept,
    /// Tickets of those who wait, the first in line at the front.
    pub(super) waiting: VecDeque<u64>,
    pub(super) next_ticket: u64,
}

#[derive(Debug)]
struct SharedRegion {
    region: Region,
    /// Bytes from here on were never handed out: they are zero.
    touched: usize,
}

/// A request, checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) length: usize,
    pub(super) alignment: usize,
    /// What a region of its own would take.
    pub(super) region_bytes: usize,
}

/// What to log, once the lock is released: a log may run any code, which may want a buffer.
pub(super) type Notice = Option<String>;

/// What a request got under the lock.
pub(super) enum Grant {
    /// Memory that is mapped, of which the first bytes need zeroing.
    Mapped { buffer: PoolBuffer, dirty_bytes: usize, notice: Notice },
    /// The right to map `region_bytes`, which are counted already, as far as they can be as those
    /// of kept regions that are to be unmapped first.
    Own { evicted: Vec<Region> },
}

impl Pool {
    /// Finds or counts the bytes for a request; `None` when there is no room now. Without a
    /// `turn` it can have only what is mapped already.
    pub(super) fn grant(
        self: &Arc<Self>,
        state: &mut State,
        want: Want,
        turn: bool,
    ) -> Result<Option<Grant>> {
        let budget = self.options.budget_bytes.unwrap_or(usize::MAX);
        if want.length == 0 {
            return Ok(Some(self.empty(state, want.alignment)));
        }
        if want.length <= SMALL_BYTES_MAX && want.alignment <= SHARED_BYTES {
            if let Some(grant) = self.share(state, want, None) {
                return Ok(Some(grant));
            }
            if let Some(region) = state.kept.take_exactly(SHARED_BYTES, SHARED_BYTES) {
                state.add_shared(region, SHARED_BYTES);
                return Ok(self.share(state, want, None));
            }
            if turn && budget.saturating_sub(state.stats.mapped_bytes) >= SHARED_BYTES {
                match self.map_shared_region(state) {
                    Ok(notice) => return Ok(self.share(state, want, notice)),
                    // Without the lock, kept regions can make room for it.
                    Err(_) if state.kept.bytes() > 0 => {}
                    Err(error) => return Err(error),
                }
            }
        }
        if let Some(grant) = self.reuse(state, want) {
            return Ok(Some(grant));
        }
        // Under a budget full of kept regions, the small requests that follow share one again.
        let spare_bytes = if want.length <= SMALL_BYTES_MAX { SHARED_BYTES } else { 0 };
        let room = || state.make_room(want.region_bytes, spare_bytes, budget);
        let evicted = turn.then(room).flatten();
        Ok(evicted.map(|evicted| Grant::Own { evicted }))
    }

    fn empty(self: &Arc<Self>, state: &mut State, alignment: usize) -> Grant {
        state.stats.buffers += 1;
        let address = NonZeroUsize::new(alignment).unwrap_or(NonZeroUsize::MIN);
        let buffer = PoolBuffer {
            address: NonNull::without_provenance(address),
            length: 0,
            locked: self.options.lock,
            place: Place::Nowhere,
            pool: Arc::clone(self),
        };
        Grant::Mapped { buffer, dirty_bytes: 0, notice: None }
    }

    /// Takes an extent of a shared region, if one is free.
    fn share(self: &Arc<Self>, state: &mut State, want: Want, notice: Notice) -> Option<Grant> {
        let length = want.length.next_multiple_of(ALIGNMENT_MIN);
        let extent = state.extents.allocate(length, want.alignment)?;
        let shared = state.shared.get_mut(&extent.space)?;
        let start = shared.region.start()?;
        let dirty_bytes = shared.touched.saturating_sub(extent.offset);
        shared.touched = shared.touched.max(extent.offset + length);
        state.stats.used_bytes += want.length;
        state.stats.buffers += 1;
        let buffer = PoolBuffer {
            address: start.map_addr(|address| address.saturating_add(extent.offset)),
            length: want.length,
            locked: shared.region.is_locked(),
            place: Place::Shared(extent),
            pool: Arc::clone(self),
        };
        Some(Grant::Mapped { buffer, dirty_bytes, notice })
    }

    /// Takes a kept region, if one fits.
    fn reuse(self: &Arc<Self>, state: &mut State, want: Want) -> Option<Grant> {
        let region = state.kept.take(want.region_bytes, want.alignment)?;
        let dirty_bytes = if want.length <= SMALL_BYTES_MAX { want.length } else { 0 };
        let buffer = self.hand_out(state, region, want.length);
        Some(Grant::Mapped { buffer, dirty_bytes, notice: None })
    }

    pub(super) fn hand_out(
        self: &Arc<Self>,
        state: &mut State,
        region: Region,
        length: usize,
    ) -> PoolBuffer {
        state.stats.used_bytes += length;
        state.stats.buffers += 1;
        PoolBuffer {
            address: region.start().unwrap_or(NonNull::dangling()),
            length,
            locked: region.is_locked(),
            place: Place::Own(Some(region)),
            pool: Arc::clone(self),
        }
    }

    /// Maps one more shared region. It is short enough to be mapped under the lock, which keeps
    /// threads that start at once from mapping one each.
    fn map_shared_region(&self, state: &mut State) -> Result<Notice> {
        limits::refuse_what_is_not_there(SHARED_BYTES)?;
        let region = Region::map(SHARED_BYTES, SHARED_BYTES, &self.options)?;
        state.count_mapped(SHARED_BYTES);
        let notice = state.count_region(&region);
        state.add_shared(region, 0);
        Ok(notice)
    }
}

impl State {
    /// Takes the bytes of a buffer back; the region, if it has no buffer any more.
    pub(super) fn take_back(&mut self, length: usize, place: Place) -> Option<Region> {
        self.stats.used_bytes -= length;
        self.stats.buffers -= 1;
        match place {
            Place::Nowhere => None,
            Place::Own(region) => region,
            Place::Shared(extent) => {
                let empty = self.extents.release(extent);
                (empty && self.extents.remove_space(extent.space))
                    .then(|| self.shared.remove(&extent.space))
                    .flatten()
                    .map(|shared| shared.region)
            }
        }
    }

    fn count_mapped(&mut self, bytes: usize) {
        self.stats.mapped_bytes += bytes;
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.mapped_bytes);
    }

    /// Counts `bytes` to be mapped, if the budget has room for them once kept regions are gone:
    /// those that come back, whose bytes stay counted. If it can be, `spare` more bytes get room.
    fn make_room(&mut self, bytes: usize, spare: usize, budget: usize) -> Option<Vec<Region>> {
        let free = budget.saturating_sub(self.stats.mapped_bytes);
        if bytes.saturating_sub(free) > self.kept.bytes() {
            return None;
        }
        let evicted = self.kept.let_go(bytes.saturating_add(spare).saturating_sub(free));
        self.count_mapped(bytes.saturating_sub(total_bytes(&evicted)));
        Some(evicted)
    }

    /// Adds a region for small buffers, of which the first `touched` bytes may not be zero.
    fn add_shared(&mut self, region: Region, touched: usize) {
        self.extents.add_space(region.id(), SHARED_BYTES);
        self.shared.insert(region.id(), SharedRegion { region, touched });
    }

    /// Counts a new region; the first refusal to lock one is to be logged.
    pub(super) fn count_region(&mut self, region: &Region) -> Notice {
        self.stats.regions += 1;
        match region.locking() {
            Locking::Locked => self.stats.locked_bytes += region.length(),
            Locking::Refused(reason) if self.stats.lock_refused.is_none() => {
                self.stats.lock_refused = Some(reason.clone());
                return Some(reason.clone());
            }
            Locking::Refused(_) | Locking::NotAsked => {}
        }
        None
    }
}
