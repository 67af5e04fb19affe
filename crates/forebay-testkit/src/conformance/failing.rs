//! What the kernel refuses comes back as the completion's `-errno`, and the engine goes on.

#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;

use forebay_io::engine::Command;

use super::Case;
use super::memory::set_device;
use super::rig::{ALIGNMENT, Job, Memory, Rig};

pub(super) const CASES: &[Case] = &[
    Case { name: "a closed descriptor is EBADF", check: closed_descriptor },
    Case { name: "a descriptor open the other way is EBADF", check: wrong_way },
    Case { name: "a misaligned direct transfer is EINVAL or exact", check: misaligned },
    Case { name: "reading at the end of a file is short or zero", check: end_of_file },
    Case { name: "an offset beyond the signed range is refused", check: offset_too_large },
    Case { name: "a full device is ENOSPC", check: full_device },
    Case { name: "an error among others leaves them alone", check: among_others },
];

/// A number that no descriptor has: above any limit on open files.
const NO_DESCRIPTOR: i32 = i32::MAX;

fn closed_descriptor(rig: &mut Rig<'_>) {
    let file = rig.file(&[0; ALIGNMENT], true);
    let memory = Memory::filled(ALIGNMENT, 0);
    let commands = [
        Command::Read,
        Command::Write,
        Command::Sync { data_only: true },
        Command::Allocate { keep_size: false },
    ];
    for command in commands {
        for buffered in [true, false] {
            let mut job = Job::new(command, &file, 0, &memory);
            (job.descriptor, job.buffered) = (NO_DESCRIPTOR, buffered);
            assert_eq!(rig.drive(&[job]), [Err(libc::EBADF)], "{command:?}");
        }
    }
    rig.drive_fully(&[Job::new(Command::Read, &file, 0, &memory)]);
}

fn wrong_way(rig: &mut Rig<'_>) {
    for direct in [true, false] {
        let file = rig.file(&[7; ALIGNMENT], direct);
        let read_only = File::open(&file.path).unwrap();
        let write_only = OpenOptions::new().write(true).open(&file.path).unwrap();
        let memory = Memory::filled(ALIGNMENT, 1);
        let mut write = Job::new(Command::Write, &file, 0, &memory);
        write.descriptor = read_only.as_raw_fd();
        let mut read = Job::new(Command::Read, &file, 0, &memory);
        read.descriptor = write_only.as_raw_fd();
        assert_eq!(rig.drive(&[write, read]), [Err(libc::EBADF), Err(libc::EBADF)]);
        assert_eq!(std::fs::read(&file.path).unwrap(), [7; ALIGNMENT]);
    }
}

fn misaligned(rig: &mut Rig<'_>) {
    let bytes = rig.noise(4 * ALIGNMENT);
    let file = rig.file(&bytes, true);
    for (start, offset, length) in [(1, 0, ALIGNMENT), (0, 1, ALIGNMENT), (0, 0, ALIGNMENT - 1)] {
        let mut job = Job::new(Command::Read, &file, offset, &Memory::filled(2 * ALIGNMENT, 0));
        (job.start, job.length) = (start, length);
        let offset = usize::try_from(offset).unwrap();
        match rig.drive(std::slice::from_ref(&job))[0] {
            Ok(moved) => {
                assert_eq!(moved, length);
                assert!(job.memory.bytes()[start..][..length] == bytes[offset..][..length]);
            }
            Err(code) => assert_eq!(code, libc::EINVAL, "{job:?}"),
        }
    }
}

fn end_of_file(rig: &mut Rig<'_>) {
    let length = ALIGNMENT + 100;
    let bytes = rig.noise(length);
    for direct in [true, false] {
        let file = rig.file(&bytes, direct);
        let memory = Memory::filled(4 * ALIGNMENT, 0x11);
        let read = |offset| Job::new(Command::Read, &file, offset, &memory);
        assert_eq!(rig.drive(&[read(0)]), [Ok(length)]);
        assert!(memory.bytes()[..length] == bytes);
        assert_eq!(rig.drive(&[read(ALIGNMENT as u64)]), [Ok(100)]);
        assert_eq!(rig.drive(&[read(2 * ALIGNMENT as u64)]), [Ok(0)]);
        assert_eq!(rig.drive(&[read(1 << 40)]), [Ok(0)]);
    }
}

fn offset_too_large(rig: &mut Rig<'_>) {
    let memory = Memory::filled(ALIGNMENT, 0);
    for direct in [true, false] {
        let file = rig.file(&[5; ALIGNMENT], direct);
        // -1 as a signed number: the file's own position to some calls.
        for offset in [u64::MAX, u64::MAX - 4095, 1 << 63] {
            for command in [Command::Read, Command::Write, Command::Allocate { keep_size: false }] {
                let outcome = rig.drive(&[Job::new(command, &file, offset, &memory)])[0];
                let refusals = [libc::EINVAL, libc::EFBIG, libc::EOVERFLOW];
                assert!(outcome.is_err_and(|code| refusals.contains(&code)), "{outcome:?}");
            }
        }
        assert_eq!(std::fs::read(&file.path).unwrap(), [5; ALIGNMENT]);
    }
}

fn full_device(rig: &mut Rig<'_>) {
    // cuFile takes no character devices, and the kernel reaches no other memory than the host's.
    set_device(None);
    let Ok(device) = OpenOptions::new().write(true).open("/dev/full") else {
        return; // Not every container has it.
    };
    let file = rig.file(&[], false);
    let mut job = Job::new(Command::Write, &file, 0, &Memory::filled(ALIGNMENT, 0));
    job.descriptor = device.as_raw_fd();
    assert_eq!(rig.drive(&[job]), [Err(libc::ENOSPC)]);
}

fn among_others(rig: &mut Rig<'_>) {
    let bytes = rig.noise(64 * ALIGNMENT);
    for direct in [true, false] {
        let file = rig.file(&bytes, direct);
        let jobs: Vec<_> = (0..64)
            .map(|block| {
                let memory = Memory::filled(ALIGNMENT, 0);
                let mut job = Job::new(Command::Read, &file, block * ALIGNMENT as u64, &memory);
                if block % 3 == 1 {
                    job.descriptor = NO_DESCRIPTOR;
                }
                job
            })
            .collect();
        for (index, outcome) in rig.drive(&jobs).into_iter().enumerate() {
            if index % 3 == 1 {
                assert_eq!(outcome, Err(libc::EBADF));
            } else {
                assert_eq!(outcome, Ok(ALIGNMENT));
                assert!(jobs[index].memory.bytes() == bytes[index * ALIGNMENT..][..ALIGNMENT]);
            }
        }
    }
}
