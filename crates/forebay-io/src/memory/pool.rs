//! The pool: which region a buffer comes from, the budget, and who waits for it.
//!
//! Mapping and unmapping large regions happens outside the lock: their bytes are counted before
//! they are mapped and until they are unmapped, so the count is never below the truth.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use super::buffer::{Place, PoolBuffer};
use super::extents::Extents;
use super::process::ProcessLocal;
use super::region::{HUGE_PAGE_BYTES, Locking, Region, region_bytes};
use super::{ALIGNMENT_MIN, limits};
use crate::error::{Error, ErrorKind, Result};

/// The length of a region that small buffers share: one huge page.
const SHARED_BYTES: usize = HUGE_PAGE_BYTES;

/// The longest buffer that shares a region; a longer one would leave less than half of it.
const SMALL_BYTES_MAX: usize = SHARED_BYTES / 2;

static GLOBAL: ArcSwapOption<Pool> = ArcSwapOption::const_empty();

/// How a [`Pool`] behaves.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// The most bytes to have mapped at any moment; `None`: as much as the machine has left.
    pub budget_bytes: Option<usize>,
    /// Keep pages in memory (`mlock2`), where the host allows it.
    pub lock: bool,
    /// Ask for transparent huge pages.
    pub huge_pages: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { budget_bytes: None, lock: true, huge_pages: true }
    }
}

/// What a [`Pool`] holds at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// The most bytes it may map.
    pub budget_bytes: Option<usize>,
    /// The lengths of its live buffers, summed.
    pub used_bytes: usize,
    /// The bytes of its regions, those being mapped or unmapped included.
    pub mapped_bytes: usize,
    /// The bytes of its regions that are locked.
    pub locked_bytes: usize,
    /// The most that `mapped_bytes` has been.
    pub peak_bytes: usize,
    /// Its live buffers.
    pub buffers: usize,
    /// Its regions.
    pub regions: usize,
    /// Why some memory isn't locked and what to do about it, if locking was ever refused.
    pub lock_refused: Option<String>,
}

/// A source of pinned memory with a hard budget. See the [module documentation](super).
#[derive(Debug)]
pub struct Pool {
    options: PoolOptions,
    state: ProcessLocal<Mutex<State>>,
    room: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stats: PoolStats,
    extents: Extents,
    shared: BTreeMap<u64, SharedRegion>,
    /// Tickets of those who wait, the first in line at the front.
    waiting: VecDeque<u64>,
    next_ticket: u64,
}

#[derive(Debug)]
struct SharedRegion {
    region: Region,
    /// Bytes from here on were never handed out: they are zero.
    touched: usize,
}

/// A request, checked.
#[derive(Clone, Copy, Debug)]
struct Want {
    length: usize,
    alignment: usize,
    /// What a region of its own would take.
    region_bytes: usize,
}

/// What to log, once the lock is released: a log may run any code, which may want a buffer.
type Notice = Option<String>;

/// What a request got under the lock.
enum Grant {
    /// Part of a shared region, of which the first bytes need zeroing.
    Shared { buffer: PoolBuffer, dirty_bytes: usize, notice: Notice },
    /// The right to map `region_bytes`, which are counted already.
    Own,
}

impl Pool {
    /// A pool of its own. Nothing is mapped yet.
    pub fn new(options: PoolOptions) -> Arc<Self> {
        let state = State::default();
        Arc::new(Self {
            options,
            state: ProcessLocal::new(Mutex::new(state)),
            room: Condvar::new(),
        })
    }

    /// The pool of this process, without a budget. A forked child gets a fresh one; asking for it
    /// waits for no lock.
    pub fn global() -> Arc<Self> {
        let here = |pool: &Option<Arc<Self>>| {
            pool.as_ref().filter(|pool| pool.state.is_here()).map(Arc::clone)
        };
        if let Some(pool) = here(&GLOBAL.load()) {
            return pool;
        }
        let fresh = Self::new(PoolOptions::default());
        GLOBAL.rcu(|current| here(current).or_else(|| Some(Arc::clone(&fresh))));
        here(&GLOBAL.load()).unwrap_or(fresh)
    }

    /// How it was made.
    pub fn options(&self) -> &PoolOptions {
        &self.options
    }

