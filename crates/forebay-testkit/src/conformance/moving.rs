//! Bytes arrive where they belong, all of them, and no others.

#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::collections::HashSet;

use forebay_io::engine::Command;

use super::Case;
use super::rig::{ALIGNMENT, Job, Memory, Rig};

pub(super) const CASES: &[Case] = &[
    Case { name: "buffered bytes are exact at any size and offset", check: buffered_exact },
    Case { name: "direct bytes are exact at aligned sizes and offsets", check: direct_exact },
    Case { name: "a read touches only the memory it was given", check: only_its_memory },
    Case { name: "many transfers complete once each, whatever the depth", check: many },
    Case { name: "a full engine accepts no more than its depth", check: full },
    Case { name: "tokens come back as they were, the extremes too", check: tokens },
    Case { name: "direct, buffered, sync and allocate mix in one batch", check: mixture },
    Case { name: "sync and allocate work", check: sync_and_allocate },
    Case { name: "uncached transfers are exact or refused", check: uncached },
];

/// Lengths around the borders of sectors, pages and the chunks in which kernels work.
const LENGTHS: [usize; 10] =
    [1, 7, 511, 512, 4095, 4096, 4097, 65_537, 1_000_003, 3 * 1024 * 1024 + 5];

fn buffered_exact(rig: &mut Rig<'_>) {
    for offset in [0u64, 1, 511, 4096, 123_457] {
        for length in LENGTHS {
            round_trip(rig, false, offset, length);
        }
    }
}

fn direct_exact(rig: &mut Rig<'_>) {
    for offset in [0u64, 4096, 40_960, 1 << 20] {
        for pages in [1, 2, 15, 256, 1025] {
            round_trip(rig, true, offset, pages * ALIGNMENT);
        }
    }
}

/// Writes into the middle of a file and reads it back; the bytes around it stay as they were.
fn round_trip(rig: &mut Rig<'_>, direct: bool, offset: u64, length: usize) {
    let start = usize::try_from(offset).unwrap();
    let mut model = rig.noise(start + length + ALIGNMENT);
    let file = rig.file(&model, direct);
    let bytes = rig.noise(length);
    model[start..start + length].copy_from_slice(&bytes);

    rig.drive_fully(&[Job::new(Command::Write, &file, offset, &Memory::holding(&bytes))]);
    assert!(std::fs::read(&file.path).unwrap() == model, "written at {offset}, {length} bytes");

    let memory = Memory::filled(length, 0xee);
    rig.drive_fully(&[Job::new(Command::Read, &file, offset, &memory)]);
    assert!(memory.bytes() == bytes, "read at {offset}, {length} bytes");
}

fn only_its_memory(rig: &mut Rig<'_>) {
    let bytes = rig.noise(16 * ALIGNMENT);
    for direct in [true, false] {
        let file = rig.file(&bytes, direct);
        let memory = Memory::filled(3 * ALIGNMENT, 0x77);
        let mut job = Job::new(Command::Read, &file, 4096, &memory);
        (job.start, job.length) = (ALIGNMENT, ALIGNMENT);
        rig.drive_fully(&[job]);
        let mut model = vec![0x77; 3 * ALIGNMENT];
        model[ALIGNMENT..2 * ALIGNMENT].copy_from_slice(&bytes[ALIGNMENT..2 * ALIGNMENT]);
        assert!(memory.bytes() == model);
    }
}

fn many(rig: &mut Rig<'_>) {
    const BLOCKS: usize = 256;
    let bytes = rig.noise(BLOCKS * ALIGNMENT);
    for direct in [true, false] {
        let file = rig.file(&bytes, direct);
        let mut order: Vec<usize> = (0..BLOCKS).collect();
        rig.random.shuffle(&mut order);
        let jobs: Vec<_> = order
            .iter()
            .map(|&block| {
                let memory = Memory::filled(ALIGNMENT, 0);
                Job::new(Command::Read, &file, (block * ALIGNMENT) as u64, &memory)
            })
            .collect();
        rig.drive_fully(&jobs);
        for (job, block) in jobs.iter().zip(order) {
            assert!(job.memory.bytes() == bytes[block * ALIGNMENT..][..ALIGNMENT]);
        }
    }
}

