//! How the ring is entered: to hand transfers over, and to sleep until something happens.

#![expect(unsafe_code, reason = "submission entries and a raw enter")]

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, opcode};

use super::{Completion, Engine, EngineKind, Error, Result, UringEngine, WakePoll};

/// `user_data` of the poll of the wake event; transfers have slot numbers.
pub(super) const WAKE_DATA: u64 = u64::MAX;

/// How often a submission that meets EAGAIN (the kernel is out of memory) is tried again when
/// nothing is in flight that would free some, and the pause before each try: two seconds in all.
const SUBMIT_RETRIES_MAX: u32 = 2000;
const SUBMIT_RETRY_PAUSE: Duration = Duration::from_millis(1);

/// The longest sleep while something is to be done that completions don't tell of: submissions that
/// met EAGAIN, a wake event that couldn't be polled.
const BOUNDED_SLEEP: Duration = Duration::from_millis(10);

/// The longest sleep with `iopoll` while transfers are in flight in the ring, which has to be asked
/// for them: about what a block takes on a fast drive.
const MIXED_SLEEP: Duration = Duration::from_micros(100);

/// What an `io_uring_enter` came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entered {
    Done,
    /// Submissions are left in the queue, for lack of memory.
    Short,
}

impl UringEngine {
    /// Hands the submission queue to the kernel. What it has no memory for stays in the queue, and
    /// goes with the next reap.
    pub(super) fn flush(&mut self) -> Result<Entered> {
        loop {
            match self.ring.submit() {
                Ok(count) => {
                    let queued = !self.ring.submission().is_empty();
                    if self.ring.params().is_setup_sqpoll() || !queued {
                        return Ok(Entered::Done);
                    }
                    // An entry that fails ends a submission on kernels before 5.18.
                    if count == 0 {
                        return Ok(Entered::Short);
                    }
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::EBUSY) => return Ok(Entered::Short),
                    _ => return Err(broken(error)),
                },
            }
        }
    }

    /// Sleeps in the kernel until a completion is there or `left` has passed. Submits first what is
    /// left in the queue, unless `submit` is false.
    fn enter(&mut self, left: Option<Duration>, submit: bool) -> Result<Entered> {
        let timespec = left.map(Timespec::from);
        let mut args = SubmitArgs::new();
        if let Some(timespec) = &timespec {
            args = args.timespec(timespec);
        }
        let submitter = self.ring.submitter();
        let entered = if submit {
            submitter.submit_with_args(1, &args)
        } else {
            let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
            // SAFETY: nothing is submitted; `args` is what EXT_ARG stands for and outlives the call.
            unsafe { submitter.enter(0, 1, flags.bits(), Some(&args)) }
        };
        match entered {
            Ok(_) => Ok(Entered::Done),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::ETIME) => Ok(Entered::Done),
                Some(libc::EAGAIN | libc::EBUSY) => Ok(Entered::Short),
                _ => Err(broken(error)),
            },
        }
    }

    /// Sleeps until something happens; `true` if that may have been the wake event.
    pub(super) fn sleep(
        &mut self,
        left: Option<Duration>,
        completions: &mut Vec<Completion>,
    ) -> Result<bool> {
        if self.polls_completions() {
            return self.sleep_polling(left, completions);
        }
        self.arm_wake_poll();
        let bounded = Some(left.map_or(BOUNDED_SLEEP, |left| left.min(BOUNDED_SLEEP)));
        let armed = self.wake_poll == WakePoll::Armed;
        let entered = self.enter(if armed { left } else { bounded }, true)?;
        if entered == Entered::Short {
            self.sleep_short(bounded)?;
        }
        // Otherwise the poll's completion tells.
        let unpolled = !armed || entered == Entered::Short;
        Ok(unpolled && self.options.wake.consume())
    }

    /// Sleeps when the kernel has no memory for what is in the submission queue.
    fn sleep_short(&mut self, left: Option<Duration>) -> Result<()> {
        let mut retries = 0;
        loop {
            let queued = self.ring.submission().len();
            let polls = usize::from(self.wake_poll == WakePoll::Armed);
            if self.in_flight + polls > queued {
                return self.enter(left, false).map(drop);
            }
            std::thread::sleep(SUBMIT_RETRY_PAUSE);
            if self.flush()? == Entered::Done {
                return Ok(());
            }
            retries += 1;
            if retries == SUBMIT_RETRIES_MAX {
                return Err(broken(io::Error::from_raw_os_error(libc::EAGAIN))
                    .hint("the kernel is short of memory"));
            }
        }
    }

    /// The sleep of a ring with `iopoll`. What it returns in doubt is `true`: a reap may end early.
    fn sleep_polling(
        &mut self,
        mut left: Option<Duration>,
        completions: &mut Vec<Completion>,
    ) -> Result<bool> {
        if self.options.wake.consume() {
            return Ok(true);
        }
        let ring_busy = self.in_flight > 0;
        let Some(threads) = self.threads.as_mut().filter(|threads| threads.in_flight() > 0) else {
            if ring_busy {
                if self.enter(left, true)? == Entered::Short {
                    self.sleep_short(Some(BOUNDED_SLEEP))?;
                }
                if !self.ring.completion().is_empty() {
                    return Ok(false);
                }
                // The kernel gives up polling when a transfer has gone to a worker of its own, and
                // when it is another thread's turn.
                left = Some(left.map_or(MIXED_SLEEP, |left| left.min(MIXED_SLEEP)));
            }
            self.options.wake.wait(left);
            return Ok(true);
        };
        let left = if ring_busy {
            Some(left.map_or(MIXED_SLEEP, |left| left.min(MIXED_SLEEP)))
        } else {
            left
        };
        threads.reap(left, completions)?;
        if ring_busy {
            // Asks the drive without waiting for it.
            self.flush()?;
        }
        Ok(true)
    }

    fn arm_wake_poll(&mut self) {
        if self.wake_poll != WakePoll::Idle {
            return;
        }
        let events = u32::from(libc::POLLIN.cast_unsigned());
        let entry = opcode::PollAdd::new(Fd(self.options.wake.as_raw_fd()), events)
            .build()
            .user_data(WAKE_DATA);
        // SAFETY: it refers to no memory, and to a descriptor that `options.wake` keeps open.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            self.wake_poll = WakePoll::Armed;
        }
    }

    /// Reaps everything that is in the ring.
    pub(super) fn drain(&mut self) -> Result<()> {
        let mut completions = Vec::with_capacity(self.in_flight);
        if self.wake_poll == WakePoll::Armed {
            // Not removed but fired: removing fails with EALREADY while the kernel looks at a poll
            // whose event was signalled and consumed meanwhile, and leaves it armed.
            self.options.wake.signal();
        }
        loop {
            self.take(&mut completions)?;
            if self.in_flight == 0 && self.wake_poll != WakePoll::Armed {
                return Ok(());
            }
            if self.enter(None, true)? == Entered::Short {
                self.sleep_short(Some(BOUNDED_SLEEP))?;
            }
        }
    }
}

fn broken(source: io::Error) -> Error {
    Error::from_io(source, "cannot enter the io_uring").engine(EngineKind::Uring.name())
}
