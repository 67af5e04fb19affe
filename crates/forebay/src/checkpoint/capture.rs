//! Copies a state into memory of the pool, chunk by chunk, while its owner waits. What is on devices
//! comes by copies on streams of Forebay's own, behind what the owner's streams had to do.
//!
//! What fits into the budget is just copied; beyond it, a chunk is copied as soon as the writer has
//! given another back, so a state of any size is captured, and what doesn't fit is written by then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use forebay_io::memory::ALIGNMENT_DEFAULT;
use forebay_io::{DeviceBytes, ErrorKind, Gather, Handle, Lent, Pool, PoolBuffer, Result};

use super::checksum::in_memory;
use super::job::Job;
use super::layout::{Chunk, ShardLayout};

/// Most threads that copy: two keep the memory of most machines busy, and a state is copied while
/// nothing else runs.
const THREADS_MAX: usize = 4;
/// Chunks for each thread: below, starting one costs more than it saves.
const CHUNKS_PER_THREAD: usize = 2;
/// Longest time without a look at whether to go on.
pub(super) const SLICE: Duration = Duration::from_millis(100);

/// A captured chunk.
#[derive(Debug)]
pub(super) struct Captured {
    pub(super) chunk: Chunk,
    pub(super) buffer: PoolBuffer,
}

/// What is captured, and into what.
#[derive(Debug)]
pub(super) struct Capture<'a> {
    pub(super) job: &'a Job,
    /// Counts what is copied from devices.
    pub(super) handle: &'a Handle,
    pub(super) pool: &'a Arc<Pool>,
    pub(super) shards: &'a [ShardLayout],
    pub(super) chunks: &'a [Chunk],
    /// The bytes of each tensor of the state.
    pub(super) bytes: &'a [Lent<'a>],
    /// Chunks that may be there without being written, if that isn't up to the pool's budget.
    pub(super) ahead_max: Option<usize>,
}

impl Capture<'_> {
    /// Copies everything, and then has the writer begin unless it had to before; or stops where the job is cancelled. `poll` is called now and then in
    /// the caller's thread; its error ends the capture.
    ///
    /// # Errors
    ///
    /// Memory that can't be had; what `poll` says.
    pub(super) fn run(
        &self,
        sender: Sender<Captured>,
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let next = AtomicUsize::new(0);
        let stop = AtomicBool::new(false);
        let available = thread::available_parallelism().map_or(1, usize::from);
        let threads = available.min(THREADS_MAX).min(self.chunks.len() / CHUNKS_PER_THREAD).max(1);
        let (report, reports) = channel();
        let outcome = thread::scope(|scope| {
            for _ in 0..threads {
                let (sender, report) = (sender.clone(), report.clone());
                let (next, stop) = (&next, &stop);
                scope.spawn(move || {
                    let copied = self.copy(next, stop, &sender);
                    stop.fetch_or(copied.is_err(), Ordering::Relaxed);
                    // The other end waits for every report.
                    let _ = report.send(copied);
                });
            }
            drop((sender, report));
            let mut outcome = Ok(());
            loop {
                match reports.recv_timeout(SLICE) {
                    Ok(copied) => outcome = outcome.and(copied),
                    Err(RecvTimeoutError::Disconnected) => return outcome,
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if !stop.load(Ordering::Relaxed)
                    && let Err(error) = poll()
                {
                    stop.store(true, Ordering::Relaxed);
                    outcome = outcome.and(Err(error));
                }
            }
        });
        self.job.begin_writing();
        outcome
    }

    fn copy(&self, next: &AtomicUsize, stop: &AtomicBool, sender: &Sender<Captured>) -> Result<()> {
        let mut gather = Gather::new(self.handle);
        let goes_on = || !stop.load(Ordering::Relaxed) && !self.job.is_cancelled();
        while goes_on() {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&chunk) = self.chunks.get(index) else { break };
            let Some(mut buffer) = self.allocate(chunk, &goes_on)? else { break };
            self.fill(chunk, buffer.as_mut_slice(), &mut gather)?;
            if sender.send(Captured { chunk, buffer }).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Memory for a chunk, as soon as there is some; `None` once there is no need for it.
    fn allocate(&self, chunk: Chunk, goes_on: &dyn Fn() -> bool) -> Result<Option<PoolBuffer>> {
        let length = usize::try_from(chunk.end - chunk.start).unwrap_or(usize::MAX);
        while goes_on() && self.ahead_max.is_some_and(|most| self.job.captured_count() >= most) {
            self.job.wait_for_buffer(SLICE);
        }
        if let Ok(buffer) = self.pool.allocate(length, ALIGNMENT_DEFAULT) {
            self.job.add_captured();
            return Ok(Some(buffer));
        }
        // What was captured has to be written to make room.
        self.job.begin_writing();
        while goes_on() {
            match self.pool.allocate_wait(length, ALIGNMENT_DEFAULT, Some(SLICE)) {
                Ok(buffer) => {
                    self.job.add_captured();
                    return Ok(Some(buffer));
                }
                Err(error) if error.kind() == ErrorKind::TimedOut => {}
                // The machine has less than the budget: what is being written comes back.
                Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                    if !self.job.wait_for_buffer(SLICE) {
                        return Err(error.within("the state can't be captured"));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn fill(&self, chunk: Chunk, buffer: &mut [u8], gather: &mut Gather<'_>) -> Result<()> {
        let mut copies: Vec<(usize, DeviceBytes<'_>)> = Vec::new();
        for placed in self.shards[chunk.shard].within(chunk.start, chunk.end) {
            let (start, end) = (placed.start.max(chunk.start), placed.end.min(chunk.end));
            let to = in_memory(start, end, chunk.start);
            match self.bytes[placed.tensor].part(in_memory(start, end, placed.start)) {
                Lent::Host(source) => buffer[to].copy_from_slice(source),
                Lent::Device(source) => copies.push((to.start, source)),
            }
        }
        if copies.is_empty() { Ok(()) } else { gather.copy_while(buffer, &copies, || ()) }
    }
}
