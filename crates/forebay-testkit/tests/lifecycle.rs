//! The life of handles and operations: waiting, cancelling, dropping, forking, taking turns.
#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_io::engine::{EngineFactory, WakeEvent};
use forebay_io::{
    Direction, EngineKind, ErrorKind, Handle, Operation, Options, Priority, Request, Target,
};
use forebay_testkit::memory::pattern;

/// Slow enough for a test to act while an operation is under way.
const SLOW_BYTES_PER_SECOND: u64 = 4 << 20;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn slow_options() -> Options {
    Options {
        block_size: 64 << 10,
        queue_depth: 4,
        parallelism: 1,
        staging_bytes: 1 << 20,
        throttle_bytes_per_second: Some(SLOW_BYTES_PER_SECOND),
        ..Options::default()
    }
}

/// Starts a store of memory that the operation itself keeps alive.
fn store(handle: &Handle, path: &Path, content: Vec<u8>, priority: Priority) -> Operation {
    submit(handle, path, content, priority).unwrap()
}

fn try_store(handle: &Handle, path: &Path, content: Vec<u8>) -> forebay_io::Result<Operation> {
    submit(handle, path, content, Priority::Demand)
}

#[expect(unsafe_code, reason = "requests name memory by address")]
fn submit(
    handle: &Handle,
    path: &Path,
    content: Vec<u8>,
    priority: Priority,
) -> forebay_io::Result<Operation> {
    let mut content = Box::new(content);
    let (address, length) = (content.as_mut_ptr(), content.len());
    let request = Request {
        whole_file: true,
        priority,
        keep: Some(content),
        ..Request::new(Direction::Store, Target::Path(path.to_path_buf()), 0, address, length)
    };
    // SAFETY: `keep` holds the memory until the operation is done.
    unsafe { handle.submit(request) }
}

#[test]
fn waiting_with_nothing_under_way_returns_at_once() {
    let handle = Handle::new(Options::default()).unwrap();
    assert!(handle.drain(None).unwrap());
    assert_eq!(handle.pending(), 0);
    handle.close().unwrap();
    handle.close().unwrap();
}

#[test]
fn a_wait_can_time_out_and_the_operation_goes_on() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = Handle::new(slow_options()).unwrap();
    let content = pattern(1, 2 << 20);
    let operation = store(&handle, &path, content.clone(), Priority::Demand);
    assert!(!operation.wait_timeout(Duration::from_millis(1)).unwrap());
    assert!(!operation.is_done());
    assert!(operation.take_keep().is_none(), "memory in use must not be let go");
    operation.wait().unwrap();
    operation.wait().unwrap();
    assert!(operation.is_done());
    assert_eq!(operation.bytes_done(), operation.bytes_total());
    assert!(operation.take_keep().is_some());
    assert!(std::fs::read(&path).unwrap() == content);
}

#[test]
fn progress_grows_from_nothing_to_everything() {
    let directory = directory();
    let handle = Handle::new(slow_options()).unwrap();
    let operation =
        store(&handle, &directory.path().join("w"), pattern(1, 1 << 20), Priority::Demand);
    let mut seen = vec![0];
    while !operation.is_done() {
        let done = operation.bytes_done();
        if *seen.last().unwrap() != done {
            seen.push(done);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(seen.len() > 3 && seen.is_sorted(), "{seen:?}");
    assert_eq!(operation.bytes_done(), 1 << 20);
}

#[test]
fn cancelling_stops_early_and_leaves_no_file_that_looks_whole() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = Handle::new(slow_options()).unwrap();
    let operation = store(&handle, &path, pattern(1, 8 << 20), Priority::Demand);
    std::thread::sleep(Duration::from_millis(50));
    operation.cancel();
    let error = operation.wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(operation.bytes_done() < 8 << 20);
    assert!(!path.exists());
    assert_eq!(handle.stats().cancelled, 1);
    handle.close().unwrap();
}

#[test]
fn dropping_a_handle_waits_for_what_is_under_way() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(3, 1 << 20);
    let handle = Handle::new(slow_options()).unwrap();
    let operation = store(&handle, &path, content.clone(), Priority::Demand);
    drop(handle);
    assert!(operation.is_done());
    operation.wait().unwrap();
    assert!(std::fs::read(&path).unwrap() == content);
}

