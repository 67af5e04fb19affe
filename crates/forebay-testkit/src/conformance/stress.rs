//! Thousands of random transfers against a model of the files.

#![expect(unsafe_code, reason = "registers memory")]
#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::os::fd::AsRawFd;
use std::path::Path;
use std::rc::Rc;

use forebay_io::engine::{Command, EngineFactory};

use super::rig::{ALIGNMENT, Job, Memory, Rig, TestFile};
use super::{Context, Outcome, Shape};
use crate::random::Random;

/// Jobs that run together; each has a region of the file to itself.
const REGIONS: usize = 48;
const REGION_BYTES: usize = 32 * ALIGNMENT;

/// A file, what it should hold, and the memory that its transfers use.
struct Side {
    file: TestFile,
    model: Vec<u8>,
    memory: Rc<Memory>,
    buffer_slot: Option<u16>,
    file_slot: Option<u32>,
}

/// Does `round_count` times a batch of reads, writes and syncs of random places and sizes on a
/// direct and a buffered file, some through registered memory and files, and compares every byte.
///
/// # Panics
///
/// When a byte differs; the seed is printed.
pub fn stress(
    factory: &dyn EngineFactory,
    directory: &Path,
    shape: Shape,
    seed: u64,
    round_count: usize,
) -> Outcome {
    let mut rig = match Rig::new(factory, directory, shape) {
        Ok(rig) => rig,
        Err(error) => return Outcome::Skipped { reason: error.to_string() },
    };
    let case = format!("stress with seed {seed}");
    let _context = Context { case: &case, factory, shape };
    rig.random = Random::new(seed);
    let mut sides = [true, false].map(|direct| side(&mut rig, direct));
    for _ in 0..round_count {
        let mut jobs = Vec::new();
        let mut checks = Vec::new();
        for region in 0..REGIONS {
            let side_index = rig.random.index(2);
            let side = &mut sides[side_index];
            let job = random_job(&mut rig.random, side, region);
            if job.command == Command::Write {
                let bytes = rig.noise(job.length);
                job.memory.put(job.start, &bytes);
                side.model[job.start..][..job.length].copy_from_slice(&bytes);
            } else if job.command == Command::Read {
                job.memory.put(job.start, &vec![0; job.length]);
                checks.push((side_index, job.start, job.length));
            }
            jobs.push(job);
        }
        rig.random.shuffle(&mut jobs);
        rig.drive_fully(&jobs);
        let memory = sides.each_ref().map(|side| side.memory.bytes());
        for (side, start, length) in checks {
            let range = start..start + length;
            assert!(memory[side][range.clone()] == sides[side].model[range], "read at {start}");
        }
        rig.forget_memory();
    }
    for side in &sides {
        assert!(std::fs::read(&side.file.path).unwrap() == side.model, "{:?}", side.file);
        if let Some(slot) = side.buffer_slot {
            rig.engine.unbind_buffer(slot);
        }
        if let Some(slot) = side.file_slot {
            rig.engine.unbind_file(slot);
        }
    }
    Outcome::Passed { case_count: round_count * REGIONS }
}

fn side(rig: &mut Rig<'_>, direct: bool) -> Side {
    let model = rig.noise(REGIONS * REGION_BYTES);
    let file = rig.file(&model, direct);
    let memory = Memory::filled(model.len(), 0);
    rig.keep(&memory);
    // SAFETY: the rig keeps the memory for longer than the engine lives.
    let buffer_slot = unsafe { rig.engine.bind_buffer(memory.address(0), memory.len()) }.unwrap();
    let file_slot = rig.engine.bind_file(file.file.as_raw_fd());
    Side { file, model, memory, buffer_slot, file_slot }
}

/// Something to do in the region. File and memory correspond byte by byte.
fn random_job(random: &mut Random, side: &Side, region: usize) -> Job {
    let unit = if side.file.direct { ALIGNMENT } else { 1 };
    let units = REGION_BYTES / unit;
    let first = random.index(units);
    let length = unit * (1 + random.index(units - first));
    let start = region * REGION_BYTES + first * unit;
    let command = match random.index(16) {
        0 => Command::Sync { data_only: true },
        1..=7 => Command::Read,
        _ => Command::Write,
    };
    let mut job = Job::new(command, &side.file, start as u64, &side.memory);
    (job.start, job.length) = (start, length);
    job.buffer_slot = side.buffer_slot.filter(|_| random.one_in(2));
    job.file_slot = side.file_slot.filter(|_| random.one_in(2));
    job
}
