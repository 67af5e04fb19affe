//! Headers: what a file says of its tensors, read and checked.
//!
//! What is accepted is what the reference library accepts, less names that are there twice.
//! Nothing is allocated from a number in the file before that has been compared with the file's
//! size. Headers are written by [`super::draft`].

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forebay_io::{Error, ErrorKind, Result, crc32c};

use super::checksum::{DIGITS, from_digits};
use super::json::{self, Entries};

/// The longest header, in bytes: the reference's limit.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the number that a file begins with: the length of the header behind it.
pub(super) const LENGTH_BYTES: usize = 8;
/// What the data section of files that we write begins at a multiple of.
pub(super) const DATA_ALIGNMENT: u64 = 4096;
/// The least padding of a header of ours. The reference pads with up to seven spaces, so that a
/// header with our key and less padding has been written by somebody else.
pub(super) const PADDING_MIN: usize = 8;
/// The key of our checksums in the metadata.
pub const CHECKSUM_KEY: &str = "forebay.crc32c";
/// How a header of ours with checksums begins: what follows is the header's own.
pub(super) const CHECKSUM_PREFIX: &str = "{\"__metadata__\":{\"forebay.crc32c\":\"";
/// Name of the entry that isn't a tensor.
pub(super) const METADATA_NAME: &str = "__metadata__";

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: super::Dtype,
    /// Its extents.
    pub shape: Vec<u64>,
    /// Its first byte in the data section.
    pub start: u64,
    /// The first byte behind it.
    pub end: u64,
}

impl TensorInfo {
    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// What is known of the checksums of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChecksumState {
    /// The file has checksums of ours for all its tensors.
    Ours,
    /// It has none.
    Absent,
    /// It was written by another library, which copied our metadata: they say nothing.
    Stale,
}

/// The header of a file. See the [module documentation](super).
#[derive(Clone, Debug)]
pub struct Header {
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    metadata: Option<BTreeMap<String, String>>,
    data_start: u64,
    /// In the order of the tensors; empty unless they are ours.
    checksums: Vec<u32>,
    state: ChecksumState,
}

impl Header {
    /// Reads the header of a file.
    ///
    /// # Errors
    ///
    /// What the system says of it; [`ErrorKind::ShortFile`], with both sizes, for a file that was
    /// cut; [`ErrorKind::Corrupt`] for anything else that the format forbids.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        open(path).and_then(|file| Self::read_from(&file)).map_err(|error| error.path(path))
    }

    /// Reads the header of an open file.
    ///
    /// # Errors
    ///
    /// As for [`Self::read`].
    pub fn read_from(file: &File) -> Result<Self> {
        let failed = |error: io::Error| match error.kind() {
            // The size said otherwise a moment ago.
            io::ErrorKind::UnexpectedEof => {
                let text = "the file ended before its header did:";
                Error::new(ErrorKind::ShortFile, text).hint("is it being written to?")
            }
            _ => Error::from_io(error, "cannot read the header of"),
        };
        let file_bytes = file.metadata().map_err(failed)?.len();
        let mut length = [0; LENGTH_BYTES];
        if file_bytes >= LENGTH_BYTES as u64 {
            read_exact(file, &mut length, 0).map_err(failed)?;
        }
        let data_start = data_start(length, file_bytes)?;
        let bytes = usize::try_from(data_start).map_err(|_| corrupt("the header is too long"))?;
        let mut header = vec![0; bytes];
        read_exact(file, &mut header, 0).map_err(failed)?;
        Self::parse(&header, file_bytes)
    }

    /// Parses the beginning of a file of `file_bytes` bytes, up to the end of its header at least.
    ///
    /// # Errors
    ///
    /// As for [`Self::read`].
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self> {
        let length = bytes.first_chunk().copied().unwrap_or_default();
        let there = if bytes.len() < length.len() { bytes.len() as u64 } else { file_bytes };
        let data_start = data_start(length, there)?;
        let header = usize::try_from(data_start).ok().and_then(|end| bytes.get(..end));
        let header = header.ok_or_else(|| short("the header", data_start, bytes.len() as u64))?;
        let json = &header[length.len()..];
        let text = std::str::from_utf8(json)
            .map_err(|error| corrupt(format!("the header is not UTF-8: {error}")))?;
        let Entries { tensors, metadata } = json::parse(text)?;
        let data_bytes = check_tensors(&tensors)?;
        let end = data_start.checked_add(data_bytes).ok_or_else(|| corrupt(TOO_LARGE))?;
        if file_bytes < end {
            return Err(short("the file, by its header,", end, file_bytes));
        }
        if file_bytes > end {
            let text = format!(
                "the file has {file_bytes} bytes, and by its header {end}: what is behind that \
                 belongs to no tensor"
            );
            return Err(corrupt(text));
        }
        let names = tensors.iter().map(|tensor| tensor.name.clone());
        let mut parsed = Self {
            by_name: names.zip(0..).collect(),
            tensors,
            metadata,
            data_start,
            checksums: Vec::new(),
            state: ChecksumState::Absent,
        };
        parsed.take_checksums(header)?;
        Ok(parsed)
    }

    /// Takes our entry out of the metadata, and checks the header by it.
    fn take_checksums(&mut self, header: &[u8]) -> Result<()> {
        let broken = || corrupt("the header doesn't match its own checksum: the file was changed");
        let Some(metadata) = &mut self.metadata else { return Ok(()) };
        let Some(value) = metadata.remove(CHECKSUM_KEY) else {
            return if is_ours_but_for_the_key(header) { Err(broken()) } else { Ok(()) };
        };
        if metadata.is_empty() {
            self.metadata = None;
        }
        if !is_ours(header) {
            self.state = ChecksumState::Stale;
            return Ok(());
        }
        let own = value.get(..DIGITS).and_then(from_digits).ok_or_else(broken)?;
        if own != header_checksum(header) {
            return Err(broken());
        }
        let listed = value[DIGITS..].split_terminator(' ').skip(1).map(from_digits);
        self.checksums = listed.collect::<Option<Vec<u32>>>().ok_or_else(broken)?;
        if let Some(tensor) = self.tensors.get(self.checksums.len()) {
            return Err(corrupt(format!("there is no checksum of the tensor {:?}", tensor.name)));
        }
        if self.checksums.len() > self.tensors.len() {
            return Err(corrupt("there are more checksums than tensors"));
        }
        self.state = ChecksumState::Ours;
        Ok(())
    }

    /// The tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A tensor by its name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// The position of a tensor in [`Self::tensors`].
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The user's metadata, without our checksums; `None` if there is none.
    pub fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        self.metadata.as_ref()
    }

    /// The file offset of the data section.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.data_start + self.tensors.last().map_or(0, |tensor| tensor.end)
    }

    /// The checksum of a tensor, if the file has one that counts.
    pub fn checksum(&self, name: &str) -> Option<u32> {
        self.checksums.get(self.position(name)?).copied()
    }

    /// What is known of the file's checksums.
    pub fn checksums(&self) -> ChecksumState {
        self.state
    }
}

