//! Copies the bytes of tensors between files: a few chunks at a time, each loaded, turned where
//! its bytes are the other way around, summed and stored.
//!
//! # Invariants
//!
//! - What is in memory at once is within the [`Budget`], whatever the sizes of tensors.
//! - When a copy returns, in whatever way, none of its threads is at work any more.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use forebay_io::{Error, ErrorKind, Handle, Options, Pool, PoolBuffer, PoolOptions, Result};

use super::Watch;
use super::budget::{Budget, PAGE_BYTES};
use super::chunk::{Chunk, Part, Place, chunks_of, runs_of};
use super::sums::{Checksums, Sum, combined};
use super::turn::{Turned, swap, turn};
use crate::catalog::{CatalogFile, Entry};

/// From here on, a run goes through the handle; what is shorter costs less through the page cache.
const RUN_BYTES_MIN: usize = 128 << 10;
/// Bytes of the pieces in which a tensor is read, a multiple of any element's.
const PIECE_BYTES: u64 = 4 << 20;
/// How often whoever watches is told.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Files between which bytes are copied.
pub(super) struct Copier<'a> {
    handle: Handle,
    pool: Arc<Pool>,
    budget: Budget,
    sources: &'a [CatalogFile],
    /// Without any, bytes are read and summed only.
    targets: Option<&'a [PathBuf]>,
    /// Whether the checksums of zip archives are wanted as well.
    with_zip: bool,
}

/// What the threads of a copy share.
#[derive(Default)]
struct State {
    next: AtomicUsize,
    done_bytes: AtomicU64,
    stop: AtomicBool,
    ended: Mutex<Ended>,
    one_ended: Condvar,
}

#[derive(Default)]
struct Ended {
    threads: u64,
    sums: Vec<Sum>,
    error: Option<Error>,
}

impl<'a> Copier<'a> {
    pub(super) fn new(
        budget: Budget,
        sources: &'a [CatalogFile],
        targets: Option<&'a [PathBuf]>,
    ) -> Result<Self> {
        let to_memory = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let pool = Pool::new(PoolOptions {
            budget_bytes: Some(to_memory(budget.total_bytes)),
            ..PoolOptions::default()
        });
        let handle = Handle::new(Options {
            staging_bytes: to_memory(budget.staging_bytes),
            pool: Some(Arc::clone(&pool)),
            ..Options::default()
        })?;
        Ok(Self { handle, pool, budget, sources, targets, with_zip: false })
    }

    /// Takes the checksums of zip archives as well.
    pub(super) fn with_zip(self, with_zip: bool) -> Self {
        Self { with_zip, ..self }
    }

