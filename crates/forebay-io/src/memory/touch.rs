//! Touching pages ahead of the transfers into them, on a thread that lives while there are any.
//!
//! `madvise(MADV_POPULATE_WRITE)` (Linux 5.14) faults pages in as a write would and changes no
//! contents, so it may run beside whoever uses them. One thread serves a pool, in order of
//! allocation. A region's [`Touching`] ends before its mapping does: dropping it takes the rest of
//! the region off the list and waits for the step under way, if that is the region's.
#![expect(unsafe_code, reason = "pages are touched by address")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::io::Errno;
use rustix::mm::Advice;

use super::registry::PIECE_BYTES;

/// The most that is touched between two looks at what was dropped: two huge pages, a fraction of a
/// millisecond of zeroing; ten where the machine is virtual and its host has to find the memory.
const STEP_BYTES: usize = 4 << 20;

/// Buffers from this length up are touched ahead. Engines register memory in pieces, and the first
/// transfer into a piece touches all of it: nothing can be ahead of that in the first, and loads
/// into one piece were measured to take as long either way.
pub const TOUCH_BYTES_MIN: usize = 2 * PIECE_BYTES;

const THREAD_NAME: &str = "forebay-touch";

/// The list of what a pool wants touched.
#[derive(Debug, Default)]
pub(super) struct Toucher {
    state: Mutex<State>,
    step_ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The thread's next step is at the front.
    waiting: VecDeque<Span>,
    /// The step under way.
    busy: Option<Busy>,
    /// The thread is there, or about to be.
    running: bool,
    /// The kernel is too old for any of it.
    unsupported: bool,
}

/// Pages of a region.
#[derive(Clone, Copy, Debug)]
struct Span {
    region: u64,
    start: usize,
    length: usize,
}

#[derive(Debug)]
struct Busy {
    region: u64,
    /// Nothing of the region is to follow.
    dropped: bool,
}

/// A region that is being touched; dropping it ends that.
#[derive(Debug)]
pub(super) struct Touching {
    toucher: Arc<Toucher>,
    region: u64,
}

impl Toucher {
    /// Has `length` bytes of pages from `start` on touched, while the answer lives. `None` where
    /// that can't be done; the pages are touched by their first use then.
    ///
    /// # Safety
    ///
    /// The pages are an anonymous mapping of this process that outlives the answer.
    pub(super) unsafe fn touch(
        self: &Arc<Self>,
        region: u64,
        start: usize,
        length: usize,
    ) -> Option<Touching> {
        let mut state = self.lock();
        if state.unsupported {
            return None;
        }
        state.waiting.push_back(Span { region, start, length });
        let starts = !std::mem::replace(&mut state.running, true);
        drop(state);
        let touching = Touching { toucher: Arc::clone(self), region };
        if starts {
            let toucher = Arc::clone(self);
            let thread = thread::Builder::new().name(THREAD_NAME.to_owned());
            if let Err(error) = thread.spawn(move || toucher.run()) {
                tracing::debug!("memory is not touched ahead: cannot start a thread: {error}");
                let mut state = self.lock();
                state.running = false;
                state.waiting.clear();
                return None;
            }
        }
        Some(touching)
    }

    /// The thread: steps until nothing is left.
    fn run(&self) {
        let mut state = self.lock();
        while let Some(span) = state.waiting.pop_front() {
            state.busy = Some(Busy { region: span.region, dropped: false });
            drop(state);
            let length = span.length.min(STEP_BYTES);
            let outcome = populate(span.start, length);
            state = self.lock();
            let dropped = state.busy.take().is_none_or(|busy| busy.dropped);
            match outcome {
                Ok(()) if span.length > length && !dropped => state.waiting.push_front(Span {
                    start: span.start + length,
                    length: span.length - length,
                    ..span
                }),
                Err(Errno::INVAL) => {
                    state.unsupported = true;
                    state.waiting.clear();
                }
                // No memory, a poisoned page: who uses it hears of that, not who doesn't.
                Ok(()) | Err(_) => {}
            }
            self.step_ended.notify_all();
        }
        state.running = false;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Touching {
    fn drop(&mut self) {
        let mut state = self.toucher.lock();
        state.waiting.retain(|span| span.region != self.region);
        while let Some(busy) = state.busy.as_mut().filter(|busy| busy.region == self.region) {
            busy.dropped = true;
            state = self.toucher.step_ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn populate(start: usize, length: usize) -> Result<(), Errno> {
    let start = ptr::with_exposed_provenance_mut::<c_void>(start);
    // SAFETY: `Toucher::touch` was promised that the pages stay mapped until the region's
    // `Touching` is dropped, which waits for this call; the advice changes no contents.
    unsafe { rustix::mm::madvise(start, length, Advice::LinuxPopulateWrite) }
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;

    const PAGES: usize = 3 * STEP_BYTES + 8192;

    fn map() -> usize {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), PAGES, access, MapFlags::PRIVATE)
        };
        start.unwrap().expose_provenance()
    }

    fn unmap(start: usize) {
        // SAFETY: the test mapped it and nothing refers to it.
        unsafe { rustix::mm::munmap(ptr::with_exposed_provenance_mut(start), PAGES) }.unwrap();
    }

    fn touch(toucher: &Arc<Toucher>, region: u64, start: usize) -> Touching {
        // SAFETY: the tests unmap after they have dropped the answer.
        unsafe { toucher.touch(region, start, PAGES) }.unwrap()
    }

    fn wait_until_idle(toucher: &Toucher) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while toucher.lock().running {
            assert!(std::time::Instant::now() < deadline, "the thread doesn't end");
            thread::yield_now();
        }
    }

    #[test]
    fn a_region_that_cannot_be_touched_ends_alone() {
        let toucher = Arc::new(Toucher::default());
        let (gone, good) = (map(), map());
        // What is not mapped is refused as memory that ran out is: `ENOMEM`.
        unmap(gone);
        let touching = [touch(&toucher, 1, gone), touch(&toucher, 2, good)];
        wait_until_idle(&toucher);
        let state = toucher.lock();
        assert!(state.waiting.is_empty() && state.busy.is_none() && !state.unsupported);
        drop(state);
        drop(touching);
        unmap(good);
    }

    #[test]
    fn what_is_dropped_is_off_the_list_and_what_is_not_stays() {
        let toucher = Arc::new(Toucher::default());
        // As if the thread were at work, so that it is the test that looks at the list.
        toucher.lock().running = true;
        let start = map();
        let [first, second] = [1, 2].map(|region| touch(&toucher, region, start));
        drop(first);
        let regions: Vec<_> = toucher.lock().waiting.iter().map(|span| span.region).collect();
        assert_eq!(regions, [2]);
        toucher.run();
        assert!(!toucher.lock().running);
        drop(second);
        unmap(start);
    }

    #[test]
    fn a_drop_waits_for_the_step_under_way_if_that_is_its_own() {
        let toucher = Arc::new(Toucher::default());
        toucher.lock().running = true;
        let start = map();
        let [first, second] = [1, 2].map(|region| touch(&toucher, region, start));
        toucher.lock().busy = Some(Busy { region: 1, dropped: false });
        drop(second);
        let dropper = thread::spawn(move || drop(first));
        while !toucher.lock().busy.as_ref().unwrap().dropped {
            thread::yield_now();
        }
        assert!(!dropper.is_finished());
        toucher.lock().busy = None;
        toucher.step_ended.notify_all();
        dropper.join().unwrap();
        assert!(toucher.lock().waiting.is_empty());
        unmap(start);
    }
}
