//! Ending a long call from another thread, such as one that hears of an interrupt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_io::{Error, ErrorKind, OwnedMemory, OwnedOperation, Result};

/// The longest time between two looks at whether to stop.
const SLICE: Duration = Duration::from_millis(50);

/// A request to end what is under way. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Has the calls that were given it end soon, with [`ErrorKind::Cancelled`].
    pub fn request(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether that was asked for.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Fails if it was.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_requested() {
            return Err(Error::new(ErrorKind::Cancelled, "it was interrupted"));
        }
        Ok(())
    }

    /// Waits for an operation, which is cancelled if a stop is asked for.
    pub(super) fn wait(&self, operation: OwnedOperation) -> Result<OwnedMemory> {
        while !operation.is_done_within(SLICE) {
            if self.is_requested() {
                operation.cancel();
            }
        }
        operation.wait()
    }
}
