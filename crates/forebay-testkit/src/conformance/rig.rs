//! What the cases work with: an engine, files, memory, and a caller that sees transfers through.

#![expect(unsafe_code, reason = "submits transfers")]
#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_io::engine::gds::OpenChannel;
use forebay_io::engine::{
    ChannelNumber, Command, Completion, Engine, EngineFactory, EngineOptions, Transfer, WakeEvent,
};
use forebay_io::error::Result;

use super::Shape;
pub(super) use super::memory::Memory;
use super::memory::device;
use crate::random::Random;

/// What direct transfers in the suite are aligned to.
pub(super) const ALIGNMENT: usize = 4096;

/// How often a transfer is tried again before the suite takes it for stuck.
const ATTEMPTS_MAX: usize = 1000;

/// After so many ends at the same byte it is the end of the file.
const STOPS_AT_END: usize = 3;

/// How long the suite waits for something that happens in milliseconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// A transfer that the suite wants done.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) command: Command,
    pub(super) descriptor: RawFd,
    pub(super) buffered: bool,
    pub(super) uncached: bool,
    pub(super) offset: u64,
    pub(super) memory: Rc<Memory>,
    /// Where in the memory it begins.
    pub(super) start: usize,
    pub(super) length: usize,
    pub(super) file_slot: Option<u32>,
    pub(super) buffer_slot: Option<u16>,
    /// The channel of the file with this descriptor, if the memory is a device's.
    channel: Option<(RawFd, ChannelNumber)>,
}

impl Job {
    /// Moves all of `memory` at `offset` of `file`.
    pub(super) fn new(command: Command, file: &TestFile, offset: u64, memory: &Rc<Memory>) -> Self {
        Self {
            command,
            descriptor: file.file.as_raw_fd(),
            buffered: !file.direct,
            uncached: false,
            offset,
            memory: Rc::clone(memory),
            start: 0,
            length: memory.len(),
            file_slot: None,
            buffer_slot: None,
            channel: file.channel.as_ref().map(|open| (file.file.as_raw_fd(), open.number())),
        }
    }

    /// What is left of it after `done` bytes.
    fn transfer(&self, token: u64, done: usize) -> Transfer {
        Transfer {
            token,
            command: self.command,
            descriptor: self.descriptor,
            file_slot: self.file_slot,
            buffer_slot: self.buffer_slot,
            channel: self.channel.filter(|(of, _)| *of == self.descriptor).map(|(_, it)| it),
            buffered: self.buffered,
            uncached: self.uncached,
            offset: self.offset.saturating_add(done as u64),
            address: self.memory.address(self.start + done),
            length: self.length - done,
        }
    }

    fn moves(&self) -> bool {
        matches!(self.command, Command::Read | Command::Write)
    }
}

/// A file of the suite's, open for direct or for buffered transfers.
#[derive(Debug)]
pub(super) struct TestFile {
    // Before the file, whose descriptor it uses.
    channel: Option<OpenChannel>,
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) direct: bool,
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// How far a job has come.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Bytes from which the next attempt goes on.
    done: usize,
    /// The most bytes seen moved.
    reached: usize,
    /// How often in a row a transfer ended at exactly `reached` bytes, short of the end.
    stops: usize,
    attempts: usize,
}

/// An engine under test, and what its transfers use. The engine is dropped first.
#[derive(Debug)]
pub(super) struct Rig<'a> {
    pub(super) engine: Box<dyn Engine>,
    pub(super) factory: &'a dyn EngineFactory,
    pub(super) options: EngineOptions,
    pub(super) wake: Arc<WakeEvent>,
    pub(super) random: Random,
    directory: &'a Path,
    kept: Vec<Rc<Memory>>,
    bound: Vec<Rc<Memory>>,
}

