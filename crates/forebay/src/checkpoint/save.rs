//! The checkpointer: a directory, its options, and saves into it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use forebay_io::memory::ALIGNMENT_DEFAULT;
use forebay_io::{
    Durability, Error, ErrorKind, Handle, Lent, Options, Pool, PoolOptions, Result, Tunings,
};

use super::capture::{Capture, Captured, SLICE};
use super::code;
use super::job::{Job, Ticket};
use super::layout::{ShardLayout, TensorSpec, chunks, lay_out};
use super::leftovers::{self, Claim};
use super::name::STEP_MAX;
use super::options::{CheckpointOptions, OnBusy, chunk_bytes};
use super::publish::{self, Publish};
use super::queue::{Entry, Queue};
use super::read::Reader;
use super::storage::{FileSystem, Storage};
use super::write::{Write, sync_directory};

/// Chunks that are copied ahead of the writers for a caller who waits for them: enough for the
/// threads of both.
const CHUNKS_AHEAD: usize = 8;
/// The least that memory is mapped by.
const PAGE_BYTES: usize = 4096;

/// A state to save: its tensors, and everything else as text of which only its owner knows what it
/// means.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// What the tensors are; no two have one name.
    pub tensors: &'a [TensorSpec],
    /// The bytes of each of them.
    pub bytes: &'a [Lent<'a>],
    /// What isn't tensors: the content of `state.json`.
    pub rest: &'a [u8],
}

/// What the caller of a save does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    /// It goes on: it is kept for as short as can be. Nothing is written before the state has been
    /// captured, if that fits the budget, and memory for all of it is there the next time.
    GoesOn,
    /// It waits: writing begins at once, after the saves before it, whatever the policy is.
    Waits,
}

/// Saves states into a directory, and finds them there. See the [module documentation](super).
///
/// It can be used from several threads at once, and any number of processes can save into one
/// directory. Dropping it waits for what is under way.
///
/// # Examples
///
/// ```
/// use forebay::checkpoint::{CheckpointOptions, Checkpointer, Meanwhile, State, TensorSpec};
/// use forebay::io::Lent;
/// use forebay::safetensors::{Dtype, Stop};
///
/// let directory = tempfile::tempdir()?;
/// let checkpointer = Checkpointer::open(directory.path(), CheckpointOptions::default())?;
/// let weights = [1, 2, 3, 4, 5];
/// let name = "weights".to_owned();
/// let tensors = [TensorSpec { name, dtype: Dtype::U8, shape: vec![5] }];
/// let state = State { tensors: &tensors, bytes: &[Lent::Host(&weights)], rest: b"{}" };
/// if let Some(ticket) = checkpointer.save(42, state, Meanwhile::GoesOn, &mut || Ok(()))? {
///     ticket.wait()?;
/// }
/// let reader = checkpointer.reader(None, true)?;
/// let shard = reader.load_shard(checkpointer.handle(), 0, &Stop::default())?;
/// let tensor = &reader.manifest().tensors[0];
/// assert_eq!(shard.as_slice()[tensor.start as usize..tensor.end as usize], weights);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpointer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    directory: PathBuf,
    options: CheckpointOptions,
    storage: Arc<dyn Storage>,
    handle: Handle,
    pool: Arc<Pool>,
    chunk_bytes: u64,
    queue: Queue,
    process: u32,
}

/// One save, by its writer's thread.
struct Writer {
    shared: Arc<Shared>,
    job: Arc<Job>,
    claim: Claim,
    tensors: Vec<TensorSpec>,
    shards: Arc<Vec<ShardLayout>>,
    state: Vec<u8>,
    meanwhile: Meanwhile,
    _obituary: Obituary,
}

impl Checkpointer {
    /// Opens a directory, which is made if it isn't there, and removes what dead writers have left
    /// in it.
    ///
    /// # Errors
    ///
    /// Options out of bounds; a directory that can't be made or listed.
    pub fn open(directory: impl AsRef<Path>, options: CheckpointOptions) -> Result<Self> {
        Self::open_tuned(directory, options, None)
    }

