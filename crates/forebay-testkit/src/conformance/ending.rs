//! Drop waits for what is in flight, and nothing is written to memory after it.

#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::time::Duration;

use forebay_io::engine::Command;

use super::Case;
use super::rig::{ALIGNMENT, Job, Memory, Rig};

pub(super) const CASES: &[Case] = &[
    Case { name: "drop with reads in flight leaves the memory alone", check: drop_with_reads },
    Case { name: "drop with writes in flight leaves whole blocks", check: drop_with_writes },
    Case { name: "drop with reads not yet handed to the kernel", check: drop_with_queued },
    Case { name: "an engine can be built after another was dropped", check: build_again },
    Case { name: "drop ends when the wake event was consumed elsewhere", check: consumed_wake },
];

/// Large enough that a drive is still at it when the engine is dropped.
const BLOCK_BYTES: usize = 1 << 20;

fn replace_engine(rig: &mut Rig<'_>) {
    let fresh = match rig.factory.build(&rig.options) {
        Ok(engine) => engine,
        Err(error) => panic!("cannot build a second engine: {error}"),
    };
    rig.engine = fresh;
}

fn drop_with_reads(rig: &mut Rig<'_>) {
    let depth = rig.engine.depth();
    let bytes = vec![0xab; depth * BLOCK_BYTES];
    for direct in [true, false] {
        let file = rig.file(&bytes, direct);
        let memory: Vec<_> = (0..depth).map(|_| Memory::filled(BLOCK_BYTES, 0)).collect();
        let jobs: Vec<_> = memory
            .iter()
            .zip(0u64..)
            .map(|(memory, index)| {
                Job::new(Command::Read, &file, index * BLOCK_BYTES as u64, memory)
            })
            .collect();
        assert!(rig.submit_batch(&jobs, 0) >= 1);
        replace_engine(rig);
        let before: Vec<_> = memory.iter().map(|memory| memory.bytes()).collect();
        std::thread::sleep(Duration::from_millis(20));
        assert!(memory.iter().map(|memory| memory.bytes()).eq(before), "written to after drop");
    }
}

fn drop_with_queued(rig: &mut Rig<'_>) {
    let file = rig.file(&vec![0xab; 2 * BLOCK_BYTES], true);
    let memory = Memory::filled(BLOCK_BYTES, 0);
    let jobs =
        [0, BLOCK_BYTES as u64].map(|offset| Job::new(Command::Read, &file, offset, &memory));
    assert!(rig.submit_for_later(&jobs) >= 1);
    replace_engine(rig);
    let before = memory.bytes();
    assert!(before.iter().all(|&byte| byte == 0 || byte == 0xab));
    std::thread::sleep(Duration::from_millis(20));
    assert!(memory.bytes() == before, "written to after drop");
}

fn drop_with_writes(rig: &mut Rig<'_>) {
    let depth = rig.engine.depth();
    for direct in [true, false] {
        let file = rig.file(&vec![0; depth * BLOCK_BYTES], direct);
        let memory = Memory::filled(BLOCK_BYTES, 0xcd);
        let jobs: Vec<_> = (0..depth as u64)
            .map(|index| Job::new(Command::Write, &file, index * BLOCK_BYTES as u64, &memory))
            .collect();
        assert!(rig.submit_batch(&jobs, 0) >= 1);
        replace_engine(rig);
        let before = std::fs::read(&file.path).unwrap();
        assert!(before.iter().all(|&byte| byte == 0 || byte == 0xcd));
        std::thread::sleep(Duration::from_millis(20));
        assert!(std::fs::read(&file.path).unwrap() == before, "written to after drop");
    }
}

fn build_again(rig: &mut Rig<'_>) {
    for _ in 0..20 {
        replace_engine(rig);
        let file = rig.file(&[4; ALIGNMENT], true);
        let memory = Memory::filled(ALIGNMENT, 0);
        rig.drive_fully(&[Job::new(Command::Read, &file, 0, &memory)]);
        assert_eq!(memory.bytes(), [4; ALIGNMENT]);
    }
}

/// An idle owner may wait for the event itself, while the engine still has it polled.
fn consumed_wake(rig: &mut Rig<'_>) {
    for _ in 0..20 {
        let file = rig.file(&[4; ALIGNMENT], true);
        let memory = Memory::filled(ALIGNMENT, 0);
        rig.drive_fully(&[Job::new(Command::Read, &file, 0, &memory)]);
        for _ in 0..2 {
            rig.wake.signal();
            rig.wake.wait(Some(Duration::from_secs(1)));
        }
        replace_engine(rig);
    }
}
