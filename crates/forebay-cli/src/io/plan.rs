//! From options to jobs: what each process does, where, how often.

use std::path::{Path, PathBuf};

use anyhow::Result;
use forebay::workload::{HandleOptions, Job, Memory, REQUESTS_MAX, Way};

use super::arguments::{Io, MemoryKind, Order, name_of};
use crate::exit::Failure;
use crate::gpu::Gpu;
use crate::scratch::Scratch;

/// What is going to be done.
#[derive(Debug)]
pub(super) struct Plan {
    /// Which ways, in turn.
    pub(super) ways: Vec<Way>,
    /// Different directories.
    pub(super) directories: Vec<PathBuf>,
    /// For each process, the index of its directory and its job.
    pub(super) processes: Vec<(usize, Job)>,
    pub(super) warmup_loops: u64,
    pub(super) loops: u64,
    pub(super) include_warmup: bool,
    /// All processes of a directory use one file.
    pub(super) shared_file: bool,
    /// The GPUs whose memory is moved.
    pub(super) gpus: Vec<Gpu>,
    /// Files of a process.
    files_count: u64,
}

impl Plan {
    /// A plan for the memory of these GPUs, or for the host's.
    pub(super) fn new(options: &Io, gpus: Option<&[Gpu]>) -> Result<Self> {
        let io_bytes = options.io_size.0;
        if io_bytes == 0 {
            return Err(Failure::usage("--io-size is 0, there is nothing to move").into());
        }
        let request = options.request_size.map_or(io_bytes, |size| size.0).min(io_bytes);
        let request_bytes = usize::try_from(request)?;
        if request_bytes == 0 {
            return Err(Failure::usage("--request-size is 0").into());
        }
        let memory = match (options.memory, options.shift) {
            (MemoryKind::Ordinary, shift) => Memory::Ordinary { shift: usize::try_from(shift)? },
            (MemoryKind::Pool, 0) => Memory::Pool,
            (MemoryKind::Pool, _) => {
                return Err(Failure::usage("--shift goes with --memory ordinary").into());
            }
        };
        let mut directories: Vec<PathBuf> = Vec::new();
        let mut processes = Vec::new();
        let mut users: Vec<u64> = Vec::new();
        let mut used: Vec<Gpu> = Vec::new();
        for (number, directory) in places_of(options)? {
            let gpu = gpus.map(|gpus| gpu_of(options, gpus, number)).transpose()?;
            let memory = gpu
                .map_or(memory, |gpu| Memory::Gpu { ordinal: gpu.ordinal, gds: options.use_gds });
            used.extend(gpu.filter(|gpu| !used.contains(gpu)).cloned());
            let known = directories.iter().position(|known| *known == directory);
            let index = known.unwrap_or(directories.len());
            if known.is_none() {
                directories.push(directory);
                users.push(0);
            }
            // Parts of one file lie behind each other.
            let before = if options.shared_file { users[index] * io_bytes } else { 0 };
            users[index] += 1;
            let offset = options.offset.0.saturating_add(before);
            let job = job(options, offset, request_bytes, memory);
            check_job(&job)?;
            processes.push((index, job));
        }
        let loops = u64::from(options.loops);
        let warmup_loops = u64::from(options.warmup_loops);
        Ok(Self {
            ways: match (options.write, options.read) {
                (true, true) => vec![Way::Write, Way::Read],
                (false, true) => vec![Way::Read],
                (_, false) => vec![Way::Write],
            },
            directories,
            processes,
            warmup_loops,
            loops,
            include_warmup: options.include_warmup_time,
            shared_file: options.shared_file,
            gpus: used,
            files_count: if options.different_file_each_iteration {
                loops + warmup_loops
            } else {
                1
            },
        })
    }

    /// Bytes that the files in each directory take.
    pub(super) fn needed_bytes(&self) -> Vec<u64> {
        let mut needed = vec![0_u64; self.directories.len()];
        for (directory, job) in &self.processes {
            let end = job.offset.saturating_add(job.io_bytes);
            let sum = &mut needed[*directory];
            *sum = if self.shared_file { end.max(*sum) } else { sum.saturating_add(end) };
        }
        needed.iter().map(|bytes| bytes.saturating_mul(self.files_count)).collect()
    }

