//! Which process this is, for the price of a memory read, across `fork`.
//!
//! The answer can't come from a process id kept in ordinary memory (a child inherits it) and
//! `getpid` is a system call. One page is mapped with `MADV_WIPEONFORK` (Linux 4.14, `madvise(2)`)
//! instead: the kernel zeroes it in a child, whoever forks and however, and the first look at a
//! zero there gives the process a new number.
#![expect(unsafe_code, reason = "the page that the kernel wipes on fork is a raw mapping")]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// The wiped page; null before the first use and where the kernel can't wipe.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// Set when the kernel refused the page: numbers are process ids then.
static NO_PAGE: AtomicBool = AtomicBool::new(false);
/// The next number. It isn't wiped, so a child's number is never one of its ancestors'.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// The number of this process, different from that of every process it was forked from.
pub(crate) fn number() -> u64 {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        page = publish_page();
    }
    if page.is_null() {
        return process_id();
    }
    // SAFETY: a published page is a valid, aligned, zero-initialised mapping that nobody unmaps.
    let cell = unsafe { &*page };
    match cell.load(Ordering::Relaxed) {
        0 => {
            let fresh = NEXT.fetch_add(1, Ordering::Relaxed);
            match cell.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => fresh,
                Err(other) => other,
            }
        }
        number => number,
    }
}

fn process_id() -> u64 {
    u64::from(rustix::process::getpid().as_raw_nonzero().get().unsigned_abs())
}

#[cold]
fn publish_page() -> *mut AtomicU64 {
    if NO_PAGE.load(Ordering::Relaxed) {
        return ptr::null_mut();
    }
    let Some(page) = map_page() else {
        NO_PAGE.store(true, Ordering::Relaxed);
        return ptr::null_mut();
    };
    match PAGE.compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => page,
        Err(other) => {
            // SAFETY: this thread mapped the page and nobody else has seen it.
            let _ = unsafe { rustix::mm::munmap(page.cast(), rustix::param::page_size()) };
            other
        }
    }
}

fn map_page() -> Option<*mut AtomicU64> {
    let length = rustix::param::page_size();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let page =
        unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, access, MapFlags::PRIVATE) }
            .ok()?;
    // SAFETY: the range is the mapping made above; the advice has no effect in this process.
    let advised = unsafe { rustix::mm::madvise(page, length, Advice::LinuxWipeOnFork) };
    if advised.is_err() {
        // SAFETY: the range is the mapping made above, which nobody else has seen.
        let _ = unsafe { rustix::mm::munmap(page, length) };
        return None;
    }
    Some(page.cast())
}

/// A value that only the process that made it can see. In a forked child it isn't there, and it
/// isn't dropped: another thread of the parent could have been halfway through changing it.
pub(crate) struct ProcessLocal<T> {
    process: u64,
    value: ManuallyDrop<T>,
}

impl<T> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: number(), value: ManuallyDrop::new(value) }
    }

    /// The value, or `None` in a forked child.
    pub(crate) fn get(&self) -> Option<&T> {
        self.is_here().then_some(&*self.value)
    }

    /// Whether this is the process that made the value.
    pub(crate) fn is_here(&self) -> bool {
        self.process == number()
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: this is the one drop of the value, and `self` isn't used after it.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for ProcessLocal<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Some(value) => value.fmt(f),
            None => f.write_str("(of another process)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_stays_the_same_within_a_process() {
        let numbers: Vec<u64> =
            (0..8).map(|_| std::thread::spawn(number).join().unwrap()).collect();
        assert!(numbers.iter().all(|&n| n == number() && n != 0), "{numbers:?}");
    }

    #[test]
    fn a_local_value_is_seen_and_dropped_where_it_was_made() {
        let value = std::sync::Arc::new(7);
        let local = ProcessLocal::new(std::sync::Arc::clone(&value));
        assert_eq!(local.get().map(|value| **value), Some(7));
        drop(local);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }
}
