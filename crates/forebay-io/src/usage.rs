//! What a process and a file have taken: processor time, memory, space, page cache.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::Advice;
use rustix::time::ClockId;

use crate::error::{Error, Result};
use crate::syscalls;

/// Processor time of this process, user and system, all threads that are or were.
pub fn processor_time() -> Duration {
    let clock = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(clock).unwrap_or_default()
}

/// The most memory, in bytes, that this process had resident at once; `None` where `/proc` doesn't
/// say.
pub fn peak_resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    rest.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes that an unprivileged user can still store in the file system that `path` is on.
///
/// # Errors
///
/// What the system says of the path.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let status = rustix::fs::statvfs(path).map_err(|code| {
        Error::from_os(code.raw_os_error(), "cannot ask for the space left on").path(path)
    })?;
    Ok(status.f_bavail.saturating_mul(status.f_frsize))
}

/// Bytes of a file that are in the page cache, in whole pages; `None` where the kernel can't tell
/// (`cachestat(2)`, Linux 6.5).
///
/// # Errors
///
/// What the system says of opening the file.
pub fn cached_bytes(path: &Path) -> Result<Option<u64>> {
    let file = open(path)?;
    let length = file.metadata().map_err(|error| Error::from_io(error, "cannot look at"))?.len();
    Ok(cached_bytes_within(&file, 0, length))
}

/// As [`cached_bytes`], of `length` bytes of an open file from `offset` on.
pub fn cached_bytes_within(file: &File, offset: u64, length: u64) -> Option<u64> {
    syscalls::cached_bytes(file.as_fd(), offset, length)
}

/// Has what was written to a file on the drive, and asks the kernel to drop the file from the page
/// cache, which some file systems don't: [`cached_bytes`] tells.
///
/// # Errors
///
/// What the system says of opening or syncing the file.
pub fn drop_cached(path: &Path) -> Result<()> {
    let file = open(path)?;
    file.sync_all().map_err(|error| Error::from_io(error, "cannot sync").path(path))?;
    // Advice that isn't taken is no failure.
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    Ok(())
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| Error::from_io(error, "cannot open").path(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_cached_until_it_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.bin");
        std::fs::write(&path, vec![7; 100_000]).unwrap();
        let Some(cached) = cached_bytes(&path).unwrap() else { return };
        assert!(cached >= 100_000, "{cached}");
        drop_cached(&path).unwrap();
        assert!(cached_bytes(&path).unwrap() < Some(cached));
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; 100_000]);
    }

    #[test]
    fn a_missing_path_is_named() {
        let missing = Path::new("/nowhere/at/all");
        for error in [
            free_bytes(missing).unwrap_err(),
            cached_bytes(missing).unwrap_err(),
            drop_cached(missing).unwrap_err(),
        ] {
            assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
        }
    }

    #[test]
    fn the_process_has_used_something() {
        assert!(processor_time() > Duration::ZERO);
        assert!(peak_resident_bytes() > Some(1 << 16));
        assert!(free_bytes(Path::new("/proc")).is_ok());
    }
}
