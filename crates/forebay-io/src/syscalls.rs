//! The few system calls that rustix has no face for. Nothing here decides anything.
#![expect(unsafe_code, reason = "raw system calls that rustix doesn't wrap")]

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

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

/// Runs `work` on a thread that has a working directory of its own. Where that is refused, the
/// working directory is that of the process.
pub(crate) fn in_directory<T: Send>(directory: &Path, work: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        // SAFETY: the thread is this call's own, and shares nothing more or less than it did with
        // the others but for its working directory, root and umask.
        if unsafe { libc::unshare(libc::CLONE_FS) } == 0 {
            // A directory that isn't there leaves the thread where it is.
            let _ = std::env::set_current_dir(directory);
        }
        work()
    };
    std::thread::scope(|scope| match scope.spawn(inside).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
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
    // To the kernel, an offset of all ones is the descriptor's own position.
    i64::try_from(offset).ok()?;
    preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT).ok()
}

/// Whether an `errno` says that the process or the system has run out of something: at another
/// moment the same call may do.
pub(crate) fn is_shortage(code: i32) -> bool {
    matches!(code, libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN)
}

/// Fails where the process can't have so many more descriptors at this moment.
pub(crate) fn try_descriptors(count: usize) -> Result<(), rustix::io::Errno> {
    use rustix::event::{EventfdFlags, eventfd};
    // They need no file, and no permission.
    let taken: Result<Vec<OwnedFd>, _> =
        (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect();
    taken.map(drop)
}

/// Duplicates a descriptor that is only known by its number; `EBADF` if it isn't open.
pub(crate) fn duplicate(number: std::os::fd::RawFd) -> Result<OwnedFd, rustix::io::Errno> {
    // SAFETY: the number is borrowed for one system call, which checks it; -1 was excluded by the
    // caller.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_dupfd_cloexec(borrowed, 0)
}

/// Most ranges in one `process_vm_readv(2)` (`UIO_MAXIOV`).
const RANGES_MAX: usize = 1024;

/// The first of the bytes that this process may not read or, if asked for, write to. Memory isn't
/// changed: what is written is what was read.
///
/// Where the kernel can't be asked (seccomp), nothing is found.
pub(crate) fn first_inaccessible(bytes: &[usize], writable: bool) -> Option<usize> {
    bytes.chunks(RANGES_MAX).find_map(|chunk| {
        let mut values = [0u8; RANGES_MAX];
        let read = transfer_bytes(libc::process_vm_readv, &mut values, chunk);
        let reached = match (read, writable) {
            (Some(count), true) if count == chunk.len() => {
                transfer_bytes(libc::process_vm_writev, &mut values, chunk)
            }
            _ => read,
        };
        reached.and_then(|count| chunk.get(count).copied())
    })
}

/// `process_vm_readv(2)` or `process_vm_writev(2)`.
type VectorCall = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

/// Moves single bytes between this process's own memory and `values`; how many could be moved, or
/// `None` if the kernel refuses to try.
fn transfer_bytes(call: VectorCall, values: &mut [u8], bytes: &[usize]) -> Option<usize> {
    let remote: Vec<libc::iovec> = bytes
        .iter()
        .map(|address| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(*address),
            iov_len: 1,
        })
        .collect();
    let local = libc::iovec { iov_base: values.as_mut_ptr().cast(), iov_len: bytes.len() };
    let process = rustix::process::getpid().as_raw_nonzero().get();
    let count = remote.len() as libc::c_ulong;
    // SAFETY: the kernel checks every address of `remote` and fails instead of faulting; `local` is
    // no longer than `values`, which is borrowed for the call. Bytes are written back as they were
    // read, to memory that the caller is about to have overwritten.
    let moved = unsafe { call(process, &raw const local, 1, remote.as_ptr(), count, 0) };
    match usize::try_from(moved) {
        Ok(count) => Some(count),
        Err(_) if std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => Some(0),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Constants are read-only.
    static CONSTANT: [u8; 4] = *b"abcd";

    #[test]
    fn memory_that_may_not_be_touched_is_found_without_touching_it() {
        let good = vec![7u8; 3000];
        let address = good.as_ptr().expose_provenance();
        let bytes: Vec<usize> = (0..3000).map(|index| address + index).collect();
        assert_eq!(first_inaccessible(&bytes, true), None);
        assert_eq!(good, vec![7; 3000]);
        let mut with_hole = bytes;
        with_hole[2500] = 4096;
        assert_eq!(first_inaccessible(&with_hole, false), Some(4096));
        let constant = CONSTANT.as_ptr().expose_provenance();
        assert_eq!(first_inaccessible(&[constant], false), None);
        assert_eq!(first_inaccessible(&[constant], true), Some(constant));
    }
}
