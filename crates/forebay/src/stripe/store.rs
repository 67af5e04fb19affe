//! What a store does around its transfers: it takes the old file's wholeness away, and gives the
//! new one its own.
//!
//! A whole-file store marks every manifest incomplete, with its own generation, before its first
//! byte, and complete after its last. A store at an offset changes no manifest unless the file
//! grows. Both hold a lock of the file meanwhile, so that other handles and processes keep out.

use std::fs::{self, File};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_io::{Commit, Error, ErrorKind, Result};

use super::code;
use super::layout::Layout;
use super::manifest::{Generation, Manifest};
use super::name::Name;
use super::publish::{remove_manifest, write_manifest};
use super::set::{Lock, Set};
use super::state::{self, Record, State};

/// One file of a store.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: Name,
    pub(super) layout: Layout,
    /// For each member, the index of its directory.
    pub(super) directories: Vec<usize>,
    /// How far into the logical file the store reaches.
    pub(super) end: u64,
    /// What the file is of if this store makes it.
    pub(super) generation: Generation,
}

/// What a store has done to the manifests of a file.
#[derive(Debug, Default)]
struct Begun {
    /// Held until the store is over.
    claim: Option<Lock>,
    /// The manifests' bytes before a whole-file store, by directory.
    before: Option<Vec<Option<Vec<u8>>>>,
    /// The generation of a file that a store at an offset goes into.
    into: Option<Generation>,
    /// The store at an offset made the file.
    created: bool,
}

/// The manifests of a store. See the [module documentation](self).
#[derive(Debug)]
pub(super) struct StoreCommit {
    set: Arc<Set>,
    whole_file: bool,
    is_durable: bool,
    entries: Vec<Entry>,
    begun: Mutex<Vec<Begun>>,
}

impl StoreCommit {
    pub(super) fn new(
        set: Arc<Set>,
        whole_file: bool,
        is_durable: bool,
        entries: Vec<Entry>,
    ) -> Self {
        Self { set, whole_file, is_durable, entries, begun: Mutex::default() }
    }

    fn write(&self, entry: &Entry, complete: bool, size: u64, of: &Generation) -> Result<()> {
        for (member_index, &directory) in entry.directories.iter().enumerate() {
            let manifest = Manifest {
                is_complete: complete,
                generation: of.clone(),
                layout: entry.layout,
                logical_bytes: size,
                member_index,
            };
            let directory = &self.set.directories[directory].path;
            write_manifest(&entry.name, directory, &manifest.to_bytes(), self.is_durable)?;
        }
        Ok(())
    }

    fn remove(&self, entry: &Entry) -> Result<()> {
        for directory in &self.set.directories {
            remove_manifest(&entry.name, &directory.path, self.is_durable)?;
        }
        Ok(())
    }

    fn begin_whole(&self, entry: &Entry, begun: &mut Begun) -> Result<()> {
        let before = state::read_all(&self.set, &entry.name)?;
        refuse_lost_member(&self.set, &entry.name, &before)?;
        begun.before = Some(before);
        self.write(entry, false, entry.end, &entry.generation)
    }

    fn begin_part(&self, entry: &Entry, begun: &mut Begun) -> Result<()> {
        match state::look(&self.set, &entry.name)? {
            State::Absent => {
                begun.created = true;
                begun.into = Some(entry.generation.clone());
                self.write(entry, true, 0, &entry.generation)
            }
            State::Unfinished => Err(state::unfinished(&entry.name)),
            State::Whole(record) if is_cut_like(&record, entry) => {
                begun.into = Some(record.generation);
                Ok(())
            }
            State::Whole(_) => Err(changed(&entry.name)),
        }
    }

    fn finish_whole(&self, entry: &Entry) -> Result<()> {
        for (bytes, directory) in
            state::read_all(&self.set, &entry.name)?.iter().zip(&self.set.directories)
        {
            let manifest = bytes.as_deref().map(Manifest::parse).transpose()?;
            let is_ours = |manifest: Manifest| manifest.generation == entry.generation;
            if !manifest.is_some_and(is_ours) {
                let path = entry.name.manifest(&directory.path);
                return Err(changed(&entry.name).path(path));
            }
        }
        self.fill_up(entry, entry.end)?;
        self.write(entry, true, entry.end, &entry.generation)
    }

    fn finish_part(&self, entry: &Entry, begun: &Begun) -> Result<()> {
        let (size, generation) = match state::look(&self.set, &entry.name)? {
            // Whoever made it failed, and took its manifests away.
            State::Absent => (None, entry.generation.clone()),
            State::Whole(record) if begun.into.as_ref() == Some(&record.generation) => {
                (Some(record.logical_bytes), record.generation)
            }
            State::Unfinished | State::Whole(_) => return Err(changed(&entry.name)),
        };
        if size.is_some_and(|size| size >= entry.end) {
            return Ok(());
        }
        self.fill_up(entry, entry.end)?;
        self.write(entry, true, entry.end, &generation)
    }

