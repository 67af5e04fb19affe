//! Writes one checkpoint, in an order that a power cut can't harm: data, its sync, the manifest,
//! its sync; then it is published (`publish`). Everything happens under names that no reader looks
//! at, so a checkpoint that has its name is whole.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::sync::{Mutex, PoisonError};
use std::thread;

use forebay_io::{Durability, Error, ErrorKind, Handle, Result};

use super::capture::Captured;
use super::checksum::{PIECE_BYTES, Run, joined, piece_count, runs_of};
use super::job::Job;
use super::layout::{Chunk, ShardLayout, TensorSpec};
use super::leftovers::Claim;
use super::manifest::{Manifest, STATE_BYTES_MAX, Shard, TensorEntry};
use super::name::{MANIFEST_FILE, Part, STATE_FILE, shard_file, step_directory};
use super::storage::{Storage, Sync};
use crate::safetensors::crc32c;

/// Threads that check and store chunks: one computes checksums while others wait for the drive.
const WRITERS: usize = 3;

/// What one save writes, and where.
#[derive(Debug)]
pub(super) struct Write<'a> {
    pub(super) job: &'a Job,
    pub(super) storage: &'a dyn Storage,
    pub(super) handle: &'a Handle,
    pub(super) durability: Durability,
    pub(super) claim: &'a Claim,
    pub(super) tensors: &'a [TensorSpec],
    pub(super) shards: &'a [ShardLayout],
    pub(super) state: &'a [u8],
}

