//! Engines: ways of asking the kernel to move blocks between files and memory.
//!
//! An [`Engine`] takes [`Transfer`]s, many at a time, and hands back one [`Completion`] for each.
//! It knows nothing of operations, retries or alignment: a completion is the raw result of the
//! kernel, and what to make of it is decided by the worker that owns the engine. Every backend
//! passes the same conformance suite (`forebay-testkit`), decorators ([`throttle`], [`record`])
//! and the fault-injecting engine of the test kit implement the same trait.
//!
//! # Invariants
//!
//! - Every accepted transfer gives exactly one completion, in any order.
//! - An engine is built, used and dropped on one thread (io_uring's single-issuer rule).
//! - Dropping an engine waits for everything in flight, then closes what it holds: memory that
//!   the kernel could still write to is never let go before that.
//! - [`Engine::reap`] sleeps in the kernel; it never spins.

pub mod aio;
pub mod gds;
pub mod record;
pub mod threads;
pub mod throttle;
pub mod timed;
pub mod uring;

mod auto;
mod deadline;
mod wake;

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

pub use auto::{AutoFactory, Fallback};
pub use gds::{ChannelNumber, Channels};
pub use wake::WakeEvent;

use crate::error::Result;

/// The most bytes the kernel moves in one call (`MAX_RW_COUNT`, see `read(2)`).
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// The most bytes in one registered buffer (`IORING_REGISTER_BUFFERS` refuses more than 1 GiB).
pub const PIECE_BYTES_MAX: usize = 1 << 30;

/// The engines that this crate has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// io_uring.
    Uring,
    /// Linux AIO (`io_submit`); its buffered transfers go to threads.
    Aio,
    /// `pread` and `pwrite` on a pool of threads.
    Threads,
}

impl EngineKind {
    /// All engines, the preferred first.
    pub const ALL: [Self; 3] = [Self::Uring, Self::Aio, Self::Threads];

    /// The name used everywhere: options, statistics, messages, file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Aio => "aio",
            Self::Threads => "threads",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a [`Transfer`] asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Move bytes from the file to memory.
    Read,
    /// Move bytes from memory to the file.
    Write,
    /// Make what was written durable; `data_only` is `fdatasync(2)`, else `fsync(2)`.
    Sync {
        /// Leave out metadata that isn't needed to read the data back.
        data_only: bool,
    },
    /// Reserve space for `offset..offset + length` (`fallocate(2)`).
    Allocate {
        /// Leave the file's size as it is (`FALLOC_FL_KEEP_SIZE`); else the file grows.
        keep_size: bool,
    },
}

/// One request to the kernel.
///
/// `address` is the memory to read into or write from. Whoever submits promises that it stays
/// valid, and for reads that nobody else touches it, until the completion has been seen.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Comes back in the [`Completion`].
    pub token: u64,
    /// What to do.
    pub command: Command,
    /// The open file.
    pub descriptor: RawFd,
    /// The slot that [`Engine::bind_file`] gave for the same file, if any.
    pub file_slot: Option<u32>,
    /// The slot of [`Engine::bind_buffer`] that the whole of the memory lies in, if any.
    pub buffer_slot: Option<u16>,
    /// The memory is a device's, and goes by the channel of this number.
    pub channel: Option<ChannelNumber>,
    /// The descriptor goes through the page cache (it was opened without `O_DIRECT`).
    pub buffered: bool,
    /// Ask the kernel to leave nothing in the page cache (`RWF_DONTCACHE`, Linux 6.14).
    pub uncached: bool,
    /// File offset in bytes.
    pub offset: u64,
    /// Memory address; unused by [`Command::Sync`] and [`Command::Allocate { .. }`](Command::Allocate).
    pub address: *mut u8,
    /// Bytes to move; at most [`TRANSFER_BYTES_MAX`] for reads and writes.
    pub length: usize,
}

/// What became of one [`Transfer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The transfer's token.
    pub token: u64,
    /// Bytes moved, or the negated `errno`; for device memory it may be the negated code of its
    /// library ([`gds`] says which).
    pub result: i64,
}

/// What an engine was found to be able to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Memory can be registered, so that a transfer pins no pages.
    pub registered_buffers: bool,
    /// Files can be registered, so that a transfer takes no reference to them.
    pub registered_files: bool,
    /// Setup flags or features in use, for reports (`"single-issuer"`, `"deferred-taskrun"`, …).
    pub features: Vec<&'static str>,
}

