//! Where tensors come from: a file, several, or the directory of a model.
//!
//! A [`Source`] is opened once: the headers are read then, and the files stay open, so that what is
//! loaded later is what was looked at, whatever happens to the names meanwhile.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};

use super::code;
use super::header::{Header, TensorInfo, corrupt, open};
use super::index::{INDEX_NAME, INDEX_SUFFIX, Index};
use crate::Stamp;

/// The name of a model's file if it has just one.
const SINGLE_NAME: &str = "model.safetensors";
/// How the names of files of tensors end.
const SUFFIX: &str = ".safetensors";

/// Where tensors come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// One file.
    File(PathBuf),
    /// Several files, in which no name is twice.
    Files(Vec<PathBuf>),
    /// The shards that an index names.
    Index(PathBuf),
    /// A model: its index (`model.safetensors.index.json`, or the only one of another name), or
    /// `model.safetensors`, or else all `*.safetensors`.
    Directory(PathBuf),
}

impl Source {
    /// What a path stands for: a directory, an index (`*.json`) or a file.
    pub fn of(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        if path.is_dir() {
            Self::Directory(path)
        } else if path.extension().is_some_and(|extension| extension == "json") {
            Self::Index(path)
        } else {
            Self::File(path)
        }
    }

    /// Opens the files and reads their headers.
    ///
    /// # Errors
    ///
    /// As for [`Header::read`] and [`Index::read`]; [`ErrorKind::Corrupt`] for an index whose shards
    /// don't have what it says; [`ErrorKind::InvalidInput`] for a name in two files.
    pub fn open(&self) -> Result<Opened> {
        match self {
            Self::File(path) => Opened::new(vec![OpenedFile::open(path)?], None),
            Self::Files(paths) => {
                let files: Result<_> = paths.iter().map(|path| OpenedFile::open(path)).collect();
                Opened::new(files?, None)
            }
            Self::Index(path) => open_shards(path),
            Self::Directory(path) => match in_directory(path)? {
                Self::Directory(_) => Err(nothing_in(path)),
                found => found.open(),
            },
        }
    }
}

/// What there is in a directory; the directory itself if there is nothing.
fn in_directory(directory: &Path) -> Result<Source> {
    for (name, kind) in
        [(INDEX_NAME, Source::Index as fn(PathBuf) -> Source), (SINGLE_NAME, Source::File)]
    {
        let path = directory.join(name);
        if path.is_file() {
            return Ok(kind(path));
        }
    }
    let failed = |error| Error::from_io(error, "cannot list").path(directory);
    let (mut indices, mut files) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.ends_with(INDEX_SUFFIX) {
            indices.push(path);
        } else if name.ends_with(SUFFIX) && !name.starts_with('.') {
            files.push(path);
        }
    }
    files.sort();
    Ok(match (&mut indices[..], files.is_empty()) {
        ([index], _) => Source::Index(std::mem::take(index)),
        (_, false) => Source::Files(files),
        (_, true) => Source::Directory(directory.to_path_buf()),
    })
}

fn nothing_in(directory: &Path) -> Error {
    Error::from_os(code::ENOENT, "cannot find files of tensors in")
        .path(directory)
        .hint("there is neither model.safetensors.index.json nor a file *.safetensors")
}

fn open_shards(path: &Path) -> Result<Opened> {
    let index = Index::read(path)?;
    let directory = path.parent().unwrap_or(Path::new(""));
    let shards = index.shards();
    let mut numbers = HashMap::new();
    let mut files = Vec::with_capacity(shards.len());
    for shard in shards {
        numbers.insert(shard, files.len());
        files.push(OpenedFile::open(&directory.join(shard))?);
    }
    let mut owners = HashMap::with_capacity(index.weight_map().len());
    for (name, shard) in index.weight_map() {
        let number = numbers[shard.as_str()];
        if files[number].header.get(name).is_none() {
            let text = format!("the index puts the tensor {name:?} into {shard}, where it is not");
            return Err(corrupt(text).path(path));
        }
        owners.insert(name.as_str(), number);
    }
    Opened::new(files, Some(&owners))
}

