//! Every call and every write of a save fails once: the error names the step and the file, older
//! checkpoints stay whole, and nothing is left over.
#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay::checkpoint::storage::{FileSystem, Storage};
use forebay::checkpoint::{CheckpointOptions, Checkpointer, Meanwhile, OnBusy, Ticket};
use forebay_io::engine::{EngineFactory, EngineKind};
use forebay_io::{Durability, ErrorKind, Handle, Options, Result};
use forebay_testkit::crash::{FaultStorage, Sample, leftovers};
use forebay_testkit::fault::{FaultFactory, FaultPlan, Scope, When};

/// `ENOSPC`.
const FULL: i32 = 28;

/// The first call of a save that comes when its state has been captured, in a directory that is
/// there: before it, five files and directories are made.
const FIRST_SYNC: usize = 5;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options() -> CheckpointOptions {
    CheckpointOptions {
        keep: Some(2),
        durability: Durability::Full,
        budget_bytes: Some(16 << 20),
        shard_bytes: 100_000,
        ..CheckpointOptions::default()
    }
}

fn with_storage(path: &Path, storage: Arc<dyn Storage>) -> Checkpointer {
    let handle = Handle::new(Options::default()).unwrap();
    Checkpointer::with(path, options(), storage, handle).unwrap()
}

/// A handle for so many bytes per second.
fn slow(rate: u64) -> Handle {
    let options = Options { throttle_bytes_per_second: Some(rate), ..Options::default() };
    Handle::new(options).unwrap()
}

fn start(checkpointer: &Checkpointer, step: u64) -> Result<Option<Ticket>> {
    Sample::new(step, 1)
        .with(|state| checkpointer.save(step, state, Meanwhile::GoesOn, &mut || Ok(())))
}

fn save(checkpointer: &Checkpointer, step: u64) -> Result<()> {
    start(checkpointer, step)?.map_or(Ok(()), |ticket| ticket.wait())
}

fn check(checkpointer: &Checkpointer, step: u64) {
    let reader = checkpointer.reader(Some(step), true).unwrap();
    assert!(Sample::new(step, 1).is_in(&reader, checkpointer.handle()).unwrap(), "step {step}");
}

#[test]
fn a_full_disk_at_any_call_keeps_what_was_there_and_says_where() {
    let directory = directory();
    let mut at = 0;
    loop {
        // Calls are counted from the opening on, which makes nothing here.
        let faults = Arc::new(FaultStorage::new(at, FULL));
        save(&with_storage(directory.path(), Arc::new(FileSystem)), 1).unwrap();
        save(&with_storage(directory.path(), Arc::new(FileSystem)), 2).unwrap();
        let failing = with_storage(directory.path(), Arc::clone(&faults) as Arc<dyn Storage>);
        let saved = save(&failing, 3);
        if !faults.has_failed() {
            saved.unwrap();
            break;
        }
        match saved {
            Err(error) => {
                assert_eq!(error.os_code(), Some(FULL), "call {at}: {error}");
                let text = error.to_string();
                let is_there = failing.latest().unwrap() == Some(3);
                assert!(text.contains("step 3 wasn't saved") || is_there, "call {at}: {error}");
                assert!(text.contains("step 3 "), "call {at}: {error}");
                assert!(error.path_ref().unwrap().starts_with(directory.path()), "{error}");
            }
            // Cleaning up behind a checkpoint that is there can wait.
            Ok(()) => check(&failing, 3),
        }
        drop(failing);
        let after = with_storage(directory.path(), Arc::new(FileSystem));
        assert_eq!(leftovers(directory.path()), [""; 0], "call {at}");
        let newest = after.latest().unwrap().unwrap();
        assert!(newest >= 2, "call {at}: step {newest}");
        for step in after.steps().unwrap() {
            check(&after, step);
        }
        save(&after, 3).unwrap();
        check(&after, 3);
        drop(after);
        std::fs::remove_dir_all(directory.path()).unwrap();
        at += 1;
    }
    assert!(at > 20, "{at} calls");
}

