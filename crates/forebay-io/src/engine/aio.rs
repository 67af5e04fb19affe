//! The Linux AIO engine: `io_submit(2)` and `io_getevents(2)` by raw system calls, no libaio.
//!
//! Only direct transfers go to the kernel's AIO: `io_submit` of a buffered one does the whole
//! transfer before it returns. Those, and allocation, go to a [`ThreadsEngine`], whose threads are
//! started when the first of them comes. Its descriptor is there from the beginning: that the
//! process has run out of them later breaks nothing.
//!
//! # How a reap sleeps in one place
//!
//! It waits for AIO completions, for completions of the threads and for the wake event. On Linux
//! 4.18 and later an `IOCB_CMD_POLL` on each of the two eventfds is kept armed in the context, and
//! `io_getevents` is the only call of a reap. On older kernels (and on gVisor) each control block
//! signals an eventfd (`IOCB_FLAG_RESFD`), and `ppoll(2)` waits for all three.
//!
//! # Invariants
//!
//! - `in_flight` counts the transfers in the context. Drop reaps them all, then destroys the
//!   context, which also cancels the polls.
//! - A poll's completion is known by the address of its control block, so tokens are free to use.

#![expect(unsafe_code, reason = "system calls that take control blocks and addresses")]

mod context;

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use context::{Context, ControlBlock, Event};

use super::deadline::Deadline;
use super::threads::{ThreadsEngine, poll_fds};
use super::{
    Capabilities, Command, Completion, Engine, EngineKind, EngineOptions, Transfer, WakeEvent,
};
use crate::error::{Error, Result};

/// Room in the context for the two polls, beside the transfers.
const POLL_COUNT: usize = 2;

/// How often `io_submit` is tried again on EAGAIN when nothing is in flight that would free what
/// the kernel lacks, and the pause before each try: two seconds in all.
const SUBMIT_RETRIES_MAX: u32 = 2000;
const SUBMIT_RETRY_PAUSE: Duration = Duration::from_millis(1);

/// The longest sleep when a poll couldn't be armed for lack of memory, so that nothing would end
/// the sleep when its event is signalled.
const UNARMED_SLEEP_MAX: Duration = Duration::from_millis(10);

/// An engine over a Linux AIO context. See the [module documentation](self).
#[derive(Debug)]
pub struct AioEngine {
    context: Context,
    options: EngineOptions,
    depth: usize,
    in_flight: usize,
    waiting: Waiting,
    /// Completions of transfers that the kernel refused at submission.
    refused: Vec<Completion>,
    /// For buffered transfers and allocation.
    threads: ThreadsEngine,
    /// Scratch, so that submitting and reaping allocate nothing.
    blocks: Vec<ControlBlock>,
    events: Vec<Event>,
}

/// What a reap sleeps on. See the [module documentation](self).
#[derive(Debug)]
enum Waiting {
    /// `io_getevents` alone: polls in the context.
    Polls { wake: Poll, threads: Poll },
    /// `ppoll`: every control block signals this event.
    Event(WakeEvent),
}

/// One `IOCB_CMD_POLL`. Boxed: its address is its name.
#[derive(Debug)]
struct Poll {
    block: Box<ControlBlock>,
    armed: bool,
}

impl AioEngine {
    /// Sets a context up, a smaller one than asked for if `fs.aio-max-nr` leaves no more room.
    ///
    /// # Errors
    ///
    /// `io_setup` or one of the other calls is refused, or not even four transfers have room; the
    /// text has cause and cure.
    pub fn new(options: &EngineOptions) -> Result<Self> {
        let mut engine = Self::without_polls(options)?;
        let mut wake = Poll::new(options.wake.as_raw_fd());
        match wake.arm(&engine.context) {
            Ok(()) => {
                let threads = Poll::new(engine.threads.done_event().as_raw_fd());
                engine.waiting = Waiting::Polls { wake, threads };
            }
            // Linux before 4.18, or an emulation of AIO that has no polls.
            Err(libc::EINVAL | libc::EAGAIN) => {}
            Err(code) => return Err(context::submit_refusal(code)),
        }
        Ok(engine)
    }

