//! Gives a written checkpoint its name, has `latest` name it, and removes old ones, in this order.
//! Says which checkpoints are there.
//!
//! All of it happens with the directory locked, so that writers of several processes take turns.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use forebay_io::{Durability, Error, ErrorKind, Result};

use super::leftovers::{Claim, remove_tree};
use super::name::{LATEST_FILE, MANIFEST_FILE, Part, Stem, parse_step, step_directory};
use super::storage::Storage;
use super::write::sync_directory;
use crate::regular;

/// Attempts at giving a checkpoint its name, which others can take and give back meanwhile where
/// directories can't be locked.
const ATTEMPTS_MAX: usize = 16;
/// Most bytes of `latest` that are looked at: the longest name takes 25.
const LATEST_BYTES_MAX: u64 = 64;

/// Where checkpoints are, and how they are kept.
#[derive(Debug)]
pub(super) struct Publish<'a> {
    pub(super) storage: &'a dyn Storage,
    pub(super) directory: &'a Path,
    pub(super) durability: Durability,
    /// How many to keep; `None`: all.
    pub(super) keep: Option<usize>,
}

impl Publish<'_> {
    /// Publishes what a writer has finished. A checkpoint of the same step is replaced in one
    /// moment; what was replaced is left under the claim's name.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub(super) fn run(&self, claim: &Claim, step: u64) -> Result<()> {
        let _lock = self.lock();
        self.name(claim, step)?;
        sync_directory(self.storage, self.durability, self.directory)?;
        let latest = self.directory.join(LATEST_FILE);
        self.storage
            .rename(&claim.path(Part::Latest), &latest)
            .map_err(|error| Error::from_io(error, "cannot write").path(latest))?;
        sync_directory(self.storage, self.durability, self.directory)
    }

    /// Removes the checkpoints with the lowest numbers where there are more than are to be kept;
    /// never the one that was just published, nor the one that `latest` names.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub(super) fn remove_old(&self, newest: u64) -> Result<()> {
        let lock = self.lock();
        let removed = self.take_old(newest)?;
        drop(lock);
        removed.iter().try_for_each(|path| remove_tree(self.storage, path))
    }

    fn name(&self, claim: &Claim, step: u64) -> Result<()> {
        let (from, to) = (claim.path(Part::Partial), self.directory.join(step_directory(step)));
        let failed = |error| Error::from_io(error, "cannot publish").path(&to);
        for _ in 0..ATTEMPTS_MAX {
            match self.storage.rename(&from, &to) {
                Ok(()) => return Ok(()),
                Err(error) if is_taken(&error) => {}
                Err(error) => return Err(failed(error)),
            }
            match self.storage.exchange(&from, &to) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // A file system that can't exchange names: the old one goes first.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                    ) =>
                {
                    self.set_aside(step)?;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        let text = "cannot publish: another process takes the name each time:";
        Err(Error::new(ErrorKind::Os, text).path(to))
    }

    /// Takes the names from checkpoints that aren't to be kept, and says what they are called now.
    fn take_old(&self, newest: u64) -> Result<Vec<PathBuf>> {
        let Some(keep) = self.keep else { return Ok(Vec::new()) };
        let steps = steps(self.directory)?;
        let latest = latest_file(self.directory);
        let old = steps.iter().filter(|&&step| step != newest && Some(step) != latest);
        let excess = steps.len().saturating_sub(keep);
        let taken = old.take(excess).map(|&step| self.set_aside(step));
        let taken: Vec<PathBuf> =
            taken.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        if !taken.is_empty() {
            // Else a power cut could bring the name back over files that are gone.
            sync_directory(self.storage, self.durability, self.directory)?;
        }
        Ok(taken)
    }

    fn set_aside(&self, step: u64) -> Result<Option<PathBuf>> {
        let from = self.directory.join(step_directory(step));
        let to = self.directory.join(Stem::random(step)?.part(Part::Removed));
        match self.storage.rename(&from, &to) {
            Ok(()) => Ok(Some(to)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::from_io(error, "cannot remove").path(from)),
        }
    }

    /// Keeps others from publishing. A file system without locks has each do as it can.
    fn lock(&self) -> Option<Lock> {
        let file = File::open(self.directory).ok()?;
        while let Err(error) = file.lock() {
            if error.kind() != io::ErrorKind::Interrupted {
                return None;
            }
        }
        Some(Lock(file))
    }
}

/// The lock of a directory, given back when this is dropped.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing isn't enough: a forked child may have the descriptor too.
        let _ = self.0.unlock();
    }
}

fn is_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists)
}

/// The steps of which there is a checkpoint, in the order of their numbers.
///
/// # Errors
///
/// The directory can't be listed.
pub(super) fn steps(directory: &Path) -> Result<Vec<u64>> {
    let failed = |error| Error::from_io(error, "cannot list").path(directory);
    let mut steps = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let step = entry.file_name().to_str().and_then(parse_step);
        steps.extend(step.filter(|_| entry.path().join(MANIFEST_FILE).exists()));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The newest step: the one that was saved last; where nothing says so, or that one is gone, the
/// one with the highest number.
///
/// # Errors
///
/// The directory can't be listed.
pub(super) fn newest(directory: &Path) -> Result<Option<u64>> {
    let steps = steps(directory)?;
    let latest = latest_file(directory).filter(|step| steps.binary_search(step).is_ok());
    Ok(latest.or(steps.last().copied()))
}

/// The step to load where none is given: the newest; also if `latest` names one that has lost its
/// manifest, so that this is noticed.
///
/// # Errors
///
/// The directory can't be listed.
pub(super) fn to_load(directory: &Path) -> Result<Option<u64>> {
    let named = latest_file(directory);
    match named.filter(|&step| directory.join(step_directory(step)).is_dir()) {
        Some(step) => Ok(Some(step)),
        None => newest(directory),
    }
}

/// What the file `latest` names.
fn latest_file(directory: &Path) -> Option<u64> {
    let path = directory.join(LATEST_FILE);
    let mut text = String::new();
    regular::open(&path).ok()?.take(LATEST_BYTES_MAX + 1).read_to_string(&mut text).ok()?;
    if text.len() as u64 > LATEST_BYTES_MAX {
        return None;
    }
    parse_step(text.strip_suffix('\n').unwrap_or(&text))
}
