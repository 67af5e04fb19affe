//! The directories of a set, and what can be asked of the files striped over them.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_io::{Error, ErrorKind, Result};

use super::code;
use super::layout::Layout;
use super::name::Name;
use super::publish::remove_manifest;
use super::state::{self, Record};

/// Directories, best on a drive each, over which files are striped. Cheap to clone.
///
/// # Examples
///
/// ```
/// use forebay::io::{Direction, Durability, Handle, Options, Request, Target};
/// use forebay::stripe::Stripe;
///
/// let (one, two) = (tempfile::tempdir()?, tempfile::tempdir()?);
/// let stripe = Stripe::new(&[one.path(), two.path()], 4096)?;
/// let handle = Handle::new(Options::default())?;
///
/// let mut weights = vec![7_u8; 10_001];
/// let target = Target::Path("w.bin".into());
/// let request = Request {
///     whole_file: true,
///     ..Request::new(Direction::Store, target, 0, weights.as_mut_ptr(), weights.len())
/// };
/// let request = stripe.spread(request, Durability::None)?;
/// // SAFETY: the memory outlives the operation, which `run` waits for.
/// unsafe { handle.run(request) }?;
/// assert_eq!(stripe.size("w.bin")?, 10_001);
/// assert_eq!(std::fs::metadata(two.path().join("w.bin"))?.len(), 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Stripe(pub(super) Arc<Set>);

#[derive(Debug)]
pub(super) struct Set {
    pub(super) directories: Vec<Directory>,
    /// What new files are cut up by.
    pub(super) layout: Layout,
    /// The directory whose files are locked: the same for every set of the same directories,
    /// whatever their order.
    anchor: usize,
}

#[derive(Debug)]
pub(super) struct Directory {
    pub(super) path: PathBuf,
    /// Device and inode: what it was when the set was made.
    key: (u64, u64),
}

impl Stripe {
    /// A set of directories that are there, with stripes of `stripe_bytes` for new files.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] as for [`Layout::new`], and for a directory that is given
    /// twice, under whatever name; [`ErrorKind::Os`] for one that isn't there.
    pub fn new(directories: &[impl AsRef<Path>], stripe_bytes: u64) -> Result<Self> {
        let layout = Layout::new(stripe_bytes, directories.len())?;
        let mut found: Vec<Directory> = Vec::new();
        for path in directories {
            let path = path.as_ref();
            let path = std::path::absolute(path)
                .map_err(|error| Error::from_io(error, "cannot use the directory").path(path))?;
            let key = directory_key(&path)?;
            if let Some(same) = found.iter().find(|directory| directory.key == key) {
                let text = format!(
                    "a directory to stripe over is given twice, as {} and as",
                    same.path.display()
                );
                return Err(Error::new(ErrorKind::InvalidInput, text).path(path));
            }
            found.push(Directory { path, key });
        }
        let anchor = (0..found.len()).min_by_key(|&index| found[index].key).unwrap_or(0);
        Ok(Self(Arc::new(Set { directories: found, layout, anchor })))
    }

    /// The directories, in the order given, as absolute paths.
    pub fn directories(&self) -> impl Iterator<Item = &Path> {
        self.0.directories.iter().map(|directory| directory.path.as_path())
    }

    /// How new files are cut up.
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// What is allowed and yet pointless, for a log: directories on one device.
    pub fn notices(&self) -> Vec<String> {
        let all = &self.0.directories;
        let earlier_on_device = |index: usize| {
            let device = all[index].key.0;
            all[..index].iter().find(|directory| directory.key.0 == device)
        };
        let notice = |index: usize| {
            let earlier = earlier_on_device(index)?;
            Some(format!(
                "{} and {} are on one device: striping over both makes nothing faster",
                earlier.path.display(),
                all[index].path.display()
            ))
        };
        (1..all.len()).filter_map(notice).collect()
    }

    /// Whether there is something striped of that name, whole or not.
    ///
    /// # Errors
    ///
    /// A name that can't be one; a directory that is missing or can't be read.
    pub fn exists(&self, name: impl AsRef<Path>) -> Result<bool> {
        let name = Name::new(name.as_ref())?;
        let found = state::read_all(&self.0, &name)?;
        Ok(found.iter().any(Option::is_some))
    }

    /// Bytes of a logical file, which is whole.
    ///
    /// # Errors
    ///
    /// As for [`Self::verify`].
    pub fn size(&self, name: impl AsRef<Path>) -> Result<u64> {
        self.record(&Name::new(name.as_ref())?).map(|record| record.logical_bytes)
    }