    /// As [`Self::open`], with the options that tuning found for drives.
    ///
    /// # Errors
    ///
    /// As for [`Self::open`].
    pub fn open_tuned(
        directory: impl AsRef<Path>,
        options: CheckpointOptions,
        tunings: Option<Arc<dyn Tunings>>,
    ) -> Result<Self> {
        options.validate()?;
        let handle = Handle::new(Options { tunings, ..Options::default() })?;
        Self::with(directory, options, Arc::new(FileSystem), handle)
    }

    /// As [`Self::open`], with what moves the bytes and changes directories: for tests.
    ///
    /// # Errors
    ///
    /// As for [`Self::open`].
    pub fn with(
        directory: impl AsRef<Path>,
        options: CheckpointOptions,
        storage: Arc<dyn Storage>,
        handle: Handle,
    ) -> Result<Self> {
        options.validate()?;
        let given = directory.as_ref();
        let directory = std::path::absolute(given)
            .map_err(|error| Error::from_io(error, "cannot use the directory").path(given))?;
        make_directory(&*storage, options.durability, &directory)?;
        // What can't be removed, as on a file system that is mounted read-only, can still be read.
        let cleaned = leftovers::clean(&*storage, &directory);
        if cleaned.is_err() {
            publish::steps(&directory)?;
        }
        let budget = options.budget();
        let pool_options = PoolOptions {
            budget_bytes: Some(budget),
            retain_bytes: budget,
            ..PoolOptions::default()
        };
        let pool = Pool::new(pool_options);
        let shared = Shared {
            handle,
            directory,
            options,
            storage,
            pool,
            chunk_bytes: chunk_bytes(budget),
            queue: Queue::default(),
            process: std::process::id(),
        };
        Ok(Self(Arc::new(shared)))
    }

    /// Saves a state. Returns when it has been captured: it may change then. `None` where nothing
    /// was saved, since enough saves are under way and [`OnBusy::Skip`] holds.
    ///
    /// A checkpoint of the same step is replaced in one moment. `poll` is called now and then while
    /// the caller is kept; its error ends the save.
    ///
    /// # Errors
    ///
    /// The failure of an earlier save that nobody has heard of; a state that can't be saved as it
    /// is; memory that can't be had; what the system says; what `poll` says.
    pub fn save(
        &self,
        step: u64,
        state: State<'_>,
        meanwhile: Meanwhile,
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Ticket>> {
        let shared = &self.0;
        shared.refuse_child()?;
        if step > STEP_MAX {
            let text = format!("step {step} is out of range, which ends at {STEP_MAX}");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        check_lengths(&state)?;
        shared.queue.take_failure().map_or(Ok(()), Err)?;
        let job = Job::new(step, Instant::now());
        let on_busy = match meanwhile {
            Meanwhile::GoesOn => shared.options.on_busy,
            // Who waits for this save anyway waits for those before it.
            Meanwhile::Waits => OnBusy::Wait,
        };
        if !shared.enter(&job, on_busy, poll)? {
            return Ok(None);
        }
        let obituary = Obituary(Arc::clone(shared), Arc::clone(&job));
        // What was waited for may have failed.
        let begun = match shared.queue.take_failure() {
            Some(error) => {
                drop(obituary);
                Err(error)
            }
            None => shared.begin(obituary, &state, meanwhile, poll),
        };
        if let Err(error) = begun {
            // The caller hears of it here.
            let _ = job.take_unheard();
            return Err(error);
        }
        job.captured();
        Ok(Some(Ticket(job)))
    }

    /// Waits until no save is under way, for at most so long; whether that is so.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        self.0.process != std::process::id() || self.0.queue.wait_below(1, timeout)
    }

    /// The oldest failure that nobody has heard of.
    pub fn take_failure(&self) -> Option<Error> {
        self.0.queue.take_failure()
    }

    /// Opens the checkpoint of a step, or the newest one. Saves under way aren't waited for.
    ///
    /// # Errors
    ///
    /// As for [`Reader::open`].
    pub fn reader(&self, step: Option<u64>, verify: bool) -> Result<Reader> {
        Reader::open(&self.0.directory, step, verify)
    }

    /// The steps of which there is a checkpoint, in the order of their numbers.
    ///
    /// # Errors
    ///
    /// The directory can't be listed.
    pub fn steps(&self) -> Result<Vec<u64>> {
        publish::steps(&self.0.directory)
    }

    /// The step that was saved last; where that isn't known, the one with the highest number.
    ///
    /// # Errors
    ///
    /// The directory can't be listed.
    pub fn latest(&self) -> Result<Option<u64>> {
        publish::newest(&self.0.directory)
    }

    /// Where the checkpoints are, as an absolute path.
    pub fn directory(&self) -> &Path {
        &self.0.directory
    }

    /// What moves the bytes.
    pub fn handle(&self) -> &Handle {
        &self.0.handle
    }

    /// Where captured states are.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.0.pool
    }

