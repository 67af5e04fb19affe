//! New files that take the place of old ones, in one step.
//!
//! The new one is made beside the old one, under a name that says whose place it is to take. Whoever
//! makes it holds a lock on it (`flock(2)`, which goes with the process, whatever ends it), so that
//! the next one to save under that name can tell what a killed process left from what is in use.
//!
//! # Invariants
//!
//! - A file that is dropped before it was published is removed, and leaves the old one alone.
//! - What a live process is writing to is never removed.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};
use tempfile::NamedTempFile;

use super::code;

/// Mode of a file that wasn't there, before the umask.
const MODE_NEW: u32 = 0o666;
/// Most links that are followed to the file that is to be replaced, as in the kernel.
const LINKS_MAX: usize = 40;
/// How the names of new files begin and end.
const PREFIX: &[u8] = b".forebay-";
const SUFFIX: &str = ".tmp";
/// Bytes of the old name in that of the new file: file systems take 255 in all.
const NAME_BYTES_MAX: usize = 160;
/// Times that a new file is made which somebody takes for a leftover before it is locked.
const TRIES: usize = 16;

/// A new file, and the one whose place it is to take. See the [module documentation](self).
#[derive(Debug)]
pub(super) struct Replaced {
    file: NamedTempFile<File>,
    name: PathBuf,
}

impl Replaced {
    /// Makes a file in the directory of the one that `path` leads to.
    pub(super) fn beside(path: &Path) -> Result<Self> {
        let name = followed(path)?;
        let before = match fs::symlink_metadata(&name) {
            Ok(before) if before.is_dir() => {
                return Err(Error::from_os(code::EISDIR, "cannot save tensors to"));
            }
            Ok(before) if !before.is_file() => {
                let text = "cannot save tensors to what is no regular file:";
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
            Ok(before) => Some(before),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::from_io(error, "cannot look at")),
        };
        let prefix = prefix_of(&name);
        remove_leftovers(folder_of(&name), &prefix);
        let file = make(folder_of(&name), &prefix)?;
        if let Some(before) = before {
            let kept = take_after(file.as_file(), &before);
            kept.map_err(|error| Error::from_io(error, "cannot keep the permissions of"))?;
        }
        Ok(Self { file, name })
    }

    /// The new file.
    pub(super) fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Gives it the old one's name.
    pub(super) fn publish(self, durable: bool) -> Result<()> {
        let Self { file, name } = self;
        file.persist(&name).map_err(|failed| Error::from_io(failed.error, "cannot rename to"))?;
        if durable {
            File::open(folder_of(&name))
                .and_then(|folder| folder.sync_all())
                .map_err(|error| Error::from_io(error, "cannot make the directory durable of"))?;
        }
        Ok(())
    }
}

/// Gives a file the mode and the owner of one that was there before. Who isn't root can't give files
/// away: then it stays theirs.
pub(crate) fn take_after(file: &File, before: &Metadata) -> io::Result<()> {
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (before.uid(), before.gid()) {
        match fchown(file, Some(before.uid()), Some(before.gid())) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            changed => changed?,
        }
    }
    file.set_permissions(Permissions::from_mode(before.mode() & 0o7777))
}

/// Where links lead, the last of which may lead to nothing.
pub(crate) fn followed(path: &Path) -> Result<PathBuf> {
    let mut name = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&name) {
            Ok(target) => name = folder_of(&name).join(target),
            Err(_) => return Ok(name),
        }
    }
    Err(Error::from_os(code::ELOOP, "cannot follow"))
}

/// Makes a file and locks it. Where there are no locks, leftovers stay.
fn make(folder: &Path, prefix: &OsStr) -> Result<NamedTempFile<File>> {
    let failed = |error| Error::from_io(error, "cannot make a file beside");
    for _ in 0..TRIES {
        let file = create(folder, prefix)?;
        match file.as_file().try_lock() {
            Err(TryLockError::WouldBlock) => {}
            Ok(()) if file.as_file().metadata().map_err(failed)?.nlink() == 0 => {}
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(file),
        }
    }
    let text = "the new file is removed again and again beside";
    Err(Error::new(ErrorKind::Mismatch, text))
}

fn create(folder: &Path, prefix: &OsStr) -> Result<NamedTempFile<File>> {
    // tempfile's error doesn't have the code of the system's.
    let mut code = None;
    let made = tempfile::Builder::new().prefix(prefix).suffix(SUFFIX).make_in(folder, |path| {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(MODE_NEW);
        options.open(path).inspect_err(|error| code = error.raw_os_error())
    });
    made.map_err(|error| match code {
        Some(code) => Error::from_os(code, "cannot make a file beside"),
        None => Error::from_io(error, "cannot make a file beside"),
    })
}

/// How the names of new files begin that are to replace this one.
fn prefix_of(name: &Path) -> OsString {
    let own = name.file_name().unwrap_or_default().as_bytes();
    let own = &own[..own.len().min(NAME_BYTES_MAX)];
    OsString::from_vec([PREFIX, own, b"-"].concat())
}

/// Removes what killed processes have left; what can't be looked at or removed stays.
fn remove_leftovers(folder: &Path, prefix: &OsStr) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.as_bytes();
        let is_new = name.starts_with(prefix.as_bytes()) && name.ends_with(SUFFIX.as_bytes());
        if is_new && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            remove_unless_locked(&entry.path());
        }
    }
}

fn remove_unless_locked(path: &Path) {
    let Ok(file) = OpenOptions::new().write(true).open(path) else { return };
    if file.try_lock().is_ok() {
        // If that fails, the next one tries again.
        let _ = fs::remove_file(path);
    }
}

fn folder_of(name: &Path) -> &Path {
    match name.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_process_left_is_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let others = ["x", ".forebay-y-abcdef.tmp", ".forebay-x-notes"];
        for name in others.into_iter().chain([".forebay-x-abcdef.tmp"]) {
            fs::write(at(name), "").unwrap();
        }
        let first = Replaced::beside(&at("x")).unwrap();
        let second = Replaced::beside(&at("x")).unwrap();
        assert!(!at(".forebay-x-abcdef.tmp").exists());
        assert!(others.iter().all(|name| at(name).exists()));
        first.publish(false).unwrap();
        second.publish(false).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), others.len());
    }

    #[test]
    fn a_name_of_any_length_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ü".repeat(127));
        Replaced::beside(&path).unwrap().publish(true).unwrap();
        assert!(path.exists());
    }
}
