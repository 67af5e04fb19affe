//! Real refusals by the kernel: what `auto` falls back to, and whether the reason tells the cure.

#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests")]

use std::process::Command;
use std::sync::Arc;

use forebay_io::engine::{
    AutoFactory, Engine, EngineFactory, EngineKind, EngineOptions, Fallback, Transfer, WakeEvent,
};
use forebay_io::{DirectMode, Error, Handle, Options, Result};
use forebay_testkit::conformance::{Outcome, Shape, run};
use forebay_testkit::memory::pattern;
use forebay_testkit::seccomp;

fn options(queue_depth: usize) -> EngineOptions {
    EngineOptions {
        queue_depth,
        wake: Arc::new(WakeEvent::new().unwrap()),
        single_submit: false,
        sqpoll: false,
        iopoll: false,
        channels: None,
    }
}

/// What `auto` gives where `calls` fail with `code`, and why nothing better.
fn auto_without(calls: &'static [libc::c_long], code: i32) -> (EngineKind, Vec<Fallback>) {
    std::thread::spawn(move || {
        seccomp::deny(calls, code).unwrap();
        let factory = AutoFactory::default();
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // Whatever it falls back to has to pass for an engine.
        let outcome = run(&factory, directory.path(), Shape::default());
        assert!(matches!(outcome, Outcome::Passed { .. }), "{outcome:?}");
        (factory.build(&options(8)).unwrap().kind(), factory.fallbacks())
    })
    .join()
    .unwrap()
}

fn refusal(kind: EngineKind, calls: &'static [libc::c_long], code: i32) -> Error {
    std::thread::spawn(move || {
        seccomp::deny(calls, code).unwrap();
        kind.build(&options(8)).unwrap_err()
    })
    .join()
    .unwrap()
}

/// The tests need Linux AIO where they expect it.
fn aio_is_here() -> bool {
    EngineKind::Aio.build(&options(8)).is_ok()
}

#[test]
fn without_io_uring_auto_takes_aio_and_names_cause_and_cure() {
    for code in [libc::EPERM, libc::EACCES, libc::ENOSYS] {
        let (kind, fallbacks) = auto_without(&[libc::SYS_io_uring_setup], code);
        assert_eq!(kind, if aio_is_here() { EngineKind::Aio } else { EngineKind::Threads });
        assert_eq!(fallbacks[0].engine, EngineKind::Uring);
        assert!(fallbacks[0].reason.contains("seccomp"), "{}", fallbacks[0]);
    }
}

#[test]
fn without_io_uring_and_aio_auto_takes_threads() {
    let (kind, fallbacks) =
        auto_without(&[libc::SYS_io_uring_setup, libc::SYS_io_setup], libc::EPERM);
    assert_eq!(kind, EngineKind::Threads);
    assert_eq!(fallbacks.len(), 2);
    assert!(fallbacks[1].reason.contains("io_setup"), "{}", fallbacks[1]);
}

/// Engines whose owners can start no threads.
#[derive(Debug)]
struct Alone(EngineKind);

impl EngineFactory for Alone {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        seccomp::deny(&[libc::SYS_clone3, libc::SYS_clone], libc::EAGAIN).unwrap();
        self.0.build(options)
    }
}

/// Engines that get no descriptor once they are built.
#[derive(Debug)]
struct OutOfDescriptors(EngineKind);

impl EngineFactory for OutOfDescriptors {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        let engine = self.0.build(options)?;
        seccomp::deny(&[libc::SYS_eventfd2], libc::EMFILE).unwrap();
        Ok(engine)
    }
}

#[test]
fn where_no_thread_can_be_started_the_workers_do_it_all() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("tensor");
    for kind in [EngineKind::Uring, EngineKind::Aio, EngineKind::Threads] {
        let Ok(_) = kind.build(&options(8)) else { continue };
        for direct in [DirectMode::Auto, DirectMode::Never] {
            let options = Options { direct, block_size: 64 << 10, ..Options::default() };
            let handle = Handle::with_factory(options, Arc::new(Alone(kind))).unwrap();
            let bytes = pattern(3, (3 << 20) + 77);
            handle.store(path.as_path(), &bytes).unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "{kind:?} {direct:?}");
            let mut loaded = vec![0; bytes.len()];
            handle.load(path.as_path(), 0, &mut loaded).unwrap();
            assert!(loaded == bytes, "{kind:?} {direct:?}");
            handle.close().unwrap();
        }
    }
}

#[test]
fn an_engine_needs_no_descriptor_after_it_was_set_up() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("tensor");
    for kind in EngineKind::ALL {
        for iopoll in [false, true] {
            let options = Options { direct: DirectMode::Never, iopoll, ..Options::default() };
            let factory = Arc::new(OutOfDescriptors(kind));
            let Ok(handle) = Handle::with_factory(options, factory) else { continue };
            let bytes = pattern(4, 100_001);
            handle.store(path.as_path(), &bytes).unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "{kind:?} {iopoll}");
            handle.close().unwrap();
        }
    }
}

