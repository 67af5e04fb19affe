//! Measures candidates on files: one, or one in each of several directories that work together.
//!
//! Transfers go around the page cache to and from pinned memory, or that of a GPU. Making a handle, and its first
//! transfers, which register memory, aren't part of the time; making bytes durable is part of a
//! store's. Bytes are random, since drives compress, and are stored over those that are there, as
//! swapping does.

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::rounds::as_float;
use super::search::{Measure, Progress, Sample};
use super::space::Candidate;
use crate::device_route::routed;
use crate::io::device::{Context, DeviceMemory};
use crate::io::memory::ALIGNMENT_DEFAULT;
use crate::io::{
    Direction, Durability, Error, ErrorKind, Handle, MemoryKind, Options, OwnedMemory, Pool,
    PoolOptions, Result, TensorMemory, usage,
};

/// Bytes that are made up and stored at once when a file is made.
const FILL_BYTES: u64 = 16 << 20;
/// What a directory moves of a sample is a multiple of this.
const GRANULE: u64 = 64 << 10;
/// Handles that are being closed while the next candidates are measured. Linux AIO sleeps some 40 ms
/// for that, longer than a short sample takes.
const CLOSING_MAX: usize = 16;
/// If more than one in this many bytes went through the page cache, the sample is said to.
const BUFFERED_SHARE: u64 = 100;

/// The memory that samples are moved from and to.
#[derive(Clone, Debug)]
pub enum SampleMemory {
    /// The host's, pinned.
    Host,
    /// A GPU's, through blocks of the host's.
    Gpu(Arc<Context>),
    /// A GPU's, by GPUDirect Storage.
    Gds(Arc<Context>),
}

impl SampleMemory {
    /// Its kind.
    pub fn kind(&self) -> MemoryKind {
        match self {
            Self::Host => MemoryKind::Host,
            Self::Gpu(_) => MemoryKind::Gpu,
            Self::Gds(_) => MemoryKind::Gds,
        }
    }

    fn allocate(&self, length: usize, pool: &Arc<Pool>) -> Result<TensorMemory> {
        Ok(match self {
            Self::Host => TensorMemory::Host(pool.allocate(length, ALIGNMENT_DEFAULT)?.into()),
            Self::Gpu(context) | Self::Gds(context) => {
                TensorMemory::Device(DeviceMemory::allocate(context, length)?)
            }
        })
    }
}

/// What a [`Drive`] works with.
pub struct DriveOptions<'a> {
    /// The files; each is made by [`Drive::new`]. Removing them is the caller's affair.
    pub files: Vec<PathBuf>,
    /// Bytes of all of them together.
    pub io_bytes: u64,
    /// The memory that samples are moved from and to.
    pub memory: SampleMemory,
    /// Drop the files from the page cache before each sample.
    pub flush_page_cache: bool,
    /// Whether the run is to end, asked before each sample.
    pub is_interrupted: &'a dyn Fn() -> bool,
    /// Hears how far a search is.
    pub on_progress: &'a dyn Fn(&Progress),
}

impl fmt::Debug for DriveOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriveOptions")
            .field("files", &self.files)
            .field("io_bytes", &self.io_bytes)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

/// Files that candidates are measured on.
#[derive(Debug)]
pub struct Drive<'a> {
    options: DriveOptions<'a>,
    file_bytes: u64,
    pool: Arc<Pool>,
    handle: Option<(Candidate, Handle)>,
    closing: VecDeque<JoinHandle<()>>,
    memory: Vec<TensorMemory>,
    position: u64,
}

