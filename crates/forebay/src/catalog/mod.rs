//! Which tensors a file or a directory holds, and where their bytes are: what listing, converting
//! and printing them go by, whatever the format.
//!
//! What something is, is told by its content, not by its name. Files of torch are told apart here
//! ([`Kind::Torch`]) and described by torch; a [`Catalog`] of theirs is put together elsewhere.
//!
//! # Invariants
//!
//! - Each tensor's bytes are within its file, by the file's length when the catalog was made.
//! - No two tensors have the same name.
//! - Nothing but headers has been read.

mod checkpoint;
mod kind;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};

use crate::Stamp;
use crate::npy;
use crate::safetensors::{ChecksumState, Dtype, Opened, OpenedFile, Source};
pub(crate) use checkpoint::verify_state;
pub use kind::Kind;

/// The tensors of a file or a directory. See the [module documentation](self).
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    /// The files, by which [`Entry::file`] goes.
    pub files: Vec<CatalogFile>,
    /// The tensors, in the order in which they lie in the files.
    pub tensors: Vec<Entry>,
    /// The text that comes with them; that of all files together.
    pub metadata: BTreeMap<String, String>,
    /// The file of what else is in a checkpoint, and its CRC32C.
    pub state: Option<(PathBuf, u32)>,
}

/// A file of a catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// Whether it has checksums.
    pub checksums: ChecksumState,
    /// As it was when its header was read.
    pub stamp: Stamp,
}

/// A tensor, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Extents of its dimensions.
    pub shape: Vec<u64>,
    /// The file, by [`Catalog::files`].
    pub file: usize,
    /// Where it begins, in bytes from the beginning of the file; `None` if it isn't there in one
    /// piece.
    pub offset: Option<u64>,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes that are to be turned around together, the most significant being first; 1 for none.
    pub swapped_bytes: usize,
    /// The first index runs fastest.
    pub fortran_order: bool,
    /// The CRC32C of its bytes, if the file has it.
    pub checksum: Option<u32>,
}

impl Catalog {
    /// Reads the headers of what is at `path`: a `.safetensors` or `.npy` file, an index of shards, or
    /// a directory of either.
    ///
    /// # Errors
    ///
    /// What opening or reading met, or what a header lacks, with the file; for a file of another
    /// format [`ErrorKind::Unsupported`].
    pub fn read(path: &Path) -> Result<Self> {
        match Kind::of(path)? {
            Kind::Safetensors => Self::read_safetensors(path),
            Kind::Npy => Self::read_npy(path),
            Kind::Torch => {
                let error = Error::new(ErrorKind::Unsupported, "torch is needed to read");
                Err(error.path(path))
            }
        }
    }

    fn read_safetensors(path: &Path) -> Result<Self> {
        let Some(manifest) = checkpoint::read_manifest(path)? else {
            return Ok(Self::of_headers(&Source::of(path).open()?));
        };
        let shards = Source::Files(checkpoint::shards(&manifest, path)).open()?;
        let mut catalog = Self::of_headers(&shards);
        checkpoint::hold_against(&manifest, path, &mut catalog)?;
        Ok(catalog)
    }

    fn of_headers(opened: &Opened) -> Self {
        let mut catalog = Self::default();
        for OpenedFile { path, header, stamp, .. } in opened.files() {
            let (path, bytes) = (path.clone(), header.file_bytes());
            let (checksums, stamp) = (header.checksums(), *stamp);
            catalog.files.push(CatalogFile { path, bytes, checksums, stamp });
            for (name, text) in header.metadata().into_iter().flatten() {
                catalog.metadata.entry(name.clone()).or_insert_with(|| text.clone());
            }
        }
        for &place in opened.places() {
            let (tensor, header) = (opened.tensor(place), &opened.files()[place.file].header);
            catalog.tensors.push(Entry {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                file: place.file,
                offset: Some(header.data_start() + tensor.start),
                bytes: tensor.bytes(),
                swapped_bytes: 1,
                fortran_order: false,
                checksum: header.checksum(&tensor.name),
            });
        }
        catalog
    }

    fn read_npy(path: &Path) -> Result<Self> {
        let mut catalog = Self::default();
        let files =
            if path.is_dir() { kind::files_of(path, ".npy")? } else { vec![path.to_path_buf()] };
        for (index, file) in files.into_iter().enumerate() {
            let name = file.file_name().and_then(|name| name.to_str());
            let Some(name) = name.map(|name| npy::tensor_name(name).unwrap_or(name.to_owned()))
            else {
                let text = "the name of this file is no Unicode, and so no tensor's:";
                return Err(Error::new(ErrorKind::InvalidInput, text).path(file));
            };
            let stamp = Stamp::at(&file)?;
            let header = npy::Header::read(&file)?;
            let (bytes, start) = (header.array_bytes(), header.data_start);
            catalog.tensors.push(Entry {
                name,
                dtype: header.element.dtype,
                bytes,
                swapped_bytes: header.element.swapped_bytes(),
                // The order of elements that have one index at most is the same.
                fortran_order: header.fortran_order
                    && header.shape.iter().filter(|extent| **extent != 1).count() > 1,
                shape: header.shape,
                file: index,
                offset: Some(start),
                checksum: None,
            });
            let (bytes, checksums) = (bytes + start, ChecksumState::Absent);
            catalog.files.push(CatalogFile { path: file, bytes, checksums, stamp });
        }
        catalog.check_names(path)?;
        Ok(catalog)
    }

    /// Where a tensor's bytes are, by [`Self::files`].
    pub(crate) fn place(&self, tensor: &Entry) -> Result<(&Path, u64)> {
        let path = self.files[tensor.file].path.as_path();
        let offset = tensor.offset.ok_or_else(|| {
            let text = format!("the bytes of {:?} aren't in one piece in", tensor.name);
            Error::new(ErrorKind::Unsupported, text).path(path)
        })?;
        Ok((path, offset))
    }

    /// Fails if a file isn't any more the one whose header was read: its bytes are then of neither.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(|CatalogFile { path, stamp, .. }| {
            stamp.hold_against(&Stamp::at(path)?, path)
        })
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// Refuses two tensors of one name; `path` is for the error.
    fn check_names(&self, path: &Path) -> Result<()> {
        let mut seen = HashSet::with_capacity(self.tensors.len());
        match self.tensors.iter().find(|tensor| !seen.insert(tensor.name.as_str())) {
            None => Ok(()),
            Some(tensor) => {
                let text = format!("there are two tensors of the name {:?} in", tensor.name);
                Err(Error::new(ErrorKind::InvalidInput, text).path(path))
            }
        }
    }
}
