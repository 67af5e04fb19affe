//! Every fault that an engine can show, at every transfer of an operation: right bytes, or an error
//! that says what happened; never a hang, and never a file that looks whole.
#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::path::Path;
use std::sync::Arc;

use forebay_io::engine::{EngineFactory, EngineKind};
use forebay_io::{
    DirectMode, Direction, Durability, ErrorKind, Handle, Options, Request, Target, probe_engines,
};
use forebay_testkit::fault::{Cut, Fault, FaultFactory, FaultPlan, Scope, When};
use forebay_testkit::memory::{Placed, pattern};
use forebay_testkit::usage::descriptors;

/// A size with whole blocks, a short one and a ragged end.
const LENGTH: usize = (1 << 20) + (5 << 16) + 1234;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn engines() -> impl Iterator<Item = EngineKind> {
    probe_engines().into_iter().filter(|probe| probe.available).map(|probe| probe.engine)
}

fn options() -> Options {
    Options {
        block_size: 64 << 10,
        queue_depth: 8,
        parallelism: 2,
        staging_bytes: 1 << 20,
        ..Options::default()
    }
}

fn faulty(kind: EngineKind, plan: FaultPlan, options: Options) -> (Handle, Arc<FaultFactory>) {
    let factory = Arc::new(FaultFactory::new(Arc::new(kind), plan));
    let shared: Arc<dyn EngineFactory> = Arc::clone(&factory) as Arc<dyn EngineFactory>;
    (Handle::with_factory(options, shared).unwrap(), factory)
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// A store whose memory the operation keeps alive by itself, for nobody to wait for.
#[expect(unsafe_code, reason = "requests name memory by address")]
fn store_and_forget(handle: &Handle, path: &Path, content: Vec<u8>) -> forebay_io::Operation {
    let mut content = Box::new(content);
    let (address, length) = (content.as_mut_ptr(), content.len());
    let target = Target::Path(path.to_path_buf());
    let request = Request {
        whole_file: true,
        keep: Some(content),
        ..Request::new(Direction::Store, target, 0, address, length)
    };
    // SAFETY: `keep` holds the memory until the operation is done.
    unsafe { handle.submit(request) }.unwrap()
}

#[test]
fn whatever_can_be_survived_is_survived_with_the_right_bytes() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    for kind in engines() {
        for seed in 0..40 {
            let plan = FaultPlan::survivable(seed);
            let (handle, factory) = faulty(kind, plan.clone(), options());
            for shift in [0, 64] {
                let mut placed = Placed::new(shift, LENGTH);
                placed.bytes_mut().copy_from_slice(&pattern(seed, LENGTH));
                handle.store(&path, placed.bytes()).unwrap();
                assert!(read(&path) == placed.bytes(), "{kind} {plan:?}");
                handle.store_at(&path, 777, &placed.bytes()[777..70_000]).unwrap();
                let mut back = Placed::new(shift, LENGTH);
                handle.load(&path, 0, back.bytes_mut()).unwrap();
                assert!(back.bytes() == placed.bytes(), "{kind} {plan:?}");
            }
            assert!(factory.counts().injected > 0, "{plan:?} did nothing");
        }
    }
}

#[test]
fn an_error_at_any_transfer_of_a_store_is_that_error_and_leaves_no_file() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(1, LENGTH);
    for kind in engines() {
        for durability in [Durability::None, Durability::Full] {
            let options = || Options { durability, ..options() };
            let (handle, factory) = faulty(kind, FaultPlan::new(0), options());
            handle.store(&path, &content).unwrap();
            let transfers = factory.counts().transfers;
            assert!(transfers > 20);
            std::fs::remove_file(&path).unwrap();
            for n in 1..=transfers {
                let code = [libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::EFBIG]
                    [usize::try_from(n).unwrap() % 4];
                let plan = FaultPlan::new(n).fail(When::Nth(n), Scope::All, code);
                let (handle, _) = faulty(kind, plan, options());
                let error = handle.store(&path, &content).unwrap_err();
                assert_eq!(error.os_code(), Some(code), "{kind} {n}: {error}");
                assert_eq!(error.path_ref(), Some(path.as_path()), "{error}");
                assert_eq!(error.wanted_bytes(), Some(LENGTH as u64), "{error}");
                assert!(error.done_bytes() <= Some(LENGTH as u64), "{error}");
                assert_eq!(error.operation_name(), Some("store"));
                if durability == Durability::Full && n == transfers {
                    assert!(read(&path) == content, "only the name isn't durable");
                } else {
                    assert!(!path.exists(), "{kind} {n}: the file looks whole");
                }
                handle.store(&path, &content).unwrap();
                assert!(read(&path) == content, "{kind} {n}: the next store");
                std::fs::remove_file(&path).unwrap();
            }
        }
    }
}