impl<'a> Drive<'a> {
    /// Makes the files, and fills them.
    ///
    /// # Errors
    ///
    /// What storing met; [`ErrorKind::Cancelled`] after an interruption.
    pub fn new(options: DriveOptions<'a>) -> Result<Self> {
        let share = options.io_bytes / options.files.len().max(1) as u64;
        let file_bytes = share - share % GRANULE;
        if file_bytes == 0 {
            let text = format!("{} bytes are too few to measure with", options.io_bytes);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let pool = Pool::new(PoolOptions::default());
        let mut drive = Self {
            options,
            file_bytes,
            pool,
            handle: None,
            closing: VecDeque::new(),
            memory: Vec::new(),
            position: 0,
        };
        drive.fill()?;
        Ok(drive)
    }

    fn fill(&mut self) -> Result<()> {
        let options = Options { pool: Some(Arc::clone(&self.pool)), ..Options::default() };
        let handle = Handle::new(Options { durability: Durability::Data, ..options })?;
        let length = in_memory(FILL_BYTES.min(self.file_bytes))?;
        let mut memory: OwnedMemory = self.pool.allocate(length, ALIGNMENT_DEFAULT)?.into();
        let mut random = fastrand::Rng::with_seed(0);
        for file in &self.options.files {
            let mut offset = 0;
            while offset < self.file_bytes {
                self.check_interruption()?;
                random.fill(memory.as_mut_slice());
                let length = FILL_BYTES.min(self.file_bytes - offset);
                let operation = handle.submit_owned(
                    Direction::Store,
                    file,
                    offset,
                    memory,
                    in_memory(length)?,
                )?;
                memory = operation.wait()?;
                offset += length;
            }
        }
        handle.close()
    }

    fn check_interruption(&self) -> Result<()> {
        if (self.options.is_interrupted)() {
            return Err(Error::new(ErrorKind::Cancelled, "interrupted"));
        }
        Ok(())
    }

    /// Has memory of so many bytes or more for each file, with contents that don't compress.
    fn provide(&mut self, bytes: u64) -> Result<()> {
        let length = in_memory(bytes)?;
        if self.memory.first().is_some_and(|memory| memory.len() >= length)
            && self.memory.len() == self.options.files.len()
        {
            return Ok(());
        }
        self.memory.clear();
        let mut random = fastrand::Rng::with_seed(bytes);
        for _ in 0..self.options.files.len() {
            let mut memory = self.options.memory.allocate(length, &self.pool)?;
            memory.write_with(|_, run| random.fill(run))?;
            self.memory.push(memory);
        }
        Ok(())
    }

    /// Has a handle with the options of the candidate.
    fn select(&mut self, candidate: &Candidate) -> Result<()> {
        if self.handle.as_ref().is_some_and(|(current, _)| current == candidate) {
            return Ok(());
        }
        self.put_away();
        let options = Options {
            durability: Durability::Data,
            page_cache: false,
            pool: Some(Arc::clone(&self.pool)),
            ..candidate.options()
        };
        // Whatever keeps it from being made keeps it from being used.
        let handle = Handle::new(routed(options, self.options.memory.kind()))
            .map_err(|error| Error::new(ErrorKind::Unsupported, error.to_string()))?;
        self.handle = Some((*candidate, handle));
        Ok(())
    }

    /// Closes the handle, on a thread of its own.
    fn put_away(&mut self) {
        let Some((_, handle)) = self.handle.take() else { return };
        if self.closing.len() == CLOSING_MAX {
            self.closing.pop_front().map(JoinHandle::join);
        }
        // Where no thread can be had, the closure goes with the handle, which closes it.
        self.closing.extend(thread::Builder::new().spawn(move || drop(handle)));
    }

    /// Moves `bytes` of each file at once.
    fn transfer(&mut self, direction: Direction, bytes: u64) -> Result<()> {
        let Some((_, handle)) = &self.handle else { return Ok(()) };
        let length = in_memory(bytes)?;
        let mut operations = Vec::new();
        for (file, memory) in self.options.files.iter().zip(self.memory.drain(..)) {
            let operation = handle.submit_owned(direction, file, self.position, memory, length)?;
            operations.push(operation);
        }
        for operation in operations {
            self.memory.push(operation.wait()?);
        }
        Ok(())
    }
}

impl Measure for Drive<'_> {
    fn measure(
        &mut self,
        candidate: &Candidate,
        direction: Direction,
        bytes: u64,
    ) -> Result<Sample> {
        self.check_interruption()?;
        let share = bytes / self.options.files.len() as u64;
        let each = (share - share % GRANULE).clamp(GRANULE, self.file_bytes);
        if self.position + each > self.file_bytes {
            self.position = 0;
        }
        self.provide(each)?;
        self.select(candidate)?;
        if self.options.flush_page_cache {
            self.options.files.iter().try_for_each(|file| usage::drop_cached(file))?;
        }
        let first = (candidate.block_size as u64).saturating_mul(candidate.parallelism as u64);
        self.transfer(Direction::Load, first.min(each))?;
        let buffered = self.buffered_bytes();
        let (cpu, started) = (usage::processor_time(), Instant::now());
        self.transfer(direction, each)?;
        let seconds = started.elapsed().as_secs_f64();
        let cpu = usage::processor_time().saturating_sub(cpu).as_secs_f64();
        let moved = each * self.options.files.len() as u64;
        self.position += each;
        Ok(Sample {
            bytes_per_second: as_float(moved) / seconds,
            cpu_seconds_per_gib: cpu * as_float(1 << 30) / as_float(moved),
            buffered: self.buffered_bytes() - buffered > moved / BUFFERED_SHARE,
        })
    }