/// A file of tensors that is open.
#[derive(Debug)]
pub struct OpenedFile {
    /// The name that it was opened by.
    pub path: PathBuf,
    /// What it says of its tensors.
    pub header: Header,
    file: File,
    /// The number of the device that it is on.
    pub(super) device: u64,
    /// As it was when its header was read.
    pub(crate) stamp: Stamp,
}

impl OpenedFile {
    fn open(path: &Path) -> Result<Self> {
        let opened = || {
            let file = open(path)?;
            let stamp = Stamp::of(&file)?;
            let header = Header::read_from(&file)?;
            Ok(Self { path: path.to_path_buf(), header, file, device: stamp.device(), stamp })
        };
        opened().map_err(|error: Error| error.path(path))
    }

    /// The file, to read from.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Fails if the file was written to since it was opened.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Mismatch`], with the path.
    pub fn check_unchanged(&self) -> Result<()> {
        let now = Stamp::of(&self.file).map_err(|error| error.path(&self.path))?;
        self.stamp.hold_against(&now, &self.path)
    }
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of its file.
    pub file: usize,
    /// Its index in the file's header.
    pub tensor: usize,
}

/// A source that is open.
#[derive(Debug)]
pub struct Opened {
    files: Vec<OpenedFile>,
    places: Vec<Place>,
    by_name: HashMap<String, usize>,
}

impl Opened {
    /// `owners` says which file's tensor of a name counts where several have it.
    fn new(files: Vec<OpenedFile>, owners: Option<&HashMap<&str, usize>>) -> Result<Self> {
        let mut places: Vec<Place> = Vec::new();
        let mut by_name = HashMap::new();
        for (file, opened) in files.iter().enumerate() {
            for (tensor, TensorInfo { name, .. }) in opened.header.tensors().iter().enumerate() {
                let owner = owners.and_then(|owners| owners.get(name.as_str()));
                if owner.is_some_and(|&owner| owner != file) {
                    continue;
                }
                match by_name.entry(name.clone()) {
                    Entry::Vacant(entry) => {
                        entry.insert(places.len());
                        places.push(Place { file, tensor });
                    }
                    Entry::Occupied(entry) => {
                        let first = &files[places[*entry.get()].file].path;
                        let text =
                            format!("the tensor {name:?} is in {} and also in", first.display());
                        return Err(Error::new(ErrorKind::InvalidInput, text).path(&opened.path));
                    }
                }
            }
        }
        Ok(Self { files, places, by_name })
    }

    /// The files.
    pub fn files(&self) -> &[OpenedFile] {
        &self.files
    }

    /// The tensors, file by file, in the order of their bytes.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Where the tensor of a name is.
    pub fn find(&self, name: &str) -> Option<Place> {
        self.by_name.get(name).map(|&index| self.places[index])
    }

    /// A tensor.
    pub fn tensor(&self, place: Place) -> &TensorInfo {
        &self.files[place.file].header.tensors()[place.tensor]
    }

    /// The tensors of these names, in their order; all without names.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] for a name that no file has.
    pub fn select(&self, names: Option<&[String]>) -> Result<Vec<Place>> {
        let Some(names) = names else { return Ok(self.places.clone()) };
        let place = |name: &String| {
            let index = self.by_name.get(name).ok_or_else(|| self.missing(name))?;
            Ok(self.places[*index])
        };
        names.iter().map(place).collect()
    }

    fn missing(&self, name: &str) -> Error {
        let error = Error::new(ErrorKind::InvalidInput, format!("there is no tensor {name:?} in"));
        match &self.files[..] {
            [file] => error.path(&file.path),
            files => error.path(format!("{} files", files.len())),
        }
    }
}
