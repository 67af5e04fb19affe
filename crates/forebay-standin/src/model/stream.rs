//! Streams and events: what is enqueued where, and what comes before it.

use std::ops::Range;
use std::sync::Arc;

use super::clock::Clock;
use super::queue::{Queue, Signal, Task, Way};
use super::{HANDLE_BASE, Model, Outcome, code};

/// Handles of the default streams: `0`, `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const DEFAULT_STREAMS: usize = 3;

/// Numbers of default streams begin here, behind those of streams that were made.
const DEFAULT_NUMBER_BASE: u32 = 1 << 30;

/// A queue of a device.
pub(crate) struct Stream {
    pub(crate) device: i32,
    pub(crate) number: u32,
    pub(crate) queue: Arc<Queue>,
    pub(crate) clock: Clock,
    /// A graph is being captured on it, for all threads to mind.
    pub(crate) is_capturing: bool,
    /// Made by `cuStreamCreate`, not a default stream.
    made: bool,
}

/// A point in a stream.
pub(crate) struct Event {
    pub(crate) device: i32,
    /// What it was recorded behind last.
    pub(crate) recorded: Option<(Arc<Signal>, Clock)>,
}

impl Stream {
    pub(crate) fn is_made(&self) -> bool {
        self.made
    }

    pub(crate) fn is_made_for(&self, device: i32) -> bool {
        self.made && self.device == device
    }
}

impl Model {
    pub(crate) fn make_stream(&mut self, device: i32) -> Outcome<usize> {
        let handle = self.new_handle();
        self.start_stream(handle, device, true)?;
        Ok(handle)
    }

