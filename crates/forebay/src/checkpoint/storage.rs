//! What a checkpoint does to directories and small files, apart from the transfers of its tensors.
//!
//! A seam: [`FileSystem`] is the real one; a test has one that writes down what was asked in which
//! order, so that what a power cut leaves can be played back.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use forebay_io::directory::exchange;
use forebay_io::files::reserve;

/// How far a sync goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// `fdatasync(2)`: what is needed to read the bytes back.
    Data,
    /// `fsync(2)`.
    Full,
}

/// Changes to directories and files. Paths are those that the caller names; nothing is followed up
/// or synced that isn't asked for.
pub trait Storage: fmt::Debug + Send + std::marker::Sync {
    /// Makes a directory, which isn't there.
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// Makes a file of `bytes` bytes, which isn't there, with room for them on the drive.
    fn create_file(&self, path: &Path, bytes: u64) -> io::Result<()>;
    /// Makes a file with this content, which isn't there.
    fn write_file(&self, path: &Path, content: &[u8]) -> io::Result<()>;
    /// Makes an empty file, which isn't there, to be locked.
    fn create_lock(&self, path: &Path) -> io::Result<File>;
    /// Has what was written to a file survive a power cut.
    fn sync_file(&self, path: &Path, sync: Sync) -> io::Result<()>;
    /// Has the names in a directory survive a power cut.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
    /// Renames a file over another, or a directory to a name that isn't taken.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Has two names change places.
    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;
}

/// The real thing.
#[derive(Clone, Copy, Debug, Default)]
pub struct FileSystem;

impl Storage for FileSystem {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let file = File::create_new(path)?;
        reserve(&file, bytes).map_err(|error| match error.os_code() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::other(error),
        })
    }

    fn write_file(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        File::create_new(path)?.write_all(content)
    }

    fn create_lock(&self, path: &Path) -> io::Result<File> {
        File::create_new(path)
    }

    fn sync_file(&self, path: &Path, sync: Sync) -> io::Result<()> {
        let file = File::open(path)?;
        match sync {
            Sync::Data => file.sync_data(),
            Sync::Full => file.sync_all(),
        }
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            // File systems without a way to sync a directory have no names to lose.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            synced => synced,
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        exchange(one, other)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}