    /// `length` zeroed bytes at a multiple of `alignment`, at once or not at all.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`], with the numbers, when the budget, the machine's free memory or
    /// a control group's limit is too small, or when the budget has room for this but earlier
    /// requests wait for it; [`ErrorKind::InvalidInput`] for an alignment that isn't a power of
    /// two of at least [`ALIGNMENT_MIN`]; [`ErrorKind::Closed`] in a forked child.
    pub fn allocate(self: &Arc<Self>, length: usize, alignment: usize) -> Result<PoolBuffer> {
        let want = self.check(length, alignment)?;
        let mut state = self.lock()?;
        let turn = state.waiting.is_empty();
        match self.grant(&mut state, want, turn)? {
            Some(grant) => {
                drop(state);
                self.fulfil(grant, want)
            }
            None => Err(self.no_room(&state, want, ErrorKind::OutOfMemory, "")),
        }
    }

    /// Like [`allocate`](Self::allocate), but waits for room in the budget, first come, first
    /// served; only what fits into memory that is mapped already overtakes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::TimedOut`] when there was no room in time, and those of `allocate`: a request
    /// larger than the whole budget isn't waited for.
    pub fn allocate_wait(
        self: &Arc<Self>,
        length: usize,
        alignment: usize,
        timeout: Option<Duration>,
    ) -> Result<PoolBuffer> {
        let want = self.check(length, alignment)?;
        // A deadline beyond what the clock can express is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.lock()?;
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.waiting.push_back(ticket);
        loop {
            let turn = state.waiting.front() == Some(&ticket);
            let outcome = match self.grant(&mut state, want, turn) {
                Ok(Some(grant)) => Ok(grant),
                Err(error) => Err(error),
                Ok(None) => match self.wait(state, deadline) {
                    (next, true) => {
                        state = next;
                        continue;
                    }
                    (next, false) => {
                        state = next;
                        let after = format!(" after {:?}", timeout.unwrap_or_default());
                        Err(self.no_room(&state, want, ErrorKind::TimedOut, &after))
                    }
                },
            };
            state.waiting.retain(|&other| other != ticket);
            if !state.waiting.is_empty() {
                self.room.notify_all();
            }
            drop(state);
            return self.fulfil(outcome?, want);
        }
    }

    /// What it holds now. In a forked child: nothing.
    pub fn stats(&self) -> PoolStats {
        let stats = self.lock().map(|state| state.stats.clone()).unwrap_or_default();
        PoolStats { budget_bytes: self.options.budget_bytes, ..stats }
    }

