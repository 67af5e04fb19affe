//! The files of a conversion: made with their full size, filled, given their headers, synced.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_io::{Error, Result};

use super::budget::Budget;
use super::chunk::{Part, Place};
use super::copy::Copier;
use super::sums::Checksums;
use super::turn::Turned;
use super::{FORMAT_DEFAULT, FORMAT_KEY, Mismatch, Room, Watch, Written, corrupt};
use crate::catalog::{Catalog, Entry};
use crate::safetensors::{Draft, TensorSpec};

/// Files that are synced at a time: each waits for the drive, and a journal takes many at once.
const SYNCED_AT_ONCE: usize = 8;

/// A file to be written.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) begin: Begin,
    /// The tensors, by the catalog, and where each begins; of a draft, in its order.
    pub(super) places: Vec<(usize, u64)>,
}

/// What a file begins with.
#[derive(Debug)]
pub(super) enum Begin {
    /// These bytes.
    Bytes(Vec<u8>),
    /// A header with the checksums of the tensors.
    Draft(Draft),
    /// The file is there, and has all but the tensors' bytes and their checksums; for each tensor.
    Rooms(Vec<Room>),
}

impl Output {
    /// A `.safetensors` file with some of the catalog's tensors.
    pub(super) fn safetensors(catalog: &Catalog, path: PathBuf, tensors: &[usize]) -> Result<Self> {
        let mut metadata: BTreeMap<String, String> = catalog.metadata.clone();
        metadata.entry(FORMAT_KEY.to_owned()).or_insert_with(|| FORMAT_DEFAULT.to_owned());
        let specs = tensors.iter().map(|index| {
            let Entry { name, dtype, shape, .. } = &catalog.tensors[*index];
            TensorSpec { name, dtype: *dtype, shape }
        });
        let specs: Vec<TensorSpec<'_>> = specs.collect();
        let draft = Draft::new(&specs, Some(&metadata), true).map_err(|error| error.path(&path))?;
        let starts = draft.tensors().iter().map(|tensor| draft.data_start() + tensor.start);
        let order = draft.order().iter().map(|index| tensors[*index]);
        let places = order.zip(starts).collect();
        Ok(Self { path, bytes: draft.file_bytes(), begin: Begin::Draft(draft), places })
    }

    /// Makes the file, with the bytes that are known.
    fn make(&self) -> io::Result<()> {
        let Begin::Bytes(begin) = &self.begin else {
            if matches!(self.begin, Begin::Draft(_)) {
                File::create_new(&self.path)?.set_len(self.bytes)?;
            }
            return Ok(());
        };
        let mut file = File::create_new(&self.path)?;
        file.write_all(begin)?;
        file.set_len(self.bytes)
    }

    /// Writes what has the checksums.
    fn finish(&self, checksums: &[Checksums]) -> Result<()> {
        let own = self.places.iter().map(|(tensor, _)| checksums[*tensor]);
        let written = match &self.begin {
            Begin::Bytes(_) => Ok(()),
            Begin::Draft(draft) => {
                let own: Vec<u32> = own.map(|checksums| checksums.crc32c).collect();
                self.open().and_then(|file| file.write_all_at(&draft.to_bytes(&own), 0))
            }
            Begin::Rooms(rooms) => self.open().and_then(|file| {
                own.zip(rooms).try_for_each(|(checksums, room)| {
                    let mut places = room.zip_checksum_at.iter();
                    places.try_for_each(|at| file.write_all_at(&checksums.zip.to_le_bytes(), *at))
                })
            }),
        };
        written.map_err(|error| unwritable(error, &self.path))
    }

    fn open(&self) -> io::Result<File> {
        File::options().write(true).open(&self.path)
    }
}