impl Write<'_> {
    fn directory(&self) -> PathBuf {
        self.claim.path(Part::Partial)
    }

    fn shard_path(&self, index: usize) -> PathBuf {
        self.directory().join(shard_file(index))
    }

    /// Makes the directory.
    ///
    /// # Errors
    ///
    /// What the system says; [`ErrorKind::InvalidInput`] for a state that is too large.
    pub(super) fn begin(&self) -> Result<()> {
        if self.state.len() as u64 > STATE_BYTES_MAX {
            let text = format!(
                "the state without its tensors takes {} bytes, of at most {STATE_BYTES_MAX}",
                self.state.len()
            );
            return Err(Error::new(ErrorKind::InvalidInput, text).hint("save arrays as tensors"));
        }
        let directory = self.directory();
        self.storage
            .create_directory(&directory)
            .map_err(|error| Error::from_io(error, "cannot make").path(directory))
    }

    /// Makes the files of the shards, of their final sizes, and writes what isn't tensors.
    fn make_files(&self) -> Result<()> {
        self.write_small(STATE_FILE, self.state)?;
        for (index, shard) in self.shards.iter().enumerate() {
            let path = self.shard_path(index);
            let bytes = shard.bytes();
            self.storage.create_file(&path, bytes).map_err(|error| {
                Error::from_io(error, "cannot make").path(&path).bytes(bytes, 0)
            })?;
        }
        Ok(())
    }

    /// Stores what is captured, until there is no more of it, then the rest. The checkpoint is
    /// whole and, if that was asked for, durable then, under its temporary name.
    ///
    /// # Errors
    ///
    /// What a transfer or the system says. The job is cancelled then.
    pub(super) fn run(&self, captured: Receiver<Captured>) -> Result<()> {
        if let Err(error) = self.make_files() {
            self.job.cancel();
            return Err(error);
        }
        self.job.wait_for_beginning();
        let runs = self.store_chunks(captured)?;
        let mut shards = Vec::new();
        let mut tensors = Vec::new();
        for (index, runs) in runs.into_iter().enumerate() {
            let (shard, entries) = self.finish_shard(index, runs)?;
            shards.push(shard);
            tensors.extend(entries);
        }
        self.sync(&self.directory().join(STATE_FILE))?;
        let manifest = Manifest {
            step: self.job.step,
            state_bytes: self.state.len() as u64,
            state_checksum: crc32c(self.state),
            shards,
            tensors,
        };
        self.write_small(MANIFEST_FILE, &manifest.to_bytes()?)?;
        self.sync(&self.directory().join(MANIFEST_FILE))?;
        self.sync_directory(&self.directory())?;
        let latest = self.claim.path(Part::Latest);
        let name = format!("{}\n", step_directory(self.job.step));
        self.storage
            .write_file(&latest, name.as_bytes())
            .map_err(|error| Error::from_io(error, "cannot write").path(&latest))?;
        self.sync(&latest)
    }

    /// The checksums of what was stored, by shard and by where it lies.
    fn store_chunks(&self, captured: Receiver<Captured>) -> Result<Vec<Vec<Run>>> {
        let captured = Mutex::new(captured);
        let all = Mutex::new(vec![Vec::new(); self.shards.len()]);
        let failure = Mutex::new(None);
        let work = || {
            loop {
                let next = captured.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(Captured { chunk, buffer }) = next else { return };
                if !self.job.is_cancelled() {
                    match self.store(chunk, buffer.as_slice()) {
                        Ok(runs) => all.lock().unwrap_or_else(PoisonError::into_inner)[chunk.shard]
                            .extend(runs),
                        Err(error) => {
                            self.job.cancel();
                            let mut failure =
                                failure.lock().unwrap_or_else(PoisonError::into_inner);
                            failure.get_or_insert(error);
                        }
                    }
                }
                drop(buffer);
                self.job.remove_captured();
            }
        };
        thread::scope(|scope| {
            for _ in 1..WRITERS {
                scope.spawn(work);
            }
            work();
        });
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        if self.job.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "the save was interrupted"));
        }
        let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        for runs in &mut all {
            runs.sort_unstable_by_key(|run| run.start);
        }
        Ok(all)
    }

    fn store(&self, chunk: Chunk, bytes: &[u8]) -> Result<Vec<Run>> {
        let shard = &self.shards[chunk.shard];
        let cuts = shard.within(chunk.start, chunk.end).map(|placed| placed.start);
        let runs = runs_of(chunk.start, bytes, cuts);
        self.handle.store_at(self.shard_path(chunk.shard), chunk.start, bytes)?;
        Ok(runs)
    }

    /// Writes a shard's header, which has the checksums of its tensors, and syncs the file.
    fn finish_shard(&self, index: usize, mut runs: Vec<Run>) -> Result<(Shard, Vec<TensorEntry>)> {
        let layout = &self.shards[index];
        let missing = || {
            let text = format!("not all of {} was captured", shard_file(index));
            Error::new(ErrorKind::Mismatch, text)
        };
        let mut entries = Vec::with_capacity(layout.tensors.len());
        for placed in &layout.tensors {
            let TensorSpec { name, dtype, shape } = &self.tensors[placed.tensor];
            entries.push(TensorEntry {
                name: name.clone(),
                shard: index,
                dtype: *dtype,
                shape: shape.clone(),
                start: placed.start,
                end: placed.end,
                checksum: joined(&runs, placed.start, placed.end).ok_or_else(missing)?,
            });
        }
        let checksums: Vec<u32> = entries.iter().map(|entry| entry.checksum).collect();
        let header = layout.header.to_bytes(&checksums);
        let path = self.shard_path(index);
        self.handle.store_at(&path, 0, &header)?;
        runs.splice(0..0, runs_of(0, &header, std::iter::empty()));
        let pieces = (0..piece_count(layout.bytes())).map(|piece| {
            let start = piece * PIECE_BYTES;
            joined(&runs, start, layout.bytes().min(start + PIECE_BYTES)).ok_or_else(missing)
        });
        let shard =
            Shard { bytes: layout.bytes(), piece_checksums: pieces.collect::<Result<_>>()? };
        self.sync(&path)?;
        Ok((shard, entries))
    }

    fn write_small(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.directory().join(name);
        self.storage
            .write_file(&path, content)
            .map_err(|error| Error::from_io(error, "cannot write").path(path))
    }

    fn sync(&self, path: &Path) -> Result<()> {
        let sync = match self.durability {
            Durability::None => return Ok(()),
            Durability::Data => Sync::Data,
            Durability::Full => Sync::Full,
        };
        self.storage
            .sync_file(path, sync)
            .map_err(|error| Error::from_io(error, "cannot sync").path(path))
    }

    fn sync_directory(&self, path: &Path) -> Result<()> {
        sync_directory(self.storage, self.durability, path)
    }
}

/// Syncs a directory where the durability asks for it.
pub(super) fn sync_directory(
    storage: &dyn Storage,
    durability: Durability,
    path: &Path,
) -> Result<()> {
    if durability != Durability::Full {
        return Ok(());
    }
    storage.sync_directory(path).map_err(|error| Error::from_io(error, "cannot sync").path(path))
}
