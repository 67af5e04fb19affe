//! Options of `forebay io`. DeepNVMe's `ds_io` has other names for some of them, which are accepted.

use std::path::PathBuf;

use clap::ValueEnum;
use forebay::ByteSize;
use serde::Serialize;

use crate::exit::Failure;

const EXAMPLES: &str = "Examples:\n  \
    forebay io --dir /nvme --io-size 1G                      one tensor, written again and again\n  \
    forebay io --dir /nvme --read --request-size 4K --in-flight 64 --order random\n  \
    forebay io --dir /nvme0 --dir /nvme1 --processes 4 --validate --json\n\n\
    Options of ds_io (--folder, --io_size, --multi_process, …) are accepted by their names.";

/// Options of `forebay io`.
#[derive(Debug, Serialize, clap::Args)]
#[command(after_help = EXAMPLES)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches, named by their fields")]
#[expect(clippy::struct_field_names, reason = "`io_size` is the field's term")]
pub(crate) struct Io {
    /// Read; with --write, what was written, else files made beforehand
    #[arg(long)]
    pub(super) read: bool,

    /// Write (the default)
    #[arg(long)]
    pub(super) write: bool,

    /// Where the files are; several directories are dealt out to the processes in turn [default: .]
    #[arg(long = "dir", alias = "folder", value_name = "DIR", help_heading = "Where")]
    pub(super) dirs: Vec<PathBuf>,

    /// A process for each mapping, numbered N, with its files in DIR
    #[arg(
        long, alias = "folder_to_device_mapping", value_name = "DIR:N", num_args = 1..,
        conflicts_with_all = ["dirs", "processes"], help_heading = "Where"
    )]
    pub(super) folder_to_device_mapping: Vec<String>,

    /// All processes use parts of one file instead of a file each
    #[arg(long, alias = "shared_file", help_heading = "Where")]
    pub(super) shared_file: bool,

    /// A file for each loop instead of the same one
    #[arg(long, alias = "different_file_each_iteration", help_heading = "Where")]
    pub(super) different_file_each_iteration: bool,

    /// Where in a file its bytes begin
    #[arg(long, default_value = "0", help_heading = "Where")]
    pub(super) offset: ByteSize,

    /// Bytes that a process moves in each loop
    #[arg(long, alias = "io_size", default_value = "1G", help_heading = "How much")]
    pub(super) io_size: ByteSize,

    /// Bytes of a request [default: all that a loop moves]
    #[arg(long, alias = "request_size", help_heading = "How much")]
    pub(super) request_size: Option<ByteSize>,

    /// Requests under way at once in a process
    #[arg(long, alias = "in_flight", default_value_t = 1, help_heading = "How much",
        value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(super) in_flight: u32,

    /// The next request starts when the one before is done: --in-flight 1
    #[arg(
        long,
        alias = "sequential_requests",
        conflicts_with = "in_flight",
        help_heading = "How much"
    )]
    pub(super) sequential_requests: bool,

    /// The order of requests
    #[arg(long, value_enum, default_value = "sequential", help_heading = "How much")]
    pub(super) order: Order,

    /// Processes that do the same at the same time
    #[arg(long, alias = "multi_process", alias = "multi-process", default_value_t = 1,
        help_heading = "How much", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) processes: u32,

    /// Loops that are measured
    #[arg(long, default_value_t = 3, help_heading = "How much",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) loops: u32,

    /// Loops before those
    #[arg(long, alias = "warmup_loops", default_value_t = 1, help_heading = "How much")]
    pub(super) warmup_loops: u32,

    /// Measure the loops before as well
    #[arg(long, alias = "include_warmup_time", help_heading = "How much")]
    pub(super) include_warmup_time: bool,

    /// The engine: auto, uring, aio or threads (`aio_handle`, of DeepNVMe, is auto)
    #[arg(long, default_value = "auto", help_heading = "How")]
    pub(super) engine: String,

    /// Most bytes in one transfer
    #[arg(long, alias = "block_size", default_value = "2M", help_heading = "How")]
    pub(super) block_size: ByteSize,

    /// Transfers in flight per worker
    #[arg(long, alias = "queue_depth", default_value_t = 32, help_heading = "How")]
    pub(super) queue_depth: usize,

    /// Workers of a process, which share each request
    #[arg(
        long,
        alias = "io_parallel",
        alias = "io-parallel",
        alias = "intra-op-parallelism",
        default_value_t = 2,
        help_heading = "How"
    )]
    pub(super) parallelism: usize,

    /// Hand each transfer to the kernel by a call of its own
    #[arg(long, alias = "single_submit", help_heading = "How")]
    pub(super) single_submit: bool,

    /// Always so; accepted for DeepNVMe's sake
    #[arg(long, alias = "overlap_events", help_heading = "How", hide = true)]
    pub(super) overlap_events: bool,

    /// io_uring: a kernel thread polls for submissions
    #[arg(long, help_heading = "How")]
    pub(super) sqpoll: bool,

    /// io_uring: completions are polled for
    #[arg(long, help_heading = "How")]
    pub(super) iopoll: bool,

    /// Go around the page cache
    #[arg(long, value_enum, default_value = "auto", help_heading = "How")]
    pub(super) direct: Direct,

    /// How far a write goes before it is done
    #[arg(long, value_enum, default_value = "none", help_heading = "How")]
    pub(super) durability: Durability,

    /// Don't drop files from the page cache before they are read
    #[arg(long, alias = "keep_cache", help_heading = "How")]
    pub(super) keep_cache: bool,

    /// Where the bytes are in memory: pinned and registered, or as the allocator gives it
    #[arg(long, value_enum, default_value = "pool", help_heading = "How")]
    pub(super) memory: MemoryKind,

    /// The bytes are in memory of GPUs: process N on GPU N, or on the GPU of its mapping
    #[arg(long, conflicts_with_all = ["memory", "shift"], help_heading = "How")]
    pub(super) gpu: bool,

    /// The same, by GPUDirect Storage, or fail
    #[arg(long, alias = "use_gds", conflicts_with_all = ["memory", "shift"], help_heading = "How")]
    pub(super) use_gds: bool,

    /// Bytes behind the beginning of a page at which ordinary memory begins
    #[arg(long, default_value_t = 0, help_heading = "How",
        value_parser = clap::value_parser!(u32).range(0..4096))]
    pub(super) shift: u32,

    /// Check every byte of every loop
    #[arg(long, help_heading = "What else")]
    pub(super) validate: bool,

    /// What contents and random orders follow from
    #[arg(long, default_value_t = 1, help_heading = "What else")]
    pub(super) seed: u64,

    /// Of DeepNVMe, for a GPU's memory
    #[arg(long, alias = "slow_bounce_buffer", help_heading = "What else", hide = true)]
    pub(super) slow_bounce_buffer: bool,

    /// Of DeepNVMe, for a GPU's memory
    #[arg(long, alias = "use_accelerator_pin_memory", help_heading = "What else", hide = true)]
    pub(super) use_accelerator_pin_memory: bool,

    /// Do what standard input says: one of the processes
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub(super) as_process: bool,
}

