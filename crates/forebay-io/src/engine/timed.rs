//! A decorator that tells an observer how long each transfer took.
//!
//! The time runs from the call that hands a transfer over to the moment its completion is reaped,
//! as the worker above sees it.

#![expect(unsafe_code, reason = "passes the promises of `Engine::submit` on")]

use std::collections::HashMap;
use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{
    Capabilities, Command, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Fallback,
    Transfer,
};
use crate::error::Result;

/// Hears of each transfer that moved bytes. Called on the workers' threads.
pub trait TransferObserver: fmt::Debug + Send + Sync {
    /// A transfer moved `bytes` in `latency`.
    fn moved(&self, bytes: u64, latency: Duration);
}

/// An engine whose transfers are timed. See the [module documentation](self).
#[derive(Debug)]
struct Timed {
    inner: Box<dyn Engine>,
    observer: Arc<dyn TransferObserver>,
    /// When the reads and writes in flight were handed over, by their tokens.
    started: HashMap<u64, Instant>,
}

impl Engine for Timed {
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
        let now = Instant::now();
        // SAFETY: the caller's promise, passed on.
        let accepted = unsafe { self.inner.submit(transfers) }?;
        for transfer in &transfers[..accepted] {
            if matches!(transfer.command, Command::Read | Command::Write) {
                self.started.insert(transfer.token, now);
            }
        }
        Ok(accepted)
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let count = completions.len();
        let reaped = self.inner.reap(timeout, completions);
        for completion in &completions[count..] {
            let started = self.started.remove(&completion.token);
            if let (Some(started), Ok(bytes @ 1..)) = (started, u64::try_from(completion.result)) {
                self.observer.moved(bytes, started.elapsed());
            }
        }
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

/// Builds engines that tell one observer how long their transfers took.
#[derive(Debug)]
pub struct TimedFactory {
    inner: Arc<dyn EngineFactory>,
    observer: Arc<dyn TransferObserver>,
}

impl TimedFactory {
    /// Times what the engines that `inner` builds do.
    pub fn new(inner: Arc<dyn EngineFactory>, observer: Arc<dyn TransferObserver>) -> Self {
        Self { inner, observer }
    }
}

impl EngineFactory for TimedFactory {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        let inner = self.inner.build(options)?;
        let observer = Arc::clone(&self.observer);
        Ok(Box::new(Timed { inner, observer, started: HashMap::new() }))
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.inner.fallbacks()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Handle, Options};

    #[derive(Debug, Default)]
    struct Seen(Mutex<Vec<(u64, Duration)>>);

    impl TransferObserver for Seen {
        fn moved(&self, bytes: u64, latency: Duration) {
            self.0.lock().unwrap().push((bytes, latency));
        }
    }

    #[test]
    fn every_byte_that_moves_is_told_of_once_and_syncs_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let seen = Arc::new(Seen::default());
        let observer: Arc<dyn TransferObserver> = Arc::<Seen>::clone(&seen);
        let factory = TimedFactory::new(Arc::new(EngineKind::Threads), observer);
        let options = Options {
            block_size: 4096,
            direct: crate::DirectMode::Never,
            durability: crate::Durability::Full,
            ..Options::default()
        };
        let handle = Handle::with_factory(options, Arc::new(factory)).unwrap();
        handle.store(directory.path().join("w"), &[7; 10_001]).unwrap();
        handle.close().unwrap();
        let seen = seen.0.lock().unwrap();
        assert_eq!(seen.iter().map(|(bytes, _)| bytes).sum::<u64>(), 10_001);
        assert_eq!(seen.len(), 3);
    }
}