/// Options that an engine is built with.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Transfers in flight at the most.
    pub queue_depth: usize,
    /// Ends a sleeping [`Engine::reap`] when signalled from another thread.
    pub wake: Arc<WakeEvent>,
    /// Hand each transfer to the kernel by a call of its own instead of in batches.
    pub single_submit: bool,
    /// io_uring: a kernel thread polls the submission queue.
    pub sqpoll: bool,
    /// io_uring: completions are polled for; needs a drive with poll queues.
    pub iopoll: bool,
    /// The channels of transfers of device memory, if there are to be any.
    pub channels: Option<Arc<Channels>>,
}

/// A way of moving blocks. See the [module documentation](self) for the rules.
#[expect(unsafe_code, reason = "callers promise that memory outlives the transfers")]
pub trait Engine: fmt::Debug {
    /// Which engine this is; a decorator answers for what it wraps.
    fn kind(&self) -> EngineKind;

    /// What it can do here.
    fn capabilities(&self) -> Capabilities;

    /// Transfers that fit in flight at once. May be less than was asked for.
    fn depth(&self) -> usize;

    /// Transfers accepted and not yet reaped.
    fn in_flight(&self) -> usize;

    /// Hands transfers to the kernel, in order, and returns how many it took, which may be fewer
    /// than given (0 included) when queues are full.
    ///
    /// # Errors
    ///
    /// Only when the engine itself is broken; what a transfer meets is in its completion.
    ///
    /// # Safety
    ///
    /// For each transfer the memory, the descriptor and the slots must stay valid until its
    /// completion has been reaped or the engine has been dropped.
    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize>;

    /// As [`Self::submit`], for a caller whose next call is [`Self::reap`]: the kernel may get the
    /// transfers only then, which saves a system call.
    ///
    /// # Errors
    ///
    /// As for [`Self::submit`].
    ///
    /// # Safety
    ///
    /// As for [`Self::submit`].
    unsafe fn submit_and_reap_next(&mut self, transfers: &[Transfer]) -> Result<usize> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.submit(transfers) }
    }

    /// Waits until at least one completion is there, [`EngineOptions::wake`] is signalled or
    /// `timeout` (forever if `None`; zero polls) has passed, and appends all completions that are
    /// there to `completions`. A signal that ended the wait is consumed. It may return earlier with
    /// nothing, but never without having slept or handled something: callers look again.
    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()>;

    /// Registers memory; `None` if this engine can't or has no room. `length` is at most
    /// [`PIECE_BYTES_MAX`].
    ///
    /// # Errors
    ///
    /// The kernel's refusal, so that it can be reported.
    ///
    /// # Safety
    ///
    /// The memory must stay mapped until [`Engine::unbind_buffer`] or the engine's drop.
    unsafe fn bind_buffer(&mut self, address: *mut u8, length: usize) -> Result<Option<u16>> {
        let _ = (address, length);
        Ok(None)
    }

    /// Gives a slot of [`Engine::bind_buffer`] back. No transfer that uses it may be in flight.
    fn unbind_buffer(&mut self, slot: u16) {
        let _ = slot;
    }

    /// Registers an open file; `None` if this engine can't or has no room.
    fn bind_file(&mut self, descriptor: RawFd) -> Option<u32> {
        let _ = descriptor;
        None
    }

    /// Gives a slot of [`Engine::bind_file`] back.
    fn unbind_file(&mut self, slot: u32) {
        let _ = slot;
    }
}

/// Builds engines, one for each worker, on the worker's own thread.
pub trait EngineFactory: fmt::Debug + Send + Sync {
    /// Builds one, or says why not.
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>>;

    /// The fallbacks taken so far on the way to an engine, the preferred engine's first.
    fn fallbacks(&self) -> Vec<Fallback> {
        Vec::new()
    }
}

/// Builds the named engine and no other.
impl EngineFactory for EngineKind {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        let engine: Box<dyn Engine> = match self {
            Self::Uring => Box::new(uring::UringEngine::new(options)?),
            Self::Aio => Box::new(aio::AioEngine::new(options)?),
            Self::Threads => Box::new(threads::ThreadsEngine::new(options)?),
        };
        Ok(match &options.channels {
            Some(channels) => Box::new(gds::GdsEngine::over(engine, channels, options)),
            None => engine,
        })
    }
}
