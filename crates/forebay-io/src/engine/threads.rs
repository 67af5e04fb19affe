//! The threads engine: `pread(2)` and `pwrite(2)` on a pool of threads.
//!
//! It works wherever files do, so it is the last resort of `auto`, and the other engines hand it
//! what they can't do themselves ([`aio`](super::aio): buffered transfers). Threads are started
//! when there is work that no idle one can take, and live as long as the engine. Where the system
//! lets none be started, the owner does one transfer after the other itself.
//!
//! # Invariants
//!
//! - A thread touches a transfer's memory only between taking it from the queue and putting its
//!   completion into `done`; drop empties the queue, then joins the threads.
//! - `done.sleeping` is true only while the owner sleeps or is about to; the thread that clears it
//!   signals `done_event`, so the event is signalled at most once for each sleep.

#![expect(unsafe_code, reason = "system calls that take the addresses of transfers")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::deadline::Deadline;
use super::{
    Capabilities, Command, Completion, Engine, EngineKind, EngineOptions, Transfer, WakeEvent,
};
use crate::error::{Error, Result};

/// The most threads of one engine: enough to keep the queue of a drive busy with blocks of 1 MiB,
/// few enough not to crowd a machine on which each worker has an engine.
pub const THREADS_MAX: usize = 16;

/// What helps where no thread can be started.
pub(super) const MORE_THREADS_HINT: &str = "raise the limit on processes (ulimit -u, pids.max)";

/// `RWF_DONTCACHE` (`include/uapi/linux/fs.h`, Linux 6.14).
pub(super) const RWF_DONTCACHE: i32 = 0x80;

/// An engine of threads. See the [module documentation](self).
#[derive(Debug)]
pub struct ThreadsEngine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
    in_flight: usize,
    /// `prepare_sleep` said yes and `finish_sleep` hasn't followed.
    sleeping: bool,
    wake: Arc<WakeEvent>,
}

/// Does a transfer on one of the threads, however long that takes.
pub(super) trait Mover: std::fmt::Debug + Send + Sync {
    /// The bytes moved or a negated code, as in a [`Completion`].
    fn perform(&self, transfer: &Transfer) -> i64;

    /// Whether the engine's owner may be kept waiting by a transfer where it can start no thread.
    fn suits_owner(&self) -> bool;
}

/// System calls.
#[derive(Debug)]
struct Kernel;

impl Mover for Kernel {
    fn perform(&self, transfer: &Transfer) -> i64 {
        perform(transfer)
    }

    fn suits_owner(&self) -> bool {
        true
    }
}

/// What the owner and its threads share.
#[derive(Debug)]
struct Shared {
    jobs: Mutex<Jobs>,
    job_added: Condvar,
    done: Mutex<Done>,
    done_event: Arc<WakeEvent>,
    mover: Arc<dyn Mover>,
}

#[derive(Debug, Default)]
struct Jobs {
    queue: VecDeque<Job>,
    idle_count: usize,
    closing: bool,
}

#[derive(Debug, Default)]
struct Done {
    completions: Vec<Completion>,
    sleeping: bool,
}

/// A transfer on its way to a thread.
#[derive(Debug)]
struct Job(Transfer);

// SAFETY: the address in it belongs to the operation until the completion is reaped (contract of
// `Engine::submit`), whichever thread asks the kernel to use it.
unsafe impl Send for Job {}

impl ThreadsEngine {
    /// An engine without threads yet: they are started by the transfers that need them.
    ///
    /// # Errors
    ///
    /// The process is out of descriptors.
    pub fn new(options: &EngineOptions) -> Result<Self> {
        Ok(Self::over(Arc::new(Kernel), Arc::new(WakeEvent::new()?), options))
    }

