//! Operations: what a user waits for, and what workers take blocks from.
//!
//! An operation goes through phases: begin, reserve room, move blocks, cut to size, make durable,
//! commit (see [`crate::commit`]). Workers call
//! `Shared::take` for one `Unit` of work at a time and `Shared::complete` for each unit when
//! it is through; nothing is queued per block, so an operation of any size costs no memory. The
//! first error wins: no further unit is given out, and the operation finishes when the last one
//! out has come back.
//!
//! # Invariants
//!
//! - Memory, files and what [`Request::keep`](crate::Request) holds stay until the last unit is
//!   back; files are closed before anybody hears that the operation is done.
//! - An operation is in the scheduler's queue, or has units out, or is done.

mod sums;
mod ticket;
mod unit;

use std::any::Any;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::commit::Commit;
use crate::config::{Durability, Priority};
use crate::device::{Context, Event};
use crate::engine::WakeEvent;
use crate::error::{Error, ErrorKind, Result};
use crate::files::{FileKey, TensorFile};
use crate::memory::process;
use crate::order::Ending;
use crate::plan::{Direction, Geometry, Reach, Route, Span};
use crate::routes::GdsFile;
use crate::scheduler::Scheduler;
use crate::staging::BlockCounts;
use crate::tracker::Tracker;

pub(crate) use sums::{Sums, join};
pub use ticket::Operation;
pub(crate) use unit::{Take, Unit, Work};

/// Smallest growth of a file, in bytes, that is worth a call to reserve it: below it, the write
/// allocates as well as a reservation would.
pub(crate) const ALLOCATE_BYTES_MIN: u64 = 1 << 20;

/// A run of bytes of one file of the operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilePart {
    pub(crate) file: usize,
    pub(crate) span: Span,
    /// Index into [`Plan::devices`] if the span's address is in a device's memory.
    pub(crate) device: Option<usize>,
}

/// A device whose memory the operation uses.
#[derive(Clone, Debug)]
pub(crate) struct DeviceUse {
    pub(crate) context: Arc<Context>,
    /// What the caller's stream had to do before is over with this.
    pub(crate) start: Arc<Event>,
}

/// What all blocks of an operation have in common.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) direction: Direction,
    pub(crate) priority: Priority,
    pub(crate) durability: Durability,
    pub(crate) drop_behind: bool,
    /// A store that replaces all of each file.
    pub(crate) whole_file: bool,
    pub(crate) require_direct: bool,
    /// The checksums of the request's parts, if they are wanted. Every byte has to pass through the
    /// host's memory then: a route that goes around it is out of the question.
    pub(crate) sums: Option<Arc<Sums>>,
    pub(crate) block_bytes: usize,
    pub(crate) staged_block_bytes: usize,
    /// The same for memory of devices.
    pub(crate) device_block_bytes: usize,
    pub(crate) parts: Vec<FilePart>,
    pub(crate) devices: Vec<DeviceUse>,
    /// Long runs of files that a store covers: file, start, end.
    pub(crate) runs: Vec<(usize, u64, u64)>,
    pub(crate) commit: Option<Arc<dyn Commit>>,
}

/// Where an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Begin,
    Allocate,
    Transfer,
    Trim,
    Sync,
    SyncDirectory,
    Commit,
    Done,
}

/// How far a store has come with its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Milestone {
    Start,
    /// They hold all bytes, and no more than they should.
    Whole,
    /// They are as durable as was asked for, their names perhaps not yet.
    Durable,
    /// Every phase ran to its end.
    Everything,
}

#[derive(Debug)]
pub(crate) struct OpenedFile {
    /// What cuFile has of it, if it goes that way. Before the file, whose descriptor it uses.
    pub(crate) gds: Option<Arc<GdsFile>>,
    pub(crate) file: Arc<TensorFile>,
    /// Some of its pages were in the page cache when the operation began.
    pub(crate) maybe_cached: bool,
    /// Some of its old content has been overwritten.
    pub(crate) spoiled: bool,
    /// Its size before this operation made it longer.
    pub(crate) size_before: Option<u64>,
}

