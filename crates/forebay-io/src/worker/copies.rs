//! Copies between staging blocks and the memory of devices.
//!
//! Each device and direction has a lane: a stream of the worker's own, on which copies follow each
//! other, and a thread that sleeps until the event behind each of them is over, then puts it among
//! those that have landed and wakes the worker. So the drive works on some blocks while others are
//! copied, and nothing spins.
//!
//! # Invariants
//!
//! - A copy that was started lands exactly once, well or badly, or is over when this is dropped.
//! - The copies of an operation on a lane come after what the caller's stream had to do of whose
//!   memory they are: an operation may name several streams of a device.
#![expect(unsafe_code, reason = "enqueues copies, which are promises about memory")]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::Worker;
use super::flight::Flight;
use crate::device::{Context, DeviceAddress, Event, Stream};
use crate::engine::WakeEvent;
use crate::error::{Error, ErrorKind, Result};
use crate::operation::DeviceUse;
use crate::plan::Direction;
use crate::stats::{Counters, add};

impl Worker {
    /// Starts the copy between a staging block and a device's memory; the flight goes on when that
    /// has landed.
    pub(super) fn copy(&mut self, token: usize, flight: Flight) {
        let (Some((_, span, block)), Some((_, address)), Some(device)) =
            (flight.block(), flight.staging, flight.unit.device())
        else {
            return self.end(token, flight, Ok(0));
        };
        let direction = flight.unit.operation.plan.direction;
        let skip = if direction == Direction::Load { block.skip(&span) } else { 0 };
        let copy = Copy {
            token,
            device,
            direction,
            block: address.wrapping_add(skip),
            address: span.address + block.position,
            length: block.length,
        };
        // SAFETY: this flight alone holds the block, and its operation, whose maker keeps the
        // memory valid, stays until the copy has landed or `copies` was dropped.
        match unsafe { self.copies.start(copy) } {
            Ok(()) => self.flights[token] = Some(flight),
            Err(error) => self.end(token, flight, Err(error)),
        }
    }

    /// Goes on with the blocks whose copies have landed.
    pub(super) fn handle_landings(&mut self) {
        for landing in self.copies.landed() {
            let token = landing.token;
            let Some(flight) = self.flights.get_mut(token).and_then(Option::take) else {
                continue;
            };
            match (landing.result, flight.unit.operation.plan.direction) {
                (Err(error), _) => self.end(token, flight, Err(error)),
                (Ok(()), Direction::Load) => self.deliver(token, flight),
                (Ok(()), Direction::Store) => self.launch(token, flight),
            }
        }
    }
}

/// A copy that is over.
#[derive(Debug)]
struct Landing {
    token: usize,
    result: Result<()>,
}

/// What is to be copied, and for whom.
#[derive(Clone, Copy, Debug)]
struct Copy<'a> {
    token: usize,
    device: &'a DeviceUse,
    /// A load copies to the device, a store from it.
    direction: Direction,
    block: *mut u8,
    address: DeviceAddress,
    length: usize,
}

/// See the [module documentation](self).
#[derive(Debug)]
pub(super) struct Copies {
    lanes: Vec<Lane>,
    shore: Arc<Shore>,
    counters: Arc<Counters>,
    under_way: usize,
}

/// A copy under way, as the watcher of its lane sees it.
#[derive(Debug)]
struct Watched {
    lane: usize,
    token: usize,
    event: Event,
}

/// Where copies land.
#[derive(Debug)]
struct Shore {
    landed: Mutex<Vec<(Watched, Result<()>)>>,
    wake: Arc<WakeEvent>,
}

impl Shore {
    fn landed(&self) -> MutexGuard<'_, Vec<(Watched, Result<()>)>> {
        self.landed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Lane {
    direction: Direction,
    stream: Stream,
    /// The start that was waited for last.
    behind: Option<Arc<Event>>,
    /// Events that are over.
    events: Vec<Event>,
    watch: Option<Sender<Watched>>,
    watcher: Option<JoinHandle<()>>,
}

impl Copies {
    pub(super) fn new(wake: Arc<WakeEvent>, counters: Arc<Counters>) -> Self {
        let shore = Arc::new(Shore { landed: Mutex::default(), wake });
        Self { lanes: Vec::new(), shore, counters, under_way: 0 }
    }

