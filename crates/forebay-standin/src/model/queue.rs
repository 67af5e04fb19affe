//! Queues: what a stream is to do, and the thread that does it late.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use super::clock::Clock;
use super::memory::Allocation;
use super::{in_host_function, model};

/// Held for reading while a task moves bytes.
static MOVING: RwLock<()> = RwLock::new(());

/// Waits until no task moves bytes, and keeps all from it until what comes back is dropped.
pub(crate) fn stop_moving() -> RwLockWriteGuard<'static, ()> {
    MOVING.write().unwrap_or_else(PoisonError::into_inner)
}

/// Something that becomes done once.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    pub(crate) fn set(&self) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_done(&self) -> bool {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait(&self) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        while !*done {
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Which way the bytes of a copy go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    In,
    Out,
}

/// One thing that a stream does.
pub(crate) enum Task {
    /// Between device and host memory.
    Copy {
        way: Way,
        allocation: Arc<Allocation>,
        offset: usize,
        host: usize,
        length: usize,
    },
    /// A kernel that writes these bytes.
    Write {
        allocation: Arc<Allocation>,
        offset: usize,
        bytes: Vec<u8>,
    },
    Wait(Arc<Signal>),
    Signal(Arc<Signal>),
    /// Also tells the host that what is before it is over.
    HostFunction {
        run: Box<dyn FnOnce() + Send>,
        clock: Clock,
    },
    /// What cuFile does in stream order.
    File(Box<dyn FnOnce() + Send>),
}

#[derive(Default)]
struct State {
    /// With how often the device's context had broken when it was enqueued.
    tasks: VecDeque<(u64, Task)>,
    busy: bool,
    held: bool,
    closing: bool,
}

/// See the [module documentation](self).
pub(crate) struct Queue {
    device: i32,
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    /// Starts the thread of the queue; `None` if there can be none.
    pub(crate) fn start(device: i32, seed: u64, delay_us: u64) -> Option<Arc<Self>> {
        let queue = Arc::new(Self { device, state: Mutex::default(), changed: Condvar::new() });
        let worker = Arc::clone(&queue);
        let delays = Delays { state: seed, most_us: delay_us };
        std::thread::Builder::new()
            .name("standin-stream".to_owned())
            .spawn(move || worker.work(delays))
            .ok()?;
        Some(queue)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, breaks: u64, task: Task) {
        self.lock().tasks.push_back((breaks, task));
        self.changed.notify_all();
    }

    /// Keeps it from starting a task, or lets it go on.
    pub(crate) fn hold(&self, held: bool) {
        self.lock().held = held;
        self.changed.notify_all();
    }

    /// Nothing comes any more: it does what is left and ends.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        state.held = false;
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.tasks.is_empty() && !state.busy
    }

    fn next(&self) -> Option<(u64, Task)> {
        let mut state = self.lock();
        state.busy = false;
        loop {
            if !state.held
                && let Some(task) = state.tasks.pop_front()
            {
                state.busy = true;
                return Some(task);
            }
            if state.closing && state.tasks.is_empty() {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, mut delays: Delays) {
        while let Some((breaks, task)) = self.next() {
            delays.pause();
            // A hold that came during the pause counts too.
            let mut state = self.lock();
            while state.held {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            drop(state);
            run(self.device, breaks, task);
        }
    }
}

fn run(device: i32, breaks: u64, task: Task) {
    match task {
        Task::Wait(signal) => return signal.wait(),
        Task::Signal(signal) => return signal.set(),
        _ => {}
    }
    let _moving = MOVING.read().unwrap_or_else(PoisonError::into_inner);
    // In a context that broke nothing runs any more, not even host functions.
    if model().breaks_of(device) != breaks {
        return;
    }
    match task {
        Task::Wait(_) | Task::Signal(_) => {}
        Task::Copy { way, allocation, offset, host, length } => {
            let moved = match way {
                Way::In => allocation.copy_in(offset, host, length),
                Way::Out => allocation.copy_out(offset, host, length),
            };
            if !moved {
                let text = format!("host memory at {host:#x} was gone when its copy ran");
                model().journal.violation(text);
            }
        }
        Task::Write { allocation, offset, bytes } => {
            allocation.copy_in(offset, bytes.as_ptr().expose_provenance(), bytes.len());
        }
        Task::HostFunction { run, clock } => {
            model().order.seen(&clock);
            in_host_function(run);
        }
        Task::File(run) => run(),
    }
}

/// How late tasks are: `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014), so that a seed gives the
/// same delays again.
struct Delays {
    state: u64,
    most_us: u64,
}

impl Delays {
    fn pause(&mut self) {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        if self.most_us > 0 {
            std::thread::sleep(Duration::from_micros(mixed % (self.most_us + 1)));
        }
    }
}
