//! Carries a job out, loop by loop.
//!
//! One thread submits requests and takes them back; the handle's workers move the bytes, and a
//! second thread looks every [`INTERVAL`] at how many have moved.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use forebay_io::device::{DeviceMemory, Devices};
use forebay_io::engine::timed::{TimedFactory, TransferObserver};
use forebay_io::engine::{AutoFactory, EngineFactory, WakeEvent};
use forebay_io::memory::ALIGNMENT_DEFAULT;
use forebay_io::{
    EngineChoice, Error, ErrorKind, Handle, OwnedMemory, OwnedOperation, Pool, Result, Stats,
    TensorMemory, usage,
};

use super::contents::{Contents, Difference};
use super::job::{Job, Memory};
use super::latency::Latencies;
use super::places::Places;
use super::rates::{INTERVAL, Rates};
use super::report::{LoopReport, Moved, ProcessReport, Way};
use crate::device_route::routed;

/// Bytes that are made, or read back, at a time: a multiple of what direct I/O moves.
const CHUNK_BYTES: usize = 4 << 20;

/// Carries a job out.
#[derive(Debug)]
pub struct Runner {
    job: Job,
    places: Places,
    handle: Arc<Handle>,
    transfers: Arc<Transfers>,
    /// Memory of each request or, where contents aren't checked, of those under way.
    pieces: Vec<Option<TensorMemory>>,
    /// What each file holds.
    generations: Vec<u64>,
}

/// Latencies of the transfers since they were last taken.
#[derive(Debug, Default)]
struct Transfers(Mutex<Latencies>);

impl Transfers {
    fn take(&self) -> Latencies {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl TransferObserver for Transfers {
    fn moved(&self, _: u64, latency: Duration) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).record(latency);
    }
}

/// A request under way.
#[derive(Debug)]
struct Flying {
    piece: usize,
    started: Instant,
    operation: OwnedOperation<TensorMemory>,
}

impl Runner {
    /// Makes the handle and the memory of a job, and fills the memory.
    ///
    /// # Errors
    ///
    /// Options that can't be used or had here, or too little memory.
    pub fn new(job: Job) -> Result<Self> {
        let options = routed(job.handle.to_options()?, job.memory.kind());
        let engine: Arc<dyn EngineFactory> = match options.engine {
            EngineChoice::Auto => Arc::new(AutoFactory::default()),
            EngineChoice::Named(kind) => Arc::new(kind),
        };
        let transfers = Arc::new(Transfers::default());
        let observer: Arc<dyn TransferObserver> = Arc::<Transfers>::clone(&transfers);
        let factory = TimedFactory::new(engine, observer);
        let handle = Arc::new(Handle::with_factory(options, Arc::new(factory))?);
        let places =
            Places { offset: job.offset, length: job.io_bytes, request_bytes: job.request_bytes };
        let count = usize::try_from(job.pieces_count()).unwrap_or(usize::MAX);
        let pool = handle.pool()?;
        let contents = Contents::new(job.seed, 0);
        let mut pieces = Vec::new();
        for index in 0..count {
            let (offset, length) = places.span(index);
            let mut piece = allocate(&pool, job.memory, length)?;
            // Also touches it, which isn't what is to be measured.
            piece.write_with(|at, run| contents.fill(offset + at as u64, run))?;
            pieces.push(Some(piece));
        }
        let generations = vec![0; job.files.len()];
        Ok(Self { job, places, handle, transfers, pieces, generations })
    }

    /// Makes the bytes that are going to be read.
    ///
    /// # Errors
    ///
    /// What the system says; [`ErrorKind::Cancelled`] once `stop` is set.
    pub fn prepare(&mut self, stop: &AtomicBool) -> Result<()> {
        for (path, generation) in self.job.files.iter().zip(&mut self.generations) {
            *generation = 0;
            let contents = Contents::new(self.job.seed, 0);
            let failed = |error, what: &str| Error::from_io(error, what).path(path);
            // Another process may have its part of the file.
            let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
            let file = opened.map_err(|error| failed(error, "cannot open"))?;
            let mut chunk = vec![0; CHUNK_BYTES];
            for (offset, length) in chunks(&self.places) {
                refuse_if_stopped(stop)?;
                contents.fill(offset, &mut chunk[..length]);
                file.write_all_at(&chunk[..length], offset)
                    .map_err(|error| failed(error, "cannot write").offset(offset))?;
            }
            file.sync_all().map_err(|error| failed(error, "cannot sync"))?;
        }
        Ok(())
    }