fn full(rig: &mut Rig<'_>) {
    let depth = rig.engine.depth();
    assert!(depth >= 1 && depth <= rig.options.queue_depth);
    let bytes = rig.noise(ALIGNMENT);
    for direct in [true, false] {
        let file = rig.file(&bytes, direct);
        let memory = Memory::filled(ALIGNMENT, 0);
        let jobs = vec![Job::new(Command::Read, &file, 0, &memory); 2 * depth + 3];
        let mut accepted = rig.submit_batch(&jobs, 0);
        accepted += rig.submit_batch(&jobs[accepted..], accepted as u64);
        assert!(accepted >= 1 && accepted <= depth, "{accepted} of depth {depth}");
        assert_eq!(rig.engine.in_flight(), accepted);
        let tokens: HashSet<u64> =
            rig.reap_count(accepted).iter().map(|completion| completion.token).collect();
        assert_eq!(tokens, (0..accepted as u64).collect());
        assert_eq!(rig.engine.in_flight(), 0);
    }
}

fn tokens(rig: &mut Rig<'_>) {
    let file = rig.file(&[1; ALIGNMENT], true);
    for token in [0, 1, u64::from(u32::MAX), 1 << 63, u64::MAX - 2, u64::MAX - 1, u64::MAX] {
        let job = Job::new(Command::Read, &file, 0, &Memory::filled(ALIGNMENT, 0));
        assert!(rig.submit_raw(&job, token));
        assert_eq!(rig.reap_count(1)[0].token, token);
    }
}

fn mixture(rig: &mut Rig<'_>) {
    let direct = rig.file(&vec![0; 8 * ALIGNMENT], true);
    let buffered = rig.file(&vec![0; 8 * ALIGNMENT], false);
    let bytes = rig.noise(2 * ALIGNMENT);
    let memory = Memory::holding(&bytes);
    let mut jobs = Vec::new();
    for index in 0..4 {
        let offset = index * 2 * ALIGNMENT as u64;
        jobs.push(Job::new(Command::Write, &direct, offset, &memory));
        jobs.push(Job::new(Command::Write, &buffered, offset, &memory));
        jobs.push(Job::new(Command::Sync { data_only: index % 2 == 0 }, &direct, 0, &memory));
        let mut allocation =
            Job::new(Command::Allocate { keep_size: false }, &buffered, 0, &memory);
        allocation.length = 8 * ALIGNMENT;
        allocation.start = 0;
        jobs.push(without_memory(allocation));
    }
    rig.drive_fully(&jobs);
    let model = bytes.repeat(4);
    assert!(std::fs::read(&direct.path).unwrap() == model);
    assert!(std::fs::read(&buffered.path).unwrap() == model);
}

/// Commands that move no bytes have no address.
fn without_memory(mut job: Job) -> Job {
    job.memory = Memory::filled(0, 0);
    job
}

fn sync_and_allocate(rig: &mut Rig<'_>) {
    for direct in [true, false] {
        let file = rig.file(b"before", direct);
        let memory = Memory::filled(0, 0);
        let mut allocation =
            Job::new(Command::Allocate { keep_size: false }, &file, 1 << 20, &memory);
        allocation.length = (1 << 20) + 1;
        let outcome = rig.drive(std::slice::from_ref(&allocation))[0];
        match outcome {
            Ok(_) => {
                let mut model = b"before".to_vec();
                model.resize((2 << 20) + 1, 0);
                assert!(std::fs::read(&file.path).unwrap() == model);
            }
            // Not every file system has it.
            Err(code) => assert_eq!(code, libc::EOPNOTSUPP),
        }
        let size = std::fs::metadata(&file.path).unwrap().len();
        allocation.command = Command::Allocate { keep_size: true };
        allocation.offset = size;
        let _ = rig.drive(std::slice::from_ref(&allocation))[0];
        assert_eq!(std::fs::metadata(&file.path).unwrap().len(), size);
        for data_only in [true, false] {
            rig.drive_fully(&[Job::new(Command::Sync { data_only }, &file, 0, &memory)]);
        }
    }
}

fn uncached(rig: &mut Rig<'_>) {
    let bytes = rig.noise(100_003);
    for direct in [true, false] {
        let length = if direct { 24 * ALIGNMENT } else { bytes.len() };
        let bytes = &bytes[..length];
        let file = rig.file(&vec![0; length], direct);
        let mut write = Job::new(Command::Write, &file, 0, &Memory::holding(bytes));
        let mut read = Job::new(Command::Read, &file, 0, &Memory::filled(length, 0));
        (write.uncached, read.uncached) = (true, true);
        match rig.drive(&[write])[0] {
            Ok(moved) => {
                assert_eq!(moved, length);
                rig.drive_fully(std::slice::from_ref(&read));
                assert!(read.memory.bytes() == bytes);
                assert!(std::fs::read(&file.path).unwrap() == bytes);
            }
            Err(code) => {
                assert_eq!(code, libc::EOPNOTSUPP);
                assert!(!direct, "a direct transfer leaves nothing in the cache anyway");
            }
        }
    }
}