    fn lock(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state.get().ok_or_else(|| {
            Error::new(
                ErrorKind::Closed,
                "the memory pool belongs to the process that this one was forked from",
            )
            .hint("make a pool in this process")
        })?;
        Ok(state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for a change; `false` when the deadline has passed.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        deadline: Option<Instant>,
    ) -> (MutexGuard<'a, State>, bool) {
        let Some(deadline) = deadline else {
            return (self.room.wait(state).unwrap_or_else(PoisonError::into_inner), true);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return (state, false);
        }
        let woken = self.room.wait_timeout(state, left);
        (woken.unwrap_or_else(PoisonError::into_inner).0, true)
    }

    fn check(&self, length: usize, alignment: usize) -> Result<Want> {
        if !alignment.is_power_of_two() || alignment < ALIGNMENT_MIN {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("the alignment is {alignment}, not a power of two from {ALIGNMENT_MIN} up"),
            ));
        }
        let too_large = |limit: String| {
            Error::new(ErrorKind::OutOfMemory, format!("cannot allocate {length} bytes: {limit}"))
        };
        let region_bytes = region_bytes(length)
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| too_large(format!("the most there can be is {}", isize::MAX)))?;
        match self.options.budget_bytes {
            Some(budget) if region_bytes > budget && length > 0 => Err(too_large(format!(
                "they take {region_bytes} bytes of whole pages and the pool's budget is {budget}"
            ))),
            _ => Ok(Want { length, alignment, region_bytes }),
        }
    }

    /// Finds or counts the bytes for a request; `None` when there is no room now. Without a
    /// `turn` it can have only what is mapped already.
    fn grant(self: &Arc<Self>, state: &mut State, want: Want, turn: bool) -> Result<Option<Grant>> {
        let may_map = |state: &State, bytes: usize| {
            let budget = self.options.budget_bytes.unwrap_or(usize::MAX);
            turn && budget.saturating_sub(state.stats.mapped_bytes) >= bytes
        };
        if want.length == 0 {
            return Ok(Some(self.empty(state, want.alignment)));
        }
        if want.length <= SMALL_BYTES_MAX && want.alignment <= SHARED_BYTES {
            if let Some(grant) = self.share(state, want, None) {
                return Ok(Some(grant));
            }
            if may_map(state, SHARED_BYTES) {
                let notice = self.add_shared_region(state)?;
                return Ok(self.share(state, want, notice));
            }
        }
        Ok(may_map(state, want.region_bytes).then(|| {
            state.count_mapped(want.region_bytes);
            Grant::Own
        }))
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
        Grant::Shared { buffer, dirty_bytes: 0, notice: None }
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
        Some(Grant::Shared { buffer, dirty_bytes, notice })
    }

    /// Maps one more shared region. It is short enough to be mapped under the lock, which keeps
    /// threads that start at once from mapping one each.
    fn add_shared_region(&self, state: &mut State) -> Result<Notice> {
        limits::refuse_what_is_not_there(SHARED_BYTES)?;
        let region = Region::map(SHARED_BYTES, SHARED_BYTES, &self.options)?;
        state.count_mapped(SHARED_BYTES);
        let notice = state.count_region(&region);
        state.extents.add_space(region.id(), SHARED_BYTES);
        state.shared.insert(region.id(), SharedRegion { region, touched: 0 });
        Ok(notice)
    }

    /// The slow part of an allocation, without the lock: zeroing or mapping.
    fn fulfil(self: &Arc<Self>, grant: Grant, want: Want) -> Result<PoolBuffer> {
        if let Grant::Shared { mut buffer, dirty_bytes, notice } = grant {
            buffer.clear(dirty_bytes);
            log(notice);
            return Ok(buffer);
        }
        let mapped = limits::refuse_what_is_not_there(want.region_bytes)
            .and_then(|()| Region::map(want.region_bytes, want.alignment, &self.options));
        let mut state = self.lock()?;
        let region = match mapped {
            Ok(region) => region,
            Err(error) => {
                state.stats.mapped_bytes -= want.region_bytes;
                self.room.notify_all();
                return Err(error);
            }
        };
        let notice = state.count_region(&region);
        state.stats.used_bytes += want.length;
        state.stats.buffers += 1;
        drop(state);
        log(notice);
        Ok(PoolBuffer {
            address: region.start().unwrap_or(NonNull::dangling()),
            length: want.length,
            locked: region.is_locked(),
            place: Place::Own(Some(region)),
            pool: Arc::clone(self),
        })
    }

    /// A buffer of `length` bytes is gone. Does nothing in a forked child.
    pub(super) fn take_back(&self, length: usize, place: Place) {
        let Ok(mut state) = self.lock() else { return };
        state.stats.used_bytes -= length;
        state.stats.buffers -= 1;
        let region = match place {
            Place::Nowhere => None,
            Place::Own(region) => region,
            Place::Shared(extent) => {
                let empty = state.extents.release(extent);
                if !state.waiting.is_empty() {
                    self.room.notify_all();
                }
                (empty && state.extents.remove_space(extent.space))
                    .then(|| state.shared.remove(&extent.space))
                    .flatten()
                    .map(|shared| shared.region)
            }
        };
        drop(state);
        if let Some(region) = region {
            self.unmap(region);
        }
    }

    /// Unmaps without the lock, then makes the bytes available to others.
    fn unmap(&self, region: Region) {
        let length = region.length();
        let locked = if region.is_locked() { length } else { 0 };
        drop(region);
        let Ok(mut state) = self.lock() else { return };
        state.stats.mapped_bytes -= length;
        state.stats.locked_bytes -= locked;
        state.stats.regions -= 1;
        self.room.notify_all();
    }

    fn no_room(&self, state: &State, want: Want, kind: ErrorKind, after: &str) -> Error {
        let budget = self.options.budget_bytes.unwrap_or(usize::MAX);
        let mapped = state.stats.mapped_bytes;
        let (length, region_bytes) = (want.length, want.region_bytes);
        let mut message = format!(
            "cannot allocate {length} bytes ({region_bytes} of whole pages){after}: {mapped} of \
             the pool's budget of {budget} bytes are in use"
        );
        let others = state.waiting.len() - usize::from(kind == ErrorKind::TimedOut);
        if others > 0 {
            let _ = write!(message, " and {others} other requests wait");
        }
        Error::new(kind, message).hint("free buffers or raise the budget")
    }
}

impl State {
    fn count_mapped(&mut self, bytes: usize) {
        self.stats.mapped_bytes += bytes;
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.mapped_bytes);
    }

    /// Counts a new region; the first refusal to lock one is to be logged.
    fn count_region(&mut self, region: &Region) -> Notice {
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

fn log(notice: Notice) {
    if let Some(text) = notice {
        tracing::warn!("{text}");
    }
}