    /// Moves every byte of the job once, and checks them where that was asked for.
    ///
    /// # Errors
    ///
    /// The first failure of a request; [`ErrorKind::Cancelled`] once `stop` is set.
    pub fn run_loop(&mut self, way: Way, index: u64, stop: &AtomicBool) -> Result<LoopReport> {
        let file = usize::try_from(index % self.job.files.len() as u64).unwrap_or(0);
        let path = self.job.files[file].clone();
        self.make_ready(way, file, index)?;
        let cached_before_bytes = match way {
            Way::Read if !self.job.keep_cache => {
                usage::drop_cached(&path)?;
                usage::cached_bytes(&path)?
            }
            Way::Read => usage::cached_bytes(&path)?,
            Way::Write => None,
        };
        let order = if self.job.random {
            self.places.shuffled(self.job.seed ^ (index << 1))
        } else {
            self.places.in_order()
        };
        self.transfers.take();
        let before = self.handle.stats();
        let cpu_before = usage::processor_time();
        let (moved, seconds, rates) =
            self.watched(&before, |runner| runner.move_all(way, &path, &order, stop));
        let requests = moved?;
        let difference = if self.job.validate { self.check(way, file, stop)? } else { None };
        Ok(LoopReport {
            way,
            bytes: self.job.io_bytes,
            seconds,
            cpu_seconds: requests.1.saturating_sub(cpu_before).as_secs_f64(),
            request_ns: requests.0.to_pairs(),
            transfer_ns: self.transfers.take().to_pairs(),
            rates,
            moved: Moved::between(&before, &self.handle.stats()),
            cached_before_bytes,
            difference: difference.map(|found| (path.display().to_string(), found)),
        })
    }

    /// What the process came to.
    pub fn finish(self) -> ProcessReport {
        let stats = self.handle.stats();
        ProcessReport {
            engine: stats.engine.to_owned(),
            peak_resident_bytes: usage::peak_resident_bytes(),
            payload_bytes: self.job.memory_bytes(),
            fallbacks: stats.fallbacks,
        }
    }

    /// Fills what is going to be written, wipes what is going to be read.
    fn make_ready(&mut self, way: Way, file: usize, index: u64) -> Result<()> {
        if way == Way::Write {
            self.generations[file] = index + 1;
        }
        if !self.job.validate {
            return Ok(());
        }
        let contents = Contents::new(self.job.seed, self.generations[file]);
        for (piece, memory) in self.pieces.iter_mut().enumerate() {
            let Some(memory) = memory else { continue };
            let offset = self.places.span(piece).0;
            memory.write_with(|at, run| match way {
                Way::Write => contents.fill(offset + at as u64, run),
                Way::Read => run.fill(0),
            })?;
        }
        Ok(())
    }

    /// Does the work while another thread looks at how far it is.
    fn watched<T>(&mut self, before: &Stats, work: impl FnOnce(&mut Self) -> T) -> (T, f64, Rates) {
        let (done, watch) = mpsc::channel();
        let start = Instant::now();
        let handle = Arc::clone(&self.handle);
        let bytes_of = |stats: &Stats| stats.bytes_read + stats.bytes_written;
        let bytes_before = bytes_of(before);
        thread::scope(|scope| {
            let watcher = scope.spawn(move || {
                let mut samples = Vec::new();
                loop {
                    let due =
                        INTERVAL.saturating_mul(u32::try_from(samples.len() + 1).unwrap_or(1));
                    let ended = watch.recv_timeout(due.saturating_sub(start.elapsed()));
                    let time = match ended {
                        Ok(time) => time,
                        Err(_) => start.elapsed(),
                    };
                    samples.push((time, bytes_of(&handle.stats()) - bytes_before));
                    if ended.is_ok() {
                        return samples;
                    }
                }
            });
            let answer = work(self);
            let seconds = start.elapsed();
            let _ = done.send(seconds);
            let samples = watcher.join().unwrap_or_default();
            (answer, seconds.as_secs_f64(), Rates::from_samples(&samples))
        })
    }

