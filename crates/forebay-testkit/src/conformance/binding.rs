//! Registered memory and files move the same bytes, and can be given back.

#![expect(unsafe_code, reason = "registers memory")]
#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::os::fd::AsRawFd;

use forebay_io::engine::Command;

use super::Case;
use super::rig::{ALIGNMENT, Job, Memory, Rig};

pub(super) const CASES: &[Case] = &[
    Case { name: "registered memory and files move exact bytes", check: bound_exact },
    Case { name: "slots can be given back and taken again", check: rebind },
    Case { name: "an engine that can't register says so", check: capabilities },
];

fn bound_exact(rig: &mut Rig<'_>) {
    let bytes = rig.noise(32 * ALIGNMENT);
    for direct in [true, false] {
        let file = rig.file(&vec![0; bytes.len()], direct);
        let source = Memory::holding(&bytes);
        let target = Memory::filled(bytes.len() + 2 * ALIGNMENT, 0);
        // SAFETY: both are unbound below, before they are freed.
        let source_slot = unsafe { rig.engine.bind_buffer(source.address(0), source.len()) };
        let source_slot = source_slot.unwrap();
        // SAFETY: as above.
        let target_slot = unsafe { rig.engine.bind_buffer(target.address(0), target.len()) };
        let target_slot = target_slot.unwrap();
        let file_slot = rig.engine.bind_file(file.file.as_raw_fd());
        let jobs = |command, slot, memory, start: usize| -> Vec<Job> {
            (0..8)
                .map(|index: usize| {
                    let offset = index * 4 * ALIGNMENT;
                    let mut job = Job::new(command, &file, offset as u64, memory);
                    (job.start, job.length) = (start + offset, 4 * ALIGNMENT);
                    (job.buffer_slot, job.file_slot) = (slot, file_slot);
                    job
                })
                .collect()
        };
        rig.drive_fully(&jobs(Command::Write, source_slot, &source, 0));
        assert!(std::fs::read(&file.path).unwrap() == bytes);
        rig.drive_fully(&jobs(Command::Read, target_slot, &target, ALIGNMENT));
        assert!(target.bytes()[ALIGNMENT..][..bytes.len()] == bytes);
        let mut sync = Job::new(Command::Sync { data_only: false }, &file, 0, &source);
        sync.file_slot = file_slot;
        rig.drive_fully(&[sync]);
        for slot in [source_slot, target_slot].into_iter().flatten() {
            rig.engine.unbind_buffer(slot);
        }
        if let Some(slot) = file_slot {
            rig.engine.unbind_file(slot);
        }
        // Unregistered, all of it works as before.
        rig.drive_fully(&[Job::new(Command::Write, &file, 0, &source)]);
    }
}

fn rebind(rig: &mut Rig<'_>) {
    // More rounds than any table has slots.
    for round in 0..2000u64 {
        let memory = Memory::filled(ALIGNMENT, 0);
        // SAFETY: unbound below, before it is freed.
        let slot = unsafe { rig.engine.bind_buffer(memory.address(0), ALIGNMENT) }.unwrap();
        let Some(slot) = slot else {
            assert_eq!(round, 0, "slots given back run out");
            break;
        };
        rig.engine.unbind_buffer(slot);
    }
    let file = rig.file(&[9; ALIGNMENT], true);
    let mut slots = Vec::new();
    while let Some(slot) = rig.engine.bind_file(file.file.as_raw_fd()) {
        assert!(!slots.contains(&slot) && slots.len() < 1 << 16);
        slots.push(slot);
    }
    if let Some(&slot) = slots.last() {
        let mut job = Job::new(Command::Read, &file, 0, &Memory::filled(ALIGNMENT, 0));
        job.file_slot = Some(slot);
        rig.drive_fully(std::slice::from_ref(&job));
        assert_eq!(job.memory.bytes(), [9; ALIGNMENT]);
    }
    let count = slots.len();
    slots.drain(..).for_each(|slot| rig.engine.unbind_file(slot));
    let again = std::iter::from_fn(|| rig.engine.bind_file(file.file.as_raw_fd())).count();
    assert_eq!(again, count);
}

fn capabilities(rig: &mut Rig<'_>) {
    let capabilities = rig.engine.capabilities();
    let memory = Memory::filled(ALIGNMENT, 0);
    let file = rig.file(&[], false);
    // SAFETY: unbound below, before it is freed.
    let buffer = unsafe { rig.engine.bind_buffer(memory.address(0), ALIGNMENT) }.unwrap();
    let slot = rig.engine.bind_file(file.file.as_raw_fd());
    assert_eq!(buffer.is_some(), capabilities.registered_buffers);
    assert_eq!(slot.is_some(), capabilities.registered_files);
    if let Some(slot) = buffer {
        rig.engine.unbind_buffer(slot);
    }
}
