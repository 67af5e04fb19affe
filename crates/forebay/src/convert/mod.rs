//! Tensors from one format to another: their bytes are copied between files, a few pieces at a
//! time, within a budget of memory.
//!
//! What is converted is a [`Catalog`], so each of these takes any format that there is one of. What
//! is written is new: the caller gives a place of its own, and puts the result under its final name
//! with [`publish`] once it is whole.
//!
//! # Invariants
//!
//! - Bytes are never changed, but for their order where NumPy has the other one.
//! - A tensor of which the source has a checksum is held against it on the way. A source that is
//!   written to or replaced meanwhile is an error.
//! - When a conversion returns without an error, every file that it wrote is on the drive.
//!
//! Which tensors there are is in [`catalog`](crate::catalog), headers in
//! [`safetensors`](crate::safetensors) and [`npy`].

mod budget;
mod chunk;
mod copy;
mod output;
mod publish;
mod shards;
mod sums;
mod turn;

use std::path::{Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::catalog::{Catalog, Entry, verify_state};
use crate::npy;
use crate::safetensors::{crc32c, crc32c_combine};
use output::{Begin, Output};
pub use publish::{publish, refuse_replacing, resolve};
pub use shards::Sharding;

/// Is told how many bytes are done, a few times a second; `false` ends the conversion.
pub type Watch<'a> = dyn FnMut(u64) -> bool + 'a;

/// The metadata that says for which framework a file is, without which transformers refuses one
/// that has any.
const FORMAT_KEY: &str = "format";
const FORMAT_DEFAULT: &str = "pt";
/// Name of the index of a sharded model, after that of the file of one that isn't.
const INDEX_NAME: &str = "model.safetensors.index.json";

/// A tensor whose bytes don't have the checksum that the file's header has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Its index in [`Catalog::tensors`].
    pub tensor: usize,
    /// By the header.
    pub wanted: u32,
    /// Of the bytes.
    pub found: u32,
}

/// Room for a tensor's bytes in a file that has everything else, such as a zip archive.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Room {
    /// Where the bytes go.
    pub offset: u64,
    /// Where their checksum goes: the CRC-32 of zip archives, 4 bytes, little endian.
    pub zip_checksum_at: Vec<u64>,
}

/// What a conversion wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The files, each with its bytes.
    pub files: Vec<(PathBuf, u64)>,
    /// Tensors that were held against the source's checksum.
    pub verified: usize,
}

/// Writes one `.safetensors` file.
///
/// # Errors
///
/// What reading or writing met, with the file; [`ErrorKind::Corrupt`] for a tensor that doesn't
/// match the source's checksum; [`ErrorKind::Cancelled`] if `watch` ended it.
///
/// # Examples
///
/// ```
/// use forebay::{catalog::Catalog, convert, npy};
/// use forebay::safetensors::{Dtype, Header};
///
/// let directory = tempfile::tempdir()?;
/// let array = [npy::Header::to_bytes(Dtype::U8, &[3])?, b"abc".to_vec()].concat();
/// std::fs::write(directory.path().join("a.npy"), array)?;
///
/// let catalog = Catalog::read(directory.path())?;
/// let path = directory.path().join("model.safetensors");
/// convert::to_safetensors(&catalog, &path, 16 << 20, &mut |_| true)?;
/// assert_eq!(Header::read(&path)?.tensors()[0].name, "a");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn to_safetensors(
    catalog: &Catalog,
    path: &Path,
    budget_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<Written> {
    let all: Vec<usize> = (0..catalog.tensors.len()).collect();
    let output = Output::safetensors(catalog, path.to_path_buf(), &all)?;
    output::write(catalog, vec![output], budget_bytes, watch)
}