impl OpenedFile {
    pub(crate) fn new(file: TensorFile, maybe_cached: bool) -> Self {
        let file = Arc::new(file);
        Self { gds: None, file, maybe_cached, spoiled: false, size_before: None }
    }
}

#[derive(Debug)]
struct Progress {
    phase: Phase,
    /// Next part (in [`Phase::Transfer`]) or file (in the others) to give out.
    next: usize,
    /// Bytes of that part that were given out.
    position: usize,
    units_out: usize,
    queued: bool,
    reached: Milestone,
    files: Vec<OpenedFile>,
    error: Option<Error>,
}

#[derive(Debug, Default)]
struct Outcome {
    result: Option<Result<()>>,
    to_signal: Vec<Arc<WakeEvent>>,
}

/// The part of an operation that its ticket and the workers share.
pub(crate) struct Shared {
    pub(crate) id: u64,
    pub(crate) plan: Plan,
    process: u64,
    bytes_total: u64,
    bytes_done: AtomicU64,
    cancelled: AtomicBool,
    done: AtomicBool,
    /// Its result has been delivered to somebody.
    heard: AtomicBool,
    progress: Mutex<Progress>,
    outcome: Mutex<Outcome>,
    finished: Condvar,
    keep: Mutex<Option<Box<dyn Any + Send>>>,
    tracker: Arc<Tracker>,
    scheduler: Weak<Scheduler>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Operation")
            .field("id", &self.id)
            .field("direction", &self.plan.direction)
            .field("bytes_total", &self.bytes_total)
            .field("bytes_done", &self.bytes_done)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(
        plan: Plan,
        files: Vec<OpenedFile>,
        tracker: Arc<Tracker>,
        scheduler: &Arc<Scheduler>,
    ) -> Arc<Self> {
        let bytes_total = plan.parts.iter().map(|part| part.span.length as u64).sum();
        let progress = Progress {
            phase: Phase::Begin,
            next: 0,
            position: 0,
            units_out: 0,
            queued: true,
            reached: Milestone::Start,
            files,
            error: None,
        };
        Arc::new(Self {
            id: tracker.next_id(),
            plan,
            process: process::number(),
            bytes_total,
            bytes_done: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            done: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            progress: Mutex::new(progress),
            outcome: Mutex::default(),
            finished: Condvar::new(),
            keep: Mutex::default(),
            tracker,
            scheduler: Arc::downgrade(scheduler),
        })
    }

