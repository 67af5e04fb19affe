//! The pool: which region a buffer comes from, the budget, and who waits for it.
//!
//! Mapping and unmapping large regions happens outside the lock: their bytes are counted before
//! they are mapped and until they are unmapped, so the count is never below the truth.

mod grant;

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use crate::device;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::buffer::{Place, PoolBuffer};
use crate::memory::options::{PoolOptions, PoolStats};
use crate::memory::process::ProcessLocal;
use crate::memory::region::{Region, region_bytes};
use crate::memory::touch::{TOUCH_BYTES_MIN, Toucher};
use crate::memory::{ALIGNMENT_MIN, limits};

use grant::{Grant, Notice, State, Want};

static GLOBAL: ArcSwapOption<Pool> = ArcSwapOption::const_empty();
static ORDINARY: ArcSwapOption<Pool> = ArcSwapOption::const_empty();

/// A source of pinned memory with a hard budget. See the [module documentation](crate::memory).
#[derive(Debug)]
pub struct Pool {
    options: PoolOptions,
    state: ProcessLocal<Mutex<State>>,
    room: Condvar,
    toucher: ProcessLocal<Arc<Toucher>>,
}

impl Pool {
    /// A pool of its own. Nothing is mapped yet.
    pub fn new(options: PoolOptions) -> Arc<Self> {
        let state = State::default();
        Arc::new(Self {
            options,
            state: ProcessLocal::new(Mutex::new(state)),
            room: Condvar::new(),
            toucher: ProcessLocal::new(Arc::default()),
        })
    }

    /// The pool of this process, without a budget. A forked child gets a fresh one; asking for it
    /// waits for no lock.
    pub fn global() -> Arc<Self> {
        Self::here(&GLOBAL, true)
    }

    /// As [`Self::global`], of memory that isn't [pinned](PoolOptions::pinned).
    pub fn ordinary() -> Arc<Self> {
        Self::here(&ORDINARY, false)
    }

    fn here(place: &ArcSwapOption<Self>, pinned: bool) -> Arc<Self> {
        let here = |pool: &Option<Arc<Self>>| {
            pool.as_ref().filter(|pool| pool.state.is_here()).map(Arc::clone)
        };
        if let Some(pool) = here(&place.load()) {
            return pool;
        }
        let fresh = Self::new(PoolOptions { pinned, ..PoolOptions::default() });
        place.rcu(|current| here(current).or_else(|| Some(Arc::clone(&fresh))));
        here(&place.load()).unwrap_or(fresh)
    }

    /// How it was made.
    pub fn options(&self) -> &PoolOptions {
        &self.options
    }

    /// `length` bytes at a multiple of `alignment`, at once or not at all. They are zero, unless
    /// they come from a region that [`PoolOptions::retain_bytes`] kept.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`], with the numbers, when the budget, the machine's free memory or
    /// a control group's limit is too small, or when the budget has room for this but earlier
    /// requests wait for it; [`ErrorKind::InvalidInput`] for an alignment that isn't a power of
    /// two of at least [`ALIGNMENT_MIN`]; [`ErrorKind::Closed`] in a forked child.
    pub fn allocate(self: &Arc<Self>, length: usize, alignment: usize) -> Result<PoolBuffer> {
        let want = self.check(length, alignment)?;
        self.notice_devices();
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
        self.notice_devices();
        let grant = self.queue(want, timeout, None)?;
        self.fulfil(grant, want)
    }

    /// Like [`allocate_wait`](Self::allocate_wait), and calls `watch` about every `interval` while
    /// there is no room. The place among those who wait is kept meanwhile, and no lock is held: so
    /// `watch` may give back memory of this pool, and end the wait with a `Break`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Cancelled`] after a `Break`, and those of `allocate_wait`.
    pub fn allocate_watched(
        self: &Arc<Self>,
        length: usize,
        alignment: usize,
        timeout: Option<Duration>,
        interval: Duration,
        watch: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<PoolBuffer> {
        let want = self.check(length, alignment)?;
        self.notice_devices();
        let grant = self.queue(want, timeout, Some(Watch { interval, watch }))?;
        self.fulfil(grant, want)
    }

    /// Waits in the queue for a grant.
    fn queue(
        self: &Arc<Self>,
        want: Want,
        timeout: Option<Duration>,
        mut watch: Option<Watch<'_>>,
    ) -> Result<Grant> {
        // A deadline beyond what the clock can express is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let place = Turn::last(self)?;
        let mut look = watch.as_ref().and_then(Watch::next);
        loop {
            let mut state = self.lock()?;
            let turn = state.waiting.front() == Some(&place.ticket);
            if let Some(grant) = self.grant(&mut state, want, turn)? {
                return Ok(grant);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                let after = format!(" after {:?}", timeout.unwrap_or_default());
                return Err(self.no_room(&state, want, ErrorKind::TimedOut, &after));
            }
            match watch.as_mut() {
                Some(watch) if look.is_some_and(|look| now >= look) => {
                    drop(state);
                    if (watch.watch)().is_break() {
                        return Err(Error::new(
                            ErrorKind::Cancelled,
                            format!("the wait for {} bytes of a pool was given up", want.length),
                        ));
                    }
                    look = watch.next();
                }
                _ => self.sleep(state, deadline.into_iter().chain(look).min()),
            }
        }
    }

    /// What it holds now. In a forked child: nothing.
    pub fn stats(&self) -> PoolStats {
        let stats = |state: MutexGuard<'_, State>| PoolStats {
            kept_bytes: state.kept.bytes(),
            ..state.stats.clone()
        };
        let stats = self.lock().map(stats).unwrap_or_default();
        PoolStats { budget_bytes: self.options.budget_bytes, ..stats }
    }