/// The order of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Order {
    /// From the first byte to the last
    Sequential,
    /// Each once, another order in each loop
    Random,
}

/// Whether transfers go around the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Direct {
    /// Where the file system takes it
    Auto,
    /// Never
    Never,
    /// Always, or fail
    Always,
}

/// How far a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Durability {
    /// The drive or the page cache has the bytes
    None,
    /// fdatasync
    Data,
    /// fsync, of the directory too
    Full,
}

/// What the bytes are moved from and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum MemoryKind {
    /// Pinned memory of the pool
    Pool,
    /// Memory of the allocator
    Ordinary,
}

/// The name of a value as options and the core have it.
pub(super) fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

impl Io {
    /// The option that asks for memory of GPUs, if one does.
    pub(super) fn gpu_option(&self) -> Option<&'static str> {
        let asked = [(self.use_gds, "--use-gds"), (self.gpu, "--gpu")];
        asked.into_iter().find(|(given, _)| *given).map(|(_, name)| name)
    }

    /// Refuses what `ds_io` does to its own pinned memory, of which there is none here.
    pub(super) fn refuse_bounce_buffers(&self) -> anyhow::Result<()> {
        let asked = [
            (self.slow_bounce_buffer, "--slow-bounce-buffer"),
            (self.use_accelerator_pin_memory, "--use-accelerator-pin-memory"),
        ];
        match asked.iter().find(|(given, _)| *given) {
            None => Ok(()),
            Some((_, name)) => {
                let text = "memory is pinned once, and registered with CUDA by itself";
                Err(Failure::environment(format!("{name}: {text}; leave the option out")).into())
            }
        }
    }
}
