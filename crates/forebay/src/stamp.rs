//! What tells that a file is still the one that was looked at: its identity, length and time of change.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forebay_io::{Error, ErrorKind, Result};

/// Changes when a file is written to, or when its name is given to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    /// The stamp of an open file.
    ///
    /// # Errors
    ///
    /// What the system says of `fstat(2)`.
    pub fn of(file: &File) -> Result<Self> {
        let facts = file.metadata().map_err(|error| Error::from_io(error, "cannot look at"))?;
        Ok(Self::from_facts(&facts))
    }

    /// The stamp of the file that has a name now.
    ///
    /// # Errors
    ///
    /// What the system says of `stat(2)`, with the path.
    pub fn at(path: &Path) -> Result<Self> {
        let facts = fs::metadata(path);
        let facts = facts.map_err(|error| Error::from_io(error, "cannot look at").path(path))?;
        Ok(Self::from_facts(&facts))
    }

    fn from_facts(facts: &Metadata) -> Self {
        Self {
            device: facts.dev(),
            inode: facts.ino(),
            bytes: facts.len(),
            modified: (facts.mtime(), facts.mtime_nsec()),
        }
    }

    /// The number of the device that it is on.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Fails if this is another stamp, of the same path now.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Mismatch`], with the path.
    pub fn hold_against(&self, now: &Self, path: &Path) -> Result<()> {
        if self == now {
            return Ok(());
        }
        let text = if (self.device, self.inode) == (now.device, now.inode) {
            "the file was written to while it was read:"
        } else {
            "another file was given the name while it was read:"
        };
        let error = Error::new(ErrorKind::Mismatch, text).path(path);
        Err(error.hint("try again when nobody writes to it"))
    }
}
