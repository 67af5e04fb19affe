//! Workers: each owns an engine, takes blocks from the scheduler, and sees them through.
//!
//! # Invariants
//!
//! - A unit taken from an operation is given back exactly once, whatever happens to the engine.
//! - Before memory or files are let go, the engine has reported the transfer or is dropped.
//! - A staging block is used again only when neither the engine nor a device's copy uses it.
//! - A worker with nothing to do sleeps in the kernel until its port is signalled.

mod bindings;
mod copies;
mod flight;
mod launch;
mod sums;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bindings::Bindings;
use copies::Copies;
use flight::{Flight, Verdict};

use crate::engine::{Completion, Engine, Transfer};
use crate::error::{Error, ErrorKind, Result};
use crate::operation::{Unit, Work};
use crate::plan::{Direction, Route};
use crate::routes::give_up;
use crate::scheduler::{Port, Room, Scheduler, Taken};
use crate::staging::{BlockCounts, StagingBlocks};
use crate::stats::{Counters, add};

/// Retries at once before pauses come in between: an interruption passes, exhaustion needs time.
const QUICK_ATTEMPTS: u32 = 8;
/// Pause before asking again for what the kernel has no resources for at the moment.
const PAUSE: Duration = Duration::from_millis(10);
/// Pause when an engine with nothing in flight takes nothing.
const REFUSED_PAUSE: Duration = Duration::from_millis(1);
/// Of this many transfers in flight, one at least is kept for demand.
const DEMAND_SHARE: usize = 4;

/// Staged blocks of a kind taken at once: few, so that the workers of a handle share the copying.
const STAGED_BATCH: usize = 2;

/// What [`Worker::refill`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refilled {
    /// No work.
    Nothing,
    /// Work, and there may be more for this worker at once.
    InPart,
    /// All the work there is or there is room for.
    All,
}

/// What a worker does once it has handed transfers over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// Sleeps in the engine.
    Reap,
    /// Copies bytes, while which the drive should have something to do.
    Copy,
}

/// See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Worker {
    engine: Box<dyn Engine>,
    /// Before the flights and the staging blocks, like the engine: dropping it waits for copies.
    copies: Copies,
    scheduler: Arc<Scheduler>,
    port: Arc<Port>,
    counters: Arc<Counters>,
    staging: StagingBlocks,
    bindings: Bindings,
    uses_page_cache: bool,
    flights: Vec<Option<Flight>>,
    free_tokens: Vec<usize>,
    /// Transfers that the engine has yet to take.
    ready: Vec<Transfer>,
    /// Staged units that got no staging block.
    parked: VecDeque<Unit>,
    prefetch_in_flight: usize,
    completions: Vec<Completion>,
    /// The kernel lacks resources: wait a moment before asking again.
    pause: bool,
}

impl Worker {
    pub(crate) fn new(
        engine: Box<dyn Engine>,
        scheduler: Arc<Scheduler>,
        port: Arc<Port>,
        counters: Arc<Counters>,
        staging: StagingBlocks,
        uses_page_cache: bool,
    ) -> Self {
        let bindings = Bindings::new(Arc::clone(&port), Arc::clone(&counters), engine.as_ref());
        let copies = Copies::new(Arc::clone(&port.wake), Arc::clone(&counters));
        Self {
            engine,
            copies,
            scheduler,
            port,
            counters,
            staging,
            bindings,
            uses_page_cache,
            flights: Vec::new(),
            free_tokens: Vec::new(),
            ready: Vec::new(),
            parked: VecDeque::new(),
            prefetch_in_flight: 0,
            completions: Vec::new(),
            pause: false,
        }
    }

    /// Works until the scheduler stops and nothing is left.
    ///
    /// # Errors
    ///
    /// The engine broke. Every unit that was out here has been given back with that error.
    pub(crate) fn run(mut self) -> Result<()> {
        match self.work() {
            Ok(()) => Ok(()),
            Err(error) => {
                self.give_everything_back(&error);
                Err(error)
            }
        }
    }

