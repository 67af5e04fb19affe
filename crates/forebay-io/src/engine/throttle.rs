//! A decorator that holds completions back, so that no more than a given rate gets through.
//!
//! Transfers go to the wrapped engine at once. Their completions are handed out on a schedule on
//! which the bytes moved take as long as the rate says; a caller that keeps a bounded number of
//! transfers in flight is slowed down to it. Waiting is done by the wrapped engine's reap.

#![expect(unsafe_code, reason = "passes the promises of `Engine::submit` on")]

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::deadline::Deadline;
use super::{
    Capabilities, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Fallback, Transfer,
};
use crate::error::{Error, ErrorKind, Result};

/// A rate that several engines share.
#[derive(Debug)]
struct Rate {
    bytes_per_second: u64,
    /// When the bytes let through so far will have taken their time.
    free_at: Mutex<Instant>,
}

impl Rate {
    /// When `bytes` that have just moved may be told of.
    fn admit(&self, bytes: u64) -> Instant {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let takes = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now().max(*free_at);
        *free_at = start.checked_add(takes).unwrap_or(start);
        *free_at
    }
}

/// An engine whose completions keep to a rate. See the [module documentation](self).
#[derive(Debug)]
pub struct Throttle {
    inner: Box<dyn Engine>,
    rate: Arc<Rate>,
    /// Completions held back, with the time at which each is handed out, in ascending order.
    held: VecDeque<(Instant, Completion)>,
}

impl Throttle {
    /// Takes what the wrapped engine completed in, and hands out what is due.
    fn hold_and_release(&mut self, fresh: Vec<Completion>, completions: &mut Vec<Completion>) {
        for completion in fresh {
            // What failed, synced or allocated moved no bytes.
            let bytes = u64::try_from(completion.result).unwrap_or(0);
            self.held.push_back((self.rate.admit(bytes), completion));
        }
        let now = Instant::now();
        while self.held.front().is_some_and(|(due, _)| *due <= now) {
            completions.extend(self.held.pop_front().map(|(_, completion)| completion));
        }
    }
}

impl Engine for Throttle {
    fn kind(&self) -> EngineKind {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        capabilities.features.push("throttled");
        capabilities
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        let count = transfers.len().min(self.depth().saturating_sub(self.in_flight()));
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.submit(&transfers[..count]) }
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let count = completions.len();
        self.hold_and_release(Vec::new(), completions);
        if completions.len() > count {
            return Ok(());
        }
        let deadline = Deadline::after(timeout);
        let due = self.held.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
        let left = match (deadline.left(), due) {
            (Some(left), Some(due)) => Some(left.min(due)),
            (left, due) => left.or(due),
        };
        // Once only: whether the wake event ended it is known to nobody but the wrapped engine.
        let mut fresh = Vec::new();
        let reaped = self.inner.reap(left, &mut fresh);
        self.hold_and_release(fresh, completions);
        reaped
    }

    unsafe fn bind_buffer(&mut self, address: *mut u8, length: usize) -> Result<Option<u16>> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.bind_buffer(address, length) }
    }

    fn unbind_buffer(&mut self, slot: u16) {
        self.inner.unbind_buffer(slot);
    }

    fn bind_file(&mut self, descriptor: RawFd) -> Option<u32> {
        self.inner.bind_file(descriptor)
    }

    fn unbind_file(&mut self, slot: u32) {
        self.inner.unbind_file(slot);
    }
}

/// Builds throttled engines, which share one rate.
#[derive(Debug)]
pub struct ThrottleFactory {
    inner: Arc<dyn EngineFactory>,
    rate: Arc<Rate>,
}

impl ThrottleFactory {
    /// Lets all engines that it builds, by way of `inner`, move `bytes_per_second` together.
    ///
    /// # Errors
    ///
    /// The rate is zero.
    pub fn new(inner: Arc<dyn EngineFactory>, bytes_per_second: u64) -> Result<Self> {
        if bytes_per_second == 0 {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "a rate of 0 bytes per second would never end",
            ));
        }
        let free_at = Mutex::new(Instant::now());
        Ok(Self { inner, rate: Arc::new(Rate { bytes_per_second, free_at }) })
    }
}

impl EngineFactory for ThrottleFactory {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        let inner = self.inner.build(options)?;
        Ok(Box::new(Throttle { inner, rate: Arc::clone(&self.rate), held: VecDeque::new() }))
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.inner.fallbacks()
    }
}
