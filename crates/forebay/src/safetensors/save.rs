//! Saving: tensors stream through a few pieces of pool memory into a new file, which takes the old
//! one's name when it is whole.
//!
//! Each piece is filled and checked in one pass over the tensors' bytes, while earlier pieces are on
//! their way to the drive. Pieces are whole pages at offsets of whole pages, so that all of a file
//! but its last bytes goes straight to the drive, however many small tensors it has.
//!
//! # Invariants
//!
//! - The memory taken is `PIECE_BYTES` × `PIECES_MAX`, whatever is saved.
//! - The header is written last, the name changed after everything is durable, and the directory
//!   synced after that. A failure removes the new file and leaves the old one alone.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};

use forebay_io::{
    Direction, Durability, Error, ErrorKind, Handle, OwnedMemory, OwnedOperation, Result, crc32c,
    crc32c_combine, reserve,
};

use super::draft::{Draft, TensorSpec};
use super::replaced::Replaced;
use super::{Dtype, Stop};

/// Bytes of a piece: long enough that a drive does its best with a few of them.
const PIECE_BYTES: usize = 8 << 20;
/// Pieces that are filled or on their way at once.
const PIECES_MAX: usize = 8;
/// What is copied and checked at a time: fits in a core's second-level cache.
const CHUNK_BYTES: usize = 256 << 10;
/// Alignment of the pieces: a page, the most that direct I/O asks for.
const ALIGNMENT: usize = 4096;

/// A tensor to be saved.
#[derive(Clone, Copy, Debug)]
pub struct TensorData<'a> {
    /// Its name.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its extents.
    pub shape: &'a [u64],
    /// Its elements, in C order, little endian.
    pub bytes: &'a [u8],
}

impl<'a> TensorData<'a> {
    fn spec(&self) -> TensorSpec<'a> {
        TensorSpec { name: self.name, dtype: self.dtype, shape: self.shape }
    }
}

/// How to save.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// How durable the file is to be when the call returns.
    pub durability: Durability,
    /// Whether the file gets checksums.
    pub checksums: bool,
    /// Ends the call early.
    pub stop: Stop,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { durability: Durability::Full, checksums: true, stop: Stop::default() }
    }
}

/// Saves tensors as one file, which replaces what had the name before in one step.
///
/// A link is followed. An existing file's permissions are kept.
///
/// # Errors
///
/// [`ErrorKind::InvalidInput`] for tensors that [`Draft::new`] refuses, bytes that aren't those of
/// the shape, or a name that isn't a regular file's; what the system says of writing. The old file
/// is untouched then.
///
/// # Examples
///
/// ```
/// use forebay::io::{Handle, Options};
/// use forebay::safetensors::{Dtype, Header, SaveOptions, TensorData, save};
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("model.safetensors");
/// let handle = Handle::new(Options::default())?;
/// let tensor = TensorData { name: "w", dtype: Dtype::I16, shape: &[2], bytes: &[1, 0, 2, 0] };
/// save(&handle, &path, &[tensor], None, &SaveOptions::default())?;
/// let header = Header::read(&path)?;
/// assert_eq!(header.get("w").unwrap().shape, [2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save(
    handle: &Handle,
    path: impl AsRef<Path>,
    tensors: &[TensorData<'_>],
    metadata: Option<&BTreeMap<String, String>>,
    options: &SaveOptions,
) -> Result<()> {
    let path = path.as_ref();
    for tensor in tensors {
        check_length(tensor).map_err(|error| error.operation("save").path(path))?;
    }
    let specs: Vec<_> = tensors.iter().map(TensorData::spec).collect();
    let draft = Draft::new(&specs, metadata, options.checksums);
    let draft = draft.map_err(|error| error.operation("save").path(path))?;
    let order = draft.order().to_vec();
    let mut writer = TensorWriter::create(handle, path, draft, options)?;
    for index in order {
        writer.write(tensors[index].bytes)?;
    }
    writer.finish()
}

fn check_length(tensor: &TensorData<'_>) -> Result<()> {
    let TensorData { name, dtype, shape, bytes } = tensor;
    let wanted = dtype.bytes_of(shape)?;
    if wanted != bytes.len() as u64 {
        let text = format!(
            "the tensor {name:?}, {dtype} of shape {shape:?}, takes {wanted} bytes, not {}",
            bytes.len()
        );
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(())
}

/// Writes the tensors of a draft, whose bytes come one behind the other, in any portions.
///
/// Dropping it before [`Self::finish`] removes what was written.
#[derive(Debug)]
pub struct TensorWriter<'a> {
    path: PathBuf,
    draft: Draft,
    options: SaveOptions,
    pieces: Pieces<'a>,
    checksums: Vec<u32>,
    /// Bytes of the data section that have come.
    written: u64,
    target: Replaced,
}

