//! Saves under way: how many there may be, in which order they are published, and what becomes of
//! their failures.
//!
//! # Invariants
//!
//! - Checkpoints are published in the order of their saves, whichever is written first.
//! - A failure is told once: to who waits for the save, else to the next save, else at the end.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_io::{Error, ErrorKind, Result};

use super::job::Job;

/// The saves of one checkpointer.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Those under way, in their order.
    running: VecDeque<Arc<Job>>,
    /// Those that failed, which nobody may have heard of.
    failed: VecDeque<Arc<Job>>,
}

/// What becomes of a save that wants to begin.
#[derive(Debug)]
pub(super) enum Entry {
    /// It has begun.
    Begun,
    /// One that is done, as its caller may know, is in the way for a moment.
    Soon,
    /// These steps are under way.
    Busy(Vec<u64>),
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a save, if fewer than `most` are under way.
    pub(super) fn enter(&self, job: &Arc<Job>, most: usize) -> Entry {
        let mut state = self.state();
        if state.running.len() < most {
            state.running.push_back(Arc::clone(job));
            return Entry::Begun;
        }
        if state.running.iter().any(|job| job.is_done()) {
            return Entry::Soon;
        }
        Entry::Busy(state.running.iter().map(|job| job.step).collect())
    }

    /// Ends a save, with its outcome.
    pub(super) fn leave(&self, job: &Arc<Job>, outcome: Result<()>) {
        let mut state = self.state();
        state.running.retain(|other| !Arc::ptr_eq(other, job));
        if outcome.is_err() {
            state.failed.push_back(Arc::clone(job));
        }
        job.finish(outcome);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until all saves before this one are through.
    pub(super) fn wait_for_turn(&self, job: &Arc<Job>) {
        let mut state = self.state();
        while state.running.front().is_some_and(|first| !Arc::ptr_eq(first, job)) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until fewer than `most` saves are under way, for at most so long; whether that is so.
    pub(super) fn wait_below(&self, most: usize, timeout: Duration) -> bool {
        let busy = |state: &mut State| state.running.len() >= most;
        let waited = self.changed.wait_timeout_while(self.state(), timeout, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Ends a save that nobody works on any more, if it hasn't been: its writer died, or never was.
    pub(super) fn bury(&self, job: &Arc<Job>) {
        if !job.is_done() {
            job.cancel();
            let text = format!("step {} wasn't saved: its writer died", job.step);
            self.leave(job, Err(Error::new(ErrorKind::Closed, text).hint("save it again")));
        }
    }

    /// The oldest failure that nobody has heard of.
    pub(super) fn take_failure(&self) -> Option<Error> {
        let mut state = self.state();
        while let Some(job) = state.failed.pop_front() {
            if let Some(error) = job.take_unheard() {
                return Some(error);
            }
        }
        None
    }
}
