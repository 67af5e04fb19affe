//! A decorator that writes down what goes through an engine, for tests and diagnosis.

#![expect(unsafe_code, reason = "passes the promises of `Engine::submit` on")]

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    Capabilities, Command, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Fallback,
    Transfer,
};
use crate::error::Result;

/// The most events that a [`Recording`] keeps: some 100 MiB.
pub const EVENTS_MAX: usize = 1 << 20;

/// A [`Transfer`] as written down: its address is a number that nobody follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedTransfer {
    /// The transfer's token.
    pub token: u64,
    /// What it asked for.
    pub command: Command,
    /// The open file, as a number; it may have been closed and given to another since.
    pub descriptor: RawFd,
    /// The slot of the registered file, if it named one.
    pub file_slot: Option<u32>,
    /// The slot of the registered memory, if it named one.
    pub buffer_slot: Option<u16>,
    /// It went through the page cache.
    pub buffered: bool,
    /// It asked to leave nothing in the page cache.
    pub uncached: bool,
    /// File offset in bytes.
    pub offset: u64,
    /// Memory address.
    pub address: usize,
    /// Bytes.
    pub length: usize,
}

impl From<&Transfer> for RecordedTransfer {
    fn from(transfer: &Transfer) -> Self {
        Self {
            token: transfer.token,
            command: transfer.command,
            descriptor: transfer.descriptor,
            file_slot: transfer.file_slot,
            buffer_slot: transfer.buffer_slot,
            buffered: transfer.buffered,
            uncached: transfer.uncached,
            offset: transfer.offset,
            address: transfer.address.addr(),
            length: transfer.length,
        }
    }
}

/// Something that happened in an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// [`Engine::submit`] was given `offered` transfers and took `accepted`, which follow.
    Batch {
        /// Transfers given.
        offered: usize,
        /// Transfers taken.
        accepted: usize,
    },
    /// A transfer was accepted.
    Submitted(RecordedTransfer),
    /// A transfer was reaped.
    Completed(Completion),
    /// Memory was registered, in this slot.
    BufferBound(u16),
    /// Memory was given back.
    BufferUnbound(u16),
    /// A file was registered, in this slot.
    FileBound(u32),
    /// A file was given back.
    FileUnbound(u32),
    /// The engine was dropped.
    Dropped,
}

/// What the engines of a [`RecordFactory`] did, in order. A clone reads the same recording.
#[derive(Clone, Debug, Default)]
pub struct Recording(Arc<Mutex<Log>>);

#[derive(Debug, Default)]
struct Log {
    events: Vec<(u32, Event)>,
    lost_count: u64,
}

impl Recording {
    /// All events, each with the number of its engine in the order in which they were built.
    pub fn events(&self) -> Vec<(u32, Event)> {
        self.log().events.clone()
    }

    /// The transfers accepted.
    pub fn transfers(&self) -> Vec<RecordedTransfer> {
        self.select(|event| match event {
            Event::Submitted(transfer) => Some(transfer),
            _ => None,
        })
    }

    /// The completions reaped.
    pub fn completions(&self) -> Vec<Completion> {
        self.select(|event| match event {
            Event::Completed(completion) => Some(completion),
            _ => None,
        })
    }

    /// Events that weren't kept because there were [`EVENTS_MAX`] already.
    pub fn lost_count(&self) -> u64 {
        self.log().lost_count
    }

    /// Forgets everything so far.
    pub fn clear(&self) {
        *self.log() = Log::default();
    }

    fn select<T>(&self, choose: impl Fn(Event) -> Option<T>) -> Vec<T> {
        self.log().events.iter().filter_map(|&(_, event)| choose(event)).collect()
    }

    fn add(&self, engine: u32, event: Event) {
        let mut log = self.log();
        if log.events.len() < EVENTS_MAX {
            log.events.push((engine, event));
        } else {
            log.lost_count += 1;
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An engine that is written down. See the [module documentation](self).
#[derive(Debug)]
pub struct Record {
    inner: Box<dyn Engine>,
    number: u32,
    recording: Recording,
}

impl Engine for Record {
    fn kind(&self) -> EngineKind {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        // SAFETY: the caller's promise, passed on.
        let accepted = unsafe { self.inner.submit(transfers) }?;
        self.recording.add(self.number, Event::Batch { offered: transfers.len(), accepted });
        for transfer in &transfers[..accepted] {
            self.recording.add(self.number, Event::Submitted(transfer.into()));
        }
        Ok(accepted)
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let count = completions.len();
        let reaped = self.inner.reap(timeout, completions);
        for completion in &completions[count..] {
            self.recording.add(self.number, Event::Completed(*completion));
        }
        reaped
    }

    unsafe fn bind_buffer(&mut self, address: *mut u8, length: usize) -> Result<Option<u16>> {
        // SAFETY: the caller's promise, passed on.
        let slot = unsafe { self.inner.bind_buffer(address, length) }?;
        if let Some(slot) = slot {
            self.recording.add(self.number, Event::BufferBound(slot));
        }
        Ok(slot)
    }

    fn unbind_buffer(&mut self, slot: u16) {
        self.recording.add(self.number, Event::BufferUnbound(slot));
        self.inner.unbind_buffer(slot);
    }

    fn bind_file(&mut self, descriptor: RawFd) -> Option<u32> {
        let slot = self.inner.bind_file(descriptor)?;
        self.recording.add(self.number, Event::FileBound(slot));
        Some(slot)
    }

    fn unbind_file(&mut self, slot: u32) {
        self.recording.add(self.number, Event::FileUnbound(slot));
        self.inner.unbind_file(slot);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.recording.add(self.number, Event::Dropped);
    }
}

/// Builds engines that are written down in one recording.
#[derive(Debug)]
pub struct RecordFactory {
    inner: Arc<dyn EngineFactory>,
    recording: Recording,
    built_count: AtomicU32,
}

impl RecordFactory {
    /// Writes down what the engines that `inner` builds do.
    pub fn new(inner: Arc<dyn EngineFactory>) -> Self {
        Self { inner, recording: Recording::default(), built_count: AtomicU32::new(0) }
    }

    /// What they did, while they live and after.
    pub fn recording(&self) -> Recording {
        self.recording.clone()
    }
}

impl EngineFactory for RecordFactory {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        let inner = self.inner.build(options)?;
        let number = self.built_count.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Record { inner, number, recording: self.recording.clone() }))
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.inner.fallbacks()
    }
}
