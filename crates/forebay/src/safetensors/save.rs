//! Saving: tensors stream through a few pieces of pool memory into a new file, which takes the old
//! one's name when it is whole.
//!
//! Each piece is filled and checked in one pass over the tensors' bytes, while earlier pieces are on
//! their way to the drive; what comes from devices is checked once it is there (see `outgoing`). Pieces are whole pages at offsets of whole pages, so that all of a file
//! but its last bytes goes straight to the drive, however many small tensors it has.
//!
//! # Invariants
//!
//! - The memory taken is that of a few pieces, whatever is saved.
//! - The header is written last, the name changed after everything is durable, and the directory
//!   synced after that. A failure removes the new file and leaves the old one alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_io::{
    Durability, Error, ErrorKind, Handle, Lent, Result, crc32c, crc32c_combine, reserve,
};

use super::draft::{Draft, TensorSpec};
use super::outgoing::Pieces;
use super::replaced::Replaced;
use super::{Dtype, Stop};

/// What is copied and checked at a time: fits in a core's second-level cache.
const CHUNK_BYTES: usize = 256 << 10;

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
    pub bytes: Lent<'a>,
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
/// use forebay::io::{Handle, Lent, Options};
/// use forebay::safetensors::{Dtype, Header, SaveOptions, TensorData, save};
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("model.safetensors");
/// let handle = Handle::new(Options::default())?;
/// let bytes = Lent::Host(&[1, 0, 2, 0]);
/// let tensor = TensorData { name: "w", dtype: Dtype::I16, shape: &[2], bytes };
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
        writer.write_lent(tensors[index].bytes)?;
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
    handle: &'a Handle,
    draft: Draft,
    options: SaveOptions,
    pieces: Pieces<'a>,
    sums: Sums,
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
        let pieces = Pieces::new(handle, file, draft.data_start(), options.stop.clone());
        Ok(Self {
            path,
            sums: Sums::new(&draft),
            handle,
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
        self.expect(bytes.len())?;
        for chunk in bytes.chunks(CHUNK_BYTES) {
            let Self { pieces, sums, draft, .. } = self;
            let pushed = pieces.push(chunk, &mut |offset, bytes| sums.add(draft, offset, bytes));
            pushed.map_err(|error| self.named(error))?;
            let offset = self.draft.data_start() + self.written;
            self.sums.add(&self.draft, offset, chunk);
            self.written += chunk.len() as u64;
        }
        Ok(())
    }

    /// As [`Self::write`], of bytes in whatever memory that stay as they are until this is finished
    /// or dropped.
    ///
    /// # Errors
    ///
    /// As for [`Self::write`]; what a device meets.
    pub fn write_lent(&mut self, bytes: Lent<'a>) -> Result<()> {
        let bytes = match bytes {
            Lent::Host(bytes) => return self.write(bytes),
            Lent::Device(bytes) => bytes,
        };
        self.expect(bytes.len())?;
        let Self { pieces, sums, draft, .. } = self;
        let lent = pieces.lend(bytes, &mut |offset, bytes| sums.add(draft, offset, bytes));
        lent.map_err(|error| self.named(error))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn expect(&self, bytes: usize) -> Result<()> {
        let total = self.draft.file_bytes() - self.draft.data_start();
        if self.written + bytes as u64 > total {
            let text = format!("more bytes than the {total} of the tensors:");
            return Err(self.named(Error::new(ErrorKind::InvalidInput, text)));
        }
        Ok(())
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
        let Self { pieces, sums, draft, .. } = self;
        pieces.flush(&mut |offset, bytes| sums.add(draft, offset, bytes))?;
        let header = draft.to_bytes(&sums.checksums);
        let durability = Some(self.options.durability);
        self.handle.store_parts(self.pieces.file(), &[(0, &header)], false, durability)
    }

    fn named(&self, error: Error) -> Error {
        error.operation("save").path_instead(&self.path)
    }
}

/// The checksums of the tensors, as far as their bytes have come: those of each in their order.
#[derive(Debug)]
struct Sums {
    checksums: Vec<u32>,
}

impl Sums {
    fn new(draft: &Draft) -> Self {
        Self { checksums: vec![0; draft.tensors().len()] }
    }

    /// Adds bytes at a file offset to the checksums of the tensors that they belong to.
    fn add(&mut self, draft: &Draft, offset: u64, mut bytes: &[u8]) {
        if !draft.has_checksums() {
            return;
        }
        let mut position = offset - draft.data_start();
        let tensors = draft.tensors();
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
}
