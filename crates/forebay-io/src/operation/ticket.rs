//! The ticket of an operation, which its user holds.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::{Shared, lock};
use crate::engine::WakeEvent;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::process;

/// The ticket of an operation: waits for it, asks after it, cancels it.
///
/// Dropping it changes nothing: the operation goes on, and a failure that nobody waited for is
/// delivered by [`Handle::close`](crate::Handle::close) and
/// [`Handle::take_unseen_failures`](crate::Handle::take_unseen_failures).
#[derive(Clone, Debug)]
pub struct Operation(pub(crate) Arc<Shared>);

impl Operation {
    /// Waits until it is done and returns its result, the same each time.
    ///
    /// # Errors
    ///
    /// The first error that any of its transfers met; [`ErrorKind::Cancelled`] after a
    /// [`Self::cancel`] that came in time; [`ErrorKind::Closed`] in a process forked from the one
    /// that it belongs to.
    pub fn wait(&self) -> Result<()> {
        self.wait_until(None).map(|_| ())
    }

    /// Waits for at most `timeout`; `false` if it isn't done by then.
    ///
    /// # Errors
    ///
    /// As for [`Self::wait`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// As [`Self::wait_timeout`], without taking notice of the result: a failure is still one that
    /// nobody has heard of.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] in a process forked from the one that it belongs to.
    pub fn wait_finished(&self, timeout: Duration) -> Result<bool> {
        self.refuse_elsewhere()?;
        Ok(self.wait_unacknowledged(Instant::now().checked_add(timeout)))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<bool> {
        let shared = &*self.0;
        self.refuse_elsewhere()?;
        if !self.wait_unacknowledged(deadline) {
            return Ok(false);
        }
        self.acknowledge();
        lock(&shared.outcome).result.clone().unwrap_or(Ok(())).map(|()| true)
    }

    fn refuse_elsewhere(&self) -> Result<()> {
        if self.0.process == process::number() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Closed,
            "the operation belongs to the process that this one was forked from",
        ))
    }

    /// Waits without taking notice of the result; `false` if the deadline came first.
    pub(crate) fn wait_unacknowledged(&self, deadline: Option<Instant>) -> bool {
        let shared = &*self.0;
        let mut outcome = lock(&shared.outcome);
        while outcome.result.is_none() {
            outcome = match deadline {
                None => shared.finished.wait(outcome).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    let waited = shared.finished.wait_timeout(outcome, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    /// Whether it is finished, well or badly. Never blocks.
    pub fn is_done(&self) -> bool {
        self.0.done.load(Ordering::Acquire)
    }

    /// Starts no further block. What is with the kernel is still waited for, so memory stays safe;
    /// unless everything had moved, [`Self::wait`] then gives [`ErrorKind::Cancelled`].
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
    }

    /// Bytes moved so far.
    pub fn bytes_done(&self) -> u64 {
        self.0.bytes_done.load(Ordering::Relaxed)
    }

    /// Bytes to move.
    pub fn bytes_total(&self) -> u64 {
        self.0.bytes_total
    }

    /// The CRC32C of each part of a request that asked for them, in order, of the bytes that were
    /// moved. `None` unless it is done and all of it has moved.
    pub fn checksums(&self) -> Option<Vec<u32>> {
        let sums = self.0.plan.sums.as_ref()?;
        let moved = matches!(lock(&self.0.outcome).result, Some(Ok(())));
        moved.then(|| sums.all())
    }

    /// Signals the event once it is done; at once if it is.
    pub fn notify(&self, wake: &Arc<WakeEvent>) {
        let mut outcome = lock(&self.0.outcome);
        if outcome.result.is_some() {
            wake.signal();
        } else {
            outcome.to_signal.push(Arc::clone(wake));
        }
    }

    /// Takes out what the request kept alive, once it is done, so that the caller can drop it
    /// where that is right to do. `None` before, and after the first call.
    pub fn take_keep(&self) -> Option<Box<dyn Any + Send>> {
        if self.is_done() { lock(&self.0.keep).take() } else { None }
    }

    /// Says that its result has been delivered, so that no other call reports its failure again;
    /// `true` if nobody had heard of it before.
    pub fn acknowledge(&self) -> bool {
        self.0.tracker.acknowledge(&self.0)
    }
}
