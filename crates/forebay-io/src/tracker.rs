//! Which operations are under way, and which failures nobody has heard of yet.
//!
//! The books' lock is taken under that of the [order](crate::order), never the other way round.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Error, ErrorKind};
use crate::operation::{Operation, Shared};
use crate::order::{Entry, Order};
use crate::stats::{Counters, add};

/// Failures kept for whoever asks; the oldest make room for new ones.
const UNSEEN_MAX: usize = 1024;

/// The books on all operations of one handle in one process.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    last_id: AtomicU64,
    counters: Arc<Counters>,
    books: Mutex<Books>,
    order: Order,
}

#[derive(Debug, Default)]
struct Books {
    live: BTreeMap<u64, Arc<Shared>>,
    unseen: BTreeMap<u64, Unseen>,
    closed: bool,
}

/// A failure that nobody has heard of, and the operation that met it.
#[derive(Debug)]
struct Unseen {
    error: Error,
    operation: Weak<Shared>,
}

impl Unseen {
    /// Takes the failure, which counts as heard of from now.
    fn hear(self) -> Error {
        if let Some(operation) = self.operation.upgrade() {
            operation.hear();
        }
        self.error
    }
}

impl Tracker {
    pub(crate) fn new(counters: Arc<Counters>) -> Self {
        Self { counters, ..Self::default() }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who waits for whom.
    pub(crate) fn order(&self) -> &Order {
        &self.order
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Puts an operation in line for its files and takes it up, to be waited for by a close.
    pub(crate) fn begin(&self, operation: &Arc<Shared>, any_name: bool) -> Entry {
        self.order.enter(operation, any_name, || {
            let mut books = self.books();
            if !books.closed {
                books.live.insert(operation.id, Arc::clone(operation));
            }
            !books.closed
        })
    }

    /// Takes no further operation up.
    pub(crate) fn close(&self) {
        self.books().closed = true;
    }

    pub(crate) fn finished(&self, id: u64, error: Option<&Error>) {
        add(&self.counters.operations, 1);
        match error.map(Error::kind) {
            None => {}
            Some(ErrorKind::Cancelled) => add(&self.counters.cancelled, 1),
            Some(_) => add(&self.counters.failures, 1),
        }
        let mut books = self.books();
        let operation = books.live.remove(&id);
        if let Some(error) = error.filter(|error| error.kind() != ErrorKind::Cancelled) {
            let operation = operation.as_ref().map(Arc::downgrade).unwrap_or_default();
            books.unseen.insert(id, Unseen { error: error.clone(), operation });
            if books.unseen.len() > UNSEEN_MAX {
                books.unseen.pop_first();
            }
        }
        drop(books);
        // Whatever its last reference keeps alive is dropped outside the lock.
        drop(operation);
    }

    /// Says that somebody hears of an operation's result, and whether nobody had before.
    pub(crate) fn acknowledge(&self, operation: &Shared) -> bool {
        let mut books = self.books();
        books.unseen.remove(&operation.id);
        operation.hear()
    }

    pub(crate) fn pending(&self) -> usize {
        self.books().live.len()
    }

    /// The operations under way now.
    pub(crate) fn live(&self) -> Vec<Operation> {
        self.books().live.values().map(|shared| Operation(Arc::clone(shared))).collect()
    }

    /// The oldest failure that nobody has heard of. It counts as heard of from now.
    pub(crate) fn take_first_unseen(&self) -> Option<Error> {
        self.books().unseen.pop_first().map(|(_, unseen)| unseen.hear())
    }

    /// The failures that nobody has heard of, the oldest first. They count as heard of from now.
    pub(crate) fn take_unseen(&self) -> Vec<Error> {
        let mut books = self.books();
        std::mem::take(&mut books.unseen).into_values().map(Unseen::hear).collect()
    }
}