    fn start_stream(&mut self, handle: usize, device: i32, made: bool) -> Outcome {
        let number = u32::try_from(handle % HANDLE_BASE / 16).unwrap_or(u32::MAX);
        let number = if made { number } else { DEFAULT_NUMBER_BASE + number };
        let seed = self.settings.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(number));
        let queue =
            Queue::start(device, seed, self.settings.delay_us).ok_or(code::OUT_OF_MEMORY)?;
        let clock = Clock::default();
        let stream = Stream { device, number, queue, clock, is_capturing: false, made };
        self.streams.insert(handle, stream);
        Ok(())
    }

    /// The handle by which a stream is known here; a default stream is made when first used.
    pub(crate) fn stream(&mut self, handle: usize, device: i32) -> Outcome<usize> {
        let handle = if handle < DEFAULT_STREAMS {
            // Legacy is the default stream by another name.
            let kind = if handle == 2 { 2 } else { 1 };
            16 * (kind + DEFAULT_STREAMS * usize::try_from(device).unwrap_or(0))
        } else {
            handle
        };
        if handle < HANDLE_BASE && !self.streams.contains_key(&handle) {
            self.start_stream(handle, device, false)?;
        }
        match self.streams.get(&handle) {
            Some(stream) if stream.device == device => Ok(handle),
            Some(_) => {
                let text = "a stream is used in the context of another device".to_owned();
                self.journal.violation(text);
                Err(code::INVALID_HANDLE)
            }
            None => Err(code::INVALID_HANDLE),
        }
    }

    /// Enqueues a task that comes after what the host knows.
    pub(crate) fn enqueue(&mut self, handle: usize, task: impl FnOnce(&Clock) -> Task) -> Outcome {
        let device = self.streams.get(&handle).ok_or(code::INVALID_HANDLE)?.device;
        let breaks = self.breaks_of(device);
        let stream = self.streams.get_mut(&handle).ok_or(code::INVALID_HANDLE)?;
        stream.clock.join(self.order.host());
        stream.clock.advance(stream.number);
        stream.queue.push(breaks, task(&stream.clock));
        Ok(())
    }

    /// Takes note that the newest task of a stream uses memory.
    pub(crate) fn note(
        &mut self,
        handle: usize,
        bytes: Range<usize>,
        writes: bool,
        what: &'static str,
    ) {
        let Some(stream) = self.streams.get(&handle) else { return };
        let found = self.order.note(bytes, writes, what, (stream.number, &stream.clock));
        if let Some(text) = found {
            self.journal.violation(text);
        }
    }

    /// Enqueues a copy. What to wait for, if the host memory isn't registered.
    pub(crate) fn copy(
        &mut self,
        handle: usize,
        way: Way,
        device: Range<usize>,
        host: usize,
    ) -> Outcome<Option<Arc<Signal>>> {
        let length = device.len();
        if length == 0 {
            return Ok(None);
        }
        self.start_copy(handle, way, device, host)?;
        if self.memory.is_registered(&(host..host + length)) {
            return Ok(None);
        }
        let text = format!("an asynchronous copy of {length} bytes uses unregistered host memory");
        self.journal.violation(text);
        self.marker(handle).map(Some)
    }

    /// Enqueues a copy of any host memory, for which the host waits: by what, and what it knows
    /// then.
    pub(crate) fn copy_now(
        &mut self,
        handle: usize,
        way: Way,
        device: Range<usize>,
        host: usize,
    ) -> Outcome<(Arc<Signal>, Clock)> {
        if !device.is_empty() {
            self.start_copy(handle, way, device, host)?;
        }
        let signal = self.marker(handle)?;
        let clock = self.streams.get(&handle).ok_or(code::INVALID_HANDLE)?.clock.clone();
        Ok((signal, clock))
    }

    fn start_copy(
        &mut self,
        handle: usize,
        way: Way,
        device: Range<usize>,
        host: usize,
    ) -> Outcome {
        let length = device.len();
        let (allocation, offset) = self.memory.device(&device).map_err(|(code, text)| {
            self.journal.violation(format!("a copy uses {text}"));
            code
        })?;
        self.enqueue(handle, |_| Task::Copy { way, allocation, offset, host, length })?;
        self.note(handle, device, way == Way::In, "a copy");
        self.note(handle, host..host + length, way == Way::Out, "a copy");
        Ok(())
    }

    /// A kernel that writes `bytes`.
    pub(crate) fn kernel_write(&mut self, handle: usize, start: usize, bytes: Vec<u8>) -> Outcome {
        let range = start..start + bytes.len();
        let (allocation, offset) = self.memory.device(&range).map_err(|(code, text)| {
            self.journal.violation(format!("a kernel writes {text}"));
            code
        })?;
        self.enqueue(handle, |_| Task::Write { allocation, offset, bytes })?;
        self.note(handle, range, true, "a kernel that writes");
        Ok(())
    }

    /// A kernel that reads, and leaves what it read in host memory.
    pub(crate) fn kernel_read(
        &mut self,
        handle: usize,
        range: Range<usize>,
        host: usize,
    ) -> Outcome {
        let length = range.len();
        let (allocation, offset) = self.memory.device(&range).map_err(|(code, text)| {
            self.journal.violation(format!("a kernel reads {text}"));
            code
        })?;
        let way = Way::Out;
        self.enqueue(handle, |_| Task::Copy { way, allocation, offset, host, length })?;
        self.note(handle, range, false, "a kernel that reads");
        Ok(())
    }

    /// A signal behind everything that a stream has to do.
    pub(crate) fn marker(&mut self, handle: usize) -> Outcome<Arc<Signal>> {
        let signal = Arc::new(Signal::default());
        self.enqueue(handle, |_| Task::Signal(Arc::clone(&signal)))?;
        Ok(signal)
    }

    pub(crate) fn record(&mut self, event: usize, handle: usize, device: i32) -> Outcome {
        let known = self.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        if known.device != device {
            let text = "an event is recorded in the context of another device".to_owned();
            self.journal.violation(text);
            return Err(code::INVALID_HANDLE);
        }
        let signal = self.marker(handle)?;
        let clock = self.streams.get(&handle).ok_or(code::INVALID_HANDLE)?.clock.clone();
        let known = self.events.get_mut(&event).ok_or(code::INVALID_HANDLE)?;
        known.recorded = Some((signal, clock));
        Ok(())
    }

    /// Has a stream wait for an event, of whatever device.
    pub(crate) fn wait_event(&mut self, handle: usize, event: usize) -> Outcome {
        let known = self.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        let Some((signal, clock)) = known.recorded.clone() else { return Ok(()) };
        self.enqueue(handle, |_| Task::Wait(signal))?;
        let stream = self.streams.get_mut(&handle).ok_or(code::INVALID_HANDLE)?;
        stream.clock.join(&clock);
        Ok(())
    }

    /// Ends a stream once it has done what is enqueued.
    pub(crate) fn destroy_stream(&mut self, handle: usize) -> Outcome {
        if handle < HANDLE_BASE {
            return Err(code::INVALID_HANDLE);
        }
        let stream = self.streams.remove(&handle).ok_or(code::INVALID_HANDLE)?;
        stream.queue.close();
        Ok(())
    }
}
