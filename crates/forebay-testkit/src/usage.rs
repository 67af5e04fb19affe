//! What a test process has used.
#![expect(unsafe_code, reason = "asks the kernel about mapped pages")]

use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

/// Processor time of this process, user and system, all threads that are or were.
pub fn process_cpu() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(clock).unwrap_or_default()
}

/// Open descriptors of this process.
pub fn descriptors() -> usize {
    // The listing itself has one open.
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1))
}

/// Bytes of the file that are in the page cache; `None` where the kernel can't tell.
pub fn cached_bytes(path: &Path) -> Option<usize> {
    let file = std::fs::File::open(path).ok()?;
    let length = usize::try_from(file.metadata().ok()?.len()).ok()?;
    let page = rustix::param::page_size();
    let mut resident = vec![0u8; length.div_ceil(page)];
    let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: a new mapping of an open file, at an address of the kernel's choice.
    let address =
        unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, file.as_raw_fd(), 0) };
    if address == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping is `length` bytes long, and the vector has a byte for each page of it.
    let status = unsafe { libc::mincore(address, length, resident.as_mut_ptr()) };
    // SAFETY: the mapping was made above, and nothing refers to it.
    unsafe { libc::munmap(address, length) };
    (status == 0).then(|| resident.iter().filter(|page| **page & 1 == 1).count() * page)
}

/// Makes the file durable and drops it from the page cache.
pub fn drop_cached(path: &Path) {
    use rustix::fs::{Advice, fadvise};
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.sync_all();
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
    }
}