    fn work(&mut self) -> Result<()> {
        loop {
            self.bindings.drop_gone_regions(self.engine.as_mut());
            let version = self.scheduler.version();
            let refilled = self.refill(Then::Reap)?;
            if self.outstanding() == 0 {
                if refilled != Refilled::Nothing {
                    continue;
                }
                if self.scheduler.is_stopping() && self.scheduler.is_empty() {
                    return Ok(());
                }
            }
            self.sleep(version, refilled)?;
            self.handle_completions()?;
            self.handle_landings();
        }
    }

    /// Takes work and hands it to the engine. Each staged block goes out as soon as it is filled,
    /// so that the drive works while the next one is copied.
    fn refill(&mut self, then: Then) -> Result<Refilled> {
        let mut room = self.room();
        let free = room.staging;
        room.staging = BlockCounts {
            host: free.host.min(STAGED_BATCH),
            device: free.device.min(STAGED_BATCH),
        };
        let Taken { units, finished } = self.scheduler.take(room);
        let staged = count_staged(&units);
        let may_be_more =
            |on_device| staged.of(on_device) == STAGED_BATCH && free.of(on_device) > STAGED_BATCH;
        let refilled = if may_be_more(false) || may_be_more(true) {
            Refilled::InPart
        } else if units.is_empty() && finished.is_empty() {
            Refilled::Nothing
        } else {
            Refilled::All
        };
        for operation in finished {
            operation.finish();
        }
        for unit in units {
            let staged = unit.is_staged();
            self.start(unit);
            if staged {
                self.submit(Then::Copy)?;
            }
        }
        self.submit(then)?;
        Ok(refilled)
    }

    fn outstanding(&self) -> usize {
        self.engine.in_flight() + self.ready.len() + self.parked.len() + self.copies.under_way()
    }

    fn room(&self) -> Room {
        let depth = self.engine.depth();
        let prefetch = (depth - depth / DEMAND_SHARE).max(1);
        let (free, parked) = (self.staging.free(), count_staged(&self.parked));
        Room {
            transfers: depth.saturating_sub(self.outstanding()),
            prefetch: prefetch.saturating_sub(self.prefetch_in_flight),
            staging: BlockCounts {
                host: free.host.saturating_sub(parked.host),
                device: free.device.saturating_sub(parked.device),
            },
        }
    }

    /// Waits for completions, for work if there is room for it, or for a message.
    fn sleep(&mut self, version: u64, refilled: Refilled) -> Result<()> {
        let idle = self.engine.in_flight() == 0;
        if idle && !self.ready.is_empty() {
            std::thread::sleep(REFUSED_PAUSE);
            return Ok(());
        }
        self.port.waiting.store(self.room().transfers > 0, Ordering::SeqCst);
        let work_is_left = refilled == Refilled::InPart || self.scheduler.version() != version;
        let timeout = work_is_left.then_some(Duration::ZERO);
        let slept = if idle {
            self.port.wake.wait(timeout);
            Ok(())
        } else {
            self.engine.reap(timeout, &mut self.completions)
        };
        self.port.waiting.store(false, Ordering::SeqCst);
        slept
    }

    fn submit(&mut self, then: Then) -> Result<()> {
        for _ in 0..self.parked.len() {
            let Some(unit) = self.parked.pop_front() else { break };
            if self.staging.free().of(unit.device().is_some()) == 0 {
                self.parked.push_back(unit);
            } else {
                self.start(unit);
            }
        }
        if self.ready.is_empty() {
            return Ok(());
        }
        let accepted = self.hand_over(then)?;
        self.ready.drain(..accepted);
        add(&self.counters.transfers, accepted as u64);
        self.counters.depth(self.engine.in_flight());
        Ok(())
    }

