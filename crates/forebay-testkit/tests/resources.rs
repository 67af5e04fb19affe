//! Engines give back what they take: descriptors, pinned pages, threads.
//!
//! These are the process's, so this has a program of its own, with a single test.

#![expect(unsafe_code, clippy::unwrap_used, reason = "registers memory; these are tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_io::engine::{EngineFactory, EngineKind, EngineOptions, WakeEvent};
use forebay_testkit::conformance::{Outcome, Shape, run};

const MEMORY_BYTES: usize = 8 << 20;

/// A number of `/proc/self/status`.
fn status(name: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits for what the kernel finishes a moment after a close or an exit.
fn settles(what: &str, wanted: usize, now: impl Fn() -> usize) {
    let begin = Instant::now();
    while now() > wanted {
        assert!(begin.elapsed() < Duration::from_secs(10), "{what}: {} of {wanted}", now());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Pages are unpinned when the slot is given back, and when the engine is dropped.
fn pinned_pages_are_given_back(options: &EngineOptions) {
    let Ok(mut engine) = EngineKind::Uring.build(options) else {
        return;
    };
    if !engine.capabilities().registered_buffers {
        return;
    }
    let mut memory = vec![0u8; MEMORY_BYTES];
    let before = status("VmPin:");
    // SAFETY: `memory` lives until the end of the function, the engine is dropped before.
    let slot = unsafe { engine.bind_buffer(memory.as_mut_ptr(), MEMORY_BYTES) }.unwrap().unwrap();
    assert!(status("VmPin:") >= before + MEMORY_BYTES / 1024);
    engine.unbind_buffer(slot);
    assert_eq!(status("VmPin:"), before, "at once");
    // SAFETY: as above.
    unsafe { engine.bind_buffer(memory.as_mut_ptr(), MEMORY_BYTES) }.unwrap().unwrap();
    drop(engine);
    assert_eq!(status("VmPin:"), before, "at once");
}

#[test]
fn engines_give_back_descriptors_threads_and_pages() {
    let options = EngineOptions {
        queue_depth: 8,
        wake: Arc::new(WakeEvent::new().unwrap()),
        single_submit: false,
        sqpoll: false,
        iopoll: false,
        channels: None,
    };
    pinned_pages_are_given_back(&options);
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for kind in EngineKind::ALL {
        let (before, threads) = (descriptors(), status("Threads:"));
        if let Outcome::Skipped { .. } = run(&kind, directory.path(), Shape::default()) {
            continue;
        }
        settles("descriptors", before, descriptors);
        // The kernel's workers of a ring count as well; they go when the ring has gone.
        settles("threads", threads, || status("Threads:"));
    }
}