#[test]
fn a_closed_handle_refuses_and_says_so() {
    let directory = directory();
    let handle = Handle::new(Options::default()).unwrap();
    handle.close().unwrap();
    let error = handle.store(directory.path().join("w"), &[1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    let error = handle.load(directory.path().join("w"), 0, &mut [1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn demand_overtakes_prefetch_that_was_there_first() {
    let directory = directory();
    let handle = Handle::new(slow_options()).unwrap();
    let prefetch =
        store(&handle, &directory.path().join("later"), pattern(1, 4 << 20), Priority::Prefetch);
    std::thread::sleep(Duration::from_millis(30));
    let demand =
        store(&handle, &directory.path().join("now"), pattern(2, 512 << 10), Priority::Demand);
    demand.wait().unwrap();
    assert!(!prefetch.is_done());
    let ahead = prefetch.bytes_done();
    assert!(ahead < 2 << 20, "{ahead} bytes of prefetch went first");
    prefetch.wait().unwrap();
}

#[test]
fn operations_of_one_priority_take_turns() {
    let directory = directory();
    let handle = Handle::new(slow_options()).unwrap();
    let long =
        store(&handle, &directory.path().join("long"), pattern(1, 8 << 20), Priority::Demand);
    let short =
        store(&handle, &directory.path().join("short"), pattern(2, 512 << 10), Priority::Demand);
    short.wait().unwrap();
    let ahead = long.bytes_done();
    assert!(ahead < 2 << 20, "the short one waited for {ahead} bytes of the long one");
    long.wait().unwrap();
}

#[test]
fn concurrent_users_of_one_handle_get_their_own_bytes() {
    let directory = directory();
    let handle = Handle::new(Options::default()).unwrap();
    std::thread::scope(|scope| {
        for user in 0..8u64 {
            let (handle, directory) = (&handle, &directory);
            scope.spawn(move || {
                let path = directory.path().join(user.to_string());
                for round in 0..30usize {
                    let content = pattern(user, 1 + round * 9973);
                    handle.store(&path, &content).unwrap();
                    let mut back = vec![0; content.len()];
                    handle.load(&path, 0, &mut back).unwrap();
                    assert!(back == content, "user {user} round {round}");
                }
            });
        }
    });
    assert_eq!(handle.pending(), 0);
}

#[test]
fn whoever_asked_is_signalled_when_it_is_done() {
    let directory = directory();
    let handle = Handle::new(slow_options()).unwrap();
    let wake = Arc::new(WakeEvent::new().unwrap());
    let operation =
        store(&handle, &directory.path().join("w"), pattern(1, 512 << 10), Priority::Demand);
    operation.notify(&wake);
    assert!(!wake.consume());
    wake.wait(Some(Duration::from_secs(30)));
    assert!(operation.is_done());
    operation.notify(&wake);
    assert!(wake.consume(), "asking after the end signals at once");
}

#[test]
fn fallbacks_of_the_factory_are_seen_and_reported_once() {
    #[derive(Debug)]
    struct Second;
    impl EngineFactory for Second {
        fn build(
            &self,
            options: &forebay_io::engine::EngineOptions,
        ) -> forebay_io::Result<Box<dyn forebay_io::engine::Engine>> {
            EngineKind::Threads.build(options)
        }
        fn fallbacks(&self) -> Vec<forebay_io::engine::Fallback> {
            vec![forebay_io::engine::Fallback {
                engine: EngineKind::Uring,
                reason: "not today".to_owned(),
            }]
        }
    }
    let handle = Handle::with_factory(Options::default(), Arc::new(Second)).unwrap();
    assert_eq!(handle.engine(), EngineKind::Threads);
    let notices = handle.notices();
    assert_eq!(notices.len(), 1);
    assert!(notices[0].contains("uring") && notices[0].contains("not today"));
    assert!(handle.notices().is_empty());
    assert_eq!(handle.stats().fallbacks.len(), 1);
}

#[test]
fn closing_while_others_submit_never_strands_an_operation() {
    let directory = directory();
    for round in 0..200 {
        let handle = Handle::new(Options { parallelism: 1, ..Options::default() }).unwrap();
        std::thread::scope(|scope| {
            for user in 0..3 {
                let (handle, path) = (&handle, directory.path().join(format!("{user}")));
                scope.spawn(move || {
                    let mut accepted = Vec::new();
                    while let Ok(operation) = try_store(handle, &path, vec![7; 100]) {
                        accepted.push(operation);
                    }
                    // What was accepted before the close is done by it, and not refused.
                    for operation in accepted {
                        operation.wait().unwrap();
                    }
                });
            }
            std::thread::sleep(Duration::from_micros(round * 20));
            handle.close().unwrap();
        });
        assert_eq!(handle.pending(), 0);
    }
}