    /// Threads that transfer by a mover, and signal an event when they do so during a sleep.
    pub(super) fn over(
        mover: Arc<dyn Mover>,
        done_event: Arc<WakeEvent>,
        options: &EngineOptions,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                jobs: Mutex::default(),
                job_added: Condvar::new(),
                done: Mutex::default(),
                done_event,
                mover,
            }),
            threads: Vec::new(),
            depth: options.queue_depth.max(1),
            in_flight: 0,
            sleeping: false,
            wake: Arc::clone(&options.wake),
        }
    }

    /// Appends what has been completed; `true` if that was anything.
    pub(super) fn take_done(&mut self, completions: &mut Vec<Completion>) -> bool {
        let mut done = lock(&self.shared.done);
        let count = done.completions.len();
        completions.append(&mut done.completions);
        drop(done);
        self.in_flight -= count;
        count > 0
    }

    /// Before a sleep on [`Self::done_event`]: from here on a completion signals it. `false` if
    /// completions are there already.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let mut done = lock(&self.shared.done);
        done.sleeping = done.completions.is_empty();
        self.sleeping = done.sleeping;
        self.sleeping
    }

    /// After that sleep, however it ended: consumes the event if it was signalled, and appends what
    /// has been completed.
    pub(super) fn finish_sleep(&mut self, completions: &mut Vec<Completion>) {
        let mut done = lock(&self.shared.done);
        let signalled = std::mem::take(&mut self.sleeping) && !done.sleeping;
        done.sleeping = false;
        drop(done);
        // The thread that cleared `done.sleeping` signals a moment later: this may have to wait.
        while signalled && !self.shared.done_event.consume() {
            let _ = poll_fds([self.shared.done_event.as_fd()], None, &mut [false]);
        }
        self.take_done(completions);
    }

    /// After a sleep on an event that others signal too and whose signal is consumed: appends what
    /// has been completed. A completion may signal it once more.
    pub(super) fn end_sleep(&mut self, completions: &mut Vec<Completion>) {
        self.sleeping = false;
        lock(&self.shared.done).sleeping = false;
        self.take_done(completions);
    }

    /// Signalled by a completion during a sleep.
    pub(super) fn done_event(&self) -> &WakeEvent {
        &self.shared.done_event
    }

    /// Starts threads until as many are idle as there are jobs, or there are enough.
    fn start_threads(&mut self, job_count: usize) -> Result<()> {
        let threads_max = self.depth.min(THREADS_MAX);
        let idle = {
            let jobs = lock(&self.shared.jobs);
            jobs.idle_count.saturating_sub(jobs.queue.len())
        };
        for _ in idle..job_count {
            if self.threads.len() >= threads_max {
                break;
            }
            let shared = Arc::clone(&self.shared);
            let name = format!("forebay-io-{}", self.threads.len());
            match std::thread::Builder::new().name(name).spawn(move || serve(&shared)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) if self.threads.is_empty() => {
                    return Err(Error::from_io(error, "cannot start a thread")
                        .engine(EngineKind::Threads.name())
                        .hint(MORE_THREADS_HINT));
                }
                Err(_) => break, // The threads that there are do the work.
            }
        }
        Ok(())
    }
}

impl Engine for ThreadsEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Threads
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        let count = transfers.len().min(self.depth - self.in_flight);
        if count == 0 {
            return Ok(0);
        }
        if let Err(error) = self.start_threads(count) {
            if !self.shared.mover.suits_owner() {
                return Err(error);
            }
            let Transfer { token, .. } = transfers[0];
            let result = self.shared.mover.perform(&transfers[0]);
            lock(&self.shared.done).completions.push(Completion { token, result });
            self.in_flight += 1;
            return Ok(1);
        }
        lock(&self.shared.jobs).queue.extend(transfers[..count].iter().copied().map(Job));
        self.in_flight += count;
        if count == 1 {
            self.shared.job_added.notify_one();
        } else {
            self.shared.job_added.notify_all();
        }
        Ok(count)
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let deadline = Deadline::after(timeout);
        loop {
            if !self.prepare_sleep() {
                self.take_done(completions);
                return Ok(());
            }
            let mut ready = [false; 2];
            let polled = poll_fds(
                [self.shared.done_event.as_fd(), self.wake.as_fd()],
                deadline.left(),
                &mut ready,
            );
            let count = completions.len();
            self.finish_sleep(completions);
            polled.map_err(|error| error.engine(EngineKind::Threads.name()))?;
            let woken = ready[1] && self.wake.consume();
            if woken || completions.len() > count || deadline.passed() {
                return Ok(());
            }
        }
    }
}

impl Drop for ThreadsEngine {
    fn drop(&mut self) {
        let mut jobs = lock(&self.shared.jobs);
        jobs.closing = true;
        jobs.queue.clear();
        drop(jobs);
        self.shared.job_added.notify_all();
        for thread in self.threads.drain(..) {
            // It can't have panicked: nothing in `serve` does. If it had, it would hold nothing.
            let _ = thread.join();
        }
    }
}

