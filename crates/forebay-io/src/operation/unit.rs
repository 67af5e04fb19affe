//! One piece of an operation's work, while a worker has it.

use std::sync::Arc;

use super::{DeviceUse, Shared};
use crate::commit::Commit;
use crate::config::Priority;
use crate::error::{Error, ErrorKind, Result};
use crate::files::TensorFile;
use crate::plan::{Block, Route, Span};
use crate::routes::GdsFile;

/// One piece of work that a worker has taken.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) operation: Arc<Shared>,
    pub(crate) work: Work,
}

impl Unit {
    /// Gives the unit back. Returns the operation if it must be put into the queue again.
    pub(crate) fn settle(mut self, result: Result<usize>) -> Option<Arc<Shared>> {
        // Its reference to the file goes first, so that finishing the operation closes the file.
        self.work = Work::Settled;
        self.operation.complete(result).then(|| Arc::clone(&self.operation))
    }

    /// Whether it goes through a staging block, as planned.
    pub(crate) fn is_staged(&self) -> bool {
        match &self.work {
            Work::Move { block, device, gds, .. } => {
                block.route == Route::Staged || (device.is_some() && gds.is_none())
            }
            _ => false,
        }
    }

    /// The device whose memory it moves, if it isn't the host's.
    pub(crate) fn device(&self) -> Option<&DeviceUse> {
        match &self.work {
            Work::Move { device, .. } => self.operation.plan.devices.get((*device)?),
            _ => None,
        }
    }

    pub(crate) fn is_prefetch(&self) -> bool {
        self.operation.plan.priority == Priority::Prefetch
    }
}

impl Drop for Unit {
    /// A unit that is dropped on the way (its worker panicked) fails its operation.
    fn drop(&mut self) {
        if matches!(self.work, Work::Settled) {
            return;
        }
        self.work = Work::Settled;
        let error = Error::new(ErrorKind::Closed, "a worker stopped in the middle of a transfer");
        if self.operation.complete(Err(error)) {
            self.operation.finish();
        }
    }
}

#[derive(Debug)]
pub(crate) enum Work {
    Allocate {
        file: Arc<TensorFile>,
        offset: u64,
        length: u64,
    },
    Move {
        file: Arc<TensorFile>,
        /// Index into the plan's parts.
        part: usize,
        span: Span,
        block: Block,
        /// Index into the plan's devices.
        device: Option<usize>,
        /// By what the block goes if its route is [`Route::Gds`].
        gds: Option<Arc<GdsFile>>,
        maybe_cached: bool,
    },
    Sync {
        file: Arc<TensorFile>,
        data_only: bool,
    },
    Trim {
        file: Arc<TensorFile>,
    },
    SyncDirectory {
        file: Arc<TensorFile>,
    },
    Begin(Arc<dyn Commit>),
    Commit(Arc<dyn Commit>),
    /// The unit has been given back.
    Settled,
}

/// The answer to [`Shared::take`].
#[derive(Debug)]
pub(crate) enum Take {
    Unit(Unit),
    /// The next block is staged, and the worker has no staging block to spare.
    NeedsStaging,
    /// Nothing until units that are out come back; the operation leaves the queue.
    Nothing,
    /// All is done; the taker calls [`Shared::finish`].
    Finish,
}