    #[expect(unsafe_code, reason = "a transfer is a promise about memory and descriptors")]
    fn hand_over(&mut self, then: Then) -> Result<usize> {
        // The flight of each transfer holds its operation, whose maker keeps the memory valid until
        // it is done, and its file; it stays in `flights` until the completion is seen, or until
        // the engine is dropped in `give_everything_back`.
        match then {
            // SAFETY: as said above.
            Then::Reap => unsafe { self.engine.submit_and_reap_next(&self.ready) },
            // SAFETY: as said above.
            Then::Copy => unsafe { self.engine.submit(&self.ready) },
        }
    }

    fn handle_completions(&mut self) -> Result<()> {
        let completions = std::mem::take(&mut self.completions);
        for completion in &completions {
            let Ok(token) = usize::try_from(completion.token) else {
                continue;
            };
            let Some(flight) = self.flights.get_mut(token).and_then(Option::take) else {
                continue;
            };
            let staged = flight.staging.is_some();
            self.handle(token, flight, completion.result);
            if staged {
                self.refill(Then::Copy)?;
            }
        }
        self.completions = completions;
        self.completions.clear();
        if std::mem::take(&mut self.pause) {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn handle(&mut self, token: usize, mut flight: Flight, result: i64) {
        match flight.judge(result) {
            Verdict::Done => return self.arrive(token, flight),
            Verdict::Failed(error) => {
                let error = error.engine(flight.engine_name(self.engine.kind()));
                return self.end(token, flight, Err(error));
            }
            Verdict::Retry => {
                add(&self.counters.retries, 1);
                self.pause |= flight.attempts > QUICK_ATTEMPTS;
            }
            Verdict::Continue => add(&self.counters.short_transfers, 1),
            Verdict::NotUncached => {
                if let Some((file, ..)) = flight.block() {
                    file.mount.refuse_uncached();
                }
            }
            Verdict::Buffered(refused) => self.reroute(&mut flight, refused),
            Verdict::Host(error) => return self.leave_gds(token, flight, &error),
        }
        self.launch(token, flight);
    }

    /// Sends a block that cuFile doesn't take through staging blocks, from its beginning.
    fn leave_gds(&mut self, token: usize, mut flight: Flight, error: &Error) {
        if let Work::Move { file, block, gds, .. } = &mut flight.unit.work {
            if let Some(gds) = gds.take() {
                give_up(file, &gds, error, &self.counters);
            }
            block.route = Route::Staged;
        }
        self.free_tokens.push(token);
        self.prefetch_in_flight -= usize::from(flight.unit.is_prefetch());
        self.start(flight.unit);
    }

    /// Sends a block that can't go directly through the page cache, from its beginning.
    fn reroute(&mut self, flight: &mut Flight, refused: Option<rustix::io::Errno>) {
        if !flight.is_copied()
            && let Some((index, _)) = flight.staging.take()
        {
            self.staging.of(false).give_back(index);
        }
        if let Work::Move { span, block, .. } = &mut flight.unit.work {
            *block = block.buffered(span);
        }
        flight.moved = 0;
        flight.refused = flight.refused.or(refused);
    }

    /// The drive has done its part of a flight.
    fn arrive(&mut self, token: usize, flight: Flight) {
        self.counters.latency(flight.started.elapsed());
        let Some((file, span, block)) = flight.block() else {
            return self.end(token, flight, Ok(0));
        };
        if let Some(code) = flight.refused {
            let reason = format!("O_DIRECT is refused by a transfer: {code}");
            if file.mount.refuse_direct(&reason) {
                let label = file.label().display();
                self.counters.fallback(&format!("no direct I/O for {label}: {reason}"));
            }
        }
        if let (Some((_, address)), Direction::Load) =
            (flight.staging, flight.unit.operation.plan.direction)
        {
            if flight.is_copied() {
                return self.copy(token, flight);
            }
            let to = std::ptr::with_exposed_provenance_mut::<u8>(span.address);
            copy(
                address.wrapping_add(block.skip(&span)),
                to.wrapping_add(block.position),
                block.length,
            );
        }
        self.deliver(token, flight);
    }

    /// All bytes of a block are where they should be: counts them.
    fn deliver(&mut self, token: usize, mut flight: Flight) {
        sums::add(&flight);
        let Some((_, _, block)) = flight.block() else {
            return self.end(token, flight, Ok(0));
        };
        let direction = flight.unit.operation.plan.direction;
        let bytes = block.length as u64;
        add(
            match (block.route, flight.cached) {
                (_, true) => &self.counters.bytes_cached,
                (Route::Direct, _) => &self.counters.bytes_direct,
                (Route::Staged, _) => &self.counters.bytes_staged,
                (Route::Gds, _) => &self.counters.bytes_gds,
                (Route::Buffered, _) => &self.counters.bytes_buffered,
            },
            bytes,
        );
        if flight.transfer.buffer_slot.is_some() || flight.is_in_registered_device_memory() {
            add(&self.counters.bytes_registered, bytes);
        }
        add(
            match direction {
                Direction::Load => &self.counters.bytes_read,
                Direction::Store => &self.counters.bytes_written,
            },
            bytes,
        );
        let goes_on = flight.go_on();
        if goes_on && !flight.unit.operation.is_stopped() {
            return self.set_off(token, flight);
        }
        let delivered = flight.delivered;
        let stopped = || Error::new(ErrorKind::Cancelled, "the operation was cancelled");
        self.end(token, flight, if goes_on { Err(stopped()) } else { Ok(delivered) });
    }

    /// Gives a unit back to its operation, and what it used to this worker.
    fn end(&mut self, token: usize, flight: Flight, result: Result<usize>) {
        if let Some((index, _)) = flight.staging {
            self.staging.of(flight.is_copied()).give_back(index);
        }
        if let Some((descriptor, _)) = flight.bound_file {
            self.bindings.release_file(self.engine.as_mut(), descriptor);
        }
        self.free_tokens.push(token);
        self.prefetch_in_flight -= usize::from(flight.unit.is_prefetch());
        let was_allocation = matches!(flight.unit.work, Work::Allocate { .. });
        if let Some(operation) = flight.unit.settle(result) {
            let helpers = if was_allocation { operation.block_count() } else { 0 };
            self.scheduler.push(operation, helpers);
        }
    }

    /// The engine is broken: waits for what it still does, then fails everything that was here.
    fn give_everything_back(self, error: &Error) {
        let Self { engine, copies, scheduler, flights, parked, .. } = self;
        drop(engine);
        drop(copies);
        let units = flights.into_iter().flatten().map(|flight| flight.unit).chain(parked);
        for unit in units {
            if let Some(operation) = unit.settle(Err(error.clone())) {
                scheduler.push(operation, usize::MAX);
            }
        }
    }
}

/// How many of these go through a staging block, by kind.
fn count_staged<'a>(units: impl IntoIterator<Item = &'a Unit>) -> BlockCounts {
    let mut counts = BlockCounts::default();
    for unit in units.into_iter().filter(|unit| unit.is_staged()) {
        *counts.of_mut(unit.device().is_some()) += 1;
    }
    counts
}

/// Fails and finishes what is queued when no worker is left, and what waited for that.
pub(crate) fn abandon(scheduler: &Scheduler, error: &Error) {
    loop {
        let operations = scheduler.take_all();
        if operations.is_empty() {
            return;
        }
        for operation in operations {
            operation.fail(error.clone());
            operation.finish();
        }
    }
}

#[expect(unsafe_code, reason = "moves bytes between staging blocks and the caller's memory")]
fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: one side is a staging block that this flight alone holds, at least `length` bytes by
    // the planner's invariants; the other is the caller's memory, valid until the operation is
    // done. They are different allocations.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) };
}