    /// Checks that a logical file is whole: every member there, of one store, as long as it has to
    /// be. Contents aren't read.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Os`] with `ENOENT` for a file, a member or a directory that isn't there;
    /// [`ErrorKind::Mismatch`] for members of different stores, a member that is too short, a
    /// store that never finished. The error names the directory or the member.
    pub fn verify(&self, name: impl AsRef<Path>) -> Result<()> {
        self.record(&Name::new(name.as_ref())?).map(drop)
    }

    /// Removes a logical file, whole or not, from all directories. Manifests go first, so that one
    /// that is removed halfway doesn't look whole.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Os`]: nothing of that name is there, a store of it is under way, or what the
    /// system says of removing a part.
    pub fn remove(&self, name: impl AsRef<Path>) -> Result<()> {
        let (set, name) = (&self.0, Name::new(name.as_ref())?);
        let found = state::read_all(set, &name)?;
        let members = set.directories.iter().map(|directory| name.member(&directory.path));
        let members: Vec<PathBuf> = members.filter(|member| member.is_file()).collect();
        if found.iter().all(Option::is_none) && members.is_empty() {
            return Err(state::absent(set, &name));
        }
        let claimed = set.claim(&name, true);
        // What is left of a file may lack just the member that is locked.
        let _claim = match claimed {
            Err(error) if error.os_code() == Some(code::ENOENT) => None,
            claimed => Some(claimed?),
        };
        let _lock = set.lock()?;
        for directory in &set.directories {
            remove_manifest(&name, &directory.path, false)?;
        }
        for member in members {
            fs::remove_file(&member)
                .map_err(|error| Error::from_io(error, "cannot remove").path(&member))?;
        }
        Ok(())
    }

    pub(super) fn record(&self, name: &Name) -> Result<Record> {
        state::whole(&self.0, name)
    }
}

impl Set {
    /// Refuses to go on if a directory isn't the one that it was: a drive that was unmounted
    /// leaves an empty directory behind.
    pub(super) fn check_directories(&self) -> Result<()> {
        for directory in &self.directories {
            if directory_key(&directory.path)? != directory.key {
                let text = "the directory isn't the one that the stripe set was made with:";
                return Err(Error::from_os(code::ENODEV, text).path(&directory.path).hint(
                    "is its drive mounted? if it is meant to be another, make a new handle",
                ));
            }
        }
        Ok(())
    }

    /// Keeps everybody else from writing and reading manifests, for a moment.
    pub(super) fn lock(&self) -> Result<Lock> {
        self.lock_by(File::lock)
    }

    /// Keeps everybody from writing manifests, for a moment: those that are read meanwhile belong
    /// together.
    pub(super) fn lock_shared(&self) -> Result<Lock> {
        self.lock_by(File::lock_shared)
    }

    fn lock_by(&self, lock: impl Fn(&File) -> io::Result<()>) -> Result<Lock> {
        let path = &self.directories[self.anchor].path;
        let file = File::open(path)
            .map_err(|error| Error::from_io(error, "cannot open the directory").path(path))?;
        while let Err(error) = lock(&file) {
            // A file system without locks has its users keep out of each other's way.
            if error.kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
        Ok(Lock(file))
    }

    /// Keeps other handles and processes from storing to a file: all of them if `alone`, and else
    /// those that want it alone. The member has to be there.
    pub(super) fn claim(&self, name: &Name, alone: bool) -> Result<Lock> {
        let path = name.member(&self.directories[self.anchor].path);
        let file = File::options()
            .write(true)
            .open(&path)
            .map_err(|error| Error::from_io(error, "cannot open").path(&path))?;
        let locked = if alone { file.try_lock() } else { file.try_lock_shared() };
        match locked {
            Err(TryLockError::WouldBlock) => {
                let text = "another handle or process is storing the striped file";
                Err(Error::from_os(code::EBUSY, text)
                    .path(name.as_path())
                    .hint("wait for it, or use one handle, which puts its stores in order"))
            }
            // As in `lock_by`.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Lock(file)),
        }
    }
}

/// A lock of `flock(2)`, given back when this is dropped.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing isn't enough: a forked child may have the descriptor too.
        let _ = self.0.unlock();
    }
}

fn directory_key(path: &Path) -> Result<(u64, u64)> {
    let failed = |error| {
        Error::from_io(error, "cannot use the directory to stripe over:")
            .path(path)
            .hint("make it, or mount its drive")
    };
    let metadata = fs::metadata(path).map_err(failed)?;
    if !metadata.is_dir() {
        return Err(failed(io::Error::from_raw_os_error(code::ENOTDIR)));
    }
    Ok((metadata.dev(), metadata.ino()))
}
