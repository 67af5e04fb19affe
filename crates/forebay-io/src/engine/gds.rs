//! GPUDirect Storage: device memory by cuFile's calls on a pool of threads, everything else by the
//! engine below.
//!
//! The threads are those of [`threads`](super::threads), so queue depth and blocks mean the same as
//! for other engines. They are started when the first transfer of device memory comes.
//!
//! A [`Channel`] is what such a transfer needs beside an address: the registered file, the device, and
//! what the caller's stream has to do before. Transfers name it by its number in [`Channels`].
//!
//! # Invariants
//!
//! - Nothing touches the memory before the channel's start is over, which a thread sleeps for.
//! - A completion is reported when cuFile's call is over: the bytes are where they should be.
//! - [`Completion::result`] is bytes, a negated `errno`, a negated code of cuFile,
//!   [`CUDA_CODE_BASE`] plus a code of the CUDA driver, negated, or [`NO_THREAD`].

#![expect(unsafe_code, reason = "hands the addresses of transfers to cuFile")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::threads::{MORE_THREADS_HINT, Mover, ThreadsEngine};
use super::{
    Capabilities, Command, Completion, Engine, EngineKind, EngineOptions, Transfer, WakeEvent,
};
use crate::device::gds::{BufferUse, DeviceRange};
use crate::device::{CODE_BASE, Context, Event, FileRange, FileRegistration, device_error};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::process;

/// What is added to the codes of the CUDA driver.
pub const CUDA_CODE_BASE: i64 = 10_000;
/// The result of a transfer for which no thread could be started.
pub const NO_THREAD: i64 = -(CODE_BASE as i64);
/// The result of a transfer in which a system call of cuFile's failed: cuFile doesn't say how.
pub const UNTOLD: i64 = -(libc::EPERM as i64);

/// Where cuFile says more.
const LOG_HINT: &str = "is the drive full, or a limit reached? cufile.log may say; \
                        device_route=\"host\" has the system's own error";

/// The number of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChannelNumber(u32);

/// Between one registered file and one device. See the [module documentation](self).
#[derive(Debug)]
pub struct Channel {
    file: Arc<FileRegistration>,
    context: Arc<Context>,
    start: Option<Arc<Event>>,
    started: AtomicBool,
    /// By where they start; they don't overlap.
    buffers: Vec<BufferUse>,
}

impl Channel {
    /// A channel whose transfers wait for `start`. `buffers` is registered memory of the device that
    /// transfers may be in.
    pub fn new(
        file: Arc<FileRegistration>,
        context: Arc<Context>,
        start: Option<Arc<Event>>,
        mut buffers: Vec<BufferUse>,
    ) -> Self {
        buffers.sort_by_key(|buffer| buffer.range().start);
        let started = AtomicBool::new(start.is_none());
        Self { file, context, start, started, buffers }
    }

    /// Whether a range is registered as a whole.
    pub fn is_registered(&self, range: DeviceRange) -> bool {
        self.base_of(range).is_some()
    }

    fn base_of(&self, range: DeviceRange) -> Option<DeviceRange> {
        let after = self.buffers.partition_point(|buffer| buffer.range().start <= range.start);
        let held = self.buffers.get(after.checked_sub(1)?)?.range();
        held.holds(&range).then_some(held)
    }