#[test]
fn an_error_at_any_transfer_of_a_load_is_that_error() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(2, LENGTH);
    std::fs::write(&path, &content).unwrap();
    for kind in engines() {
        for page_cache in [false, true] {
            let options = || Options { page_cache, ..options() };
            let (handle, factory) = faulty(kind, FaultPlan::new(0), options());
            let mut back = vec![0; LENGTH];
            handle.load(&path, 0, &mut back).unwrap();
            for n in 1..=factory.counts().transfers {
                let plan = FaultPlan::new(n).fail(When::Nth(n), Scope::All, libc::EIO);
                let (handle, _) = faulty(kind, plan, options());
                let error = handle.load(&path, 0, &mut back).unwrap_err();
                assert_eq!(error.os_code(), Some(libc::EIO), "{kind} {n}: {error}");
                assert!(error.offset_bytes().is_some(), "{error}");
                back.fill(0);
                handle.load(&path, 0, &mut back).unwrap();
                assert!(back == content, "{kind} {n}: the next load");
            }
        }
    }
}

#[test]
fn a_short_transfer_at_any_place_is_continued() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(3, LENGTH);
    for kind in engines() {
        for cut in [Cut::Aligned, Cut::Ragged] {
            for n in 1..=50 {
                let plan = FaultPlan::new(n).shorten(When::Nth(n), Scope::Moves, cut);
                let (handle, _) = faulty(kind, plan, options());
                handle.store(&path, &content).unwrap();
                assert!(read(&path) == content, "{kind} {cut:?} {n}");
                let mut back = vec![0; LENGTH];
                handle.load(&path, 0, &mut back).unwrap();
                assert!(back == content, "{kind} {cut:?} {n}");
            }
        }
    }
}

#[test]
fn direct_transfers_that_are_refused_go_through_the_page_cache_from_then_on() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    if !forebay_io::facts(directory.path()).unwrap().direct {
        return eprintln!("skipped: no direct I/O here");
    }
    let content = pattern(4, LENGTH);
    for kind in engines() {
        for code in [libc::EINVAL, libc::EOPNOTSUPP] {
            let plan = FaultPlan::new(0).refuse_direct(code);
            let (handle, factory) = faulty(kind, plan, options());
            handle.store(&path, &content).unwrap();
            assert!(read(&path) == content, "{kind} {code}");
            let injected = factory.counts().injected;
            assert!(injected > 0);
            let mut back = vec![0; LENGTH];
            handle.load(&path, 0, &mut back).unwrap();
            assert!(back == content, "{kind} {code}");
            assert_eq!(factory.counts().injected, injected, "direct was tried again");
            let stats = handle.stats();
            assert_eq!(stats.bytes_buffered, 2 * LENGTH as u64);
            let text = format!("{:?}", stats.fallbacks);
            assert!(text.contains("O_DIRECT is refused by a transfer"), "{text}");

            let always = Options { direct: DirectMode::Always, ..options() };
            let (handle, _) = faulty(kind, FaultPlan::new(0).refuse_direct(code), always);
            let error = handle.store(&path, &content).unwrap_err();
            assert_eq!(error.os_code(), Some(code), "{error}");
        }
    }
}

#[test]
fn transfers_that_never_move_anything_end_in_an_error() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(5, LENGTH);
    std::fs::write(&path, &content).unwrap();
    let zero = |scope| FaultPlan::new(0).rule(When::From(1), scope, Fault::Zero);
    let (handle, _) = faulty(EngineKind::Threads, zero(Scope::Reads), options());
    let error = handle.load(&path, 0, &mut vec![0; LENGTH]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShortFile, "{error}");
    let (handle, _) = faulty(EngineKind::Threads, zero(Scope::Writes), options());
    let error = handle.store(&path, &content).unwrap_err();
    assert_eq!(error.os_code(), Some(libc::EIO), "{error}");
}

