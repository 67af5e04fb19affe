//! The queue that all workers of a handle take work from: two priorities, each served in turn.
//!
//! # Invariants
//!
//! - Demand comes before prefetch; among operations of one priority, each gives one block in turn.
//! - A push is never missed by a worker that is about to sleep: the worker says that it will sleep,
//!   then looks at [`Scheduler::version`] again.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::Priority;
use crate::engine::WakeEvent;
use crate::operation::{Shared, Take, Unit};
use crate::staging::BlockCounts;

/// How a worker is reached from other threads.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) wake: Arc<WakeEvent>,
    /// The worker sleeps, or is about to, and could take work.
    pub(crate) waiting: AtomicBool,
    /// The worker's thread is there.
    pub(crate) alive: AtomicBool,
    /// Memory regions that are gone, whose registration the worker must end.
    pub(crate) regions_gone: Mutex<Vec<u64>>,
}

impl Port {
    pub(crate) fn new(wake: Arc<WakeEvent>) -> Self {
        Self {
            wake,
            waiting: AtomicBool::new(false),
            alive: AtomicBool::new(true),
            regions_gone: Mutex::default(),
        }
    }
}

impl crate::memory::RegionListener for Port {
    fn region_gone(&self, region: u64) {
        self.regions_gone.lock().unwrap_or_else(PoisonError::into_inner).push(region);
        self.wake.signal();
    }
}

/// What a worker has room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) transfers: usize,
    /// How many of the transfers may be prefetch.
    pub(crate) prefetch: usize,
    pub(crate) staging: BlockCounts,
}

/// What a worker got.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    pub(crate) units: Vec<Unit>,
    pub(crate) finished: Vec<Arc<Shared>>,
}

#[derive(Debug, Default)]
struct Queues {
    demand: VecDeque<Arc<Shared>>,
    prefetch: VecDeque<Arc<Shared>>,
}

/// See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Scheduler {
    queues: Mutex<Queues>,
    version: AtomicU64,
    stopping: AtomicBool,
    ports: Vec<Arc<Port>>,
}

impl Scheduler {
    pub(crate) fn new(ports: Vec<Arc<Port>>) -> Self {
        Self {
            queues: Mutex::default(),
            version: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            ports,
        }
    }

    pub(crate) fn ports(&self) -> &[Arc<Port>] {
        &self.ports
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an operation into the queue and wakes as many sleeping workers as it can use.
    pub(crate) fn push(&self, operation: Arc<Shared>, workers: usize) {
        {
            let mut queues = self.queues();
            match operation.plan.priority {
                Priority::Demand => queues.demand.push_back(operation),
                Priority::Prefetch => queues.prefetch.push_back(operation),
            }
            self.version.fetch_add(1, Ordering::SeqCst);
        }
        let mut left = workers;
        for port in &self.ports {
            if left == 0 {
                break;
            }
            if port.waiting.swap(false, Ordering::SeqCst) {
                port.wake.signal();
                left -= 1;
            }
        }
    }

    /// Grows with each push.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Tells all workers to leave once nothing is left to do.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        for port in &self.ports {
            port.wake.signal();
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn is_empty(&self) -> bool {
        let queues = self.queues();
        queues.demand.is_empty() && queues.prefetch.is_empty()
    }

    /// Takes work for one worker, as much as it has room for.
    pub(crate) fn take(&self, room: Room) -> Taken {
        let mut taken = Taken::default();
        let mut queues = self.queues();
        let mut room = room;
        take_in_turn(&mut queues.demand, &mut room, &mut taken);
        room.transfers = room.transfers.min(room.prefetch);
        take_in_turn(&mut queues.prefetch, &mut room, &mut taken);
        taken
    }

    /// Empties the queue, for a handle whose workers are all gone.
    pub(crate) fn take_all(&self) -> Vec<Arc<Shared>> {
        let mut queues = self.queues();
        let mut all: Vec<_> = queues.demand.drain(..).collect();
        all.extend(queues.prefetch.drain(..));
        all
    }
}

fn take_in_turn(queue: &mut VecDeque<Arc<Shared>>, room: &mut Room, taken: &mut Taken) {
    let mut passed_over = 0;
    while room.transfers > 0 && passed_over < queue.len() {
        let Some(operation) = queue.pop_front() else {
            return;
        };
        match operation.take(room.staging) {
            Take::Unit(unit) => {
                room.transfers -= 1;
                if unit.is_staged() {
                    *room.staging.of_mut(unit.device().is_some()) -= 1;
                }
                taken.units.push(unit);
                queue.push_back(operation);
            }
            Take::NeedsStaging => {
                passed_over += 1;
                queue.push_back(operation);
            }
            Take::Nothing => {}
            Take::Finish => taken.finished.push(operation),
        }
    }
}