    /// Says where the files of each process are.
    pub(super) fn put_files(&mut self, scratches: &[Scratch]) {
        for (number, (directory, job)) in self.processes.iter_mut().enumerate() {
            let owner = if self.shared_file { "shared".to_owned() } else { number.to_string() };
            let folder = scratches[*directory].path();
            let name = |index| folder.join(format!("file-{owner}-{index}"));
            job.files = (0..self.files_count).map(name).collect();
        }
    }
}

/// The GPU of a process: the one of its mapping, or the next in turn.
fn gpu_of<'a>(options: &Io, gpus: &'a [Gpu], number: u32) -> Result<&'a Gpu> {
    let number = usize::try_from(number)?;
    let index =
        if options.folder_to_device_mapping.is_empty() { number % gpus.len() } else { number };
    gpus.get(index).ok_or_else(|| {
        let count = gpus.len();
        let text = format!("--folder-to-device-mapping names GPU {number}, and there are {count}");
        Failure::environment(text).into()
    })
}

/// The number and the directory of each process.
fn places_of(options: &Io) -> Result<Vec<(u32, PathBuf)>> {
    let mut numbered = Vec::new();
    for mapping in &options.folder_to_device_mapping {
        let split = mapping.rsplit_once(':');
        let parsed = split.and_then(|(folder, number)| Some((number.parse::<u32>().ok()?, folder)));
        let Some((number, folder)) = parsed.filter(|(_, folder)| !folder.is_empty()) else {
            let text = format!("--folder-to-device-mapping {mapping:?} isn't of the form DIR:N");
            return Err(Failure::usage(text).into());
        };
        if numbered.iter().any(|(other, _)| *other == number) {
            let text = format!("--folder-to-device-mapping has the number {number} twice");
            return Err(Failure::usage(text).into());
        }
        numbered.push((number, PathBuf::from(folder)));
    }
    if !numbered.is_empty() {
        numbered.sort();
        return Ok(numbered);
    }
    let here = [PathBuf::from(".")];
    let dirs: &[PathBuf] = if options.dirs.is_empty() { &here } else { &options.dirs };
    let count = options.processes.max(u32::try_from(dirs.len())?);
    Ok((0..count).zip(dirs.iter().cycle().cloned()).collect())
}

fn job(options: &Io, offset: u64, request_bytes: usize, memory: Memory) -> Job {
    let engine = if options.engine == "aio_handle" { "auto" } else { &options.engine };
    Job {
        files: Vec::new(),
        offset,
        io_bytes: options.io_size.0,
        request_bytes,
        in_flight: if options.sequential_requests { 1 } else { options.in_flight as usize },
        random: options.order == Order::Random,
        seed: options.seed,
        validate: options.validate,
        keep_cache: options.keep_cache,
        memory,
        handle: HandleOptions {
            engine: engine.to_owned(),
            block_size: usize::try_from(options.block_size.0).unwrap_or(usize::MAX),
            queue_depth: options.queue_depth,
            parallelism: options.parallelism,
            single_submit: options.single_submit,
            sqpoll: options.sqpoll,
            iopoll: options.iopoll,
            direct: name_of(&options.direct),
            durability: name_of(&options.durability),
            page_cache: true,
        },
    }
}

/// Refuses a job that can't be carried out anywhere.
fn check_job(job: &Job) -> Result<()> {
    job.handle.to_options().map_err(|error| Failure::usage(error.to_string()))?;
    let requests = job.requests_count();
    if requests > REQUESTS_MAX {
        let text = format!("{requests} requests in each loop, {REQUESTS_MAX} are the most");
        return Err(Failure::usage(format!("{text}: pass a larger --request-size")).into());
    }
    let end = job.offset.checked_add(job.io_bytes);
    if end.is_none_or(|end| i64::try_from(end).is_err()) {
        let text = format!("{} bytes from {} on don't fit in a file", job.io_bytes, job.offset);
        return Err(Failure::usage(text).into());
    }
    Ok(())
}

