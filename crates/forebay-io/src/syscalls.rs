//! The few system calls that rustix has no face for. Nothing here decides anything.
#![expect(unsafe_code, reason = "raw system calls that rustix doesn't wrap")]

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// Number of `cachestat(2)`, the same on every architecture that Linux added it to in 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of `linux/mman.h`.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of `linux/mman.h`, in pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Bytes of the file's range that are in the page cache, in whole pages; `None` where the kernel
/// can't tell (`cachestat(2)`, Linux 6.5) or may not (seccomp).
pub(crate) fn cached_bytes(file: BorrowedFd<'_>, offset: u64, length: u64) -> Option<u64> {
    let range = CachestatRange { offset, length };
    let mut found = Cachestat::default();
    // SAFETY: the descriptor is open for the call's duration; both structures have the kernel's
    // layout and live on this stack; the kernel reads the first and writes the second, then
    // keeps neither.
    let status = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0u32)
    };
    (status == 0).then(|| found.cached * page_bytes())
}

/// The size of a page in bytes.
pub(crate) fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Reads what is in the page cache already, without waiting for the drive (`RWF_NOWAIT`).
///
/// Returns the bytes read, or `None` if nothing could be had at once.
pub(crate) fn read_cached(file: BorrowedFd<'_>, buffer: &mut [u8], offset: u64) -> Option<usize> {
    use rustix::io::{IoSliceMut, ReadWriteFlags, preadv2};
    preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT).ok()
}

/// Duplicates a descriptor that is only known by its number; `EBADF` if it isn't open.
pub(crate) fn duplicate(number: std::os::fd::RawFd) -> Result<OwnedFd, rustix::io::Errno> {
    // SAFETY: the number is borrowed for one system call, which checks it; -1 was excluded by the
    // caller.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_dupfd_cloexec(borrowed, 0)
}