    /// Lets go of the memory that is kept for the next save.
    pub fn trim(&self) -> usize {
        self.0.pool.trim()
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        while !self.wait_idle(Duration::MAX) {}
    }
}

impl Shared {
    fn refuse_child(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let text = "the checkpointer belongs to the process that this one was forked from";
        Err(Error::new(ErrorKind::Closed, text).hint("make one in this process"))
    }

    /// Has memory for a whole state be mapped and touched, as far as the budget goes: a capture that
    /// got chunks back while it went on has taken less.
    fn warm(&self, shards: &[ShardLayout]) {
        let chunks = chunks(shards, self.chunk_bytes);
        let total: u64 = chunks.iter().map(|chunk| chunk.end - chunk.start).sum();
        let budget = self.pool.options().budget_bytes.unwrap_or(usize::MAX) as u64;
        let most = total.min(budget.saturating_sub(self.chunk_bytes));
        if self.pool.stats().mapped_bytes as u64 >= most {
            return;
        }
        let mut held = Vec::new();
        for chunk in chunks {
            let length = usize::try_from(chunk.end - chunk.start).unwrap_or(usize::MAX);
            let Ok(mut buffer) = self.pool.allocate(length, ALIGNMENT_DEFAULT) else { return };
            for page in buffer.as_mut_slice().chunks_mut(PAGE_BYTES) {
                page[0] = 0;
            }
            held.push(buffer);
        }
    }

    /// Gets a place among the saves under way, by the policy; `false` if there is none.
    fn enter(
        &self,
        job: &Arc<Job>,
        on_busy: OnBusy,
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<bool> {
        let most = self.options.in_flight;
        loop {
            let busy = match self.queue.enter(job, most) {
                Entry::Begun => return Ok(true),
                Entry::Soon => Vec::new(),
                Entry::Busy(steps) => steps,
            };
            if busy.is_empty() || on_busy == OnBusy::Wait {
                self.queue.wait_below(most, SLICE);
                poll()?;
            } else if on_busy == OnBusy::Skip {
                return Ok(false);
            } else {
                let steps: Vec<String> = busy.iter().map(u64::to_string).collect();
                let (step, steps) = (job.step, steps.join(", "));
                let text = format!("step {step} isn't saved while {steps} is under way");
                return Err(Error::from_os(code::EBUSY, text)
                    .hint("wait for it, or choose on_busy=\"wait\" or \"skip\""));
            }
        }
    }

    /// Starts the writer and captures the state.
    fn begin(
        self: &Arc<Self>,
        obituary: Obituary,
        state: &State<'_>,
        meanwhile: Meanwhile,
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let job = &Arc::clone(&obituary.1);
        let naming = |error: Error| error.within(format!("step {} wasn't saved", job.step));
        let shards = lay_out(state.tensors, self.options.shard_bytes).map_err(naming)?;
        let shards = Arc::new(shards);
        let claim = Claim::new(&*self.storage, &self.directory, job.step).map_err(naming)?;
        let writer = Writer {
            shared: Arc::clone(self),
            job: Arc::clone(job),
            claim,
            tensors: state.tensors.to_vec(),
            shards: Arc::clone(&shards),
            state: state.rest.to_vec(),
            meanwhile,
            _obituary: obituary,
        };
        if meanwhile == Meanwhile::Waits {
            job.begin_writing();
        }
        let (sender, receiver) = channel();
        if let Err(error) = writer.write().begin() {
            writer.claim.release(&*self.storage);
            return Err(naming(error));
        }
        let thread = thread::Builder::new().name("forebay-save".to_owned());
        if let Err(error) = thread.spawn(move || writer.run(receiver)) {
            // What was begun for it is nobody's now.
            let _ = leftovers::clean(&*self.storage, &self.directory);
            return Err(naming(Error::from_io(error, "cannot start a thread")));
        }
        let chunks = chunks(&shards, self.chunk_bytes);
        let capture = Capture {
            job,
            handle: &self.handle,
            pool: &self.pool,
            shards: &shards,
            chunks: &chunks,
            bytes: state.bytes,
            ahead_max: (meanwhile == Meanwhile::Waits).then_some(CHUNKS_AHEAD),
        };
        let captured = capture.run(sender, poll);
        if captured.is_ok() && !job.is_cancelled() {
            return Ok(());
        }
        // The writer gives up, cleans up, and says what it met if it was the first to fail.
        job.cancel();
        job.wait_done(None);
        captured.map_err(naming)?;
        job.take_unheard().map_or(Ok(()), Err)
    }
}

impl Writer {
    fn write(&self) -> Write<'_> {
        Write {
            job: &self.job,
            storage: &*self.shared.storage,
            handle: &self.shared.handle,
            durability: self.shared.options.durability,
            claim: &self.claim,
            tensors: &self.tensors,
            shards: &self.shards,
            state: &self.state,
        }
    }

