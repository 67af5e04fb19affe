//! Stores that touch the same file take effect one after the other where that matters.
//!
//! A whole-file store waits for every earlier store of the same file, and every later one waits for
//! it; stores at offsets go on side by side. So the file holds what the last store wrote, and a
//! store that failed or was cancelled never undoes what a later one did. A file is known by device
//! and inode, whatever its name; the order holds within one handle.
//!
//! # Invariants
//!
//! - An operation enters all its files at once, so two never wait for each other.
//! - Cleaning up after a failure happens while nobody else is in line for the file.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::files::FileKey;
use crate::operation::{OpenedFile, Shared};

/// See the [module documentation](self).
#[derive(Debug, Default)]
pub(crate) struct Order(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    files: HashMap<FileKey, VecDeque<Place>>,
    /// For how many files each waiting operation has yet to wait, by its number.
    waiting: HashMap<u64, usize>,
}

#[derive(Debug)]
struct Place {
    operation: Arc<Shared>,
    alone: bool,
    may_go: bool,
}

impl Order {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an operation in line for its files. `true`: it can begin; else [`Self::leave`] of the
    /// last one that it waits for returns it.
    pub(crate) fn enter(&self, operation: &Arc<Shared>) -> bool {
        let files = operation.stored_files();
        if files.is_empty() {
            return true;
        }
        let mut lines = self.lines();
        let mut waits = 0;
        for (key, alone) in files {
            let line = lines.files.entry(key).or_default();
            let may_go = line.is_empty() || (!alone && line.iter().all(|place| !place.alone));
            waits += usize::from(!may_go);
            line.push_back(Place { operation: Arc::clone(operation), alone, may_go });
        }
        if waits > 0 {
            lines.waiting.insert(operation.id, waits);
        }
        waits == 0
    }

    /// Takes an operation out of line and returns those that can begin now. `each` is called for
    /// every file of it, with the operation that is next in line, if there is one.
    pub(crate) fn leave(
        &self,
        operation: &Arc<Shared>,
        files: &[OpenedFile],
        each: impl Fn(&OpenedFile, Option<&Arc<Shared>>),
    ) -> Vec<Arc<Shared>> {
        let mut lines = self.lines();
        let mut released = Vec::new();
        lines.waiting.remove(&operation.id);
        for opened in files {
            let key = opened.file.key;
            let Some(mut line) = lines.files.remove(&key) else {
                each(opened, None);
                continue;
            };
            line.retain(|place| place.operation.id != operation.id);
            each(opened, line.front().map(|place| &place.operation));
            for place in release(&mut line) {
                if lines.is_last_wait(place.id) {
                    released.push(place);
                }
            }
            if !line.is_empty() {
                lines.files.insert(key, line);
            }
        }
        released
    }
}

impl Lines {
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