    /// Says that its result is delivered to somebody, and whether that is the first time.
    pub(crate) fn hear(&self) -> bool {
        !self.heard.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn bytes_total(&self) -> u64 {
        self.bytes_total
    }

    /// Whether it fails or was cancelled, so that nothing more needs to move.
    pub(crate) fn is_stopped(&self) -> bool {
        self.cancelled.load(Ordering::Acquire) || lock(&self.progress).error.is_some()
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.plan.direction {
            Direction::Load => "load",
            Direction::Store => "store",
        }
    }

    /// About how many blocks there are, for deciding how many workers to wake; at least one, to
    /// finish an operation that has nothing to move.
    pub(crate) fn block_count(&self) -> usize {
        let whole = self.bytes_total / self.plan.block_bytes.max(1) as u64;
        usize::try_from(whole).unwrap_or(usize::MAX).max(self.plan.parts.len()).max(1)
    }

    /// Gives out the next unit of work.
    pub(crate) fn take(self: &Arc<Self>, staging: BlockCounts) -> Take {
        let mut progress = lock(&self.progress);
        loop {
            let cancelled = self.cancelled.load(Ordering::Acquire);
            if progress.error.is_some() || (cancelled && self.has_blocks_left(&progress)) {
                progress.phase = Phase::Done;
            }
            match self.next_work(&mut progress, staging) {
                Ok(Some(work)) => {
                    progress.units_out += 1;
                    return Take::Unit(Unit { operation: Arc::clone(self), work });
                }
                Ok(None) if progress.units_out > 0 => {
                    progress.queued = false;
                    return Take::Nothing;
                }
                Ok(None) if progress.phase == Phase::Done => {
                    progress.queued = false;
                    return Take::Finish;
                }
                Ok(None) => {
                    let passed = self.milestone_after(progress.phase);
                    progress.reached = progress.reached.max(passed);
                    progress.phase = self.phase_after(progress.phase);
                    progress.next = 0;
                    progress.position = 0;
                }
                Err(NeedsStaging) => return Take::NeedsStaging,
            }
        }
    }

    /// A cancel that comes when every block is out already changes nothing.
    fn has_blocks_left(&self, progress: &Progress) -> bool {
        match progress.phase {
            Phase::Begin | Phase::Allocate => true,
            Phase::Transfer => progress.next < self.plan.parts.len(),
            Phase::Trim | Phase::Sync | Phase::SyncDirectory | Phase::Commit | Phase::Done => false,
        }
    }

    fn next_work(
        &self,
        progress: &mut Progress,
        staging: BlockCounts,
    ) -> Result<Option<Work>, NeedsStaging> {
        match progress.phase {
            Phase::Transfer => self.next_block(progress, staging),
            Phase::Done => Ok(None),
            Phase::Begin => Ok(self.next_commit(progress).map(Work::Begin)),
            Phase::Commit => Ok(self.next_commit(progress).map(Work::Commit)),
            Phase::Allocate => Ok(self.next_allocation(progress)),
            Phase::Trim => {
                let replaced = |file: &Arc<TensorFile>| file.is_replaced();
                Ok(next_file(progress, replaced).map(|file| Work::Trim { file }))
            }
            Phase::Sync => Ok(next_file(progress, |_| true).map(|file| Work::Sync {
                file,
                data_only: self.plan.durability != Durability::Full,
            })),
            Phase::SyncDirectory => {
                let named = |file: &Arc<TensorFile>| file.directory().is_some();
                Ok(next_file(progress, named).map(|file| Work::SyncDirectory { file }))
            }
        }
    }

    fn next_block(
        &self,
        progress: &mut Progress,
        staging: BlockCounts,
    ) -> Result<Option<Work>, NeedsStaging> {
        while let Some(part) = self.plan.parts.get(progress.next) {
            let opened = &mut progress.files[part.file];
            let granule = opened.file.offset_alignment;
            let on_device = part.device.is_some();
            let gds = opened.gds.as_ref();
            let by_gds = part
                .device
                .is_some_and(|device| gds.is_some_and(|gds| gds.channel(device).is_some()));
            let geometry = Geometry {
                offset_alignment: granule,
                memory_alignment: opened.file.memory_alignment,
                block_bytes: round_up(self.plan.block_bytes, granule),
                staged_block_bytes: if on_device {
                    self.plan.device_block_bytes
                } else {
                    self.plan.staged_block_bytes
                },
                direct: opened.file.is_direct(),
                reach: match part.device {
                    None => Reach::Kernel,
                    Some(_) if by_gds => Reach::Gds,
                    Some(_) => Reach::Copies,
                },
            };
            let block = part.span.block_at(&geometry, self.plan.direction, progress.position);
            let Some(block) = block else {
                progress.next += 1;
                progress.position = 0;
                continue;
            };
            let gds = gds.filter(|_| block.route == Route::Gds).map(Arc::clone);
            let staged = block.route == Route::Staged || (on_device && gds.is_none());
            if staged && staging.of(on_device) == 0 {
                return Err(NeedsStaging);
            }
            opened.spoiled = true;
            progress.position += block.length;
            return Ok(Some(Work::Move {
                file: Arc::clone(&opened.file),
                part: progress.next,
                span: part.span,
                block,
                device: part.device,
                gds,
                maybe_cached: opened.maybe_cached,
            }));
        }
        Ok(None)
    }

    /// Room is reserved where a store makes a file longer.
    fn next_allocation(&self, progress: &mut Progress) -> Option<Work> {
        while let Some((file, start, end)) = self.plan.runs.get(progress.next).copied() {
            progress.next += 1;
            let opened = &mut progress.files[file];
            let size = opened.file.current_size();
            let offset = start.max(size);
            let length = end.saturating_sub(offset);
            if opened.file.is_regular() && length >= ALLOCATE_BYTES_MIN {
                opened.size_before.get_or_insert(size);
                return Some(Work::Allocate { file: Arc::clone(&opened.file), offset, length });
            }
        }
        None
    }

    /// What is called once in a phase.
    fn next_commit(&self, progress: &mut Progress) -> Option<Arc<dyn Commit>> {
        let first = std::mem::replace(&mut progress.next, 1) == 0;
        self.plan.commit.clone().filter(|_| first)
    }

    fn phase_after(&self, phase: Phase) -> Phase {
        match phase {
            Phase::Begin if self.plan.direction == Direction::Store => Phase::Allocate,
            Phase::Begin | Phase::Allocate => Phase::Transfer,
            Phase::Transfer if self.plan.direction == Direction::Store => Phase::Trim,
            // Dirty pages can't be dropped: dropping behind a store needs its bytes on the drive.
            Phase::Trim if self.plan.durability != Durability::None || self.plan.drop_behind => {
                Phase::Sync
            }
            Phase::Sync if self.plan.durability == Durability::Full => Phase::SyncDirectory,
            Phase::Transfer | Phase::Trim | Phase::Sync | Phase::SyncDirectory => Phase::Commit,
            Phase::Commit | Phase::Done => Phase::Done,
        }
    }

    fn milestone_after(&self, phase: Phase) -> Milestone {
        match phase {
            _ if self.phase_after(phase) == Phase::Done => Milestone::Everything,
            Phase::Trim if self.plan.durability != Durability::None => Milestone::Whole,
            Phase::Trim | Phase::Sync => Milestone::Durable,
            _ => Milestone::Start,
        }
    }

    /// Takes back a unit. Returns whether the operation must be put into the queue again.
    fn complete(&self, result: Result<usize>) -> bool {
        let mut progress = lock(&self.progress);
        progress.units_out -= 1;
        match result {
            Ok(bytes) => {
                self.bytes_done.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Err(error) => {
                progress.error.get_or_insert(error);
            }
        }
        let requeue = progress.units_out == 0 && !progress.queued;
        progress.queued |= requeue;
        requeue
    }

    /// Records an error that keeps the operation from going on, whatever is out.
    pub(crate) fn fail(&self, error: Error) {
        lock(&self.progress).error.get_or_insert(error);
    }

    /// Puts the files right, closes them, tells everybody who waits, and lets the stores begin that
    /// waited for this one.
    pub(crate) fn finish(self: &Arc<Self>) {
        let (files, result, ending) = {
            let mut progress = lock(&self.progress);
            let reached = progress.reached;
            let result = self.result(progress.error.take(), reached == Milestone::Everything);
            let ending = match reached {
                // Files that are one are none before all of it is done.
                Milestone::Whole | Milestone::Durable if self.plan.commit.is_some() => {
                    Ending::Halfway
                }
                Milestone::Start => Ending::Halfway,
                Milestone::Whole => Ending::Unsure,
                Milestone::Durable | Milestone::Everything => Ending::Stored,
            };
            (std::mem::take(&mut progress.files), result, ending)
        };
        for OpenedFile { file, .. } in &files {
            self.leave_page_cache(file);
        }
        let is_spoiled = files.iter().any(|opened| opened.spoiled);
        let abandon = || {
            if let (Some(commit), Err(_)) = (&self.plan.commit, &result) {
                commit.abandon(is_spoiled);
            }
        };
        let released = match self.plan.direction {
            Direction::Load => {
                abandon();
                Vec::new()
            }
            Direction::Store => self.tracker.order().leave(self, &files, ending, abandon),
        };
        drop(files);
        self.deliver(result);
        Self::release(released);
    }

    fn deliver(&self, result: Result<()>) {
        self.tracker.finished(self.id, result.as_ref().err());
        let to_signal = {
            let mut outcome = lock(&self.outcome);
            outcome.result = Some(result);
            self.done.store(true, Ordering::Release);
            std::mem::take(&mut outcome.to_signal)
        };
        self.finished.notify_all();
        for wake in to_signal {
            wake.signal();
        }
    }

    /// The files of a store; `None` for a load, which waits for nobody.
    pub(crate) fn stored_files(&self) -> Option<Vec<FileKey>> {
        let stored = || lock(&self.progress).files.iter().map(|opened| opened.file.key).collect();
        (self.plan.direction == Direction::Store).then(stored)
    }

    /// Whether the names that were asked for still name the files that were opened, or, if
    /// `any_name` will do, something does.
    pub(crate) fn is_current(&self, any_name: bool) -> bool {
        let current = |file: &TensorFile| file.is_current() || (any_name && file.is_named());
        lock(&self.progress).files.iter().all(|opened| current(&opened.file))
    }

    /// Closes the files of an operation that never began, removes those that it made, and returns
    /// what was to be kept alive.
    pub(crate) fn withdraw(&self) -> Option<Box<dyn Any + Send>> {
        for opened in std::mem::take(&mut lock(&self.progress).files) {
            self.tracker.order().discard(&opened.file);
        }
        lock(&self.keep).take()
    }

    /// Lets stores begin that waited for this one.
    fn release(operations: Vec<Arc<Self>>) {
        for operation in operations {
            if let Some(scheduler) = operation.scheduler.upgrade() {
                let workers = operation.block_count();
                scheduler.push(operation, workers);
            }
        }
    }

    /// Hands over what is to be kept alive until the last unit is back.
    pub(crate) fn keep(&self, keep: Option<Box<dyn Any + Send>>) {
        *lock(&self.keep) = keep;
    }

    /// Drops what must not stay in the page cache and can be dropped, being clean.
    fn leave_page_cache(&self, file: &TensorFile) {
        if !file.is_direct() {
            if self.plan.drop_behind {
                file.drop_cached(0, None);
            }
            return;
        }
        // The ragged ends of a store. Those that aren't durable yet were written so that the kernel
        // drops them when they are.
        let durable_store =
            self.plan.direction == Direction::Store && self.plan.durability != Durability::None;
        if let ([part], true) = (&self.plan.parts[..], durable_store) {
            let start = part.span.offset - part.span.offset % file.offset_alignment;
            let end = part.span.offset + part.span.length as u64;
            file.drop_cached(
                start,
                NonZeroU64::new(end.next_multiple_of(file.offset_alignment) - start),
            );
        }
    }

    fn result(&self, error: Option<Error>, complete: bool) -> Result<()> {
        let error = match error {
            Some(error) => error,
            // A cancel that came too late changes nothing.
            None if complete => return Ok(()),
            None => Error::new(ErrorKind::Cancelled, "the operation was cancelled"),
        };
        let done = self.bytes_done.load(Ordering::Relaxed);
        Err(error.operation(self.name()).bytes(self.bytes_total, done))
    }
}

/// The next block has to wait for a staging block.
struct NeedsStaging;

fn next_file(
    progress: &mut Progress,
    wanted: impl Fn(&Arc<TensorFile>) -> bool,
) -> Option<Arc<TensorFile>> {
    let rest = progress.files.get(progress.next..)?;
    let found = rest.iter().position(|opened| wanted(&opened.file));
    progress.next += found.map_or(rest.len(), |index| index + 1);
    found.map(|_| Arc::clone(&progress.files[progress.next - 1].file))
}

fn round_up(bytes: usize, granule: u64) -> usize {
    bytes.next_multiple_of(usize::try_from(granule).unwrap_or(1))
}