    /// The writer's thread: what is captured, then everything else.
    fn run(self, captured: Receiver<Captured>) {
        let publish = Publish {
            storage: &*self.shared.storage,
            directory: &self.shared.directory,
            durability: self.shared.options.durability,
            keep: self.shared.options.keep,
        };
        let step = self.job.step;
        let saved = self.write().run(captured).and_then(|()| {
            self.shared.queue.wait_for_turn(&self.job);
            publish.run(&self.claim, step)
        });
        let outcome = match saved {
            Ok(()) => publish.remove_old(step).map_err(|error| {
                error.within(format!("step {step} is saved, but an older one isn't removed"))
            }),
            Err(error) => Err(error.within(format!("step {step} wasn't saved"))),
        };
        self.claim.release(&*self.shared.storage);
        if outcome.is_ok() && self.meanwhile == Meanwhile::GoesOn {
            self.job.finish(Ok(()));
            self.shared.warm(&self.shards);
        }
        self.shared.queue.leave(&self.job, outcome);
    }
}

/// Has a save end, whatever becomes of those who work on it.
struct Obituary(Arc<Shared>, Arc<Job>);

impl Drop for Obituary {
    fn drop(&mut self) {
        self.0.queue.bury(&self.1);
    }
}

/// Refuses bytes that aren't what the tensors are said to have.
fn check_lengths(state: &State<'_>) -> Result<()> {
    if state.tensors.len() != state.bytes.len() {
        let text = format!("{} tensors with {} bytes", state.tensors.len(), state.bytes.len());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    for (tensor, bytes) in state.tensors.iter().zip(state.bytes) {
        let wanted = tensor.dtype.bytes_of(&tensor.shape)?;
        if wanted != bytes.len() as u64 {
            let (name, found) = (&tensor.name, bytes.len());
            let text = format!("tensor {name:?} takes {wanted} bytes and has {found}");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    }
    Ok(())
}

/// Makes a directory and those above it, durable if that is asked for.
fn make_directory(storage: &dyn Storage, durability: Durability, path: &Path) -> Result<()> {
    let failed = |error| Error::from_io(error, "cannot make the directory").path(path);
    if fs::metadata(path).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(());
    }
    let Some(parent) = path.parent() else {
        return Err(failed(io::ErrorKind::NotFound.into()));
    };
    make_directory(storage, durability, parent)?;
    match storage.create_directory(path) {
        Ok(()) => sync_directory(storage, durability, parent),
        // Another process was faster, unless it is no directory.
        Err(_) if fs::metadata(path).is_ok_and(|metadata| metadata.is_dir()) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}