    /// The engine as it is on kernels that have no `IOCB_CMD_POLL`, for tests of that way of waiting.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn without_polls(options: &EngineOptions) -> Result<Self> {
        let (context, depth) = Context::new(options.queue_depth.max(1), POLL_COUNT)?;
        Ok(Self {
            context,
            options: options.clone(),
            depth,
            in_flight: 0,
            waiting: Waiting::Event(WakeEvent::new()?),
            refused: Vec::new(),
            threads: ThreadsEngine::new(options)?,
            blocks: Vec::with_capacity(depth),
            events: vec![Event::default(); depth + POLL_COUNT],
        })
    }

    /// Hands `transfers`, all of which AIO takes, to the kernel; how many were accepted.
    fn submit_to_kernel(&mut self, transfers: &[Transfer]) -> Result<usize> {
        let result_event = match &self.waiting {
            Waiting::Polls { .. } => None,
            Waiting::Event(event) => Some(event.as_raw_fd()),
        };
        self.blocks.clear();
        self.blocks
            .extend(transfers.iter().map(|transfer| ControlBlock::new(transfer, result_event)));
        let batch = if self.options.single_submit { 1 } else { transfers.len() };
        let mut accepted = 0;
        let mut retries = 0;
        while accepted < transfers.len() {
            let end = transfers.len().min(accepted + batch);
            // SAFETY: the caller of `Engine::submit` keeps memory and descriptors valid until the
            // completion; drop reaps every one.
            match unsafe { self.context.submit(&mut self.blocks[accepted..end]) } {
                Ok(count) => {
                    accepted += count;
                    self.in_flight += count;
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) if self.in_flight() > 0 => break,
                Err(libc::EAGAIN) if retries < SUBMIT_RETRIES_MAX => {
                    retries += 1;
                    std::thread::sleep(SUBMIT_RETRY_PAUSE);
                }
                Err(libc::EAGAIN) => return Err(context::submit_refusal(libc::EAGAIN)),
                // The first block of the batch is at fault, such as by a closed descriptor.
                Err(code) => {
                    let token = transfers[accepted].token;
                    self.refused.push(Completion { token, result: -i64::from(code) });
                    accepted += 1;
                }
            }
        }
        Ok(accepted)
    }

    /// Appends what is there without sleeping.
    fn take_ready(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        completions.append(&mut self.refused);
        self.threads.take_done(completions);
        self.take_events(0, Some(Duration::ZERO), completions).map(drop)
    }

    /// One `io_getevents`; `true` if the wake event was among them and signalled.
    fn take_events(
        &mut self,
        min_count: usize,
        timeout: Option<Duration>,
        completions: &mut Vec<Completion>,
    ) -> Result<bool> {
        let count = match self.context.events(min_count, timeout, &mut self.events) {
            Ok(count) => count,
            Err(libc::EINTR) => 0,
            Err(code) => {
                return Err(Error::from_os(code, "cannot reap Linux AIO completions")
                    .engine(EngineKind::Aio.name()));
            }
        };
        let mut woken = false;
        for event in &self.events[..count] {
            if let Waiting::Polls { wake, threads } = &mut self.waiting {
                if event.is_of(&wake.block) {
                    wake.armed = false;
                    woken |= self.options.wake.consume();
                    continue;
                }
                if event.is_of(&threads.block) {
                    threads.armed = false;
                    continue;
                }
            }
            self.in_flight -= 1;
            completions.push(event.completion());
        }
        Ok(woken)
    }

    /// Sleeps until something happens; `true` if that was the wake event.
    fn sleep(&mut self, left: Option<Duration>, completions: &mut Vec<Completion>) -> Result<bool> {
        let threads_ready = !self.threads.prepare_sleep();
        let left = if threads_ready { Some(Duration::ZERO) } else { left };
        let slept = match &self.waiting {
            Waiting::Polls { .. } => self.sleep_in_getevents(left, completions),
            Waiting::Event(_) => self.sleep_in_poll(left, completions),
        };
        self.threads.finish_sleep(completions);
        slept
    }

    fn sleep_in_getevents(
        &mut self,
        left: Option<Duration>,
        completions: &mut Vec<Completion>,
    ) -> Result<bool> {
        let Waiting::Polls { wake, threads } = &mut self.waiting else {
            return Ok(false);
        };
        let mut armed = wake.arm(&self.context).is_ok();
        if self.threads.in_flight() > 0 {
            armed &= threads.arm(&self.context).is_ok();
        }
        let left = if armed {
            left
        } else {
            Some(left.map_or(UNARMED_SLEEP_MAX, |left| left.min(UNARMED_SLEEP_MAX)))
        };
        let woken = self.take_events(1, left, completions)?;
        Ok(woken || (!armed && self.options.wake.consume()))
    }

    fn sleep_in_poll(
        &mut self,
        left: Option<Duration>,
        completions: &mut Vec<Completion>,
    ) -> Result<bool> {
        let Waiting::Event(event) = &self.waiting else {
            return Ok(false);
        };
        let done_event = self.threads.done_event();
        let mut ready = [false; 3];
        poll_fds([event.as_fd(), self.options.wake.as_fd(), done_event.as_fd()], left, &mut ready)
            .map_err(|error| error.engine(EngineKind::Aio.name()))?;
        // Consumed before the completions are taken: one that comes later signals it again.
        event.consume();
        self.take_events(0, Some(Duration::ZERO), completions)?;
        Ok(ready[1] && self.options.wake.consume())
    }
}