#[test]
fn a_kernel_that_never_has_resources_ends_in_an_error() {
    let directory = directory();
    let plan = FaultPlan::new(0).fail(When::From(1), Scope::Writes, libc::EAGAIN);
    let (handle, _) = faulty(EngineKind::Threads, plan, Options { parallelism: 1, ..options() });
    let error = handle.store(directory.path().join("w"), &[1; 100]).unwrap_err();
    assert_eq!(error.os_code(), Some(libc::EAGAIN), "{error}");
    assert!(handle.stats().retries > 100);
}

#[test]
fn a_full_disk_in_the_middle_fails_even_if_a_later_smaller_block_fits() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    std::fs::write(&path, vec![0xAA; LENGTH]).unwrap();
    for kind in engines() {
        let plan = FaultPlan::new(0).fail(When::Nth(3), Scope::Writes, libc::ENOSPC);
        let (handle, _) = faulty(kind, plan, options());
        let error = handle.store(&path, &pattern(6, LENGTH)).unwrap_err();
        assert_eq!(error.os_code(), Some(libc::ENOSPC));
        assert!(error.to_string().contains("free some space"), "{error}");
        assert!(read(&path).len() < LENGTH, "{kind}: half new, half old, and of the right size");
    }
}

#[test]
fn a_file_is_as_it_was_when_there_is_no_room_to_grow_it() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    for kind in engines() {
        std::fs::write(&path, vec![0xAA; 5000]).unwrap();
        let plan = FaultPlan::new(0).fail(When::Nth(1), Scope::Allocations, libc::ENOSPC);
        let (handle, _) = faulty(kind, plan, options());
        let error = handle.store(&path, &pattern(7, 4 << 20)).unwrap_err();
        assert_eq!(error.os_code(), Some(libc::ENOSPC), "{error}");
        assert!(read(&path) == vec![0xAA; 5000], "{kind}");
    }
}

#[test]
fn a_file_system_without_reservations_is_written_all_the_same() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(8, (4 << 20) + 3);
    for kind in engines() {
        for code in [libc::EOPNOTSUPP, libc::ENOSYS] {
            let plan = FaultPlan::new(0).fail(When::From(1), Scope::Allocations, code);
            let (handle, factory) = faulty(kind, plan, options());
            handle.store(&path, &content).unwrap();
            assert!(read(&path) == content, "{kind}");
            assert_eq!(factory.counts().injected, 1);
            std::fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn a_failure_that_nobody_waited_for_is_delivered_once() {
    let directory = directory();
    let failing = || FaultPlan::new(0).fail(When::Nth(1), Scope::Writes, libc::EIO);
    for kind in engines() {
        let (handle, _) = faulty(kind, failing(), options());
        drop(store_and_forget(&handle, &directory.path().join("a"), pattern(1, LENGTH)));
        let error = handle.close().unwrap_err();
        assert_eq!(error.os_code(), Some(libc::EIO));
        handle.close().unwrap();

        let (handle, _) = faulty(kind, failing(), options());
        let operation = store_and_forget(&handle, &directory.path().join("b"), pattern(1, LENGTH));
        let first = operation.wait().unwrap_err().to_string();
        assert_eq!(operation.wait().unwrap_err().to_string(), first);
        assert!(handle.take_unseen_failures().is_empty(), "it was delivered by wait");
        handle.close().unwrap();
    }
}

#[test]
fn failures_and_successes_by_the_thousand_leak_no_descriptor() {
    let directory = directory();
    let plan = FaultPlan::new(1).fail(When::OneIn(3), Scope::Moves, libc::EIO);
    let (handle, _) = faulty(EngineKind::Uring, plan, options());
    let path = directory.path().join("w.bin");
    let content = pattern(1, 9000);
    let (mut failed, mut operations) = (0, Vec::new());
    let mut before = 0;
    for n in 0..5000 {
        if n == 100 {
            before = descriptors();
        }
        failed += usize::from(handle.store(&path, &content).is_err());
        let operation = store_and_forget(&handle, &path, content.clone());
        let _ = operation.wait();
        operations.push(operation);
    }
    assert!(failed > 500, "{failed}");
    assert!(descriptors() <= before + 8, "{} descriptors, {before} before", descriptors());
    assert_eq!(handle.pending(), 0);
}
