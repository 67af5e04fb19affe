//! Requests that name logical files, turned into requests over their members.

use std::fs;
use std::io;
use std::sync::Arc;

use forebay_io::{Direction, Durability, Error, ErrorKind, Part, Request, Result, Target};

use super::layout::Layout;
use super::load::LoadWatch;
use super::manifest::Generation;
use super::name::Name;
use super::publish::sync_folder;
use super::set::{Set, Stripe};
use super::state::{self, State};
use super::store::{Entry, StoreCommit};

/// Where the members of a logical file are.
#[derive(Debug)]
struct Place {
    layout: Layout,
    /// For each member, the index of its directory.
    directories: Vec<usize>,
}

impl Stripe {
    /// Turns a request whose targets are names of logical files into one over their members, to be
    /// given to a handle. `durability` is what the request has if it doesn't say so itself.
    ///
    /// A load is checked against the manifests here, and again when its bytes are there. A store
    /// makes the folders that its names have, below the directories of the set.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] for a request that wants checksums;
    /// [`ErrorKind::InvalidInput`] for targets that aren't names; for a load, what
    /// [`Self::verify`] says, and [`ErrorKind::ShortFile`] where it reaches behind the end.
    pub fn spread(&self, mut request: Request, durability: Durability) -> Result<Request> {
        let operation = match request.direction {
            Direction::Load => "load",
            Direction::Store => "store",
        };
        if request.checksums {
            // Pieces are parts of the request, and those of a part are on several drives.
            let text = "checksums of striped files aren't computed on the way";
            return Err(Error::new(ErrorKind::Unsupported, text)
                .operation(operation)
                .hint("compute them of the tensors"));
        }
        let durability = request.durability.unwrap_or(durability);
        let spread = match request.direction {
            Direction::Load => self.spread_load(&mut request),
            Direction::Store => self.spread_store(&mut request, durability),
        };
        spread.map(|()| request).map_err(|error| error.operation(operation))
    }

    fn spread_load(&self, request: &mut Request) -> Result<()> {
        let names = names_of(request)?;
        let ends = ends_of(request)?;
        let mut files = Vec::new();
        for (name, end) in names.into_iter().zip(ends) {
            let record = self.record(&name)?;
            if end > record.logical_bytes {
                let text = format!(
                    "the tensors reach to byte {end} of the striped file, which has {}:",
                    record.logical_bytes
                );
                return Err(Error::new(ErrorKind::ShortFile, text)
                    .path(name.as_path())
                    .bytes(end, 0));
            }
            files.push((name, record));
        }
        let places: Vec<(&Name, Place)> = files
            .iter()
            .map(|(name, record)| {
                let directories = record.directories.clone();
                (name, Place { layout: record.layout, directories })
            })
            .collect();
        cut_up(&self.0, request, &places)?;
        request.commit = Some(Arc::new(LoadWatch { set: Arc::clone(&self.0), files }));
        Ok(())
    }

    fn spread_store(&self, request: &mut Request, durability: Durability) -> Result<()> {
        let set = &self.0;
        let names = names_of(request)?;
        let ends = ends_of(request)?;
        set.check_directories()?;
        let mut entries = Vec::new();
        for (name, end) in names.into_iter().zip(ends) {
            let place = self.place_of(&name, request.whole_file)?;
            make_folders(set, &name, durability == Durability::Full)?;
            entries.push(Entry {
                name,
                layout: place.layout,
                directories: place.directories,
                end,
                generation: Generation::random()?,
            });
        }
        let places: Vec<(&Name, Place)> = entries
            .iter()
            .map(|entry| {
                let directories = entry.directories.clone();
                (&entry.name, Place { layout: entry.layout, directories })
            })
            .collect();
        cut_up(set, request, &places)?;
        if request.whole_file {
            end_members(request, &entries);
        }
        let is_durable = durability != Durability::None;
        let commit = StoreCommit::new(Arc::clone(set), request.whole_file, is_durable, entries);
        request.commit = Some(Arc::new(commit));
        Ok(())
    }