#[test]
fn a_filter_that_allows_setup_only_is_noticed_at_setup() {
    let cases = [
        (EngineKind::Uring, &[libc::SYS_io_uring_enter][..]),
        (EngineKind::Uring, &[libc::SYS_io_uring_register]),
        (EngineKind::Aio, &[libc::SYS_io_submit]),
        (EngineKind::Aio, &[libc::SYS_io_getevents]),
    ];
    for (kind, calls) in cases {
        let error = refusal(kind, calls, libc::EPERM);
        assert_eq!(error.engine_name(), Some(kind.name()));
        assert_eq!(error.os_code(), Some(libc::EPERM), "{error}");
        assert!(error.to_string().contains("seccomp profile"), "{error}");
    }
}

#[test]
fn a_ring_that_meets_other_errors_tells_what_to_do() {
    let cases = [(libc::ENOMEM, "ulimit -l"), (libc::EMFILE, "ulimit -n")];
    for (code, hint) in cases {
        let error = refusal(EngineKind::Uring, &[libc::SYS_io_uring_setup], code);
        assert!(error.to_string().contains(hint), "{error}");
    }
}

/// `io_setup` fails with EAGAIN whatever is asked for, as when `fs.aio-max-nr` is used up.
#[test]
fn exhausted_aio_names_the_sysctl_its_value_and_what_was_wanted() {
    let error = refusal(EngineKind::Aio, &[libc::SYS_io_setup], libc::EAGAIN);
    let max = std::fs::read_to_string("/proc/sys/fs/aio-max-nr").unwrap();
    let text = error.to_string();
    for part in ["fs.aio-max-nr", max.trim(), "fs.aio-nr", "10 requests wanted", "sysctl -w"] {
        assert!(text.contains(part), "{part} isn't in: {text}");
    }
}

#[test]
fn more_than_aio_max_nr_leaves_gives_a_smaller_depth() {
    let read = |name: &str| -> Option<usize> {
        std::fs::read_to_string(format!("/proc/sys/fs/{name}")).ok()?.trim().parse().ok()
    };
    let (Some(max), true) = (read("aio-max-nr"), aio_is_here()) else {
        return;
    };
    // More than there can be: it gets half of that, or less.
    let engine = EngineKind::Aio.build(&options(max + 1)).unwrap();
    let depth = engine.depth();
    assert!(depth >= 4 && depth <= max, "{depth} of {max}");
}

/// A kernel that has no memory for submissions, as far as the engine can tell.
#[test]
fn submissions_that_never_get_through_end_in_an_error() {
    for kind in [EngineKind::Uring, EngineKind::Aio] {
        let Ok(_) = kind.build(&options(8)) else { continue };
        std::thread::spawn(move || {
            let mut engine = kind.build(&options(8)).unwrap();
            seccomp::deny(&[libc::SYS_io_uring_enter, libc::SYS_io_submit], libc::EAGAIN).unwrap();
            let sync = Transfer {
                token: 0,
                command: forebay_io::engine::Command::Sync { data_only: true },
                descriptor: -1,
                file_slot: None,
                buffer_slot: None,
                channel: None,
                buffered: false,
                uncached: false,
                offset: 0,
                address: std::ptr::null_mut(),
                length: 0,
            };
            // SAFETY: a sync has no memory, and -1 is no descriptor.
            let submitted = unsafe { engine.submit(&[sync]) };
            let ended = submitted.and_then(|_| engine.reap(None, &mut Vec::new()));
            let error = ended.unwrap_err();
            assert_eq!(error.os_code(), Some(libc::EAGAIN));
            assert!(error.to_string().contains("short of memory"), "{error}");
        })
        .join()
        .unwrap();
    }
}

#[test]
fn deny_syscalls_runs_a_command_with_the_calls_refused() {
    let launcher = env!("CARGO_BIN_EXE_deny-syscalls");
    let mkdir = libc::SYS_mkdir.to_string();
    let both = format!("{mkdir},{}", libc::SYS_mkdirat);
    let directory = tempfile::tempdir().unwrap();
    let made = directory.path().join("made");
    let run = |arguments: &[&str]| {
        Command::new(launcher).args(arguments).arg("mkdir").arg(&made).output().unwrap()
    };
    let denied = run(&[&both]);
    assert_eq!(denied.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&denied.stderr).contains("not permitted"));
    let full = run(&["--errno", "28", &both]);
    assert!(String::from_utf8_lossy(&full.stderr).contains("No space left"));
    assert!(!made.exists());
    assert_eq!(run(&["425,206"]).status.code(), Some(0));
    assert!(made.exists());
    assert_eq!(Command::new(launcher).arg("425").output().unwrap().status.code(), Some(2));
}