const TOO_LARGE: &str = "the sizes in the header are more than a file can have";

/// An error about a file's contents; its name follows.
pub(super) fn corrupt(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, text.into() + ":")
}

fn short(what: &str, wanted: u64, found: u64) -> Error {
    let text = format!("{what} takes {wanted} bytes and there are {found}:");
    Error::new(ErrorKind::ShortFile, text).bytes(wanted, found).hint("was the file cut?")
}

/// Opens a file to read, if it is one.
pub(crate) fn open(path: &Path) -> Result<File> {
    let failed = |error: io::Error| Error::from_io(error, "cannot open");
    // Opening a pipe would wait for its other end: look first.
    let kind = std::fs::metadata(path).map_err(failed)?;
    if kind.is_dir() {
        return Err(Error::from_os(super::code::EISDIR, "cannot read tensors from"));
    }
    if !kind.is_file() {
        let text = "cannot read tensors from what is no regular file:";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    File::open(path).map_err(failed)
}

fn read_exact(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(buffer, offset)
}

/// Where the data begins, by the first bytes of a file.
fn data_start(length: [u8; LENGTH_BYTES], file_bytes: u64) -> Result<u64> {
    if file_bytes < LENGTH_BYTES as u64 {
        return Err(short("a file of tensors", LENGTH_BYTES as u64, file_bytes));
    }
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX {
        let text = format!("the header would have {length} bytes, {HEADER_BYTES_MAX} are allowed");
        return Err(corrupt(text).hint("is it a file of tensors?"));
    }
    let start = LENGTH_BYTES as u64 + length;
    if start > file_bytes { Err(short("the header", start, file_bytes)) } else { Ok(start) }
}

/// Checks that the tensors, in order, cover the data section; its bytes.
fn check_tensors(tensors: &[TensorInfo]) -> Result<u64> {
    let mut position = 0;
    for TensorInfo { name, dtype, shape, start, end } in tensors {
        if *start != position || end < start {
            let text = format!(
                "the tensor {name:?} lies at bytes {start} to {end}, and the one before it ends at \
                 {position}"
            );
            return Err(corrupt(text));
        }
        let wanted = dtype.bytes_of(shape);
        let wanted = wanted.map_err(|error| corrupt(format!("the tensor {name:?}: {error}")))?;
        if end - start != wanted {
            let text = format!(
                "the tensor {name:?}, {dtype} of shape {shape:?}, takes {wanted} bytes, and has {} \
                 in the file",
                end - start
            );
            return Err(corrupt(text).bytes(wanted, end - start));
        }
        position = *end;
    }
    Ok(position)
}

/// Whether the bytes of a header with our key are as we write them.
fn is_ours(header: &[u8]) -> bool {
    let json = &header[LENGTH_BYTES..];
    let padding = json.iter().rev().take_while(|&&byte| byte == b' ').count();
    json.starts_with(CHECKSUM_PREFIX.as_bytes())
        && padding >= PADDING_MIN
        && (header.len() as u64).is_multiple_of(DATA_ALIGNMENT)
}

/// Whether a header would match its own checksum if it had our key: a damaged key must not make a
/// file pass for one without checksums.
fn is_ours_but_for_the_key(header: &[u8]) -> bool {
    let start = LENGTH_BYTES + CHECKSUM_PREFIX.len();
    let own = header.get(start..start + DIGITS).and_then(|own| std::str::from_utf8(own).ok());
    let Some(own) = own.and_then(from_digits) else { return false };
    let mut mended = header.to_vec();
    mended[LENGTH_BYTES..start].copy_from_slice(CHECKSUM_PREFIX.as_bytes());
    is_ours(&mended) && header_checksum(&mended) == own
}

/// The checksum of a header of ours, its own digits taken as zeros.
pub(super) fn header_checksum(header: &[u8]) -> u32 {
    let mut zeroed = header.to_vec();
    let start = LENGTH_BYTES + CHECKSUM_PREFIX.len();
    if let Some(own) = zeroed.get_mut(start..start + DIGITS) {
        own.fill(b'0');
    }
    crc32c(&zeroed)
}