    /// How a file is, or is to be, cut up: a new one as the set says, an old one that stays as it
    /// is. What is unfinished will be the set's when its store is through.
    fn place_of(&self, name: &Name, whole_file: bool) -> Result<Place> {
        let new = || Place {
            layout: self.0.layout,
            directories: (0..self.0.directories.len()).collect(),
        };
        if whole_file {
            return Ok(new());
        }
        match state::with_members(&self.0, name)? {
            State::Absent | State::Unfinished => Ok(new()),
            State::Whole(record) => {
                Ok(Place { layout: record.layout, directories: record.directories })
            }
        }
    }
}

fn names_of(request: &Request) -> Result<Vec<Name>> {
    let name = |target: &Target| match target {
        Target::Path(path) => Name::new(path),
        Target::Descriptor(number) => {
            let text = format!(
                "a striped file has a name, and descriptor {number} has none: give the name, or \
                 use a handle without `stripe`"
            );
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    };
    request.files.iter().map(name).collect()
}

/// How far into each logical file the parts reach.
fn ends_of(request: &Request) -> Result<Vec<u64>> {
    let mut ends = vec![0; request.files.len()];
    for part in &request.parts {
        let end = part.offset.checked_add(part.length as u64);
        let end = end.filter(|end| i64::try_from(*end).is_ok());
        let (Some(end), Some(last)) = (end, ends.get_mut(part.file)) else {
            let text = format!(
                "offset {} and length {} don't fit in file {}",
                part.offset, part.length, part.file
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        };
        *last = end.max(*last);
    }
    Ok(ends)
}

/// Replaces the request's files by their members, and its parts by pieces. Pieces are in logical
/// order, so that neighbouring transfers go to different drives.
fn cut_up(set: &Set, request: &mut Request, places: &[(&Name, Place)]) -> Result<()> {
    let mut first_files = Vec::with_capacity(places.len());
    let mut files = Vec::new();
    for (name, place) in places {
        first_files.push(files.len());
        let member = |&index: &usize| name.member(&set.directories[index].path);
        files.extend(place.directories.iter().map(member).map(Target::Path));
    }
    let mut parts = Vec::new();
    for part in &request.parts {
        let layout = &places[part.file].1.layout;
        for piece in layout.pieces(part.offset, part.length as u64) {
            let (position, length) =
                (usize::try_from(piece.position), usize::try_from(piece.length));
            let (Ok(position), Ok(length)) = (position, length) else {
                return Err(Error::new(ErrorKind::InvalidInput, "a tensor larger than memory"));
            };
            parts.push(Part {
                file: first_files[part.file] + piece.member,
                offset: piece.offset,
                address: part.address.wrapping_add(position),
                length,
                device: part.device,
            });
        }
    }
    request.files = files;
    request.parts = parts;
    Ok(())
}

/// Says where each member of a whole file ends, which an empty part does: no piece may reach there.
fn end_members(request: &mut Request, entries: &[Entry]) {
    let mut file = 0;
    for entry in entries {
        for member in 0..entry.layout.member_count() {
            let offset = entry.layout.member_bytes(member, entry.end);
            let address = std::ptr::null_mut();
            request.parts.push(Part { file, offset, address, length: 0, device: None });
            file += 1;
        }
    }
}

/// Makes the folders of a name below every directory of the set, never the directory itself.
fn make_folders(set: &Set, name: &Name, is_durable: bool) -> Result<()> {
    for directory in &set.directories {
        for folder in name.folders() {
            let path = directory.path.join(folder);
            match fs::create_dir(&path) {
                Ok(()) if is_durable => sync_folder(&path)?,
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(Error::from_io(error, "cannot make the folder").path(path));
                }
            }
        }
    }
    Ok(())
}
