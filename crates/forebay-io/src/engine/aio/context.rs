//! An AIO context: the four system calls, and their structures as the kernel lays them out.
//!
//! Layouts and numbers are from `include/uapi/linux/aio_abi.h`.

#![expect(unsafe_code, reason = "raw system calls")]

use std::io;
use std::time::Duration;

use super::{Command, Completion, EngineKind, Error, Transfer};

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_FSYNC: u16 = 2;
const IOCB_CMD_FDSYNC: u16 = 3;
const IOCB_CMD_POLL: u16 = 5;
const IOCB_FLAG_RESFD: u32 = 1;

/// Below this many transfers in flight threads do better, so setting up fails instead.
const DEPTH_MIN: usize = 4;

/// The most control blocks handed over in one call, so that their addresses fit on the stack.
const SUBMIT_COUNT_MAX: usize = 64;

/// `struct iocb`.
#[derive(Debug)]
#[repr(C)]
pub(super) struct ControlBlock {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    length: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_event: u32,
}

/// `struct io_event`. `result` is signed, whatever old headers say.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Event {
    data: u64,
    block: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<ControlBlock>() == 64 && size_of::<Event>() == 32);

impl ControlBlock {
    /// The block for a transfer, which signals `result_event` if there is one.
    pub(super) fn new(transfer: &Transfer, result_event: Option<i32>) -> Self {
        let mut block = Self::empty(transfer.descriptor);
        block.data = transfer.token;
        match transfer.command {
            Command::Read | Command::Write => {
                let reads = transfer.command == Command::Read;
                block.opcode = if reads { IOCB_CMD_PREAD } else { IOCB_CMD_PWRITE };
                block.buffer = transfer.address.expose_provenance() as u64;
                block.length = transfer.length as u64;
                // Out of range is EINVAL, by way of a negative offset.
                block.offset = i64::try_from(transfer.offset).unwrap_or(-1);
            }
            Command::Sync { data_only: true } => block.opcode = IOCB_CMD_FDSYNC,
            Command::Sync { data_only: false } => block.opcode = IOCB_CMD_FSYNC,
            Command::Allocate { .. } => unreachable!("allocation goes to threads"),
        }
        if let Some(descriptor) = result_event {
            block.flags = IOCB_FLAG_RESFD;
            block.result_event = descriptor.cast_unsigned();
        }
        block
    }

    /// A block that completes once when `descriptor` is readable.
    pub(super) fn poll(descriptor: i32) -> Self {
        let mut block = Self::empty(descriptor);
        block.opcode = IOCB_CMD_POLL;
        block.buffer = u64::from(libc::POLLIN.cast_unsigned());
        block
    }

    fn empty(descriptor: i32) -> Self {
        Self {
            data: 0,
            key: 0,
            rw_flags: 0,
            opcode: 0,
            priority: 0,
            descriptor: descriptor.cast_unsigned(),
            buffer: 0,
            length: 0,
            offset: 0,
            reserved: 0,
            flags: 0,
            result_event: 0,
        }
    }
}

impl Event {
    /// It is the completion of this very block.
    pub(super) fn is_of(&self, block: &ControlBlock) -> bool {
        self.block == std::ptr::from_ref(block).addr() as u64
    }

    /// As the engine reports it.
    pub(super) fn completion(&self) -> Completion {
        Completion { token: self.data, result: self.result }
    }
}

/// `aio_context_t`. Dropping it cancels polls and waits for transfers.
#[derive(Debug)]
pub(super) struct Context(libc::c_ulong);

impl Context {
    /// A context for `depth` transfers, or as many as there is room for, and `extra` more blocks.
    pub(super) fn new(depth: usize, extra: usize) -> Result<(Self, usize), Error> {
        let mut tried = depth;
        loop {
            match Self::setup(tried + extra) {
                Ok(context) => {
                    context.probe()?;
                    return Ok((context, tried));
                }
                Err(libc::EAGAIN | libc::EINVAL | libc::ENOMEM) if tried > DEPTH_MIN => {
                    tried = (tried / 2).max(DEPTH_MIN);
                }
                Err(code) => return Err(setup_refusal(code, depth + extra)),
            }
        }
    }

