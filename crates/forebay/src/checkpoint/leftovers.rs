//! Who is writing what: names that a writer claims, and what dead writers have left.
//!
//! A writer makes a lock file and locks it (`flock(2)`, which goes with the process, whatever ends
//! it) before anything else of its name is there, and removes the lock file last. So what has a
//! locked file belongs to a live writer; the rest is nobody's. On a file system without locks
//! nothing can be told, and nothing that has a lock file is touched.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_io::{Error, Result};

use super::name::{Part, Stem};
use super::storage::Storage;

/// Attempts at claiming a name: a cleaner can take a lock file for a dead writer's in the moment
/// before it is locked.
const CLAIM_ATTEMPTS_MAX: usize = 8;

/// The names that one writer has to itself, as long as this lives or its process does.
#[derive(Debug)]
pub(super) struct Claim {
    directory: PathBuf,
    stem: Stem,
    lock: File,
}

impl Claim {
    /// Claims names for a step.
    ///
    /// # Errors
    ///
    /// What the system says of making a file in the directory.
    pub(super) fn new(storage: &dyn Storage, directory: &Path, step: u64) -> Result<Self> {
        let mut attempt = 0;
        loop {
            let stem = Stem::random(step)?;
            let path = directory.join(stem.part(Part::Lock));
            let lock = storage
                .create_lock(&path)
                .map_err(|error| Error::from_io(error, "cannot save into").path(directory))?;
            // A file system without locks has nobody clean up there either.
            let _ = lock.try_lock();
            attempt += 1;
            if is_at(&lock, &path) || attempt == CLAIM_ATTEMPTS_MAX {
                return Ok(Self { directory: directory.to_path_buf(), stem, lock });
            }
        }
    }

    /// Where a part is.
    pub(super) fn path(&self, part: Part) -> PathBuf {
        self.directory.join(self.stem.part(part))
    }

    /// Removes what is left under the names, and gives them back. What can't be removed now is
    /// nobody's from then on, and for the next cleaner.
    pub(super) fn release(self, storage: &dyn Storage) {
        let removed = remove_parts(storage, &self.directory, &self.stem);
        if removed.is_ok() {
            let _ = storage.remove_file(&self.path(Part::Lock));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Closing isn't enough: a forked child may have the descriptor too.
        let _ = self.lock.unlock();
    }
}

/// Removes what dead writers have left in a directory, and says how many of them there were.
///
/// # Errors
///
/// The first thing that couldn't be removed; the others are.
pub(super) fn clean(storage: &dyn Storage, directory: &Path) -> Result<usize> {
    let mut stems: BTreeMap<Stem, bool> = BTreeMap::new();
    let failed = |error| Error::from_io(error, "cannot list").path(directory);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if let Some((stem, part)) = name.to_str().and_then(Stem::parse) {
            *stems.entry(stem).or_default() |= part == Part::Removed;
        }
    }
    let mut count = 0;
    let mut outcome = Ok(());
    for (stem, is_removal) in stems {
        let cleaned = if is_removal {
            remove_parts(storage, directory, &stem).map(|()| true)
        } else {
            clean_one(storage, directory, &stem)
        };
        match cleaned {
            Ok(was_there) => count += usize::from(was_there),
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    outcome.map(|()| count)
}

/// Removes what a writer has left, if it is dead.
fn clean_one(storage: &dyn Storage, directory: &Path, stem: &Stem) -> Result<bool> {
    let path = directory.join(stem.part(Part::Lock));
    let lock = match File::open(&path) {
        Ok(lock) => Some(lock),
        // The lock file is there before the rest and goes after it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(Error::from_io(error, "cannot open").path(path)),
    };
    if let Some(lock) = &lock {
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => return Ok(false),
        }
    }
    remove_parts(storage, directory, stem)?;
    if let Some(lock) = lock {
        ignore_missing(storage.remove_file(&path))
            .map_err(|error| Error::from_io(error, "cannot remove").path(&path))?;
        let _ = lock.unlock();
    }
    Ok(true)
}

/// Removes everything of a stem but its lock file.
fn remove_parts(storage: &dyn Storage, directory: &Path, stem: &Stem) -> Result<()> {
    for part in [Part::Partial, Part::Removed] {
        remove_tree(storage, &directory.join(stem.part(part)))?;
    }
    let path = directory.join(stem.part(Part::Latest));
    ignore_missing(storage.remove_file(&path))
        .map_err(|error| Error::from_io(error, "cannot remove").path(path))
}

/// Removes a directory and what is in it; one that isn't there, or that another removes at the
/// same time, is fine.
pub(super) fn remove_tree(storage: &dyn Storage, path: &Path) -> Result<()> {
    let failed = |path: &Path, error| Error::from_io(error, "cannot remove").path(path);
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| failed(path, error))?,
    };
    for entry in entries {
        let entry = entry.map_err(|error| failed(path, error))?;
        let inner = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(storage, &inner)?;
        } else {
            ignore_missing(storage.remove_file(&inner)).map_err(|error| failed(&inner, error))?;
        }
    }
    ignore_missing(storage.remove_directory(path)).map_err(|error| failed(path, error))
}

fn ignore_missing(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Whether a path names the open file.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let key = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => key(open) == key(named),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::storage::FileSystem;
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn write_partly(claim: &Claim) {
        fs::create_dir(claim.path(Part::Partial)).unwrap();
        fs::write(claim.path(Part::Partial).join("shard-00001.safetensors"), b"half").unwrap();
        fs::write(claim.path(Part::Latest), b"step").unwrap();
    }

    #[test]
    fn what_a_live_writer_has_stays_and_what_a_dead_one_left_goes() {
        let directory = tempfile::tempdir().unwrap();
        let live = Claim::new(&FileSystem, directory.path(), 1).unwrap();
        write_partly(&live);
        let dead = Claim::new(&FileSystem, directory.path(), 1).unwrap();
        write_partly(&dead);
        drop(dead);
        fs::write(directory.path().join(".step-mine"), b"of somebody else").unwrap();
        assert_eq!(names(directory.path()).len(), 7);

        assert_eq!(clean(&FileSystem, directory.path()).unwrap(), 1);
        assert_eq!(names(directory.path()).len(), 4);
        assert_eq!(fs::read(live.path(Part::Latest)).unwrap(), b"step");
        assert_eq!(clean(&FileSystem, directory.path()).unwrap(), 0);

        live.release(&FileSystem);
        assert_eq!(names(directory.path()), [".step-mine"]);
    }

    #[test]
    fn remains_without_a_lock_file_and_halves_of_removals_go() {
        let directory = tempfile::tempdir().unwrap();
        let claim = Claim::new(&FileSystem, directory.path(), 7).unwrap();
        write_partly(&claim);
        fs::remove_file(claim.path(Part::Lock)).unwrap();
        drop(claim);
        let removed = directory.path().join(Stem::random(6).unwrap().part(Part::Removed));
        fs::create_dir_all(removed.join("deeper")).unwrap();
        fs::write(removed.join("deeper").join("file"), b"x").unwrap();

        assert_eq!(clean(&FileSystem, directory.path()).unwrap(), 2);
        assert_eq!(names(directory.path()), [""; 0]);
    }
}
