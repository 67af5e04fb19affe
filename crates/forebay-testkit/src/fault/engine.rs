//! The engine that carries a plan out, and its factory.

#![expect(unsafe_code, reason = "passes the promises of `Engine::submit` on; cuts transfers short")]

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_io::engine::{
    Capabilities, Command, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Fallback,
    Transfer,
};
use forebay_io::error::Result;

use super::plan::{Cut, Fault, FaultPlan};
use crate::random::Random;

/// What a direct transfer can be cut at: no drive or file system here asks for more.
const CUT_ALIGNMENT: usize = 4096;

/// What the engines of a factory have done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Transfers accepted, those that were made to fail included.
    pub transfers: u64,
    /// Reads accepted.
    pub reads: u64,
    /// Writes accepted.
    pub writes: u64,
    /// Transfers made to fail or cut short.
    pub injected: u64,
    /// Completions held back.
    pub late: u64,
    /// Submissions that met a full queue.
    pub full: u64,
}

#[derive(Debug)]
struct Shared {
    plan: FaultPlan,
    progress: Mutex<Progress>,
    /// Held from looking at a transfer's number to counting it, so that engines of one factory
    /// never give two transfers the same one.
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Progress {
    counts: Counts,
    /// Transfers so far in the scope of each rule.
    seen: Vec<u64>,
    submissions: u64,
    random: Random,
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to happen to the transfer if it is accepted next.
    fn fault_for(&self, transfer: &Transfer) -> Option<Fault> {
        let progress = self.progress();
        let rules = self.plan.rules.iter().zip(&progress.seen);
        let mut hits = rules.filter(|(rule, seen)| {
            rule.scope.holds(transfer) && rule.hits(**seen + 1, self.plan.seed)
        });
        hits.next().map(|(rule, _)| rule.fault)
    }

    /// Counts the transfer, which has been accepted.
    fn count(&self, transfer: &Transfer, injected: bool) {
        let mut progress = self.progress();
        for (rule, seen) in self.plan.rules.iter().zip(&mut progress.seen) {
            *seen += u64::from(rule.scope.holds(transfer));
        }
        let counts = &mut progress.counts;
        counts.transfers += 1;
        counts.reads += u64::from(transfer.command == Command::Read);
        counts.writes += u64::from(transfer.command == Command::Write);
        counts.injected += u64::from(injected);
    }

    /// Counts a submission; `true` if the plan has it meet a full queue.
    fn submission_is_full(&self) -> bool {
        let mut progress = self.progress();
        let number = progress.submissions;
        progress.submissions += 1;
        let full = self.plan.full.is_some_and(|(every, full)| number % every >= every - full);
        progress.counts.full += u64::from(full);
        full
    }

    /// For how long a completion is held back.
    fn delay(&self) -> Option<Duration> {
        let (one_in, longest) = self.plan.late?;
        let mut progress = self.progress();
        if !progress.random.one_in(one_in) {
            return None;
        }
        progress.counts.late += 1;
        let longest_us = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX).max(1);
        Some(Duration::from_micros(progress.random.below(longest_us)))
    }
}

/// An engine that fails as planned. See the [module documentation](super).
#[derive(Debug)]
pub struct FaultEngine {
    inner: Box<dyn Engine>,
    shared: Arc<Shared>,
    /// Completions of transfers that never went to the wrapped engine.
    made_up: Vec<Completion>,
    /// Completions held back, each until its time.
    late: Vec<(Instant, Completion)>,
}

impl FaultEngine {
    /// Accepts one transfer, if the wrapped engine does.
    fn submit_one(&mut self, transfer: &Transfer) -> Result<bool> {
        let fault = self.shared.fault_for(transfer);
        let result = match fault {
            None => return self.pass_on(transfer, false),
            Some(Fault::Error(code)) => -i64::from(code),
            Some(Fault::Zero) => 0,
            Some(Fault::Short(cut)) => {
                let Some(length) = cut_length(transfer, cut, &self.shared) else {
                    return self.pass_on(transfer, false);
                };
                let moves_any = transfer.buffered || transfer.channel.is_some();
                if cut == Cut::Aligned || moves_any {
                    return self.pass_on(&Transfer { length, ..*transfer }, true);
                }
                let Some(file) = reopen_buffered(transfer) else {
                    return self.pass_on(transfer, false);
                };
                move_ragged(transfer, &file, length)
            }
        };
        self.shared.count(transfer, true);
        self.made_up.push(Completion { token: transfer.token, result });
        Ok(true)
    }

    fn pass_on(&mut self, transfer: &Transfer, injected: bool) -> Result<bool> {
        // SAFETY: the caller's promise of `Engine::submit`, passed on for the same memory or less.
        let accepted = unsafe { self.inner.submit(&[*transfer]) }? == 1;
        if accepted {
            self.shared.count(transfer, injected);
        }
        Ok(accepted)
    }

    /// Hands out what has come and isn't to be late, and what was late long enough.
    fn release(&mut self, fresh: Vec<Completion>, completions: &mut Vec<Completion>) {
        let first = completions.len();
        let now = Instant::now();
        for completion in self.made_up.drain(..).chain(fresh) {
            match self.shared.delay() {
                Some(delay) => self.late.push((now + delay, completion)),
                None => completions.push(completion),
            }
        }
        self.late.retain(|(due, completion)| {
            let wait = *due > now;
            if !wait {
                completions.push(*completion);
            }
            wait
        });
        if self.shared.plan.reordered {
            self.shared.progress().random.shuffle(&mut completions[first..]);
        }
    }
}