/// Where a directory is, for people.
pub(super) fn label(directory: &Path) -> String {
    std::fs::canonicalize(directory)
        .unwrap_or_else(|_| directory.to_path_buf())
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        io: Io,
    }

    fn plan(arguments: &[&str]) -> Result<Plan> {
        let words = std::iter::once("io").chain(arguments.iter().copied());
        let gpu = |ordinal| Gpu { ordinal, name: format!("GPU {ordinal}") };
        let options = Alone::try_parse_from(words)?.io;
        let gpus = options.gpu_option().map(|_| [gpu(0), gpu(1)]);
        Plan::new(&options, gpus.as_ref().map(|gpus| &gpus[..]))
    }

    #[test]
    fn parts_of_a_shared_file_lie_behind_each_other_in_each_directory() {
        let words = ["--dir", "/a", "--dir", "/b", "--processes", "4", "--shared-file"];
        let plan = plan(&[&words[..], &["--io-size", "1000", "--offset", "7"]].concat()).unwrap();
        let offsets: Vec<_> =
            plan.processes.iter().map(|(directory, job)| (*directory, job.offset)).collect();
        assert_eq!(offsets, [(0, 7), (1, 7), (0, 1007), (1, 1007)]);
        assert_eq!(plan.needed_bytes(), [2007, 2007]);
    }

    #[test]
    fn every_directory_gets_a_process_and_mappings_go_by_their_numbers() {
        assert_eq!(plan(&["--dir", "/a", "--dir", "/b"]).unwrap().processes.len(), 2);
        let mapped = plan(&["--folder_to_device_mapping", "/b:7", "/a:1"]).unwrap();
        assert_eq!(mapped.directories, [PathBuf::from("/a"), PathBuf::from("/b")]);
        for wrong in [&["/a"][..], &["/a:x"], &[":1"], &["/a:1", "/b:1"]] {
            let words = [&["--folder_to_device_mapping"][..], wrong].concat();
            assert!(plan(&words).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn gpus_are_dealt_out_in_turn_or_as_mapped() {
        let ordinals = |plan: &Plan| -> Vec<Memory> {
            plan.processes.iter().map(|(_, job)| job.memory).collect()
        };
        let gpu = |ordinal| Memory::Gpu { ordinal, gds: false };
        let dealt = plan(&["--gpu", "--processes", "3", "--dir", "/a"]).unwrap();
        assert_eq!(ordinals(&dealt), [gpu(0), gpu(1), gpu(0)]);
        assert_eq!(dealt.gpus.len(), 2);
        let mapped = plan(&["--use_gds", "--folder_to_device_mapping", "/a:1"]).unwrap();
        assert_eq!(ordinals(&mapped), [Memory::Gpu { ordinal: 1, gds: true }]);
        assert_eq!(mapped.gpus[0].ordinal, 1);
        let error = plan(&["--gpu", "--folder_to_device_mapping", "/a:2"]).unwrap_err();
        assert!(error.to_string().contains("GPU 2, and there are 2"), "{error}");
        assert!(plan(&["--gpu", "--memory", "pool"]).is_err());
    }

    #[test]
    fn the_names_of_ds_io_are_taken() {
        let words = "--folder /a --io_size 100M --block_size 1M --queue_depth 8 --single_submit \
            --sequential_requests --validate --engine aio_handle --loops 2 --io_parallel 4 \
            --multi_process 2 --warmup_loops 0 --include_warmup_time --read \
            --different_file_each_iteration";
        let plan = plan(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
        assert_eq!(plan.ways, [Way::Read]);
        assert_eq!(plan.needed_bytes(), [2 * 2 * (100 << 20)]);
        let (_, job) = &plan.processes[1];
        assert_eq!((job.handle.block_size, job.handle.parallelism, job.in_flight), (1 << 20, 4, 1));
        assert_eq!(job.handle.engine, "auto");
    }

    #[test]
    fn what_cannot_be_done_is_wrong_use() {
        for (words, part) in [
            (&["--io-size", "0"][..], "nothing to move"),
            (&["--request-size", "0"], "--request-size is 0"),
            (&["--shift", "3"], "--memory ordinary"),
            (&["--engine", "torch_io"], "torch_io"),
            (&["--block-size", "7"], "block_size is 7"),
            (&["--io-size", "1T", "--request-size", "1"], "--request-size"),
            (&["--offset", "8192P"], "don't fit in a file"),
        ] {
            let error = plan(words).unwrap_err();
            assert!(error.to_string().contains(part), "{words:?}: {error}");
            assert_eq!(error.downcast_ref::<Failure>().unwrap().exit(), crate::Exit::Usage);
        }
    }
}