    fn progress(&mut self, progress: &Progress) {
        (self.options.on_progress)(progress);
    }
}

impl Drop for Drive<'_> {
    fn drop(&mut self) {
        self.put_away();
        for closing in self.closing.drain(..) {
            let _ = closing.join();
        }
    }
}

impl Drive<'_> {
    fn buffered_bytes(&self) -> u64 {
        let stats = self.handle.as_ref().map(|(_, handle)| handle.stats()).unwrap_or_default();
        stats.bytes_buffered + stats.bytes_cached
    }
}

fn in_memory(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| {
        Error::new(ErrorKind::InvalidInput, format!("{bytes} bytes don't fit in memory"))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use forebay_standin::Standin;

    use super::*;
    use crate::io::EngineKind;
    use crate::io::device::{Cuda, Search};
    use crate::tune::Space;

    fn measure_on(count: usize, io_bytes: u64, memory: SampleMemory) {
        let directory = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> =
            (0..count).map(|index| directory.path().join(index.to_string())).collect();
        let options = DriveOptions {
            files: files.clone(),
            io_bytes,
            memory,
            flush_page_cache: true,
            is_interrupted: &|| false,
            on_progress: &|_| (),
        };
        let mut drive = Drive::new(options).unwrap();
        let before: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
        let candidate = Space::standard(vec![EngineKind::Threads], 1).modes()[0];
        for direction in [Direction::Load, Direction::Store, Direction::Load] {
            let sample = drive.measure(&candidate, direction, io_bytes / 3).unwrap();
            assert!(sample.bytes_per_second > 0.0 && sample.bytes_per_second.is_finite());
        }
        for (file, before) in files.iter().zip(before) {
            let after = fs::read(file).unwrap();
            assert_eq!(after.len(), before.len(), "samples stay within the file");
            assert!(after != vec![0; after.len()]);
        }
    }

    #[test]
    fn samples_stay_within_one_file_or_several() {
        measure_on(1, 3 << 20, SampleMemory::Host);
        measure_on(3, (7 << 20) + 12345, SampleMemory::Host);
    }

    #[test]
    fn samples_move_the_memory_of_the_gpu_that_was_asked_for() {
        let standin = Standin::new().unwrap();
        let folders = vec![standin.folder().to_path_buf()];
        let before = standin.census();
        {
            let cuda = Cuda::load(&Search { folders, system: false }).unwrap();
            let context = Context::retain(&cuda, 1).unwrap();
            measure_on(2, 6 << 20, SampleMemory::Gpu(context));
        }
        assert!(standin.count("cuMemcpyHtoDAsync_v2") > 0, "a load");
        assert!(standin.count("cuMemcpyDtoHAsync_v2") > 0, "a store");
        assert_eq!(standin.census().split(' ').nth(3), before.split(' ').nth(3), "allocations");
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn an_interruption_ends_it_before_the_next_sample() {
        let directory = tempfile::tempdir().unwrap();
        let options = DriveOptions {
            files: vec![directory.path().join("f")],
            io_bytes: 1 << 20,
            memory: SampleMemory::Host,
            flush_page_cache: false,
            is_interrupted: &|| true,
            on_progress: &|_| (),
        };
        assert_eq!(Drive::new(options).unwrap_err().kind(), ErrorKind::Cancelled);
    }

    #[test]
    fn a_directory_that_fails_is_named() {
        let options = DriveOptions {
            files: vec![PathBuf::from("/no/such/place/f")],
            io_bytes: 1 << 20,
            memory: SampleMemory::Host,
            flush_page_cache: false,
            is_interrupted: &|| false,
            on_progress: &|_| (),
        };
        let error = Drive::new(options).unwrap_err();
        assert!(error.to_string().contains("/no/such/place"), "{error}");
    }
}