    fn setup(count: usize) -> Result<Self, i32> {
        let count = libc::c_uint::try_from(count).map_err(|_| libc::EINVAL)?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes the new context's number to `id`, a local.
        check(unsafe { libc::syscall(libc::SYS_io_setup, count, &raw mut id) })?;
        Ok(Self(id))
    }

    /// Tries the other calls: a seccomp filter can allow `io_setup` and refuse them.
    fn probe(&self) -> Result<(), Error> {
        // SAFETY: no blocks are handed over.
        let submitted = unsafe { self.submit(&mut []) };
        for answer in [submitted, self.events(0, Some(Duration::ZERO), &mut [])] {
            match answer {
                // An interruption or a shortage passes; it's no refusal.
                Ok(_) | Err(libc::EINTR | libc::EAGAIN) => {}
                Err(code) => return Err(submit_refusal(code)),
            }
        }
        Ok(())
    }

    /// Hands blocks to the kernel, which copies them; how many it took, or the `errno` of the first.
    ///
    /// # Safety
    ///
    /// The memory that the blocks refer to must stay valid until their events have been seen.
    pub(super) unsafe fn submit(&self, blocks: &mut [ControlBlock]) -> Result<usize, i32> {
        let mut addresses = [std::ptr::null_mut::<ControlBlock>(); SUBMIT_COUNT_MAX];
        let count = blocks.len().min(SUBMIT_COUNT_MAX);
        for (address, block) in addresses.iter_mut().zip(blocks) {
            *address = block;
        }
        // SAFETY: `addresses` holds `count` pointers to blocks that are borrowed for the call; what
        // they refer to is the caller's promise.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.0, count, addresses.as_mut_ptr()) })
    }

    /// Takes events, waiting for `min_count` of them until `timeout` (forever if `None`) has passed.
    pub(super) fn events(
        &self,
        min_count: usize,
        timeout: Option<Duration>,
        events: &mut [Event],
    ) -> Result<usize, i32> {
        let timeout = timeout.map(|timeout| libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the kernel writes at most `events.len()` events and reads `timeout`, a local.
        check(unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.0,
                min_count,
                events.len(),
                events.as_mut_ptr(),
                timeout,
            )
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this one's own and isn't used after this. The kernel waits for
        // transfers in it, and a failure means that it is gone already.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// The count that a system call returned, or its `errno`.
fn check(returned: libc::c_long) -> Result<usize, i32> {
    usize::try_from(returned)
        .map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Why `io_setup` was refused, and what to do about it.
fn setup_refusal(code: i32, wanted: usize) -> Error {
    let error = match code {
        libc::EAGAIN => {
            let read = |name| {
                let text = std::fs::read_to_string(format!("/proc/sys/fs/{name}"));
                text.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
            };
            let (max, used) = (read("aio-max-nr"), read("aio-nr"));
            Error::from_os(
                code,
                format!(
                    "cannot set up Linux AIO: {wanted} requests wanted, at least {DEPTH_MIN}, but \
                     fs.aio-max-nr is {max} and fs.aio-nr, what is in use, is {used}"
                ),
            )
            .hint("raise it: sysctl -w fs.aio-max-nr=1048576")
        }
        libc::EPERM | libc::EACCES => {
            Error::from_os(code, "a seccomp filter, such as a container's, refuses io_setup").hint(
                "allow io_setup, io_submit, io_getevents and io_destroy in its seccomp profile",
            )
        }
        libc::ENOSYS => Error::from_os(code, "this kernel, or a seccomp filter, has no Linux AIO"),
        _ => Error::from_os(code, "cannot set up Linux AIO"),
    };
    error.engine(EngineKind::Aio.name())
}

/// Why `io_submit` was refused although `io_setup` wasn't.
pub(super) fn submit_refusal(code: i32) -> Error {
    let error = Error::from_os(code, "cannot submit to Linux AIO");
    let error = match code {
        libc::EPERM | libc::EACCES | libc::ENOSYS => {
            error.hint("allow io_submit, io_getevents and io_destroy in the seccomp profile")
        }
        libc::EAGAIN => error.hint("the kernel is short of memory"),
        _ => error,
    };
    error.engine(EngineKind::Aio.name())
}