    /// Gives every member the length that the logical size asks for: behind a gap, some have got
    /// no bytes.
    fn fill_up(&self, entry: &Entry, size: u64) -> Result<()> {
        for (member, &directory) in entry.directories.iter().enumerate() {
            let path = entry.name.member(&self.set.directories[directory].path);
            let wanted = entry.layout.member_bytes(member, size);
            let failed = |error| Error::from_io(error, "cannot lengthen").path(&path);
            if fs::metadata(&path).map_err(failed)?.len() >= wanted {
                continue;
            }
            let file = File::options().write(true).open(&path).map_err(failed)?;
            file.set_len(wanted).map_err(failed)?;
            if self.is_durable {
                file.sync_all().map_err(failed)?;
            }
        }
        Ok(())
    }

    fn abandon_whole(
        &self,
        entry: &Entry,
        before: &[Option<Vec<u8>>],
        spoiled: bool,
    ) -> Result<()> {
        let was_there = before.iter().any(Option::is_some);
        if spoiled && was_there {
            return self.write(entry, false, entry.end, &entry.generation);
        }
        for (bytes, directory) in before.iter().zip(&self.set.directories) {
            match bytes {
                Some(bytes) if !spoiled => {
                    write_manifest(&entry.name, &directory.path, bytes, self.is_durable)?;
                }
                _ => remove_manifest(&entry.name, &directory.path, self.is_durable)?,
            }
        }
        Ok(())
    }

    /// Takes a file away again that a store at an offset made, unless another one has put bytes
    /// into it.
    fn abandon_part(&self, entry: &Entry) -> Result<()> {
        match state::look(&self.set, &entry.name)? {
            State::Whole(record)
                if record.generation == entry.generation && record.logical_bytes == 0 =>
            {
                self.remove(entry)
            }
            _ => Ok(()),
        }
    }
}

impl Commit for StoreCommit {
    fn begin(&self) -> Result<()> {
        let mut all = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        for entry in &self.entries {
            all.push(Begun::default());
            let Some(begun) = all.last_mut() else { continue };
            self.set.check_directories()?;
            begun.claim = Some(self.set.claim(&entry.name, self.whole_file)?);
            let _lock = self.set.lock()?;
            if self.whole_file {
                self.begin_whole(entry, begun)?;
            } else {
                self.begin_part(entry, begun)?;
            }
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        let mut all = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        self.set.check_directories()?;
        for (entry, begun) in self.entries.iter().zip(all.iter()) {
            let _lock = self.set.lock()?;
            if self.whole_file {
                self.finish_whole(entry)?;
            } else {
                self.finish_part(entry, begun)?;
            }
        }
        all.clear();
        Ok(())
    }

    fn abandon(&self, is_spoiled: bool) {
        let mut all = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        for (entry, begun) in self.entries.iter().zip(all.iter()) {
            // What can't be put right stays incomplete, which says enough.
            let Ok(_lock) = self.set.lock() else { continue };
            let _ = match &begun.before {
                Some(before) => self.abandon_whole(entry, before, is_spoiled),
                None if begun.created => self.abandon_part(entry),
                None => Ok(()),
            };
        }
        all.clear();
    }
}

fn is_cut_like(record: &Record, entry: &Entry) -> bool {
    record.layout == entry.layout && record.directories == entry.directories
}

fn changed(name: &Name) -> Error {
    let text = "the striped file was stored anew by somebody else meanwhile:";
    Error::new(ErrorKind::Mismatch, text)
        .path(name.as_path())
        .hint("let one handle at a time store it")
}

/// Refuses to store anew a file of which a member's directory has nothing: its drive is missing,
/// and what was stored would go to the drive below.
fn refuse_lost_member(set: &Set, name: &Name, found: &[Option<Vec<u8>>]) -> Result<()> {
    let manifests = found.iter().flatten().filter_map(|bytes| Manifest::parse(bytes).ok());
    let complete = manifests.filter(|manifest| manifest.is_complete);
    let members = complete.map(|manifest| manifest.layout.member_count()).max().unwrap_or(0);
    let there = found.iter().flatten().count();
    let lost = found.iter().position(Option::is_none);
    match lost {
        Some(index) if there < members.min(found.len()) => {
            let text = "a member of the striped file that is to be replaced is missing:";
            Err(Error::from_os(code::ENOENT, text)
                .path(name.member(&set.directories[index].path))
                .hint("is its drive mounted? if it is lost, remove the file first"))
        }
        _ => Ok(()),
    }
}
