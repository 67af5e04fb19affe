//! What the manifests of one name say together.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use forebay_io::{Error, ErrorKind, Result};

use super::code;
use super::layout::Layout;
use super::manifest::{Generation, MANIFEST_BYTES_MAX, Manifest};
use super::name::Name;
use super::set::Set;
use crate::regular;

/// A logical file that is whole, as far as its manifests go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) generation: Generation,
    pub(super) layout: Layout,
    pub(super) logical_bytes: u64,
    /// For each member, the index of its directory.
    pub(super) directories: Vec<usize>,
}

#[derive(Debug)]
pub(super) enum State {
    /// There is no manifest.
    Absent,
    /// A store hasn't finished, or was interrupted.
    Unfinished,
    Whole(Record),
}

/// The bytes of a name's manifests, by directory.
pub(super) fn read_all(set: &Set, name: &Name) -> Result<Vec<Option<Vec<u8>>>> {
    set.check_directories()?;
    let paths = set.directories.iter().map(|directory| name.manifest(&directory.path));
    paths
        .map(|path| read(&path).map_err(|error| Error::from_io(error, "cannot read").path(path)))
        .collect()
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match regular::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(MANIFEST_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Reads the manifests and makes sense of them. The caller holds a lock of the set.
pub(super) fn look(set: &Set, name: &Name) -> Result<State> {
    let mut manifests = Vec::new();
    for (bytes, directory) in read_all(set, name)?.into_iter().zip(&set.directories) {
        let parsed = bytes.map(|bytes| Manifest::parse(&bytes)).transpose();
        manifests.push(parsed.map_err(|error| error.path(name.manifest(&directory.path)))?);
    }
    judge(set, name, &manifests)
}

/// The record of a name that is whole, its members included.
pub(super) fn whole(set: &Set, name: &Name) -> Result<Record> {
    match with_members(set, name)? {
        State::Absent => Err(absent(set, name)),
        State::Unfinished => Err(unfinished(name)),
        State::Whole(record) => Ok(record),
    }
}

/// As [`look`], and looks at the members of what is whole. While it does, no store begins, nor
/// does one end.
pub(super) fn with_members(set: &Set, name: &Name) -> Result<State> {
    // A directory that is gone can't be locked, and is to be named.
    set.check_directories()?;
    let _lock = set.lock_shared()?;
    let state = look(set, name)?;
    if let State::Whole(record) = &state {
        check_members(set, name, record)?;
    }
    Ok(state)
}

pub(super) fn absent(set: &Set, name: &Name) -> Error {
    let text = "there is no striped file of that name, no manifest";
    Error::from_os(code::ENOENT, text).path(name.manifest(&set.directories[0].path))
}

pub(super) fn unfinished(name: &Name) -> Error {
    let text = "a store of the striped file hasn't finished, or was interrupted:";
    Error::new(ErrorKind::Mismatch, text)
        .path(name.as_path())
        .hint("wait for it if it is under way, else store it again")
}

fn judge(set: &Set, name: &Name, manifests: &[Option<Manifest>]) -> Result<State> {
    let there: Vec<&Manifest> = manifests.iter().flatten().collect();
    if there.is_empty() {
        return Ok(State::Absent);
    }
    if there.iter().any(|manifest| !manifest.is_complete) {
        return Ok(State::Unfinished);
    }
    let Some(common) = most_common(&there) else { return Ok(State::Absent) };
    check_places(set, name, manifests, common)?;
    let mut directories = vec![None; common.layout.member_count()];
    for (index, manifest) in manifests.iter().enumerate() {
        let Some(manifest) = manifest else { continue };
        if let Some(other) = directories[manifest.member_index].replace(index) {
            let text = format!(
                "two directories have member {} of a striped file, {} and",
                manifest.member_index,
                name.member(&set.directories[other].path).display()
            );
            return Err(Error::new(ErrorKind::Mismatch, text)
                .path(name.member(&set.directories[index].path)));
        }
    }
    let missing: Vec<String> = (0..directories.len())
        .filter(|&member| directories[member].is_none())
        .map(|member| member.to_string())
        .collect();
    if !missing.is_empty() {
        let text = format!(
            "the striped file has {} members, and of those directories that were given none has \
             member {}:",
            directories.len(),
            missing.join(", ")
        );
        return Err(Error::from_os(code::ENOENT, text)
            .path(name.as_path())
            .hint("give all the directories that it was stored to"));
    }
    Ok(State::Whole(Record {
        generation: common.generation.clone(),
        layout: common.layout,
        logical_bytes: common.logical_bytes,
        directories: directories.into_iter().flatten().collect(),
    }))
}

/// A manifest of the generation that most directories have.
fn most_common<'a>(manifests: &[&'a Manifest]) -> Option<&'a Manifest> {
    let votes = |one: &Manifest| {
        manifests.iter().filter(|other| other.generation == one.generation).count()
    };
    manifests.iter().copied().max_by_key(|manifest| votes(manifest))
}

/// Every directory has a manifest, and all agree.
fn check_places(
    set: &Set,
    name: &Name,
    manifests: &[Option<Manifest>],
    common: &Manifest,
) -> Result<()> {
    let count = common.layout.member_count();
    for (manifest, directory) in manifests.iter().zip(&set.directories) {
        let member = name.member(&directory.path);
        match manifest {
            Some(manifest) if manifest.generation != common.generation => {
                let text = "members of different stores: this one isn't of the store that most \
                            are of,";
                return Err(Error::new(ErrorKind::Mismatch, text)
                    .path(member)
                    .hint("store the file again, or give the directories that belong together"));
            }
            Some(manifest) => {
                let same = manifest.layout == common.layout
                    && manifest.logical_bytes == common.logical_bytes;
                if !same {
                    // Growing a file was interrupted between two manifests.
                    let text = "the manifests of a striped file differ in its size:";
                    return Err(Error::new(ErrorKind::Mismatch, text)
                        .path(name.manifest(&directory.path))
                        .hint("store the file again"));
                }
            }
            None if count < set.directories.len() => {
                let text = format!("the striped file has {count} members, none of them here:");
                return Err(Error::new(ErrorKind::Mismatch, text)
                    .path(member)
                    .hint("give the directories that it was stored to"));
            }
            None => {
                let text = "a member of the striped file is missing:";
                return Err(Error::from_os(code::ENOENT, text)
                    .path(member)
                    .hint("is its drive mounted? without it the file is lost: there is no copy"));
            }
        }
    }
    Ok(())
}

/// Every member is there and long enough.
fn check_members(set: &Set, name: &Name, record: &Record) -> Result<()> {
    for (member, &directory) in record.directories.iter().enumerate() {
        let path = name.member(&set.directories[directory].path);
        let wanted = record.layout.member_bytes(member, record.logical_bytes);
        let found = fs::metadata(&path)
            .map_err(|error| {
                Error::from_io(error, format!("member {member} of a striped file is missing:"))
                    .path(&path)
            })?
            .len();
        if found < wanted {
            let text =
                format!("member {member} of a striped file is cut: {found} of {wanted} bytes in");
            return Err(Error::new(ErrorKind::Mismatch, text).path(path));
        }
    }
    Ok(())
}
