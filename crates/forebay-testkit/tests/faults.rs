//! The fault engine does what its plan says, and what it reports is what happened.

#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit transfers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_io::engine::{
    Command, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Transfer, WakeEvent,
};
use forebay_testkit::fault::{Cut, FaultFactory, FaultPlan, Scope, When};

const BLOCK: usize = 16384;
const WHOLE: i64 = 16384;

#[repr(align(4096))]
struct Block([u8; BLOCK]);

fn factory(plan: FaultPlan) -> FaultFactory {
    FaultFactory::new(Arc::new(EngineKind::Threads), plan)
}

fn build(factory: &dyn EngineFactory) -> Box<dyn Engine> {
    let wake = Arc::new(WakeEvent::new().unwrap());
    let options = EngineOptions {
        queue_depth: 8,
        wake,
        single_submit: false,
        sqpoll: false,
        iopoll: false,
        channels: None,
    };
    factory.build(&options).unwrap()
}

/// Does one transfer of `block` at the start of `file` and returns its raw result.
fn once(
    engine: &mut dyn Engine,
    command: Command,
    file: &File,
    direct: bool,
    block: &mut Block,
) -> i64 {
    let transfer = Transfer {
        token: 5,
        command,
        descriptor: file.as_raw_fd(),
        file_slot: None,
        buffer_slot: None,
        channel: None,
        buffered: !direct,
        uncached: false,
        offset: 0,
        address: block.0.as_mut_ptr(),
        length: BLOCK,
    };
    // SAFETY: `block` and `file` are borrowed until the completion has been reaped below.
    assert_eq!(unsafe { engine.submit(&[transfer]) }.unwrap(), 1);
    let mut completions: Vec<Completion> = Vec::new();
    while completions.is_empty() {
        engine.reap(None, &mut completions).unwrap();
    }
    assert_eq!(completions.len(), 1);
    completions[0].result
}

fn open(path: &Path, direct: bool) -> File {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).write(true).create(true).custom_flags(flags).open(path).unwrap()
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn the_nth_write_of_all_engines_fails_and_does_nothing() {
    let directory = directory();
    let factory = factory(FaultPlan::new(1).fail(When::Nth(3), Scope::Writes, libc::ENOSPC));
    let mut engines = [build(&factory), build(&factory)];
    let mut block = Box::new(Block([9; BLOCK]));
    for number in 1..=4u8 {
        let path = directory.path().join(number.to_string());
        let file = open(&path, false);
        let engine = &mut *engines[usize::from(number) % 2];
        let written = once(engine, Command::Write, &file, false, &mut block);
        let read = once(engine, Command::Read, &file, false, &mut block);
        if number == 3 {
            assert_eq!((written, read), (-i64::from(libc::ENOSPC), 0));
        } else {
            assert_eq!((written, read), (WHOLE, WHOLE));
        }
    }
    let counts = factory.counts();
    assert_eq!((counts.transfers, counts.writes, counts.injected), (8, 4, 1));
}

#[test]
fn a_short_result_is_the_length_of_what_was_moved() {
    let directory = directory();
    for (number, (direct, cut)) in
        [(false, Cut::Ragged), (true, Cut::Ragged), (true, Cut::Aligned)].iter().enumerate()
    {
        for seed in 0..20 {
            let factory = factory(FaultPlan::new(seed).shorten(When::Every(1), Scope::Moves, *cut));
            let mut engine = build(&factory);
            let path = directory.path().join(format!("{number}-{seed}"));
            let file = open(&path, *direct);
            let mut block = Box::new(Block([7; BLOCK]));
            let written = once(&mut *engine, Command::Write, &file, *direct, &mut block);
            let written = usize::try_from(written).unwrap();
            assert!(written > 0 && written < BLOCK);
            assert_eq!(std::fs::read(&path).unwrap(), vec![7; written]);
            assert!(*cut == Cut::Ragged || written.is_multiple_of(4096));

            std::fs::write(&path, [8; BLOCK]).unwrap();
            let read = once(&mut *engine, Command::Read, &file, *direct, &mut block);
            let read = usize::try_from(read).unwrap();
            assert!(read > 0 && read < BLOCK);
            assert!(block.0[..read].iter().all(|&byte| byte == 8));
            assert!(block.0[read..].iter().all(|&byte| byte == 7));
        }
    }
}

#[test]
fn direct_transfers_can_be_refused_alone() {
    let directory = directory();
    let factory = factory(FaultPlan::new(1).refuse_direct(libc::EOPNOTSUPP));
    let mut engine = build(&factory);
    let path = directory.path().join("file");
    let (direct, buffered) = (open(&path, true), open(&path, false));
    let mut block = Box::new(Block([7; BLOCK]));
    let refused = once(&mut *engine, Command::Write, &direct, true, &mut block);
    assert_eq!(refused, -i64::from(libc::EOPNOTSUPP));
    let taken = once(&mut *engine, Command::Write, &buffered, false, &mut block);
    assert_eq!(taken, WHOLE);
    let synced = once(&mut *engine, Command::Sync { data_only: true }, &direct, true, &mut block);
    assert_eq!(synced, 0);
}

#[test]
fn a_plan_does_the_same_again_for_the_same_seed() {
    let directory = directory();
    let file = open(&directory.path().join("file"), false);
    let results = |seed| -> Vec<i64> {
        let factory = factory(FaultPlan::survivable(seed));
        let mut engine = build(&factory);
        let mut block = Box::new(Block([7; BLOCK]));
        (0..100).map(|_| once(&mut *engine, Command::Write, &file, false, &mut block)).collect()
    };
    assert_eq!(results(11), results(11));
    assert_ne!(results(11), results(12));
    assert!(results(11).contains(&-i64::from(libc::EINTR)));
}

#[test]
fn a_late_completion_is_late_and_a_sleeping_reap_waits_for_it() {
    let directory = directory();
    let file = open(&directory.path().join("file"), false);
    let factory = factory(FaultPlan::new(4).late(1, Duration::from_millis(40)));
    let mut engine = build(&factory);
    let mut block = Box::new(Block([7; BLOCK]));
    let begin = Instant::now();
    for _ in 0..10 {
        once(&mut *engine, Command::Write, &file, false, &mut block);
    }
    assert_eq!(factory.counts().late, 10);
    // Ten delays from 0 to 40 ms; all of them under 3 ms is one in 10^11.
    assert!(begin.elapsed() > Duration::from_millis(30));
}