impl<'a> Rig<'a> {
    pub(super) fn new(
        factory: &'a dyn EngineFactory,
        directory: &'a Path,
        shape: Shape,
    ) -> Result<Self> {
        let wake = Arc::new(WakeEvent::new()?);
        let options = EngineOptions {
            queue_depth: shape.queue_depth,
            wake: Arc::clone(&wake),
            single_submit: shape.single_submit,
            sqpoll: shape.sqpoll,
            iopoll: shape.iopoll,
            channels: device().map(|device| device.channels()),
        };
        let engine = factory.build(&options)?;
        let random = Random::new(0x5eed);
        Ok(Self {
            engine,
            factory,
            options,
            wake,
            random,
            directory,
            kept: Vec::new(),
            bound: Vec::new(),
        })
    }

    /// A new file that holds `bytes`, open for reading and writing.
    pub(super) fn file(&self, bytes: &[u8], direct: bool) -> TestFile {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("{}-{number}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        // Device memory goes no other way.
        let mut file = open(&path, direct || device().is_some());
        file.channel = device().map(|device| device.open(&file.file));
        file
    }

    /// `length` bytes that nothing else holds.
    pub(super) fn noise(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.random.fill(&mut bytes);
        bytes
    }

    /// Keeps memory for longer than the engine lives.
    pub(super) fn keep(&mut self, memory: &Rc<Memory>) {
        self.bound.push(Rc::clone(memory));
    }

    /// Lets the memory of transfers go. None may be in flight.
    pub(super) fn forget_memory(&mut self) {
        assert_eq!(self.engine.in_flight(), 0);
        self.kept.clear();
    }

    /// Submits one attempt as it is; `false` if the engine is full.
    pub(super) fn submit_raw(&mut self, job: &Job, token: u64) -> bool {
        self.submit_batch(std::slice::from_ref(job), token) == 1
    }

    /// Submits the jobs in one batch, with tokens from `token` on; how many were accepted.
    pub(super) fn submit_batch(&mut self, jobs: &[Job], token: u64) -> usize {
        let tokens = (0..).map(|index: u64| token.wrapping_add(index));
        let transfers: Vec<_> =
            jobs.iter().zip(tokens).map(|(job, token)| job.transfer(token, 0)).collect();
        self.kept.extend(jobs.iter().map(|job| Rc::clone(&job.memory)));
        let accepted = self.hand_over(&transfers, false);
        assert!(accepted <= transfers.len());
        accepted
    }

    /// Hands the first attempts of all jobs to an engine that may wait with them until it is
    /// reaped, which it never is.
    pub(super) fn submit_for_later(&mut self, jobs: &[Job]) -> usize {
        let transfers: Vec<_> =
            jobs.iter().zip(0..).map(|(job, token)| job.transfer(token, 0)).collect();
        self.kept.extend(jobs.iter().map(|job| Rc::clone(&job.memory)));
        self.hand_over(&transfers, true)
    }

    /// `kept` must hold the memory of the transfers.
    fn hand_over(&mut self, transfers: &[Transfer], reap_next: bool) -> usize {
        if reap_next {
            // SAFETY: `kept` holds the memory for longer than the engine lives; descriptors are
            // those of files that the case keeps, or meant to be wrong.
            unsafe { self.engine.submit_and_reap_next(transfers) }.unwrap()
        } else {
            // SAFETY: as above.
            unsafe { self.engine.submit(transfers) }.unwrap()
        }
    }

    /// Reaps until `count` completions have come.
    pub(super) fn reap_count(&mut self, count: usize) -> Vec<Completion> {
        let begin = Instant::now();
        let mut completions = Vec::new();
        while completions.len() < count {
            assert!(begin.elapsed() < PATIENCE, "{} of {count} completed", completions.len());
            self.engine.reap(Some(Duration::from_secs(1)), &mut completions).unwrap();
        }
        assert_eq!(completions.len(), count, "more completions than transfers");
        completions
    }

    /// Sees every job through as a careful caller does: goes on after short transfers, tries again
    /// what was interrupted. For each, the bytes moved or the `errno` that ended it.
    pub(super) fn drive(&mut self, jobs: &[Job]) -> Vec<std::result::Result<usize, i32>> {
        let begin = Instant::now();
        let first_token = self.random.next_u64();
        let mut states = vec![State::default(); jobs.len()];
        let mut outcomes = vec![None; jobs.len()];
        let mut waiting: Vec<usize> = (0..jobs.len()).rev().collect();
        let mut flying: HashMap<u64, usize> = HashMap::new();
        let mut next_token = first_token;
        self.kept.extend(jobs.iter().map(|job| Rc::clone(&job.memory)));
        while !(waiting.is_empty() && flying.is_empty()) {
            assert!(begin.elapsed() < PATIENCE, "stuck: {flying:?} of {jobs:?}");
            let batch: Vec<_> = waiting.iter().rev().copied().collect();
            let transfers: Vec<_> = batch
                .iter()
                .zip(0u64..)
                .map(|(&index, n)| {
                    jobs[index].transfer(next_token.wrapping_add(n), states[index].done)
                })
                .collect();
            let reap_next = self.random.next_u64().is_multiple_of(2);
            let accepted = self.hand_over(&transfers, reap_next);
            for (transfer, &index) in transfers[..accepted].iter().zip(&batch) {
                assert_eq!(waiting.pop(), Some(index));
                assert_eq!(flying.insert(transfer.token, index), None);
                next_token = transfer.token.wrapping_add(1);
            }
            assert_eq!(self.engine.in_flight(), flying.len());
            if flying.is_empty() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let mut completions = Vec::new();
            self.engine.reap(None, &mut completions).unwrap();
            for completion in completions {
                let index = flying
                    .remove(&completion.token)
                    .unwrap_or_else(|| panic!("{completion:?} was completed twice or never asked"));
                outcomes[index] = judge(&jobs[index], &mut states[index], completion.result);
                if outcomes[index].is_none() {
                    waiting.push(index);
                }
            }
        }
        assert_eq!(self.engine.in_flight(), 0);
        outcomes.into_iter().map(|outcome| outcome.unwrap()).collect()
    }

    /// [`Self::drive`] for jobs that must move all their bytes.
    pub(super) fn drive_fully(&mut self, jobs: &[Job]) {
        for (outcome, job) in self.drive(jobs).into_iter().zip(jobs) {
            let wanted = if job.moves() { job.length } else { 0 };
            assert_eq!(outcome, Ok(wanted), "{job:?}");
        }
    }
}

/// What the result means: an outcome, or `None` if the job has to go on.
fn judge(job: &Job, state: &mut State, result: i64) -> Option<std::result::Result<usize, i32>> {
    state.attempts += 1;
    assert!(state.attempts < ATTEMPTS_MAX, "no progress: {job:?}");
    let Ok(moved) = usize::try_from(result) else {
        let code = i32::try_from(-result).unwrap();
        let again = matches!(code, libc::EINTR | libc::EAGAIN);
        return (!again).then_some(Err(code));
    };
    if !job.moves() {
        assert_eq!(moved, 0, "{:?} returned more than zero", job.command);
        return Some(Ok(0));
    }
    let end = state.done + moved;
    assert!(end <= job.length, "more bytes than asked for: {job:?}");
    if end == job.length || moved == 0 {
        return Some(Ok(end.max(state.reached)));
    }
    // A direct transfer that ends between alignments is tried again from before there. At the end
    // of a file it ends at the same byte each time, one that is cut short at another.
    state.stops = if end == state.reached { state.stops + 1 } else { 1 };
    if state.stops == STOPS_AT_END {
        return Some(Ok(end));
    }
    state.reached = state.reached.max(end);
    // A direct transfer can only go on from where it is aligned.
    state.done = if job.buffered { end } else { end - end % ALIGNMENT };
    None
}

/// Opens it for reading and writing. Falls back to buffered where `O_DIRECT` is refused.
fn open(path: &Path, direct: bool) -> TestFile {
    let try_open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    let path = path.to_path_buf();
    match try_open(if direct { libc::O_DIRECT } else { 0 }) {
        Ok(file) => TestFile { channel: None, file, path, direct },
        Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
            TestFile { channel: None, file: try_open(0).unwrap(), path, direct: false }
        }
        Err(error) => panic!("cannot open {}: {error}", path.display()),
    }
}
