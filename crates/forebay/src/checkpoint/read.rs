//! Reads checkpoints: chooses one, checks it, and says what of it is cut, changed or missing.
//!
//! What is read is compared with the manifest's checksums while more of it comes, by several
//! threads. A file that differs is searched for the tensors that do, so that an error names them.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use forebay_io::memory::ALIGNMENT_DEFAULT;
use forebay_io::{Error, ErrorKind, Handle, Pool, PoolBuffer, Result};

use super::checksum::{PIECE_BYTES, PIECE_LENGTH, in_memory, piece_count};
use super::leftovers::is_at;
use super::manifest::{MANIFEST_BYTES_MAX, Manifest, TensorEntry};
use super::name::{MANIFEST_FILE, STATE_FILE, STEP_MAX, shard_file, step_directory};
use super::publish::{steps, to_load};
use crate::regular;
use crate::safetensors::{Stop, crc32c, crc32c_combine};

/// Threads that read pieces and check them: each piece is several transfers, so few keep the queues
/// full while one computes a checksum.
const READERS: u64 = 4;
/// Attempts at opening a checkpoint, which others can replace or remove meanwhile.
const ATTEMPTS_MAX: usize = 16;
/// Most tensors that one error names.
const NAMED_MAX: usize = 3;

/// A checkpoint that is open: its description and what of the state isn't tensors.
#[derive(Debug)]
pub struct Reader {
    directory: PathBuf,
    /// The directory itself, whatever has its name by now.
    opened: File,
    manifest: Manifest,
    state: Vec<u8>,
    verify: bool,
}

