//! The io_uring engine: batches of transfers handed over and reaped with one call each.
//!
//! # How a reap is woken
//!
//! A one-shot poll of the wake event is kept armed in the ring, so that a reap sleeps in
//! `io_uring_enter` alone. A ring with `iopoll` can't poll events, and does nothing but direct
//! transfers: everything else goes to a [`ThreadsEngine`], and so does a transfer whose drive turns
//! out to have no poll queues (EOPNOTSUPP).
//!
//! # Invariants
//!
//! - `in_flight` counts the transfers in the ring, queued or with the kernel; each holds a slot of
//!   `transfers` whose number is its `user_data`, so tokens are free to use.
//! - The submission queue has room for all of them and the poll, the completion queue for twice
//!   that, so neither overflows.
//! - Drop removes the poll, reaps every transfer, and gives registered memory back before the ring
//!   is closed (closing gives it back at some later time).

#![expect(unsafe_code, reason = "submission entries and registrations that hold addresses")]

mod entry;
mod setup;
mod slots;
mod waiting;

use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::IoUring;

use self::slots::Slots;
use self::waiting::WAKE_DATA;
use super::deadline::Deadline;
use super::threads::ThreadsEngine;
use super::{Capabilities, Command, Completion, Engine, EngineKind, EngineOptions, Transfer};
use crate::error::{Error, Result};

/// Slots for registered memory: 64 GiB in pieces of 64 MiB.
const BUFFER_SLOTS: u32 = 1024;

/// Slots for registered files.
const FILE_SLOTS: u32 = 64;

/// An engine over an io_uring. See the [module documentation](self).
pub struct UringEngine {
    ring: IoUring,
    options: EngineOptions,
    features: Vec<&'static str>,
    depth: usize,
    in_flight: usize,
    transfers: Vec<Transfer>,
    transfer_slots: Slots,
    buffers: Slots,
    files: Slots,
    wake_poll: WakePoll,
    /// For what a ring with `iopoll` can't do; there from the beginning, so that it takes no
    /// descriptor when the process may have run out of them.
    threads: Option<Box<ThreadsEngine>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WakePoll {
    Idle,
    Armed,
    /// The kernel failed it: sleeps are bounded instead.
    Refused,
}

impl UringEngine {
    /// Sets a ring up with the best flags that this kernel takes.
    ///
    /// # Errors
    ///
    /// io_uring isn't there, is refused or is too old; the text has cause and cure.
    pub fn new(options: &EngineOptions) -> Result<Self> {
        let (ring, mut features) = setup::build(options)?;
        let threads = ring.params().is_setup_iopoll().then(|| ThreadsEngine::new(options));
        let room = (ring.params().sq_entries() as usize).saturating_sub(setup::ENTRIES_EXTRA);
        let depth = options.queue_depth.clamp(1, room.max(1));
        // Tables without entries came with Linux 5.19; before, there is no registration.
        let buffers = ring.submitter().register_buffers_sparse(BUFFER_SLOTS).is_ok();
        let files = ring.submitter().register_files_sparse(FILE_SLOTS).is_ok();
        if options.single_submit {
            features.push("single-submit");
        }
        Ok(Self {
            ring,
            options: options.clone(),
            features,
            depth,
            in_flight: 0,
            transfers: Vec::with_capacity(depth),
            transfer_slots: Slots::new(u32::try_from(depth).unwrap_or(u32::MAX)),
            buffers: Slots::new(if buffers { BUFFER_SLOTS } else { 0 }),
            files: Slots::new(if files { FILE_SLOTS } else { 0 }),
            wake_poll: WakePoll::Idle,
            threads: threads.transpose()?.map(Box::new),
        })
    }

    fn polls_completions(&self) -> bool {
        self.ring.params().is_setup_iopoll()
    }

    /// The ring can do it.
    fn takes(&self, transfer: &Transfer) -> bool {
        let moves = matches!(transfer.command, Command::Read | Command::Write);
        !self.polls_completions() || (moves && !transfer.buffered)
    }

    fn submit_to_threads(&mut self, transfer: Transfer) -> Result<bool> {
        let Some(threads) = &mut self.threads else { return Ok(false) };
        // SAFETY: the caller's promise, passed on; drop waits for the threads too.
        Ok(unsafe { threads.submit(&[transfer]) }? == 1)
    }

    /// Puts the transfer in the submission queue; `false` if that is full.
    fn queue(&mut self, transfer: &Transfer) -> bool {
        let Some(slot) = self.transfer_slots.take() else {
            return false;
        };
        let entry = entry::of(transfer).user_data(slot.into());
        // SAFETY: what the entry refers to stays valid until the completion (`Engine::submit`),
        // which drop waits for.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.transfer_slots.give(slot);
            return false;
        }
        let index = slot as usize;
        if index < self.transfers.len() {
            self.transfers[index] = *transfer;
        } else {
            // Slots are first taken in ascending order.
            self.transfers.push(*transfer);
        }
        self.in_flight += 1;
        true
    }