fn faulty(path: &Path, plan: FaultPlan) -> (Checkpointer, Arc<FaultFactory>) {
    let factory = Arc::new(FaultFactory::new(Arc::new(EngineKind::Threads), plan));
    let engines = Arc::clone(&factory) as Arc<dyn EngineFactory>;
    let storage = Arc::new(FileSystem);
    let handle = Handle::with_factory(Options::default(), engines).unwrap();
    (Checkpointer::with(path, options(), storage, handle).unwrap(), factory)
}

fn full_at(write: u64) -> FaultPlan {
    FaultPlan::new(1).fail(When::Nth(write), Scope::Writes, FULL)
}

#[test]
fn a_full_disk_at_any_write_keeps_what_was_there_and_leaves_nothing() {
    let directory = directory();
    save(&with_storage(directory.path(), Arc::new(FileSystem)), 1).unwrap();
    let mut write = 1;
    loop {
        let (checkpointer, factory) = faulty(directory.path(), full_at(write));
        let saved = save(&checkpointer, 2);
        if factory.counts().injected == 0 {
            saved.unwrap();
            break;
        }
        let error = saved.unwrap_err();
        assert_eq!(error.os_code(), Some(FULL), "write {write}: {error}");
        assert!(error.to_string().contains("step 2 wasn't saved"), "{error}");
        assert!(error.path_ref().unwrap().starts_with(directory.path()), "{error}");
        assert_eq!(leftovers(directory.path()), [""; 0], "write {write}");
        assert_eq!(checkpointer.steps().unwrap(), [1]);
        check(&checkpointer, 1);
        write += 1;
    }
    assert!(write > 4, "{write} writes");
}

#[test]
fn a_failure_that_nobody_waited_for_is_told_by_the_next_save_once() {
    let directory = directory();
    let storage = Arc::new(FaultStorage::new(FIRST_SYNC, FULL));
    let checkpointer = with_storage(directory.path(), storage);
    let ticket = start(&checkpointer, 7).unwrap().unwrap();
    assert!(checkpointer.wait_idle(Duration::from_secs(60)));
    assert!(ticket.is_done());
    let error = start(&checkpointer, 8).unwrap_err();
    assert!(error.to_string().contains("step 7 wasn't saved"), "{error}");
    assert_eq!(checkpointer.steps().unwrap(), [0; 0]);
    save(&checkpointer, 8).unwrap();
    check(&checkpointer, 8);
    assert_eq!(ticket.wait().unwrap_err().os_code(), Some(FULL));
}

#[test]
fn a_save_right_after_one_that_was_waited_for_is_never_refused() {
    for on_busy in [OnBusy::Error, OnBusy::Skip] {
        let directory = directory();
        let options = CheckpointOptions { on_busy, durability: Durability::None, ..options() };
        let checkpointer = Checkpointer::open(directory.path(), options).unwrap();
        for step in 0..50 {
            start(&checkpointer, step).unwrap().unwrap().wait().unwrap();
        }
        check(&checkpointer, 49);
    }
}

#[test]
fn a_failure_of_the_save_that_the_next_one_waits_for_is_told_once() {
    let directory = directory();
    let storage = Arc::new(FaultStorage::new(FIRST_SYNC, FULL));
    // Slow enough that the first is under way when the second begins.
    let handle = slow(500_000);
    let checkpointer = Checkpointer::with(directory.path(), options(), storage, handle).unwrap();
    let ticket = start(&checkpointer, 7).unwrap().unwrap();
    assert!(!ticket.is_done());
    let error = start(&checkpointer, 8).unwrap_err();
    assert!(error.to_string().contains("step 7 wasn't saved"), "{error}");
    save(&checkpointer, 8).unwrap();
    check(&checkpointer, 8);
    assert!(checkpointer.take_failure().is_none());
}

#[test]
fn a_failure_that_was_waited_for_is_not_told_again() {
    let directory = directory();
    let storage = Arc::new(FaultStorage::new(FIRST_SYNC, FULL));
    let checkpointer = with_storage(directory.path(), storage);
    let ticket = start(&checkpointer, 7).unwrap().unwrap();
    assert_eq!(ticket.wait().unwrap_err().os_code(), Some(FULL));
    save(&checkpointer, 8).unwrap();
    assert!(checkpointer.take_failure().is_none());
}