impl Engine for AioEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Aio
    }

    fn capabilities(&self) -> Capabilities {
        let waiting = match &self.waiting {
            Waiting::Polls { .. } => "polls",
            Waiting::Event(_) => "result-event",
        };
        Capabilities { features: vec![waiting], ..Capabilities::default() }
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight + self.refused.len() + self.threads.in_flight()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        let count = transfers.len().min(self.depth - self.in_flight());
        let mut accepted = 0;
        // `IOCB_CMD_FSYNC` came with `IOCB_CMD_POLL`, in Linux 4.18.
        let syncs = matches!(self.waiting, Waiting::Polls { .. });
        let takes = |transfer: &Transfer| kernel_takes(transfer, syncs);
        // Runs of transfers that go the same way, so that the order stays.
        for run in transfers[..count].chunk_by(|a, b| takes(a) == takes(b)) {
            let taken = if takes(&run[0]) {
                self.submit_to_kernel(run)
            } else {
                // SAFETY: the caller's promise, passed on; drop waits for the threads too.
                unsafe { self.threads.submit(run) }
            };
            match taken {
                Ok(taken) => {
                    accepted += taken;
                    if taken < run.len() {
                        break;
                    }
                }
                // What was accepted so far completes; the caller meets the error when it tries the
                // rest again.
                Err(_) if accepted > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(accepted)
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let count = completions.len();
        if !self.refused.is_empty() {
            return self.take_ready(completions);
        }
        let deadline = Deadline::after(timeout);
        loop {
            let woken = self.sleep(deadline.left(), completions)?;
            if woken || completions.len() > count || deadline.passed() {
                return Ok(());
            }
        }
    }
}

impl Drop for AioEngine {
    fn drop(&mut self) {
        let mut completions = Vec::with_capacity(self.in_flight);
        while self.in_flight > 0 {
            if let Err(error) = self.take_events(1, None, &mut completions) {
                // `io_destroy`, which comes next, waits for them as well.
                tracing::error!(%error, in_flight = self.in_flight, "cannot drain Linux AIO");
                break;
            }
        }
    }
}

impl Poll {
    fn new(descriptor: i32) -> Self {
        Self { block: Box::new(ControlBlock::poll(descriptor)), armed: false }
    }

    /// Arms it unless it is armed.
    fn arm(&mut self, context: &Context) -> Result<(), i32> {
        while !self.armed {
            // SAFETY: a poll refers to no memory; its descriptor is open as long as the engine.
            match unsafe { context.submit(std::slice::from_mut(&mut *self.block)) } {
                Ok(count) => self.armed = count == 1,
                Err(libc::EINTR) => {}
                Err(code) => return Err(code),
            }
        }
        Ok(())
    }
}

/// AIO can do it without blocking in `io_submit`.
fn kernel_takes(transfer: &Transfer, syncs: bool) -> bool {
    match transfer.command {
        Command::Read | Command::Write => !transfer.buffered,
        Command::Sync { .. } => syncs,
        Command::Allocate { .. } => false,
    }
}