impl Engine for FaultEngine {
    fn kind(&self) -> EngineKind {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.made_up.len() + self.late.len()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        let in_flight = self.in_flight();
        let mut room = transfers.len().min(self.depth().saturating_sub(in_flight));
        if room > 0 && self.shared.submission_is_full() {
            room = usize::from(in_flight == 0);
        }
        let shared = Arc::clone(&self.shared);
        for (index, transfer) in transfers[..room].iter().enumerate() {
            let _turn = shared.turn.lock().unwrap_or_else(PoisonError::into_inner);
            match self.submit_one(transfer) {
                Ok(true) => {}
                Err(error) if index == 0 => return Err(error),
                // The caller meets an error when it tries the rest again.
                Ok(false) | Err(_) => return Ok(index),
            }
        }
        Ok(room)
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        let now = Instant::now();
        let next_due = self.late.iter().map(|(due, _)| due.saturating_duration_since(now)).min();
        let next_due = if self.made_up.is_empty() { next_due } else { Some(Duration::ZERO) };
        let left = match (timeout, next_due) {
            (Some(timeout), Some(due)) => Some(timeout.min(due)),
            (timeout, due) => timeout.or(due),
        };
        let mut fresh = Vec::new();
        let reaped = self.inner.reap(left, &mut fresh);
        self.release(fresh, completions);
        reaped
    }

    unsafe fn bind_buffer(&mut self, address: *mut u8, length: usize) -> Result<Option<u16>> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.bind_buffer(address, length) }
    }

    fn unbind_buffer(&mut self, slot: u16) {
        self.inner.unbind_buffer(slot);
    }

    fn bind_file(&mut self, descriptor: RawFd) -> Option<u32> {
        self.inner.bind_file(descriptor)
    }

    fn unbind_file(&mut self, slot: u32) {
        self.inner.unbind_file(slot);
    }
}

/// How much of the transfer is done, or `None` if it can't be cut.
fn cut_length(transfer: &Transfer, cut: Cut, shared: &Shared) -> Option<usize> {
    let unit = match cut {
        Cut::Aligned => CUT_ALIGNMENT,
        Cut::Ragged => 1,
    };
    let moves = matches!(transfer.command, Command::Read | Command::Write);
    let pieces = transfer.length.checked_sub(1).filter(|_| moves)? / unit;
    (pieces > 0).then(|| unit * (1 + shared.progress().random.index(pieces)))
}

/// The file of a direct transfer, open for the page cache: a direct descriptor would refuse lengths
/// that aren't aligned. `None` if the descriptor is of no use for the transfer anyway.
fn reopen_buffered(transfer: &Transfer) -> Option<File> {
    let reads = transfer.command == Command::Read;
    // SAFETY: it takes numbers only.
    let flags = unsafe { libc::fcntl(transfer.descriptor, libc::F_GETFL) };
    let refused = if reads { libc::O_WRONLY } else { libc::O_RDONLY };
    if flags < 0 || flags & libc::O_ACCMODE == refused {
        return None;
    }
    let path = format!("/proc/self/fd/{}", transfer.descriptor);
    OpenOptions::new().read(reads).write(!reads).open(path).ok()
}

/// Moves the first `length` bytes of a transfer by way of `file`.
fn move_ragged(transfer: &Transfer, file: &File, length: usize) -> i64 {
    let (fd, address) = (file.as_raw_fd(), transfer.address.cast::<libc::c_void>());
    let offset = libc::off_t::try_from(transfer.offset).unwrap_or(-1);
    let moved = if transfer.command == Command::Read {
        // SAFETY: the memory is valid for the whole transfer (`Engine::submit`).
        unsafe { libc::pread(fd, address, length, offset) }
    } else {
        // SAFETY: as above.
        unsafe { libc::pwrite(fd, address, length, offset) }
    };
    if moved < 0 {
        -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    } else {
        moved as i64
    }
}

/// Builds engines that carry one plan out together. Prints the plan if dropped by a failing test.
#[derive(Debug)]
pub struct FaultFactory {
    inner: Arc<dyn EngineFactory>,
    shared: Arc<Shared>,
}

impl FaultFactory {
    /// Has the engines that `inner` builds fail as planned.
    pub fn new(inner: Arc<dyn EngineFactory>, plan: FaultPlan) -> Self {
        let progress = Progress {
            counts: Counts::default(),
            seen: vec![0; plan.rules.len()],
            submissions: 0,
            random: Random::new(plan.seed),
        };
        Self {
            inner,
            shared: Arc::new(Shared {
                plan,
                progress: Mutex::new(progress),
                turn: Mutex::default(),
            }),
        }
    }

    /// What its engines have done so far.
    pub fn counts(&self) -> Counts {
        self.shared.progress().counts.clone()
    }
}

impl EngineFactory for FaultFactory {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        let inner = self.inner.build(options)?;
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(FaultEngine { inner, shared, made_up: Vec::new(), late: Vec::new() }))
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.inner.fallbacks()
    }
}

impl Drop for FaultFactory {
    #[expect(clippy::print_stderr, reason = "a failing test has to tell its seed")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("faults: {:?}, {:?}", self.shared.plan, self.counts());
        }
    }
}