#[test]
fn a_writer_that_dies_is_told_of_at_once_whoever_waits() {
    let directory = directory();
    // Those before are made by the caller's thread, those behind clean up.
    for at in FIRST_SYNC..FIRST_SYNC + 12 {
        let faults = Arc::new(FaultStorage::panicking(at));
        let failing = with_storage(directory.path(), Arc::clone(&faults) as Arc<dyn Storage>);
        let saved = start(&failing, 7).and_then(|ticket| {
            let outcome = ticket.map(|ticket| ticket.wait_timeout(Duration::from_secs(60)));
            outcome.map_or(Ok(true), |outcome| outcome)
        });
        assert!(faults.has_failed(), "call {at}");
        let error = saved.unwrap_err();
        assert!(error.to_string().contains("step 7 wasn't saved: its writer died"), "{error}");
        save(&failing, 8).unwrap();
        check(&failing, 8);
        drop(failing);
        let after = with_storage(directory.path(), Arc::new(FileSystem));
        assert_eq!(leftovers(directory.path()), [""; 0], "call {at}");
        for step in after.steps().unwrap() {
            check(&after, step);
        }
        drop(after);
        std::fs::remove_dir_all(directory.path()).unwrap();
        std::fs::create_dir(directory.path()).unwrap();
    }
}

#[test]
fn an_interrupted_capture_leaves_nothing() {
    let directory = directory();
    let options = CheckpointOptions { shard_bytes: 64 << 20, ..options() };
    // More than the budget, and slow: the capture has to wait for the writer.
    let sample = Sample::new(1, 400);
    let handle = slow(20 << 20);
    let storage = Arc::new(FileSystem);
    let checkpointer = Checkpointer::with(directory.path(), options, storage, handle).unwrap();
    let mut calls = 0;
    let saved = sample.with(|state| {
        checkpointer.save(1, state, Meanwhile::GoesOn, &mut || {
            calls += 1;
            if calls > 3 {
                return Err(forebay_io::Error::new(ErrorKind::Cancelled, "enough"));
            }
            Ok(())
        })
    });
    let error = saved.unwrap_err();
    assert!(error.to_string().contains("enough"), "{error}");
    assert_eq!(leftovers(directory.path()), [""; 0]);
    assert!(checkpointer.take_failure().is_none());
    assert_eq!(checkpointer.pool().stats().used_bytes, 0);
}

#[test]
fn saves_in_quick_succession_follow_the_policy_and_publish_in_order() {
    for (on_busy, in_flight) in
        [(OnBusy::Wait, 1), (OnBusy::Wait, 3), (OnBusy::Skip, 1), (OnBusy::Error, 2)]
    {
        let directory = directory();
        let options = CheckpointOptions { keep: None, on_busy, in_flight, ..options() };
        let handle = slow(1 << 20);
        let storage = Arc::new(FileSystem);
        let checkpointer = Checkpointer::with(directory.path(), options, storage, handle).unwrap();
        let saves: Vec<_> = (1..=5).map(|step| start(&checkpointer, step)).collect();
        for saved in &saves {
            match saved {
                Ok(Some(ticket)) => ticket.wait().unwrap(),
                Ok(None) => assert_eq!(on_busy, OnBusy::Skip),
                Err(error) => {
                    assert_eq!(on_busy, OnBusy::Error);
                    assert_eq!(error.os_code(), Some(16), "{error}");
                }
            }
        }
        let steps = checkpointer.steps().unwrap();
        let expected: &[u64] = match on_busy {
            OnBusy::Wait => &[1, 2, 3, 4, 5],
            OnBusy::Skip => &[1],
            OnBusy::Error => &[1, 2],
        };
        assert_eq!(steps, expected, "{on_busy:?}");
        assert_eq!(checkpointer.latest().unwrap(), expected.last().copied());
        for step in steps {
            check(&checkpointer, step);
        }
    }
}