impl<'a> TensorWriter<'a> {
    /// Makes the new file, beside the one that it is to replace, and reserves its room.
    ///
    /// # Errors
    ///
    /// As for [`save`].
    pub fn create(
        handle: &'a Handle,
        path: impl AsRef<Path>,
        draft: Draft,
        options: &SaveOptions,
    ) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let named = |error: Error| error.operation("save").path_instead(&path);
        let target = Replaced::beside(&path).map_err(named)?;
        reserve(target.file(), draft.file_bytes()).map_err(named)?;
        let file = target.file().try_clone();
        let file = file.map_err(|error| named(Error::from_io(error, "cannot open")))?;
        let pieces = Pieces {
            handle,
            file,
            stop: options.stop.clone(),
            filling: None,
            filled: 0,
            offset: draft.data_start(),
            on_their_way: VecDeque::new(),
        };
        Ok(Self {
            path,
            checksums: vec![0; draft.tensors().len()],
            draft,
            options: options.clone(),
            pieces,
            written: 0,
            target,
        })
    }

    /// The draft that it writes by.
    pub fn draft(&self) -> &Draft {
        &self.draft
    }

    /// Takes the next bytes of the data section.
    ///
    /// # Errors
    ///
    /// What an earlier piece met on its way; [`ErrorKind::InvalidInput`] for more than there are.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let total = self.draft.file_bytes() - self.draft.data_start();
        if self.written + bytes.len() as u64 > total {
            let text = format!("more bytes than the {total} of the tensors:");
            return Err(self.named(Error::new(ErrorKind::InvalidInput, text)));
        }
        for chunk in bytes.chunks(CHUNK_BYTES) {
            self.pieces.push(chunk).map_err(|error| self.named(error))?;
            if self.draft.has_checksums() {
                self.check(chunk);
            }
            self.written += chunk.len() as u64;
        }
        Ok(())
    }

    /// Adds bytes at the current position to the checksums of the tensors that they belong to.
    fn check(&mut self, mut bytes: &[u8]) {
        let mut position = self.written;
        let tensors = self.draft.tensors();
        let mut index = tensors.partition_point(|tensor| tensor.end <= position);
        while let Some(tensor) = tensors.get(index).filter(|_| !bytes.is_empty()) {
            let left = usize::try_from(tensor.end - position).unwrap_or(usize::MAX);
            let (own, rest) = bytes.split_at(left.min(bytes.len()));
            let sum = &mut self.checksums[index];
            *sum = if position == tensor.start {
                crc32c(own)
            } else {
                crc32c_combine(*sum, crc32c(own), own.len() as u64)
            };
            position += own.len() as u64;
            bytes = rest;
            index += 1;
        }
    }

    /// Writes the header, makes the file durable, and gives it its name.
    ///
    /// # Errors
    ///
    /// As for [`save`]; [`ErrorKind::InvalidInput`] if bytes are missing.
    pub fn finish(mut self) -> Result<()> {
        self.complete().map_err(|error| self.named(error))?;
        let Self { path, options, target, .. } = self;
        let durable = options.durability == Durability::Full;
        target.publish(durable).map_err(|error| error.operation("save").path_instead(path))
    }

    fn complete(&mut self) -> Result<()> {
        let total = self.draft.file_bytes() - self.draft.data_start();
        if self.written != total {
            let text = format!("the tensors have {total} bytes, {} have come:", self.written);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        self.pieces.flush()?;
        let header = self.draft.to_bytes(&self.checksums);
        let durability = Some(self.options.durability);
        let Pieces { handle, file, .. } = &self.pieces;
        handle.store_parts(file, &[(0, &header)], false, durability)
    }

    fn named(&self, error: Error) -> Error {
        error.operation("save").path_instead(&self.path)
    }
}

/// The pieces of memory between the tensors and the drive.
#[derive(Debug)]
struct Pieces<'a> {
    handle: &'a Handle,
    file: File,
    stop: Stop,
    filling: Option<OwnedMemory>,
    /// Bytes of that one that are there.
    filled: usize,
    /// Where in the file it goes.
    offset: u64,
    on_their_way: VecDeque<OwnedOperation>,
}

impl Pieces<'_> {
    fn push(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut piece = match self.filling.take() {
                Some(piece) => piece,
                None => self.free()?,
            };
            let room = &mut piece.as_mut_slice()[self.filled..];
            let (now, rest) = bytes.split_at(room.len().min(bytes.len()));
            room[..now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = rest;
            let is_full = self.filled == piece.len();
            self.filling = Some(piece);
            if is_full {
                self.send()?;
            }
        }
        Ok(())
    }

    /// A piece with nothing in it: a new one, or the one that is on its way the longest.
    fn free(&mut self) -> Result<OwnedMemory> {
        self.stop.check()?;
        if self.on_their_way.len() < PIECES_MAX {
            let pool = self.handle.pool()?;
            match pool.allocate(PIECE_BYTES, ALIGNMENT) {
                Ok(buffer) => return Ok(buffer.into()),
                Err(error) if self.on_their_way.is_empty() => return Err(error),
                // The pool's budget takes fewer.
                Err(_) => {}
            }
        }
        match self.on_their_way.pop_front() {
            Some(operation) => self.stop.wait(operation),
            None => Err(Error::new(ErrorKind::OutOfMemory, "there is no memory to save with")),
        }
    }

    fn send(&mut self) -> Result<()> {
        let Some(piece) = self.filling.take() else { return Ok(()) };
        let length = std::mem::take(&mut self.filled);
        let offset = self.offset;
        self.offset += length as u64;
        let (handle, file) = (self.handle, &self.file);
        let sent = handle.submit_owned(Direction::Store, file, offset, piece, length)?;
        self.on_their_way.push_back(sent);
        Ok(())
    }

    /// Sends what is left, and waits for everything.
    fn flush(&mut self) -> Result<()> {
        if self.filled > 0 {
            self.send()?;
        }
        while let Some(operation) = self.on_their_way.pop_front() {
            self.stop.wait(operation)?;
        }
        self.stop.check()
    }
}

impl Drop for Pieces<'_> {
    fn drop(&mut self) {
        for operation in &self.on_their_way {
            operation.cancel();
        }
        for operation in self.on_their_way.drain(..) {
            // The failure that ended the save is being returned; these follow from it.
            let _ = operation.wait();
        }
    }
}
