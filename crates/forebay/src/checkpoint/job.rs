//! One save under way: what its writer, its caller and those who wait for it know of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_io::engine::WakeEvent;
use forebay_io::{Error, Result};

/// A save: waited for through a [`Ticket`].
#[derive(Debug)]
pub(super) struct Job {
    pub(super) step: u64,
    started: Instant,
    state: Mutex<State>,
    changed: Condvar,
    /// The caller was interrupted while the state was captured.
    is_cancelled: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Result<()>>,
    /// The failure has been told to somebody.
    is_heard: bool,
    blocked: Duration,
    total: Duration,
    /// Buffers of captured bytes that aren't written yet.
    captured_count: usize,
    /// Writers may take time from the capture.
    may_write: bool,
    wakes: Vec<Arc<WakeEvent>>,
}

impl Job {
    pub(super) fn new(step: u64, started: Instant) -> Arc<Self> {
        Arc::new(Self {
            step,
            started,
            state: Mutex::default(),
            changed: Condvar::new(),
            is_cancelled: AtomicBool::new(false),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it; the first outcome stays.
    pub(super) fn finish(&self, outcome: Result<()>) {
        let mut state = self.state();
        if state.outcome.is_none() {
            state.outcome = Some(outcome);
            state.total = self.started.elapsed();
        }
        let wakes = std::mem::take(&mut state.wakes);
        drop(state);
        self.changed.notify_all();
        for wake in wakes {
            wake.signal();
        }
    }

    /// The caller has its state back.
    pub(super) fn captured(&self) {
        self.state().blocked = self.started.elapsed();
    }

    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.begin_writing();
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    pub(super) fn is_done(&self) -> bool {
        self.state().outcome.is_some()
    }

    /// Has writers begin.
    pub(super) fn begin_writing(&self) {
        let was_begun = std::mem::replace(&mut self.state().may_write, true);
        if !was_begun {
            self.changed.notify_all();
        }
    }

    /// Waits until writers are to begin.
    pub(super) fn wait_for_beginning(&self) {
        let before = |state: &mut State| !state.may_write && state.outcome.is_none();
        let waited = self.changed.wait_while(self.state(), before);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// A buffer was filled.
    pub(super) fn add_captured(&self) {
        self.state().captured_count += 1;
    }

    /// Buffers of captured bytes that aren't written yet.
    pub(super) fn captured_count(&self) -> usize {
        self.state().captured_count
    }

    /// A buffer was given back.
    pub(super) fn remove_captured(&self) {
        let mut state = self.state();
        state.captured_count = state.captured_count.saturating_sub(1);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for a moment until a buffer comes back; `false` if there is none that could.
    pub(super) fn wait_for_buffer(&self, time: Duration) -> bool {
        let state = self.state();
        if state.captured_count == 0 {
            return false;
        }
        drop(self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner));
        true
    }

    /// Waits until it is done, for at most so long; whether it is.
    pub(super) fn wait_done(&self, timeout: Option<Duration>) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.state();
        while state.outcome.is_none() {
            let Some(deadline) = deadline else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Its failure, if it failed and nobody has been told.
    pub(super) fn take_unheard(&self) -> Option<Error> {
        let mut state = self.state();
        let Some(Err(error)) = &state.outcome else { return None };
        let error = error.clone();
        let news = !std::mem::replace(&mut state.is_heard, true);
        news.then_some(error)
    }

    /// Its outcome, which counts as told.
    fn hear(&self) -> Option<Result<()>> {
        let mut state = self.state();
        let outcome = state.outcome.clone()?;
        state.is_heard = true;
        Some(outcome)
    }
}

/// A save under way, or done.
#[derive(Clone, Debug)]
pub struct Ticket(pub(super) Arc<Job>);

impl Ticket {
    /// The step that is saved.
    pub fn step(&self) -> u64 {
        self.0.step
    }

    /// Waits for at most `timeout`; `false` if it isn't done by then.
    ///
    /// # Errors
    ///
    /// What the save met, naming its step.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        self.0.wait_done(Some(timeout));
        self.0.hear().map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    /// Waits until the checkpoint is there.
    ///
    /// # Errors
    ///
    /// As for [`Self::wait_timeout`].
    pub fn wait(&self) -> Result<()> {
        self.0.wait_done(None);
        self.0.hear().unwrap_or(Ok(()))
    }

    /// Whether it is done, well or badly. Never blocks.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Signals the event once it is done; at once if it is.
    pub fn notify(&self, wake: &Arc<WakeEvent>) {
        let mut state = self.0.state();
        if state.outcome.is_some() {
            drop(state);
            wake.signal();
        } else {
            state.wakes.push(Arc::clone(wake));
        }
    }

    /// How long the caller was kept until its state was captured, waiting for earlier saves
    /// included.
    pub fn blocked(&self) -> Duration {
        self.0.state().blocked
    }

    /// How long it took from the call until it was done, or has taken so far.
    pub fn total(&self) -> Duration {
        let state = self.0.state();
        if state.outcome.is_some() { state.total } else { self.0.started.elapsed() }
    }
}