    /// Sleeps until the caller's stream has done what comes before.
    fn wait_for_start(&self) -> Result<()> {
        if let Some(start) = self.start.as_ref().filter(|_| !self.started.load(Ordering::Acquire)) {
            start.wait()?;
            self.started.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn perform(&self, transfer: &Transfer) -> Result<usize> {
        self.wait_for_start()?;
        let &Transfer { offset, length, .. } = transfer;
        let start = transfer.address.expose_provenance();
        let base = self.base_of(DeviceRange { start, length }).map_or(start, |held| held.start);
        let range = FileRange { base, base_offset: start - base, offset, length };
        if transfer.command == Command::Read {
            // SAFETY: the submitter keeps the memory valid until the completion (`Engine::submit`).
            unsafe { self.file.read(&self.context, range) }
        } else {
            // SAFETY: as above.
            unsafe { self.file.write(&self.context, range) }
        }
    }
}

/// The channels of a handle, by their numbers.
#[derive(Debug)]
pub struct Channels {
    process: u64,
    open: Mutex<Vec<Option<Arc<Channel>>>>,
}

impl Default for Channels {
    fn default() -> Self {
        Self { process: process::number(), open: Mutex::default() }
    }
}

/// A channel that transfers can name until this is dropped.
#[derive(Debug)]
pub struct OpenChannel {
    channels: Arc<Channels>,
    number: ChannelNumber,
    channel: Arc<Channel>,
}

impl OpenChannel {
    /// Its number.
    pub fn number(&self) -> ChannelNumber {
        self.number
    }

    /// The channel.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }
}

impl Drop for OpenChannel {
    fn drop(&mut self) {
        // A forked child has no transfers, and may have inherited the lock held.
        if self.channels.process == process::number() {
            self.channels.open()[self.number.0 as usize] = None;
        }
    }
}

impl Channels {
    fn open(&self) -> MutexGuard<'_, Vec<Option<Arc<Channel>>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a channel a number.
    pub fn add(self: &Arc<Self>, channel: Channel) -> OpenChannel {
        let channel = Arc::new(channel);
        let mut open = self.open();
        let free = open.iter().position(Option::is_none).unwrap_or_else(|| {
            open.push(None);
            open.len() - 1
        });
        open[free] = Some(Arc::clone(&channel));
        let number = ChannelNumber(u32::try_from(free).unwrap_or(u32::MAX));
        OpenChannel { channels: Arc::clone(self), number, channel }
    }

    fn get(&self, number: ChannelNumber) -> Option<Arc<Channel>> {
        self.open().get(number.0 as usize)?.clone()
    }
}

/// Whether a transfer is for cuFile; what only names a channel isn't.
fn moves_device_memory(transfer: &Transfer) -> bool {
    transfer.channel.is_some() && matches!(transfer.command, Command::Read | Command::Write)
}

/// cuFile's calls.
#[derive(Debug)]
struct CuFileMover(Arc<Channels>);

impl Mover for CuFileMover {
    fn perform(&self, transfer: &Transfer) -> i64 {
        let channel = transfer.channel.and_then(|number| self.0.get(number));
        let Some(channel) = channel else { return -i64::from(libc::EBADF) };
        if i64::try_from(transfer.offset).is_err() {
            return -i64::from(libc::EINVAL);
        }
        match channel.perform(transfer) {
            Ok(moved) => i64::try_from(moved).unwrap_or(i64::MAX),
            Err(error) => code_of(&error),
        }
    }

    /// The caller's stream, which a transfer waits for, may wait for others of the owner.
    fn suits_owner(&self) -> bool {
        false
    }
}

/// An error as the result of a completion.
fn code_of(error: &Error) -> i64 {
    if let Some(code) = error.os_code() {
        return -i64::from(code);
    }
    match error.device_code() {
        Some(code) if code.library == "cufile" => -i64::from(code.code),
        Some(code) => -(CUDA_CODE_BASE + i64::from(code.code)),
        None => -i64::from(libc::EIO),
    }
}

/// The error behind a completion's result, unless it is bytes or the system's; `what` says what was
/// being done.
pub fn error_of(result: i64, context: &Context, what: &str) -> Option<Error> {
    let refusal = match result {
        NO_THREAD => Some(("no thread can be started for cuFile's calls", MORE_THREADS_HINT)),
        UNTOLD => Some(("a system call of cuFile's failed, and it doesn't say how", LOG_HINT)),
        _ => None,
    };
    if let Some((text, hint)) = refusal {
        return Some(Error::new(ErrorKind::Device, format!("{text}: {what}")).hint(hint));
    }
    let code = result.checked_neg()?;
    if code > CUDA_CODE_BASE {
        let code = i32::try_from(code - CUDA_CODE_BASE).unwrap_or(i32::MAX);
        return Some(device_error("cuda", code, context, what));
    }
    let code = i32::try_from(code).ok()?;
    (code > CODE_BASE).then(|| device_error("cufile", code, context, what))
}

/// An engine with one for device memory over it. See the [module documentation](self).
#[derive(Debug)]
pub struct GdsEngine {
    inner: Box<dyn Engine>,
    crew: ThreadsEngine,
    wake: Arc<WakeEvent>,
    /// Of transfers for which there is no thread; the next reap has them.
    refused: Vec<Completion>,
}

impl GdsEngine {
    /// Device memory by channels, and everything else by `inner`, which was built with the same
    /// options.
    pub fn over(inner: Box<dyn Engine>, channels: &Arc<Channels>, options: &EngineOptions) -> Self {
        let mover = Arc::new(CuFileMover(Arc::clone(channels)));
        // Whatever the engine below sleeps for, it wakes up for this.
        let crew = ThreadsEngine::over(mover, Arc::clone(&options.wake), options);
        Self { inner, crew, wake: Arc::clone(&options.wake), refused: Vec::new() }
    }

    unsafe fn hand_over(&mut self, transfers: &[Transfer], reap_next: bool) -> Result<usize> {
        let mut taken = 0;
        while taken < transfers.len() {
            let room = self.depth().saturating_sub(self.in_flight());
            let rest = &transfers[taken..];
            let is_device = moves_device_memory(&rest[0]);
            let same = rest.iter().take(room);
            let count = same.take_while(|next| moves_device_memory(next) == is_device).count();
            if count == 0 {
                break;
            }
            let run = &rest[..count];
            let accepted = match (is_device, reap_next) {
                // SAFETY: the caller's promise, passed on.
                (true, _) => match unsafe { self.crew.submit(run) } {
                    Err(_) => Ok(self.refuse(run)),
                    accepted => accepted,
                },
                // SAFETY: as above.
                (false, true) => unsafe { self.inner.submit_and_reap_next(run) },
                // SAFETY: as above.
                (false, false) => unsafe { self.inner.submit(run) },
            };
            let accepted = match accepted {
                // The caller meets the error when it tries the rest again.
                Err(_) if taken > 0 => break,
                accepted => accepted?,
            };
            taken += accepted;
            if accepted < count {
                break;
            }
        }
        Ok(taken)
    }

    fn refuse(&mut self, transfers: &[Transfer]) -> usize {
        let tokens = transfers.iter().map(|transfer| transfer.token);
        self.refused.extend(tokens.map(|token| Completion { token, result: NO_THREAD }));
        transfers.len()
    }
}

impl Engine for GdsEngine {
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
        self.inner.in_flight() + self.crew.in_flight() + self.refused.len()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.hand_over(transfers, false) }
    }

    unsafe fn submit_and_reap_next(&mut self, transfers: &[Transfer]) -> Result<usize> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.hand_over(transfers, true) }
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let timeout = if self.refused.is_empty() { timeout } else { Some(Duration::ZERO) };
        completions.append(&mut self.refused);
        if self.crew.in_flight() == 0 {
            return self.inner.reap(timeout, completions);
        }
        let timeout = if self.crew.prepare_sleep() { timeout } else { Some(Duration::ZERO) };
        let slept = if self.inner.in_flight() == 0 {
            self.wake.wait(timeout);
            Ok(())
        } else {
            self.inner.reap(timeout, completions)
        };
        self.crew.end_sleep(completions);
        slept
    }

    unsafe fn bind_buffer(&mut self, address: *mut u8, length: usize) -> Result<Option<u16>> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.bind_buffer(address, length) }
    }

    fn unbind_buffer(&mut self, slot: u16) {
        self.inner.unbind_buffer(slot);
    }

    fn bind_file(&mut self, descriptor: std::os::fd::RawFd) -> Option<u32> {
        self.inner.bind_file(descriptor)
    }

    fn unbind_file(&mut self, slot: u32) {
        self.inner.unbind_file(slot);
    }
}