impl Reader {
    /// Opens the checkpoint of a step, or the newest. Its manifest is checked in any case, its
    /// other files with `verify`; whether they are there and of the right size is.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Os`] with `ENOENT` where there is none, or a file of it is missing;
    /// [`ErrorKind::ShortFile`] for one that was cut; [`ErrorKind::Mismatch`] for what was
    /// changed. The error names the file.
    pub fn open(directory: &Path, step: Option<u64>, verify: bool) -> Result<Self> {
        let mut attempt = 0;
        loop {
            let chosen = match step {
                Some(step) => step,
                None => to_load(directory)?.ok_or_else(|| absent(directory, None))?,
            };
            attempt += 1;
            let path = directory.join(step_directory(chosen));
            let opened = File::open(&path).ok().filter(|_| chosen <= STEP_MAX && path.is_dir());
            let Some(opened) = opened else {
                // Somebody removed it since it was chosen.
                if attempt < ATTEMPTS_MAX && step.is_none() && to_load(directory)? != Some(chosen) {
                    continue;
                }
                return Err(absent(directory, Some(chosen)));
            };
            match Self::read(&path, chosen, verify) {
                Ok((manifest, state)) => {
                    return Ok(Self { directory: path, opened, manifest, state, verify });
                }
                // Somebody removed or replaced it while it was read.
                Err(_) if attempt < ATTEMPTS_MAX && !is_at(&opened, &path) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The manifest, and what isn't tensors; every file has its size.
    fn read(path: &Path, step: u64, verify: bool) -> Result<(Manifest, Vec<u8>)> {
        let manifest_path = path.join(MANIFEST_FILE);
        let manifest = read_small(&manifest_path, MANIFEST_BYTES_MAX)
            .and_then(|bytes| Manifest::parse(&bytes))
            .map_err(|error| error.path(&manifest_path))?;
        if manifest.step != step {
            let text = format!("the manifest is of step {}:", manifest.step);
            return Err(Error::new(ErrorKind::Mismatch, text).path(manifest_path));
        }
        let state_path = path.join(STATE_FILE);
        check_size(&state_path, manifest.state_bytes)?;
        let state = read_small(&state_path, manifest.state_bytes)
            .map_err(|error| error.path(&state_path))?;
        if verify && crc32c(&state) != manifest.state_checksum {
            let text = "it differs from its checksum:";
            return Err(Error::new(ErrorKind::Mismatch, text).path(state_path));
        }
        for (index, shard) in manifest.shards.iter().enumerate() {
            check_size(&path.join(shard_file(index)), shard.bytes)?;
        }
        Ok((manifest, state))
    }

    /// Whether it is still there: nobody has removed or replaced it since it was opened. What was
    /// read of it before may be of two checkpoints otherwise.
    pub fn is_current(&self) -> bool {
        is_at(&self.opened, &self.directory)
    }

    /// Its description.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What of the state isn't tensors, as it was given to save.
    pub fn state(&self) -> &[u8] {
        &self.state
    }

    /// The whole file of a shard, in memory like any other, which a forked child has too; checked,
    /// unless it was opened otherwise. A request to stop ends it.
    ///
    /// # Errors
    ///
    /// Memory that can't be had, what a transfer meets, and as for [`Self::open`]; tensors that
    /// differ are named.
    pub fn load_shard(&self, handle: &Handle, index: usize, cancel: &Stop) -> Result<PoolBuffer> {
        let length = usize::try_from(self.manifest.shards[index].bytes).unwrap_or(usize::MAX);
        let mut region = Pool::ordinary().allocate(length, ALIGNMENT_DEFAULT)?;
        let pieces = region.as_mut_slice().chunks_mut(PIECE_LENGTH).enumerate();
        let pieces = Mutex::new(pieces);
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let bad = self.by_threads(index, |stop| {
            let mut bad = Vec::new();
            while let Some((piece, memory)) = next().filter(|_| !is_set(stop)) {
                refuse_cancelled(cancel)?;
                if !self.read_piece(handle, index, piece, memory)? {
                    bad.push(piece);
                }
            }
            Ok(bad)
        })?;
        if bad.is_empty() {
            return Ok(region);
        }
        let bytes = region.as_slice();
        Err(self.damage(index, &bad, |tensor| {
            Ok(crc32c(&bytes[in_memory(tensor.start, tensor.end, 0)]) != tensor.checksum)
        })?)
    }

    /// Reads and checks a shard without keeping it, within a few pieces of memory.
    ///
    /// # Errors
    ///
    /// As for [`Self::load_shard`].
    pub fn verify_shard(&self, handle: &Handle, index: usize, cancel: &Stop) -> Result<()> {
        let bytes = self.manifest.shards[index].bytes;
        let longest = in_memory(0, bytes.min(PIECE_BYTES), 0).len();
        let next = AtomicUsize::new(0);
        let bad = self.by_threads(index, |stop| {
            let mut memory = Pool::global().allocate(longest, ALIGNMENT_DEFAULT)?;
            let mut bad = Vec::new();
            while !is_set(stop) {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                let start = piece as u64 * PIECE_BYTES;
                if start >= bytes {
                    break;
                }
                refuse_cancelled(cancel)?;
                let length = in_memory(start, bytes.min(start + PIECE_BYTES), start).len();
                if !self.read_piece(handle, index, piece, &mut memory.as_mut_slice()[..length])? {
                    bad.push(piece);
                }
            }
            Ok(bad)
        })?;
        if bad.is_empty() {
            return Ok(());
        }
        let mut memory = Pool::global().allocate(longest, ALIGNMENT_DEFAULT)?;
        Err(self.damage(index, &bad, |tensor| {
            refuse_cancelled(cancel)?;
            self.differs(handle, tensor, memory.as_mut_slice())
        })?)
    }

    /// Has several threads work on a shard; what all of them found bad. The first failure tells
    /// the others to stop.
    fn by_threads(
        &self,
        shard: usize,
        work: impl Fn(&AtomicBool) -> Result<Vec<usize>> + Sync,
    ) -> Result<Vec<usize>> {
        let pieces = piece_count(self.manifest.shards[shard].bytes);
        let stop = AtomicBool::new(false);
        let one = || {
            let found = work(&stop);
            stop.fetch_or(found.is_err(), Ordering::Relaxed);
            found
        };
        let mut bad = thread::scope(|scope| {
            let others = (1..pieces.min(READERS)).map(|_| scope.spawn(one)).collect::<Vec<_>>();
            let mut found = one();
            for other in others {
                let other = other.join().unwrap_or_else(|_| {
                    Err(Error::new(ErrorKind::Closed, "a thread that checks pieces died"))
                });
                found = found.and_then(|bad| Ok([bad, other?].concat()));
            }
            found
        })?;
        bad.sort_unstable();
        Ok(bad)
    }

    /// Reads a piece; whether it is as its checksum says.
    fn read_piece(
        &self,
        handle: &Handle,
        shard: usize,
        piece: usize,
        memory: &mut [u8],
    ) -> Result<bool> {
        let path = self.shard_path(shard);
        handle.load(&path, piece as u64 * PIECE_BYTES, memory)?;
        let wanted = self.manifest.shards[shard].piece_checksums[piece];
        Ok(!self.verify || crc32c(memory) == wanted)
    }

    /// Whether a tensor differs from its checksum, read by way of some memory.
    fn differs(&self, handle: &Handle, tensor: &TensorEntry, memory: &mut [u8]) -> Result<bool> {
        let path = self.shard_path(tensor.shard);
        let mut checksum = 0;
        let mut at = tensor.start;
        while at < tensor.end {
            let length = (tensor.end - at).min(memory.len() as u64);
            let part = &mut memory[in_memory(0, length, 0)];
            handle.load(&path, at, part)?;
            checksum = crc32c_combine(checksum, crc32c(part), length);
            at += length;
        }
        Ok(checksum != tensor.checksum)
    }

    /// What is wrong with a shard in which pieces differ from their checksums.
    fn damage(
        &self,
        shard: usize,
        bad: &[usize],
        mut differs: impl FnMut(&TensorEntry) -> Result<bool>,
    ) -> Result<Error> {
        let mut names = Vec::new();
        let mut count = 0;
        for tensor in self.manifest.tensors.iter().filter(|tensor| tensor.shard == shard) {
            let pieces = tensor.start / PIECE_BYTES..tensor.end.div_ceil(PIECE_BYTES);
            let is_near = bad.iter().any(|&piece| pieces.contains(&(piece as u64)));
            if is_near && differs(tensor)? {
                count += 1;
                if names.len() < NAMED_MAX {
                    names.push(format!("{:?}", tensor.name));
                }
            }
        }
        let text = match count {
            0 => {
                let starts = bad.iter().map(|&piece| (piece as u64 * PIECE_BYTES).to_string());
                let starts = starts.take(NAMED_MAX).collect::<Vec<_>>().join(", ");
                format!(
                    "bytes that belong to no tensor, in the header or its padding, differ from \
                     their checksum, in the pieces of {PIECE_BYTES} bytes from {starts}:"
                )
            }
            1 => format!("tensor {} differs from its checksum:", names[0]),
            _ if count > names.len() => {
                let more = count - names.len();
                format!("tensors {} and {more} more differ from their checksums:", names.join(", "))
            }
            _ => format!("tensors {} differ from their checksums:", names.join(", ")),
        };
        let error = Error::new(ErrorKind::Mismatch, text).path(self.shard_path(shard));
        Ok(error.hint("load an older step, or take the file from a copy"))
    }

    /// The file of a shard.
    pub fn shard_path(&self, index: usize) -> PathBuf {
        self.directory.join(shard_file(index))
    }
}

fn is_set(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

fn refuse_cancelled(cancel: &Stop) -> Result<()> {
    if cancel.is_requested() {
        return Err(Error::new(ErrorKind::Cancelled, "the load was cancelled"));
    }
    Ok(())
}

/// What to say where there is no checkpoint.
fn absent(directory: &Path, step: Option<u64>) -> Error {
    let there = steps(directory).unwrap_or_default();
    let error = match step {
        Some(step) => {
            let text = format!("there is no checkpoint of step {step} in");
            Error::from_os(super::code::ENOENT, text)
        }
        None => Error::from_os(super::code::ENOENT, "there is no checkpoint in"),
    };
    let error = error.path(directory);
    match (there.first(), there.last()) {
        (Some(first), Some(last)) => {
            error.hint(format!("it has {} of them, from {first} to {last}", there.len()))
        }
        _ => error,
    }
}

/// Compares a file's size with what it has to be.
fn check_size(path: &Path, wanted: u64) -> Result<()> {
    let metadata = fs::metadata(path).map_err(|error| {
        Error::from_io(error, "a file of the checkpoint is missing:").path(path)
    })?;
    let found = metadata.len();
    let text = format!("it has {found} bytes, and had {wanted} when it was written:");
    match found.cmp(&wanted) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Less => Err(Error::new(ErrorKind::ShortFile, text).path(path)),
        std::cmp::Ordering::Greater => Err(Error::new(ErrorKind::Mismatch, text).path(path)),
    }
}

/// Reads a file of at most so many bytes.
fn read_small(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let failed = |error| Error::from_io(error, "cannot read").path(path);
    let file = regular::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        let text = format!("it has more than {bytes_max} bytes:");
        return Err(Error::new(ErrorKind::Mismatch, text).path(path));
    }
    Ok(bytes)
}