    /// Lets go of all regions that are kept without a buffer, and says how many bytes those were.
    pub fn trim(&self) -> usize {
        let Ok(mut state) = self.lock() else { return 0 };
        let gone = state.kept.let_go(usize::MAX);
        drop(state);
        self.unmap(gone, 0)
    }

    /// Has memory that is about to be handed out registered with CUDA, if that has come up.
    fn notice_devices(&self) {
        if self.options.pinned {
            device::notice();
        }
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

    /// Sleeps until something changes, or the moment has come.
    fn sleep(&self, state: MutexGuard<'_, State>, until: Option<Instant>) {
        // A lock that a panic left is judged where it is taken.
        match until {
            None => drop(self.room.wait(state)),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                drop(self.room.wait_timeout(state, left));
            }
        }
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

    /// The slow part of an allocation, without the lock: zeroing, unmapping, mapping.
    fn fulfil(self: &Arc<Self>, grant: Grant, want: Want) -> Result<PoolBuffer> {
        let evicted = match grant {
            Grant::Own { evicted } => evicted,
            Grant::Mapped { mut buffer, dirty_bytes, notice } => {
                buffer.clear(dirty_bytes);
                log(notice);
                return Ok(buffer);
            }
        };
        self.unmap(evicted, want.region_bytes);
        let mapped = self.map(want).or_else(|error| match self.trim() {
            0 => Err(error),
            _ => self.map(want),
        });
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
        let buffer = self.hand_out(&mut state, region, want.length);
        drop(state);
        log(notice);
        Ok(buffer)
    }

    /// Maps a region for a request, if the machine has the memory.
    fn map(&self, want: Want) -> Result<Region> {
        limits::refuse_what_is_not_there(want.region_bytes)?;
        let mut region = Region::map(want.region_bytes, want.alignment, &self.options)?;
        if let (true, Some(toucher)) = (self.options.touch, self.toucher.get())
            && want.region_bytes >= TOUCH_BYTES_MIN
        {
            region.touch(toucher);
        }
        Ok(region)
    }

    /// A buffer of `length` bytes is gone. Does nothing in a forked child.
    pub(in crate::memory) fn take_back(&self, length: usize, place: Place) {
        let Ok(mut state) = self.lock() else { return };
        let region = state.take_back(length, place);
        let retain_bytes = self.options.retain_bytes;
        let gone = region.map_or_else(Vec::new, |region| state.kept.put(region, retain_bytes));
        if !state.waiting.is_empty() {
            self.room.notify_all();
        }
        drop(state);
        self.unmap(gone, 0);
    }

    /// Unmaps without the lock, then makes the bytes available to others, but for `heir_bytes` of
    /// them, which stay counted. Returns how many bytes those regions had.
    fn unmap(&self, regions: Vec<Region>, heir_bytes: usize) -> usize {
        if regions.is_empty() {
            return 0;
        }
        let count = regions.len();
        let length = total_bytes(&regions);
        let locked: usize =
            regions.iter().filter(|region| region.is_locked()).map(Region::length).sum();
        drop(regions);
        let Ok(mut state) = self.lock() else { return 0 };
        state.stats.mapped_bytes -= length.saturating_sub(heir_bytes);
        state.stats.locked_bytes -= locked;
        state.stats.regions -= count;
        self.room.notify_all();
        length
    }

    fn no_room(&self, state: &State, want: Want, kind: ErrorKind, after: &str) -> Error {
        let budget = self.options.budget_bytes.unwrap_or(usize::MAX);
        let mapped = state.stats.mapped_bytes - state.kept.bytes();
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

/// What is done now and then while a request waits.
struct Watch<'a> {
    interval: Duration,
    watch: &'a mut dyn FnMut() -> ControlFlow<()>,
}

impl Watch<'_> {
    /// The moment of the next call; none beyond what the clock can express.
    fn next(&self) -> Option<Instant> {
        Instant::now().checked_add(self.interval)
    }
}

/// A request's place among those who wait, given up when it is dropped.
struct Turn<'a> {
    pool: &'a Pool,
    ticket: u64,
}

impl<'a> Turn<'a> {
    /// The last place.
    fn last(pool: &'a Pool) -> Result<Self> {
        let mut state = pool.lock()?;
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.waiting.push_back(ticket);
        Ok(Self { pool, ticket })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Ok(mut state) = self.pool.lock() else { return };
        state.waiting.retain(|&other| other != self.ticket);
        if !state.waiting.is_empty() {
            self.pool.room.notify_all();
        }
    }
}

fn total_bytes(regions: &[Region]) -> usize {
    regions.iter().map(Region::length).sum()
}

fn log(notice: Notice) {
    if let Some(text) = notice {
        tracing::warn!("{text}");
    }
}