    /// Makes all requests; returns their latencies and the processor time at the end.
    fn move_all(
        &mut self,
        way: Way,
        path: &Path,
        order: &[usize],
        stop: &AtomicBool,
    ) -> Result<(Latencies, Duration)> {
        let wake = Arc::new(WakeEvent::new()?);
        let mut latencies = Latencies::default();
        let mut free: Vec<usize> = (0..self.pieces.len()).collect();
        let mut flying: Vec<Flying> = Vec::new();
        let mut next = order.iter();
        loop {
            refuse_if_stopped(stop)?;
            while flying.len() < self.job.in_flight {
                let Some(request) = next.next() else { break };
                let piece = if self.job.validate { Some(*request) } else { free.pop() };
                let Some(piece) = piece else { break };
                let started = Instant::now();
                let operation = self.start(way, path, *request, piece)?;
                operation.notify(&wake);
                flying.push(Flying { piece, started, operation });
            }
            if flying.is_empty() {
                return Ok((latencies, usage::processor_time()));
            }
            wake.wait(Some(INTERVAL));
            for index in (0..flying.len()).rev() {
                if flying[index].operation.is_done() {
                    let landed = flying.swap_remove(index);
                    latencies.record(landed.started.elapsed());
                    self.pieces[landed.piece] = Some(landed.operation.wait()?);
                    free.push(landed.piece);
                }
            }
        }
    }

    fn start(
        &mut self,
        way: Way,
        path: &Path,
        request: usize,
        piece: usize,
    ) -> Result<OwnedOperation<TensorMemory>> {
        let (offset, length) = self.places.span(request);
        let lost = || Error::new(ErrorKind::Closed, "the memory of a failed request is gone");
        let memory = self.pieces[piece].take().ok_or_else(lost)?;
        self.handle.submit_owned(way.direction(), path, offset, memory, length)
    }

    /// Compares what was read, or reads back what was written, by the kernel's plain calls.
    fn check(&self, way: Way, file: usize, stop: &AtomicBool) -> Result<Option<Difference>> {
        let contents = Contents::new(self.job.seed, self.generations[file]);
        if way == Way::Read {
            let mut first: Option<Difference> = None;
            for (piece, memory) in self.pieces.iter().enumerate() {
                let (Some(memory), offset) = (memory, self.places.span(piece).0) else { continue };
                memory.read_with(|at, run| {
                    let found = contents.difference(offset + at as u64, run);
                    first = first.into_iter().chain(found).min_by_key(|found| found.offset);
                })?;
            }
            return Ok(first);
        }
        let path = &self.job.files[file];
        usage::drop_cached(path)?;
        let failed = |error| Error::from_io(error, "cannot read back").path(path);
        let opened = File::open(path).map_err(failed)?;
        let mut chunk = vec![0; CHUNK_BYTES];
        for (offset, length) in chunks(&self.places) {
            refuse_if_stopped(stop)?;
            opened.read_exact_at(&mut chunk[..length], offset).map_err(failed)?;
            let difference = contents.difference(offset, &chunk[..length]);
            if difference.is_some() {
                return Ok(difference);
            }
        }
        Ok(None)
    }
}

fn allocate(pool: &Arc<Pool>, memory: Memory, length: usize) -> Result<TensorMemory> {
    Ok(match memory {
        Memory::Pool => TensorMemory::Host(pool.allocate(length, ALIGNMENT_DEFAULT)?.into()),
        Memory::Ordinary { shift } => TensorMemory::Host(OwnedMemory::ordinary(length, shift)),
        Memory::Gpu { ordinal, .. } => {
            let context = Devices::global()?.context(ordinal)?;
            TensorMemory::Device(DeviceMemory::allocate(&context, length)?)
        }
    })
}

