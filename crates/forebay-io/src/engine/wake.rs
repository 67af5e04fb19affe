//! A wake-up call between threads that a sleeping engine can wait for beside its completions.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, Result};

/// An `eventfd(2)`: signalled from any thread, consumed by the engine's owner.
#[derive(Debug)]
pub struct WakeEvent(OwnedFd);

impl WakeEvent {
    /// A new event, not signalled, non-blocking and closed on exec.
    ///
    /// # Errors
    ///
    /// The process is out of descriptors.
    pub fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|code| Error::from_os(code.raw_os_error(), "cannot create an eventfd"))
    }

    /// Signals it. Signals that aren't consumed yet add up to one.
    pub fn signal(&self) {
        // The only failure of a valid eventfd is EAGAIN at 2^64 - 2 signals: it is signalled then.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Consumes the signal; `false` if there was none. Never blocks.
    pub fn consume(&self) -> bool {
        let mut count = [0u8; 8];
        rustix::io::read(&self.0, &mut count).is_ok()
    }

    /// Sleeps until it is signalled or `timeout` has passed, and consumes the signal.
    pub fn wait(&self, timeout: Option<std::time::Duration>) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        // EINTR is an early return, which callers allow for.
        let _ = poll(&mut fds, timeout.as_ref());
        self.consume();
    }
}

impl AsFd for WakeEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for WakeEvent {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