    /// Copies all parts; the checksums of each of `count` tensors.
    pub(super) fn copy(
        &self,
        parts: Vec<Part>,
        turned: &[Turned],
        count: usize,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<Checksums>> {
        let mut sums = Vec::new();
        let mut done_bytes = 0;
        for tensor in turned {
            if !watch(done_bytes) {
                return Err(stopped());
            }
            sums.push(self.carry_turned(tensor)?);
            done_bytes += tensor.bytes;
        }
        let chunks = chunks_of(parts, self.budget.chunk_bytes);
        let state = State { done_bytes: AtomicU64::new(done_bytes), ..State::default() };
        let threads = self.budget.chunk_count.min(chunks.len() as u64);
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..threads).map(|_| scope.spawn(|| self.work(&chunks, &state))).collect();
            // One that panics doesn't say that it has ended.
            let is_over = || workers.iter().all(ScopedJoinHandle::is_finished);
            state.watch(threads, is_over, watch);
        });
        let ended = state.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = ended.error {
            return Err(error);
        }
        if state.stop.into_inner() {
            return Err(stopped());
        }
        sums.extend(ended.sums);
        Ok(combined(sums, count))
    }

    /// Carries chunk after chunk until there is none, or another thread has failed.
    fn work(&self, chunks: &[Chunk], state: &State) {
        let mut sums = Vec::new();
        let error = self.carry_all(chunks, state, &mut sums).err();
        if error.is_some() {
            state.stop.store(true, Ordering::Relaxed);
        }
        let mut ended = state.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.threads += 1;
        ended.sums.append(&mut sums);
        // The first error is the cause of the others.
        ended.error = ended.error.take().or(error);
        state.one_ended.notify_all();
    }

    fn carry_all(&self, chunks: &[Chunk], state: &State, sums: &mut Vec<Sum>) -> Result<()> {
        let mut memory = self.memory(self.budget.chunk_bytes + PAGE_BYTES)?;
        while !state.stop.load(Ordering::Relaxed) {
            let index = state.next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(index) else { break };
            self.carry(chunk, &mut memory, sums)?;
            state.done_bytes.fetch_add(chunk.length, Ordering::Relaxed);
        }
        Ok(())
    }

    fn carry(&self, chunk: &Chunk, memory: &mut PoolBuffer, sums: &mut Vec<Sum>) -> Result<()> {
        let target = chunk.target();
        let first = to_memory(target.offset % PAGE_BYTES)?;
        let bytes = &mut memory.as_mut_slice()[first..][..to_memory(chunk.length)?];
        let mut rest = &mut *bytes;
        for (source, length) in runs_of(&chunk.parts) {
            let (run, behind) = rest.split_at_mut(to_memory(length)?);
            self.load(source, run)?;
            rest = behind;
        }
        let mut rest = &mut *bytes;
        for part in &chunk.parts {
            let (own, behind) = rest.split_at_mut(to_memory(part.length)?);
            swap(own, part.swapped_bytes);
            let Part { tensor, start, length, .. } = *part;
            let checksums = Checksums::of(own, self.with_zip);
            sums.push(Sum { tensor, start, length, checksums });
            rest = behind;
        }
        self.store(target, bytes)
    }

    /// Copies a tensor whose first index runs fastest, which takes all of it at once, twice.
    fn carry_turned(&self, tensor: &Turned) -> Result<Sum> {
        let path = &self.sources[tensor.source.file].path;
        let needed = tensor.bytes.saturating_mul(2);
        if needed > self.budget.whole_bytes() {
            let text = format!(
                "an array in Fortran order takes twice its {} bytes of memory, of which {} may be \
                 used:",
                tensor.bytes,
                self.budget.whole_bytes()
            );
            let error = Error::new(ErrorKind::OutOfMemory, text).path(path);
            return Err(error.hint("raise the budget, or save it in C order"));
        }
        let mut found = self.memory(tensor.bytes)?;
        let mut wanted = self.memory(tensor.bytes)?;
        self.load(tensor.source, found.as_mut_slice())?;
        swap(found.as_mut_slice(), tensor.swapped_bytes);
        let extents = tensor.shape.iter().map(|extent| to_memory(*extent));
        let shape: Vec<usize> = extents.collect::<Result<_>>()?;
        turn(found.as_slice(), &shape, wanted.as_mut_slice());
        self.store(tensor.target, wanted.as_slice())?;
        let checksums = Checksums::of(wanted.as_slice(), self.with_zip);
        Ok(Sum { tensor: tensor.tensor, start: 0, length: tensor.bytes, checksums })
    }

    fn memory(&self, bytes: u64) -> Result<PoolBuffer> {
        self.pool.allocate(to_memory(bytes)?, to_memory(PAGE_BYTES)?)
    }

    fn load(&self, source: Place, bytes: &mut [u8]) -> Result<()> {
        let path = &self.sources[source.file].path;
        if bytes.len() >= RUN_BYTES_MIN {
            return self.handle.load(path, source.offset, bytes);
        }
        File::open(path)
            .and_then(|file| file.read_exact_at(bytes, source.offset))
            .map_err(|error| failed(error, "cannot read", path, source.offset))
    }

    fn store(&self, target: Place, bytes: &[u8]) -> Result<()> {
        let Some(targets) = self.targets else { return Ok(()) };
        let path = &targets[target.file];
        if bytes.len() >= RUN_BYTES_MIN {
            return self.handle.store_at(path, target.offset, bytes);
        }
        File::options()
            .write(true)
            .open(path)
            .and_then(|file| file.write_all_at(bytes, target.offset))
            .map_err(|error| failed(error, "cannot write", path, target.offset))
    }
}

impl State {
    /// Tells whoever watches how far it is, until all threads have ended.
    fn watch(&self, threads: u64, is_over: impl Fn() -> bool, watch: &mut Watch<'_>) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while ended.threads < threads && !is_over() {
            let waited = self.one_ended.wait_timeout(ended, WATCH_INTERVAL);
            let (taken, _) = waited.unwrap_or_else(PoisonError::into_inner);
            drop(taken);
            if !watch(self.done_bytes.load(Ordering::Relaxed)) {
                self.stop.store(true, Ordering::Relaxed);
            }
            ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn stopped() -> Error {
    Error::new(ErrorKind::Cancelled, "the conversion was interrupted")
}

fn failed(error: std::io::Error, text: &str, path: &Path, offset: u64) -> Error {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        let text = "the file has become shorter:";
        return Error::new(ErrorKind::ShortFile, text).path(path).offset(offset);
    }
    Error::from_io(error, text).path(path).offset(offset)
}

fn to_memory(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| {
        Error::new(ErrorKind::OutOfMemory, format!("{bytes} bytes are more than memory can be"))
    })
}

/// Gives a tensor's bytes to `take`, in pieces of at most [`PIECE_BYTES`].
pub(super) fn read_pieces<E: From<Error>>(
    path: &Path,
    mut offset: u64,
    tensor: &Entry,
    mut take: impl FnMut(&[u8]) -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    if tensor.fortran_order && tensor.bytes > 0 {
        let text = format!("the tensor {:?} is in Fortran order in", tensor.name);
        let error = Error::new(ErrorKind::Unsupported, text).path(path);
        return Err(error.hint("it is a .npy file already; convert turns it into C order").into());
    }
    let file = File::open(path).map_err(|error| failed(error, "cannot open", path, 0))?;
    let mut memory = vec![0; to_memory(tensor.bytes.min(PIECE_BYTES))?];
    let end = offset + tensor.bytes;
    while offset < end {
        let piece = &mut memory[..to_memory((end - offset).min(PIECE_BYTES))?];
        file.read_exact_at(piece, offset)
            .map_err(|error| failed(error, "cannot read", path, offset))?;
        swap(piece, tensor.swapped_bytes);
        take(piece)?;
        offset += piece.len() as u64;
    }
    Ok(())
}
