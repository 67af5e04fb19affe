//! A timer signal every millisecond, as of a profiler, interrupts sleeps and calls: nothing is lost.
//!
//! The timer and the handler are the process's, so this has a program of its own.

#![expect(unsafe_code, reason = "sets a signal handler")]

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_io::engine::EngineKind;
use forebay_testkit::conformance::{Outcome, Shape, run};

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

fn start_timer() {
    // SAFETY: zero bytes are a valid `sigaction`, without flags: calls aren't restarted.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: the handler only adds to an atomic number.
    let set = unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    let each = libc::timeval { tv_sec: 0, tv_usec: 1000 };
    let timer = libc::itimerval { it_interval: each, it_value: each };
    // SAFETY: `timer` is a local that outlives the call.
    let set = unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}

#[test]
fn every_engine_conforms_under_a_storm_of_signals() {
    start_timer();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for kind in EngineKind::ALL {
        let outcome = run(&kind, directory.path(), Shape::default());
        assert!(matches!(outcome, Outcome::Passed { .. } | Outcome::Skipped { .. }));
    }
    assert!(SIGNALS.load(Ordering::Relaxed) > 100, "the timer runs");
}