    /// Copies that haven't landed.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// Starts a copy.
    ///
    /// # Errors
    ///
    /// The driver refuses; nothing is under way then.
    ///
    /// # Safety
    ///
    /// The block is the caller's alone, and the device memory valid, until the copy has landed or
    /// this was dropped.
    unsafe fn start(&mut self, copy: Copy<'_>) -> Result<()> {
        let context = &copy.device.context;
        match context.cuda().pin_region_of(context, copy.block, copy.length) {
            Ok(true) => {}
            Ok(false) => self.counters.fallback("staging blocks aren't registered with CUDA"),
            Err(error) => self.counters.fallback(&format!("staging blocks aren't pinned: {error}")),
        }
        let index = self.lane(context, copy.direction)?;
        let lane = &mut self.lanes[index];
        let event = match lane.events.pop() {
            Some(event) => event,
            None => Event::new(context)?,
        };
        let start = &copy.device.start;
        if !lane.behind.as_ref().is_some_and(|last| Arc::ptr_eq(last, start)) {
            lane.stream.wait_for(start)?;
            lane.behind = Some(Arc::clone(start));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { lane.enqueue(&copy) }?;
        if let Err(error) = lane.watch(index, copy.token, event) {
            // Nobody would see it land.
            lane.stream.settle();
            return Err(error);
        }
        self.under_way += 1;
        add(&self.counters.bytes_device, copy.length as u64);
        Ok(())
    }

    /// The lane of a device and direction, which is made when it is first used.
    fn lane(&mut self, context: &Arc<Context>, direction: Direction) -> Result<usize> {
        let serves =
            |lane: &Lane| lane.direction == direction && lane.stream.context().is_same(context);
        if let Some(index) = self.lanes.iter().position(serves) {
            return Ok(index);
        }
        self.lanes.push(Lane::new(context, direction, &self.shore)?);
        Ok(self.lanes.len() - 1)
    }

    /// The copies that have landed since the last call.
    fn landed(&mut self) -> Vec<Landing> {
        if self.under_way == 0 {
            return Vec::new();
        }
        let landed = std::mem::take(&mut *self.shore.landed());
        self.under_way -= landed.len();
        let land = |(Watched { lane, token, event }, result)| {
            self.lanes[lane].events.push(event);
            Landing { token, result }
        };
        landed.into_iter().map(land).collect()
    }
}

impl Lane {
    fn new(context: &Arc<Context>, direction: Direction, shore: &Arc<Shore>) -> Result<Self> {
        let stream = Stream::new(context)?;
        let (watch, watched) = channel();
        let shore = Arc::clone(shore);
        let watcher = std::thread::Builder::new()
            .name("forebay-copies".to_owned())
            .spawn(move || watch_over(&watched, &shore))
            .map_err(|error| Error::from_io(error, "cannot start a thread for copies"))?;
        Ok(Self {
            direction,
            stream,
            behind: None,
            events: Vec::new(),
            watch: Some(watch),
            watcher: Some(watcher),
        })
    }

    /// # Safety
    ///
    /// As for [`Copies::start`].
    unsafe fn enqueue(&self, copy: &Copy<'_>) -> Result<()> {
        let Copy { direction, block, address, length, .. } = *copy;
        match direction {
            // SAFETY: the caller's promise is passed on.
            Direction::Load => unsafe { self.stream.copy_in(address, block, length) },
            // SAFETY: the caller's promise is passed on.
            Direction::Store => unsafe { self.stream.copy_out(block, address, length) },
        }
    }

    /// Has the copy that was enqueued last land once it is over.
    fn watch(&self, lane: usize, token: usize, event: Event) -> Result<()> {
        event.record(&self.stream)?;
        let gone = || Error::new(ErrorKind::Closed, "the thread for copies is gone");
        let watch = self.watch.as_ref().ok_or_else(gone)?;
        watch.send(Watched { lane, token, event }).map_err(|_| gone())
    }
}

/// The life of a watcher's thread. A copy in a context that broke is over, badly.
fn watch_over(watched: &Receiver<Watched>, shore: &Shore) {
    for copy in watched {
        let result = copy.event.settle();
        shore.landed().push((copy, result));
        shore.wake.signal();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.stream.settle();
        self.watch = None;
        if let Some(watcher) = self.watcher.take() {
            // It doesn't panic; if it did, nothing would be left to do.
            let _ = watcher.join();
        }
    }
}