    /// Puts as many transfers as there is room for in the submission queue.
    fn queue_all(&mut self, transfers: &[Transfer]) -> Result<usize> {
        let count = transfers.len().min(self.depth - self.in_flight());
        let mut accepted = 0;
        for transfer in &transfers[..count] {
            let taken = if self.takes(transfer) {
                self.queue(transfer)
            } else {
                match self.submit_to_threads(*transfer) {
                    Ok(taken) => taken,
                    Err(error) if accepted == 0 => return Err(error),
                    Err(_) => false, // The caller meets it when it tries the rest again.
                }
            };
            if !taken {
                break;
            }
            accepted += 1;
            if self.options.single_submit {
                self.flush()?;
            }
        }
        Ok(accepted)
    }

    /// Takes what the completion queue holds; `true` if the wake event was among it and signalled.
    fn take(&mut self, completions: &mut Vec<Completion>) -> Result<bool> {
        let mut woken = false;
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else {
                return Ok(woken);
            };
            match entry.user_data() {
                WAKE_DATA => {
                    let failed = entry.result() < 0 && entry.result() != -libc::ECANCELED;
                    self.wake_poll = if failed { WakePoll::Refused } else { WakePoll::Idle };
                    woken |= self.options.wake.consume();
                }
                slot => self.complete(slot, entry.result(), completions)?,
            }
        }
    }

    fn complete(
        &mut self,
        slot: u64,
        result: i32,
        completions: &mut Vec<Completion>,
    ) -> Result<()> {
        let Some((index, transfer)) = usize::try_from(slot)
            .ok()
            .and_then(|index| Some((u32::try_from(slot).ok()?, *self.transfers.get(index)?)))
        else {
            debug_assert!(false, "no transfer has slot {slot}");
            return Ok(());
        };
        self.transfer_slots.give(index);
        self.in_flight -= 1;
        if self.polls_completions() && result == -libc::EOPNOTSUPP {
            if !self.features.contains(&"iopoll-refused") {
                self.features.push("iopoll-refused");
            }
            if self.submit_to_threads(transfer)? {
                return Ok(());
            }
        }
        completions.push(Completion { token: transfer.token, result: result.into() });
        Ok(())
    }

    fn threads_in_flight(&self) -> usize {
        self.threads.as_ref().map_or(0, |threads| threads.in_flight())
    }
}

impl std::fmt::Debug for UringEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringEngine")
            .field("features", &self.features)
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight)
            .field("wake_poll", &self.wake_poll)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl Engine for UringEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Uring
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            registered_buffers: self.buffers.count() > 0,
            registered_files: self.files.count() > 0,
            features: self.features.clone(),
        }
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight + self.threads_in_flight()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        let accepted = self.queue_all(transfers)?;
        if accepted > 0 && !self.options.single_submit {
            self.flush()?;
        }
        Ok(accepted)
    }

    unsafe fn submit_and_reap_next(&mut self, transfers: &[Transfer]) -> Result<usize> {
        if self.polls_completions() {
            // SAFETY: the caller's promise is passed on.
            return unsafe { self.submit(transfers) };
        }
        self.queue_all(transfers)
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let count = completions.len();
        let mut woken = self.take(completions)?;
        let found = woken || completions.len() > count;
        if found && !self.ring.submission().is_empty() {
            // No sleep that would take them along.
            self.flush()?;
        }
        while !woken && completions.len() == count {
            let left = deadline.left();
            woken = self.sleep(left, completions)?;
            woken |= self.take(completions)?;
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
        }
        Ok(())
    }

    unsafe fn bind_buffer(&mut self, address: *mut u8, length: usize) -> Result<Option<u16>> {
        let Some(slot) = self.buffers.take() else {
            return Ok(None);
        };
        let memory = libc::iovec { iov_base: address.cast(), iov_len: length };
        // SAFETY: the caller keeps the memory mapped until the slot is given back.
        match unsafe { self.ring.submitter().register_buffers_update(slot, &[memory], None) } {
            Ok(()) => Ok(u16::try_from(slot).ok()),
            Err(source) => {
                self.buffers.give(slot);
                let error = Error::from_io(source, format!("cannot register {length} bytes"));
                let error = error.engine(EngineKind::Uring.name());
                Err(if error.os_code() == Some(libc::ENOMEM) {
                    error.hint("raise the limit on locked memory (ulimit -l)")
                } else {
                    error
                })
            }
        }
    }

    fn unbind_buffer(&mut self, slot: u16) {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty slot refers to no memory.
        match unsafe {
            self.ring.submitter().register_buffers_update(slot.into(), &[nothing], None)
        } {
            Ok(()) => self.buffers.give(slot.into()),
            // The slot still holds the old memory, so it is never used again.
            Err(error) => tracing::warn!(%error, slot, "cannot unregister a buffer"),
        }
    }

    fn bind_file(&mut self, descriptor: RawFd) -> Option<u32> {
        let slot = self.files.take()?;
        if self.ring.submitter().register_files_update(slot, &[descriptor]).is_ok() {
            return Some(slot);
        }
        self.files.give(slot);
        None
    }

    fn unbind_file(&mut self, slot: u32) {
        match self.ring.submitter().register_files_update(slot, &[-1]) {
            Ok(_) => self.files.give(slot),
            Err(error) => tracing::warn!(%error, slot, "cannot unregister a file"),
        }
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        if let Err(error) = self.drain() {
            tracing::error!(%error, in_flight = self.in_flight, "cannot drain an io_uring");
        }
        if self.buffers.count() > 0 {
            let _ = self.ring.submitter().unregister_buffers();
        }
    }
}
