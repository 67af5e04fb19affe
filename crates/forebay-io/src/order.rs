//! Stores that touch the same file take effect one after the other where that matters, and what a
//! failed one leaves is put right.
//!
//! A whole-file store waits for every earlier store of the same file, and every later one waits for
//! it; stores at offsets go on side by side. So the file holds what the last store wrote, and a
//! store that failed or was cancelled never undoes what another did. A file is known by device
//! and inode, whatever its name; the order holds within one handle.
//!
//! # Invariants
//!
//! - An operation enters all its files at once, so two never wait for each other.
//! - Nobody enters for a file that its name no longer leads to, and a name is only removed while
//!   nobody is in line for the file: both happen under the lock.
//! - A file that a store made is removed when the last of those in line for it has failed, unless
//!   one of them succeeded.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::files::{FileKey, TensorFile};
use crate::operation::{OpenedFile, Shared};

/// See the [module documentation](self).
#[derive(Debug, Default)]
pub(crate) struct Order(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    files: HashMap<FileKey, VecDeque<Place>>,
    /// For how many files each waiting operation has yet to wait, by its number.
    waiting: HashMap<u64, usize>,
    /// Files that stores made and in which none has succeeded yet, by the names they were made as.
    made: HashMap<FileKey, PathBuf>,
}

#[derive(Debug)]
struct Place {
    operation: Arc<Shared>,
    alone: bool,
    may_go: bool,
}

/// The answer to [`Order::enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// It can begin.
    Go,
    /// [`Order::leave`] of the last one that it waits for returns it.
    Wait,
    /// The name of a file leads to another one by now. Nothing was done.
    Stale,
    /// The handle is closed. Nothing was done.
    Refused,
}

/// What a store has made of its files when it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// They are as was asked for.
    Stored,
    /// They hold all bytes, which may not be durable. An old file is left to its owner, who hears
    /// of it; a new one isn't worth keeping.
    Unsure,
    /// Some of the bytes are missing, or bytes behind them are still there.
    Halfway,
}

impl Order {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that opening the file made it, unless another store got hold of it already. Either
    /// [`Self::discard`] or [`Self::enter`] follows.
    pub(crate) fn made(&self, file: &TensorFile) {
        let Some(path) = file.made_as() else { return };
        let mut lines = self.lines();
        if !lines.files.contains_key(&file.key) && file.current_size() == 0 {
            lines.made.insert(file.key, path.to_path_buf());
        }
    }

    /// Removes what opening the file made, if it was that and nobody else uses it.
    pub(crate) fn discard(&self, file: &TensorFile) {
        if file.made_as().is_some() {
            self.lines().remove_if_made(file);
        }
    }

    /// Puts an operation in line for its files, if `take_up` takes it up. With `any_name`, as long
    /// as they have one: there may be file systems on which names and files never compare equal.
    pub(crate) fn enter(
        &self,
        operation: &Arc<Shared>,
        any_name: bool,
        take_up: impl FnOnce() -> bool,
    ) -> Entry {
        let Some(files) = operation.stored_files() else {
            return if take_up() { Entry::Go } else { Entry::Refused };
        };
        let mut lines = self.lines();
        if !operation.is_current(any_name) {
            return Entry::Stale;
        }
        if !take_up() {
            return Entry::Refused;
        }
        let mut waits = 0;
        for key in files {
            let alone = operation.plan.whole_file;
            let line = lines.files.entry(key).or_default();
            let may_go = line.is_empty() || (!alone && line.iter().all(|place| !place.alone));
            waits += usize::from(!may_go);
            line.push_back(Place { operation: Arc::clone(operation), alone, may_go });
        }
        if waits > 0 {
            lines.waiting.insert(operation.id, waits);
            return Entry::Wait;
        }
        Entry::Go
    }

    /// Takes a store out of line, puts right what it leaves, and returns those that can begin now.
    /// `last` is called before anybody else gets in line.
    pub(crate) fn leave(
        &self,
        operation: &Arc<Shared>,
        files: &[OpenedFile],
        ending: Ending,
        last: impl FnOnce(),
    ) -> Vec<Arc<Shared>> {
        let mut lines = self.lines();
        let mut released = Vec::new();
        for OpenedFile { file, spoiled, size_before, .. } in files {
            match ending {
                Ending::Stored => {
                    lines.made.remove(&file.key);
                }
                Ending::Unsure => {}
                Ending::Halfway => file.cut_after_failure(*spoiled, *size_before),
            }
            let Some(line) = lines.files.get_mut(&file.key) else { continue };
            line.retain(|place| place.operation.id != operation.id);
            for place in release(line) {
                if lines.is_last_wait(place.id) {
                    released.push(place);
                }
            }
            lines.close_if_empty(file);
        }
        last();
        released
    }
}

impl Lines {
    fn close_if_empty(&mut self, file: &TensorFile) {
        if self.files.get(&file.key).is_some_and(VecDeque::is_empty) {
            self.files.remove(&file.key);
            self.remove_if_made(file);
        }
    }

    /// Removes a file that is a failed store's, unless somebody is in line for it.
    fn remove_if_made(&mut self, file: &TensorFile) {
        if self.files.contains_key(&file.key) {
            return;
        }
        if let Some(path) = self.made.remove(&file.key) {
            file.unlink(&path);
        }
    }

    fn is_last_wait(&mut self, id: u64) -> bool {
        let Some(waits) = self.waiting.get_mut(&id) else { return false };
        *waits -= 1;
        let last = *waits == 0;
        if last {
            self.waiting.remove(&id);
        }
        last
    }
}

/// Lets those go at the front of a line that may: the first, and behind it all that share.
fn release(line: &mut VecDeque<Place>) -> Vec<Arc<Shared>> {
    let mut released = Vec::new();
    for (index, place) in line.iter_mut().enumerate() {
        if index > 0 && place.alone {
            break;
        }
        if !place.may_go {
            place.may_go = true;
            released.push(Arc::clone(&place.operation));
        }
        if place.alone {
            break;
        }
    }
    released
}
