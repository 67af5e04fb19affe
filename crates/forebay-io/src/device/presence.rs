//! Whether somebody has brought CUDA up in this process, looked at in passing.
//!
//! Others, such as torch, may make a context at any time and never hand Forebay anything of a device.
//! So [`notice`] is called whenever pinned memory is taken from a pool and whenever a request is
//! submitted. With the first context that it sees, the memory of all pools is registered.
//!
//! # Invariants
//!
//! - Nothing is loaded, started or made: the driver is looked for among the libraries that are there,
//!   and asked which devices have a context.
//! - A look without the driver asks the loader one number, which takes its lock, so it does that
//!   every 20 ms at most, and looks for names only when libraries have come since. Once pools are
//!   registered, or can't be, it is a few reads of memory.
//! - Nobody waits for another's look. A child that was forked after a look asks nothing: neither the
//!   driver nor the loader, whose lock may have been held by a thread that isn't there.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use rustix::time::{ClockId, clock_gettime};

use super::cuda::NAMES;
use super::devices::Devices;
use super::library;
use super::symbols::Driver;
use crate::error::Result;
use crate::memory::process;

/// How long a look at the loader holds, in milliseconds. Bringing CUDA up takes longer.
const LOADER_PAUSE_MS: u64 = 20;

/// The process that was the first to look; 0: none.
static HOME: AtomicU64 = AtomicU64::new(0);
/// When the loader was last asked, in milliseconds of the monotonic clock.
static ASKED_AT: AtomicU64 = AtomicU64::new(0);
/// The process in which pools are registered, or can't be; 0: none.
static SETTLED: AtomicU64 = AtomicU64::new(0);
/// The process in which a thread is looking closely.
static LOOKING: AtomicU64 = AtomicU64::new(0);
/// How often libraries had come when the driver wasn't among them.
static WITHOUT_DRIVER: AtomicU64 = AtomicU64::new(0);
/// The driver that somebody loaded.
static DRIVER: ArcSwapOption<Driver> = ArcSwapOption::const_empty();

/// Looks whether a device has a context in this process, and registers the memory of all pools
/// with the driver if so, that to come included. Whether they are registered, or have been refused.
pub fn notice() -> bool {
    let here = process::number();
    let home = HOME.compare_exchange(0, here, Ordering::AcqRel, Ordering::Acquire);
    if home.is_err_and(|home| home != here) {
        return false;
    }
    match SETTLED.load(Ordering::Acquire) {
        0 => {}
        settled => return settled == here,
    }
    if DRIVER.load().is_none() && !may_have_come() {
        return false;
    }
    if LOOKING.swap(here, Ordering::AcqRel) == here {
        return false;
    }
    let settled = look().unwrap_or_else(|error| {
        tracing::warn!(target: "forebay", "the memory of pools isn't registered with CUDA: {error}");
        true
    });
    if settled {
        SETTLED.store(here, Ordering::Release);
    }
    LOOKING.store(0, Ordering::Release);
    settled
}

/// As [`notice`], for somebody who knows that CUDA came up: the loader is asked now, and in a forked
/// child too, which looks by itself from then on.
pub fn notice_at_once() -> bool {
    HOME.store(process::number(), Ordering::Release);
    look_again();
    notice()
}

/// Whether libraries have come since the driver wasn't among them, as far as is known.
fn may_have_come() -> bool {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let now = now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000;
    let asked = ASKED_AT.load(Ordering::Relaxed);
    if now.saturating_sub(asked) < LOADER_PAUSE_MS {
        return false;
    }
    let is_mine = ASKED_AT.compare_exchange(asked, now, Ordering::Relaxed, Ordering::Relaxed);
    is_mine.is_ok() && library::load_count() != WITHOUT_DRIVER.load(Ordering::Relaxed)
}

/// Has the next look start from the beginning, since the driver is looked for elsewhere.
pub(super) fn look_again() {
    WITHOUT_DRIVER.store(0, Ordering::Relaxed);
    ASKED_AT.store(0, Ordering::Relaxed);
}

/// Registers all pools if a device has a context; whether that is so.
fn look() -> Result<bool> {
    let Some(driver) = driver()? else { return Ok(false) };
    let Some(ordinal) = active_device(&driver) else { return Ok(false) };
    Devices::global()?.context(ordinal).map(|_| true)
}

/// The driver's functions, if somebody has loaded it.
fn driver() -> Result<Option<Arc<Driver>>> {
    if let Some(driver) = DRIVER.load_full() {
        return Ok(Some(driver));
    }
    let count = library::load_count();
    let Some(library) = library::loaded(NAMES, &Devices::search()) else {
        WITHOUT_DRIVER.store(count, Ordering::Relaxed);
        return Ok(None);
    };
    let driver = Arc::new(Driver::of(library)?);
    DRIVER.store(Some(Arc::clone(&driver)));
    Ok(Some(driver))
}

/// The first device with a context. A driver that nobody has started refuses to say, and so does one
/// in a process that was forked from the one that started it.
fn active_device(driver: &Driver) -> Option<u32> {
    let mut count = 0;
    // SAFETY: the result's pointer is valid.
    let asked = unsafe { (driver.device_count)(&raw mut count) };
    let is_active = |ordinal: &i32| {
        let (mut device, mut flags, mut active) = (0, 0, 0);
        // SAFETY: the result's pointer is valid.
        let found = unsafe { (driver.device)(&raw mut device, *ordinal) };
        // SAFETY: the results' pointers are valid.
        let asked = unsafe { (driver.state)(device, &raw mut flags, &raw mut active) };
        found == 0 && asked == 0 && active != 0
    };
    let ordinal = if asked == 0 { (0..count).find(is_active) } else { None };
    ordinal.and_then(|ordinal| u32::try_from(ordinal).ok())
}