/// Writes `.safetensors` files and their index into an empty directory, as Hugging Face's
/// libraries name them.
///
/// # Errors
///
/// As for [`to_safetensors`]; [`ErrorKind::InvalidInput`] for more files than tensors.
pub fn to_shards(
    catalog: &Catalog,
    directory: &Path,
    sharding: Sharding,
    budget_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<Written> {
    let sizes: Vec<u64> = catalog.tensors.iter().map(|tensor| tensor.bytes).collect();
    let shards = shards::divide(&sizes, sharding)?;
    let names: Vec<String> =
        (0..shards.len()).map(|index| shards::name(index, shards.len())).collect();
    let mut outputs = Vec::new();
    for (tensors, name) in shards.iter().zip(&names) {
        outputs.push(Output::safetensors(catalog, directory.join(name), tensors)?);
    }
    let mut written = output::write(catalog, outputs, budget_bytes, watch)?;
    let index = shards::index(catalog, &shards, &names);
    written.files.push(output::write_small(directory.join(INDEX_NAME), &index)?);
    Ok(written)
}

/// Writes a `.npy` file for each tensor into an empty directory, by [`npy::file_name`].
///
/// # Errors
///
/// As for [`to_safetensors`]; [`ErrorKind::Unsupported`] for a dtype that NumPy can't be given.
pub fn to_npy(
    catalog: &Catalog,
    directory: &Path,
    budget_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<Written> {
    let mut outputs = Vec::new();
    for (index, tensor) in catalog.tensors.iter().enumerate() {
        let header = npy_header(tensor)?;
        let offset = header.len() as u64;
        outputs.push(Output {
            path: directory.join(npy::file_name(&tensor.name)?),
            bytes: offset + tensor.bytes,
            begin: Begin::Bytes(header),
            places: vec![(index, offset)],
        });
    }
    output::write(catalog, outputs, budget_bytes, watch)
}

/// Writes the tensors' bytes into a file that is there and has room for each.
///
/// # Errors
///
/// As for [`to_safetensors`].
pub fn into_room(
    catalog: &Catalog,
    path: &Path,
    rooms: Vec<Room>,
    budget_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<Written> {
    let facts = std::fs::metadata(path);
    let facts = facts.map_err(|error| Error::from_io(error, "cannot open").path(path))?;
    let places = rooms.iter().map(|room| room.offset).enumerate().collect();
    let (path, begin) = (path.to_path_buf(), Begin::Rooms(rooms));
    let output = Output { path, bytes: facts.len(), begin, places };
    output::write(catalog, vec![output], budget_bytes, watch)
}

/// The header of the `.npy` file of a tensor.
///
/// # Errors
///
/// [`ErrorKind::Unsupported`], with the tensor's name, for a dtype that NumPy can't be given.
pub fn npy_header(tensor: &Entry) -> Result<Vec<u8>> {
    npy::Header::to_bytes(tensor.dtype, &tensor.shape).map_err(|error| {
        let text = format!("the tensor {:?}: {error}", tensor.name);
        Error::new(error.kind(), text)
    })
}

/// Gives a tensor's bytes to `take`, piece by piece, the least significant byte of an element
/// first.
///
/// # Errors
///
/// What reading met; [`ErrorKind::Unsupported`] for an array in Fortran order; what `take` returns;
/// [`ErrorKind::Corrupt`], after the last piece, for bytes that don't match the tensor's checksum.
pub fn read_pieces<E: From<Error>>(
    catalog: &Catalog,
    tensor: &Entry,
    mut take: impl FnMut(&[u8]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let (path, offset) = catalog.place(tensor)?;
    let mut found = crc32c(&[]);
    let sum_and_take = |piece: &[u8]| {
        found = crc32c_combine(found, crc32c(piece), piece.len() as u64);
        take(piece)
    };
    copy::read_pieces(path, offset, tensor, sum_and_take)?;
    catalog.check_unchanged()?;
    match tensor.checksum {
        Some(wanted) if wanted != found => {
            Err(mismatched(path, &tensor.name, wanted, found).into())
        }
        _ => Ok(()),
    }
}

/// Reads every tensor of which the catalog has a checksum, and what else is in a checkpoint; the
/// tensors that don't match.
///
/// # Errors
///
/// As for [`to_safetensors`].
pub fn verify(
    catalog: &Catalog,
    budget_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<Vec<Mismatch>> {
    if let Some((path, checksum)) = &catalog.state {
        verify_state(path, *checksum)?;
    }
    output::verify(catalog, budget_bytes, watch)
}

/// A tensor whose bytes aren't those that its file says they are.
fn corrupt(catalog: &Catalog, mismatch: &Mismatch) -> Error {
    let Mismatch { tensor, wanted, found } = *mismatch;
    let tensor = &catalog.tensors[tensor];
    mismatched(&catalog.files[tensor.file].path, &tensor.name, wanted, found)
}

fn mismatched(path: &Path, tensor: &str, wanted: u32, found: u32) -> Error {
    let text = format!(
        "the tensor {tensor:?} has CRC32C {found:08x}, and by the file's header {wanted:08x}:"
    );
    Error::new(ErrorKind::Corrupt, text).path(path)
}