/// Offsets and lengths of the range in chunks.
fn chunks(places: &Places) -> impl Iterator<Item = (u64, usize)> {
    let chunks = Places { request_bytes: CHUNK_BYTES, ..*places };
    (0..chunks.count()).map(move |index| chunks.span(index))
}

fn refuse_if_stopped(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) {
        return Err(Error::new(ErrorKind::Cancelled, "the workload was interrupted"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::job::HandleOptions;
    use super::*;

    fn job(directory: &Path) -> Job {
        Job {
            files: vec![directory.join("a"), directory.join("b")],
            offset: 100,
            io_bytes: 1_000_003,
            request_bytes: 65_537,
            in_flight: 3,
            random: true,
            seed: 7,
            validate: true,
            keep_cache: false,
            memory: Memory::Ordinary { shift: 3 },
            handle: HandleOptions {
                engine: "auto".to_owned(),
                block_size: 8192,
                queue_depth: 8,
                parallelism: 2,
                single_submit: false,
                sqpoll: false,
                iopoll: false,
                direct: "auto".to_owned(),
                durability: "none".to_owned(),
                page_cache: true,
            },
        }
    }

    static GO: AtomicBool = AtomicBool::new(false);

    #[test]
    fn odd_sizes_are_written_and_read_right_in_every_memory() {
        for memory in [Memory::Pool, Memory::Ordinary { shift: 511 }] {
            let directory = tempfile::tempdir().unwrap();
            let mut runner = Runner::new(Job { memory, ..job(directory.path()) }).unwrap();
            for index in 0..3 {
                let report = runner.run_loop(Way::Write, index, &GO).unwrap();
                assert_eq!((report.bytes, report.difference), (1_000_003, None));
                assert_eq!(report.moved.total_bytes(), 1_000_003);
                let requests = Latencies::from_pairs(&report.request_ns).percentiles().unwrap();
                assert_eq!(requests.count, 16);
                assert!(Latencies::from_pairs(&report.transfer_ns).percentiles().is_some());
            }
            for index in 0..2 {
                let report = runner.run_loop(Way::Read, index, &GO).unwrap();
                assert_eq!(report.difference, None);
            }
            assert_eq!(std::fs::metadata(directory.path().join("a")).unwrap().len(), 1_000_103);
        }
    }

    #[test]
    fn a_flipped_byte_is_found_when_it_is_read_and_when_it_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let mut runner = Runner::new(job(directory.path())).unwrap();
        runner.prepare(&GO).unwrap();
        assert_eq!(runner.run_loop(Way::Read, 0, &GO).unwrap().difference, None);
        let file = OpenOptions::new().read(true).write(true).open(directory.path().join("a"));
        let file = file.unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 70_000).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 70_000).unwrap();
        let (path, found) = runner.run_loop(Way::Read, 0, &GO).unwrap().difference.unwrap();
        assert!(path.ends_with("/a"), "{path}");
        let wanted = Difference { offset: 70_000, wanted: byte[0], found: byte[0] ^ 1 };
        assert_eq!(found, wanted);
        // What is read back after a write is compared by the same means.
        assert_eq!(runner.check(Way::Write, 0, &GO).unwrap(), Some(wanted));
        assert_eq!(runner.check(Way::Write, 1, &GO).unwrap(), None);
    }

    #[test]
    fn what_an_earlier_loop_left_is_not_taken_for_what_this_one_wrote() {
        let directory = tempfile::tempdir().unwrap();
        let mut runner = Runner::new(job(directory.path())).unwrap();
        runner.run_loop(Way::Write, 0, &GO).unwrap();
        runner.generations[0] = 3;
        assert!(runner.check(Way::Write, 0, &GO).unwrap().is_some());
    }

    #[test]
    fn a_stopped_runner_says_so_and_an_odd_option_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let mut runner = Runner::new(job(directory.path())).unwrap();
        let stop = AtomicBool::new(true);
        let error = runner.run_loop(Way::Write, 0, &stop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        let mut odd = job(directory.path());
        odd.handle.engine = "warp".to_owned();
        assert!(Runner::new(odd).unwrap_err().to_string().contains("\"warp\""));
    }
}