/// Writes files with the catalog's tensors, and has them on the drive.
pub(super) fn write(
    catalog: &Catalog,
    outputs: Vec<Output>,
    budget_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<Written> {
    let budget = Budget::divide(budget_bytes)?;
    for output in &outputs {
        output.make().map_err(|error| unwritable(error, &output.path))?;
    }
    let targets: Vec<PathBuf> = outputs.iter().map(|output| output.path.clone()).collect();
    let (parts, turned) = work_of(catalog, &outputs)?;
    let copier = Copier::new(budget, &catalog.files, Some(&targets))?;
    let with_zip = outputs.iter().any(|output| matches!(output.begin, Begin::Rooms(_)));
    let checksums = copier.with_zip(with_zip).copy(parts, &turned, catalog.tensors.len(), watch)?;
    catalog.check_unchanged()?;
    if let Some(mismatch) = mismatches(catalog, &checksums).first() {
        return Err(corrupt(catalog, mismatch));
    }
    let verified = catalog.tensors.iter().filter(|tensor| tensor.checksum.is_some()).count();
    for output in &outputs {
        output.finish(&checksums)?;
    }
    sync_all(&targets)?;
    let files = outputs.into_iter().map(|output| (output.path, output.bytes)).collect();
    Ok(Written { files, verified })
}

/// Which bytes go where.
fn work_of(catalog: &Catalog, outputs: &[Output]) -> Result<(Vec<Part>, Vec<Turned>)> {
    let (mut parts, mut turned) = (Vec::new(), Vec::new());
    for (file, output) in outputs.iter().enumerate() {
        for &(tensor, offset) in &output.places {
            let entry = &catalog.tensors[tensor];
            let (_, offset_there) = catalog.place(entry)?;
            let source = Place { file: entry.file, offset: offset_there };
            let target = Place { file, offset };
            let swapped_bytes = entry.swapped_bytes;
            if entry.fortran_order && entry.bytes > 0 {
                let shape = entry.shape.clone();
                let bytes = entry.bytes;
                turned.push(Turned { tensor, source, target, bytes, shape, swapped_bytes });
            } else {
                let (start, length) = (0, entry.bytes);
                parts.push(Part { tensor, start, source, target, length, swapped_bytes });
            }
        }
    }
    Ok((parts, turned))
}

/// Reads the tensors that have a checksum, and holds them against it.
pub(super) fn verify(
    catalog: &Catalog,
    budget_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<Vec<Mismatch>> {
    let mut parts = Vec::new();
    for (tensor, entry) in catalog.tensors.iter().enumerate() {
        if entry.checksum.is_some() {
            let (_, offset) = catalog.place(entry)?;
            let source = Place { file: entry.file, offset };
            let (start, length, swapped_bytes) = (0, entry.bytes, 1);
            // A chunk goes by where its bytes go: here, by where they come from.
            parts.push(Part { tensor, start, source, target: source, length, swapped_bytes });
        }
    }
    let copier = Copier::new(Budget::divide(budget_bytes)?, &catalog.files, None)?;
    let found = copier.copy(parts, &[], catalog.tensors.len(), watch)?;
    catalog.check_unchanged()?;
    Ok(mismatches(catalog, &found))
}

/// The tensors that don't have the checksum which the source says they have.
fn mismatches(catalog: &Catalog, found: &[Checksums]) -> Vec<Mismatch> {
    let pairs = catalog.tensors.iter().zip(found).enumerate();
    let compared = pairs.filter_map(|(tensor, (entry, found))| {
        let found = found.crc32c;
        entry.checksum.map(|wanted| Mismatch { tensor, wanted, found })
    });
    compared.filter(|compared| compared.wanted != compared.found).collect()
}

/// Writes a file that is in memory, and has it on the drive.
pub(super) fn write_small(path: PathBuf, bytes: &[u8]) -> Result<(PathBuf, u64)> {
    File::create_new(&path)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .map_err(|error| unwritable(error, &path))?;
    Ok((path, bytes.len() as u64))
}

/// Syncs files, and the directories that they are in.
fn sync_all(files: &[PathBuf]) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let sync_some = || {
        while let Some(path) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = sync(path) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..SYNCED_AT_ONCE.min(files.len()) {
            scope.spawn(sync_some);
        }
    });
    if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let directories: BTreeSet<&Path> = files.iter().filter_map(|path| path.parent()).collect();
    directories.into_iter().try_for_each(sync)
}

/// Has a file, or the names in a directory, on the drive.
pub(super) fn sync(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|error| Error::from_io(error, "cannot sync").path(path))
}

fn unwritable(error: io::Error, path: &Path) -> Error {
    Error::from_io(error, "cannot write").path(path)
}