/// Sleeps in `ppoll(2)` until one of `fds` is readable or `timeout` has passed, and says which are.
/// A signal ends it early.
pub(super) fn poll_fds<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
    ready: &mut [bool; N],
) -> Result<()> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {
            for (ready, fd) in ready.iter_mut().zip(&fds) {
                *ready = !fd.revents().is_empty();
            }
            Ok(())
        }
        Err(rustix::io::Errno::INTR) => Ok(()),
        Err(code) => Err(Error::from_os(code.raw_os_error(), "cannot wait for completions")),
    }
}

/// The guarded data; a thread that panicked while holding the lock left it consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The life of a thread.
fn serve(shared: &Shared) {
    block_signals();
    let mut jobs = lock(&shared.jobs);
    loop {
        if jobs.closing {
            return;
        }
        let Some(Job(transfer)) = jobs.queue.pop_front() else {
            jobs.idle_count += 1;
            jobs = shared.job_added.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            jobs.idle_count -= 1;
            continue;
        };
        drop(jobs);
        let completion =
            Completion { token: transfer.token, result: shared.mover.perform(&transfer) };
        let mut done = lock(&shared.done);
        done.completions.push(completion);
        let signal = std::mem::take(&mut done.sleeping);
        drop(done);
        if signal {
            shared.done_event.signal();
        }
        jobs = lock(&shared.jobs);
    }
}

/// Leaves the process's signals to the threads of its own, so that a profiler's timer interrupts no
/// transfer.
fn block_signals() {
    // SAFETY: zero bytes are a valid `sigset_t`.
    let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `signals` is a local that outlives the call.
    unsafe { libc::sigfillset(&raw mut signals) };
    // SAFETY: as above; the old mask isn't asked for. It fails for no valid first argument.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const signals, std::ptr::null_mut()) };
}

/// Does the transfer by system calls and returns the bytes moved or the negated `errno`.
fn perform(transfer: &Transfer) -> i64 {
    let descriptor = transfer.descriptor;
    let Ok(offset) = libc::off_t::try_from(transfer.offset) else {
        return -i64::from(libc::EINVAL);
    };
    let returned = match transfer.command {
        Command::Read | Command::Write => move_bytes(transfer, offset),
        // SAFETY: it takes a number; a wrong one is EBADF.
        Command::Sync { data_only: true } => unsafe { libc::fdatasync(descriptor) }.into(),
        // SAFETY: as above.
        Command::Sync { data_only: false } => unsafe { libc::fsync(descriptor) }.into(),
        Command::Allocate { keep_size } => {
            let Ok(length) = libc::off_t::try_from(transfer.length) else {
                return -i64::from(libc::EFBIG);
            };
            let mode = if keep_size { libc::FALLOC_FL_KEEP_SIZE } else { 0 };
            // SAFETY: it takes numbers only.
            unsafe { libc::fallocate(descriptor, mode, offset, length) }.into()
        }
    };
    if returned < 0 {
        -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    } else {
        returned
    }
}

/// `pread(2)`, `pwrite(2)` or, where flags are needed, `preadv2(2)`, `pwritev2(2)`.
///
/// By `libc` and not `rustix`, which takes slices: the memory may be written to by others.
fn move_bytes(transfer: &Transfer, offset: libc::off_t) -> i64 {
    let &Transfer { descriptor: fd, length, .. } = transfer;
    let address = transfer.address.cast::<libc::c_void>();
    let block = libc::iovec { iov_base: address, iov_len: length };
    let block = &raw const block;
    let reads = transfer.command == Command::Read;
    let uncached = transfer.uncached && transfer.buffered;
    let returned = match (reads, uncached) {
        // SAFETY: the submitter keeps the memory valid until the completion (`Engine::submit`).
        (true, false) => unsafe { libc::pread(fd, address, length, offset) },
        // SAFETY: as above.
        (false, false) => unsafe { libc::pwrite(fd, address, length, offset) },
        // SAFETY: as above; `block` outlives the call.
        (true, true) => unsafe { libc::preadv2(fd, block, 1, offset, RWF_DONTCACHE) },
        // SAFETY: as above.
        (false, true) => unsafe { libc::pwritev2(fd, block, 1, offset, RWF_DONTCACHE) },
    };
    returned as i64
}
