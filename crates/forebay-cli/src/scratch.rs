//! Directories for the files of a run, which must not outlive it.
//!
//! Each has a file that the run keeps locked until the directory is gone. A run that was killed
//! holds its lock no longer, so the next one removes what it left; directories without that file,
//! and those of other users, are left alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

const LOCK: &str = ".forebay.lock";
/// Attempts at a name that nobody has, or at a directory that another run takes for a leftover.
const TRIES: u32 = 10;

/// A directory that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Makes a directory in `directory` for a subcommand, after [`remove_leftovers`].
    pub(crate) fn new(directory: &Path, subcommand: &str) -> io::Result<Self> {
        let prefix = format!("forebay-{subcommand}-");
        remove_leftovers(directory, subcommand);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut last = ErrorKind::AlreadyExists.into();
        for attempt in 0..TRIES {
            let name = format!("{prefix}{}-{}-{attempt}", process::id(), started.subsec_nanos());
            let path = directory.join(name);
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => last = error,
                Err(error) => return Err(error),
                Ok(()) => match lock_new(&path) {
                    Ok(lock) => return Ok(Self { path, _lock: lock }),
                    Err(error) => {
                        // Whoever took it for a leftover may be removing it, too.
                        let _ = fs::remove_dir_all(&path);
                        last = error;
                    }
                },
            }
        }
        Err(last)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The directory goes before the lock, or another run would remove it at the same time.
        // Nothing can be done about one that can't be removed: the next run tries again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Makes and takes the lock of a new directory.
fn lock_new(path: &Path) -> io::Result<File> {
    let name = path.join(LOCK);
    let lock = OpenOptions::new().write(true).create_new(true).open(&name)?;
    match lock.try_lock() {
        // Another run had the lock for a moment, and has removed the directory.
        Err(fs::TryLockError::WouldBlock) => Err(ErrorKind::WouldBlock.into()),
        Ok(()) if !name.exists() => Err(ErrorKind::NotFound.into()),
        // Without locks on this file system no other run can take it for a leftover either.
        Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(lock),
    }
}

/// Removes the directories that killed runs of a subcommand have left in `directory`; one that
/// can't be removed stays. To be done before looking how much room there is: they take of it.
pub(crate) fn remove_leftovers(directory: &Path, subcommand: &str) {
    let prefix = format!("forebay-{subcommand}-");
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(&prefix);
        if ours && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            // What can't be looked at can't be told from a live run's.
            let _ = remove_if_stale(&entry.path());
        }
    }
}

fn remove_if_stale(path: &Path) -> io::Result<()> {
    let name = path.join(LOCK);
    let status = fs::symlink_metadata(&name)?;
    // The owner of this entry is the effective user of this process.
    if !status.is_file() || status.uid() != fs::metadata("/proc/self")?.uid() {
        return Ok(());
    }
    let lock = OpenOptions::new().write(true).open(&name)?;
    match lock.try_lock() {
        Ok(()) => fs::remove_dir_all(path),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_dead_run_left_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let live = Scratch::new(directory.path(), "tune").unwrap();
        let dead = directory.path().join("forebay-tune-1-2-3");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(LOCK), "").unwrap();
        fs::write(dead.join("file"), "left").unwrap();
        let mine = directory.path().join("forebay-tune-mine");
        fs::create_dir(&mine).unwrap();
        fs::write(mine.join("w.bin"), "mine").unwrap();
        let other = Scratch::new(directory.path(), "tune").unwrap();
        assert!(!dead.exists());
        assert_eq!(fs::read(mine.join("w.bin")).unwrap(), b"mine");
        assert!(live.path().exists() && other.path().exists());
        assert_ne!(live.path(), other.path());
        let path = live.path().to_path_buf();
        drop(live);
        assert!(!path.exists());
    }
}
