//! What a user can choose about a handle, with defaults and bounds. The only file that reads the
//! environment, should that ever be needed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::device::Devices;
use crate::engine::{EngineKind, TRANSFER_BYTES_MAX};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Pool;
use crate::plan::Direction;

/// Default block. Registered memory took half the CPU time of blocks of 1 MiB (`make bench
/// BENCH=sweep`); larger ones would let a demand wait longer behind what is in flight.
const DEFAULT_BLOCK_BYTES: usize = 2 << 20;
/// Default staging memory for devices. With the other defaults, each of two workers has 16 blocks
/// of 2 MiB: half of them cover the 2 ms that a drive of 8 GB/s may take for a transfer, and the
/// rest are being copied or wait for a worker. `PCIe` 4.0 x16 can move 31.5 GB/s (16 GT/s, 128b/130b),
/// so a block takes it 67 µs at the least, ten times what a call that enqueues a copy takes (5 to 7
/// µs, arXiv:2602.21548, section 5.2). Derived, not measured.
const DEFAULT_DEVICE_STAGING_BYTES: usize = 64 << 20;
/// Smallest block: one page, the granule of direct I/O.
pub const BLOCK_BYTES_MIN: usize = 4096;
/// Largest block: a power of two below what the kernel moves in a call.
pub const BLOCK_BYTES_MAX: usize = 1 << 30;
/// Deepest queue: io_uring's own limit on submission entries (`IORING_MAX_ENTRIES`).
pub const QUEUE_DEPTH_MAX: usize = 32768;
/// Most workers of one handle; each is a thread with an engine of its own.
pub const PARALLELISM_MAX: usize = 64;
/// Least staging memory for a worker: two of the largest granules, each way once.
const STAGING_BYTES_MIN: usize = 128 << 10;

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// The first that works here: io_uring, Linux AIO, threads.
    #[default]
    Auto,
    /// This one, or an error.
    Named(EngineKind),
}

/// Whether transfers go around the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectMode {
    /// Where the file system takes direct I/O.
    #[default]
    Auto,
    /// Never: everything goes through the page cache.
    Never,
    /// Always: where direct I/O is refused, the operation is an error.
    Always,
}

/// Which way the memory of devices goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceRoute {
    /// By GPUDirect Storage where that is direct, else through the host's memory.
    #[default]
    Auto,
    /// By GPUDirect Storage; where that isn't direct, an operation is an error.
    Gds,
    /// Through the host's memory. cuFile isn't even looked for.
    Host,
}

/// How far a store goes before it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The kernel and the drive have the bytes; a power cut may lose them.
    #[default]
    None,
    /// `fdatasync(2)`: the bytes survive a power cut.
    Data,
    /// `fsync(2)` of the file and of its directory: so does a new file's name.
    Full,
}

/// Which operations go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Demand,
    /// It is wanted later; it never takes the whole queue.
    Prefetch,
}

/// Which memory bytes are moved from and to, and by which route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// The host's.
    #[default]
    Host,
    /// A GPU's, through blocks of the host's.
    Gpu,
    /// A GPU's, by GPUDirect Storage.
    Gds,
}

impl MemoryKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Host, Self::Gpu, Self::Gds];

    /// Its name: `host`, `gpu` or `gds`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu => "gpu",
            Self::Gds => "gds",
        }
    }
}

macro_rules! named {
    ($type:ty, $what:literal, $($name:literal => $value:expr),+ $(,)?) => {
        impl FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                match text {
                    $($name => Ok($value),)+
                    other => Err(Error::new(
                        ErrorKind::InvalidInput,
                        format!("{} {other:?} is not known", $what),
                    )
                    .hint(concat!("one of:" $(, " ", $name)+))),
                }
            }
        }
    };
}

named!(EngineChoice, "engine",
    "auto" => Self::Auto,
    "uring" => Self::Named(EngineKind::Uring),
    "aio" => Self::Named(EngineKind::Aio),
    "threads" => Self::Named(EngineKind::Threads));
named!(DirectMode, "direct mode", "auto" => Self::Auto, "never" => Self::Never, "always" => Self::Always);
named!(DeviceRoute, "device route", "auto" => Self::Auto, "gds" => Self::Gds, "host" => Self::Host);
named!(Durability, "durability", "none" => Self::None, "data" => Self::Data, "full" => Self::Full);
named!(MemoryKind, "kind of memory", "host" => Self::Host, "gpu" => Self::Gpu, "gds" => Self::Gds);
named!(Priority, "priority", "demand" => Self::Demand, "prefetch" => Self::Prefetch);

/// Options of a [`Handle`](crate::Handle).
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches, named by their fields")]
pub struct Options {
    /// Which engine moves the blocks.
    pub engine: EngineChoice,
    /// Most bytes in one transfer. Rounded up to the granule of the file.
    pub block_size: usize,
    /// Transfers in flight per worker.
    pub queue_depth: usize,
    /// Workers, each with an engine of its own, that share the blocks of all operations.
    pub parallelism: usize,
    /// Hand each transfer to the kernel by a call of its own.
    pub single_submit: bool,
    /// io_uring: a kernel thread polls for submissions; takes a core.
    pub sqpoll: bool,
    /// io_uring: completions are polled for; needs a drive with poll queues.
    pub iopoll: bool,
    /// Whether transfers go around the page cache.
    pub direct: DirectMode,
    /// How far a store goes before it is done, unless it says otherwise itself.
    pub durability: Durability,
    /// What moved through the page cache is dropped from it once the operation is done.
    pub drop_behind: bool,
    /// Loads take from the page cache what is there already.
    pub page_cache: bool,
    /// Most memory, in bytes, for staging blocks of all workers together. Taken when first needed.
    pub staging_bytes: usize,
    /// As [`Self::staging_bytes`], for the memory of devices, whose every byte goes through such a
    /// block: of [`Self::block_size`], or less so that each worker has four.
    pub device_staging_bytes: usize,
    /// Slow the handle down to this many bytes per second.
    pub throttle_bytes_per_second: Option<u64>,
    /// Where memory comes from; `None` is the pool of the process, [`Pool::global`].
    pub pool: Option<Arc<Pool>>,
    /// Which way the memory of devices goes.
    pub device_route: DeviceRoute,
    /// Whose cuFile is used; `None` is that of the process, [`Devices::global`].
    pub devices: Option<Arc<Devices>>,
    /// What drives do best with. For files on a drive that it knows, that takes the place of the
    /// options above that [`Tuning`] has too; a request goes by the drive of its first file. Each
    /// set of options has workers of its own, with staging memory of their own.
    pub tunings: Option<Arc<dyn Tunings>>,
}

/// The options that a drive was found to do best with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Which engine moves the blocks.
    pub engine: EngineChoice,
    /// Most bytes in one transfer.
    pub block_size: usize,
    /// Transfers in flight per worker.
    pub queue_depth: usize,
    /// Workers.
    pub parallelism: usize,
    /// Hand each transfer to the kernel by a call of its own.
    pub single_submit: bool,
    /// Memory for the staging blocks of devices; `None`: what the handle was given.
    pub device_staging_bytes: Option<usize>,
}

/// Knows what drives do best with.
pub trait Tunings: fmt::Debug + Send + Sync {
    /// The best options for moving files on the drive of `file` in one direction, to or from one
    /// kind of memory, if known. A handle asks once for each file system, direction and kind.
    fn tuning(&self, file: &Path, direction: Direction, memory: MemoryKind) -> Option<Tuning>;
}

impl Default for Options {
    fn default() -> Self {
        Self {
            engine: EngineChoice::Auto,
            block_size: DEFAULT_BLOCK_BYTES,
            queue_depth: 32,
            parallelism: 2,
            single_submit: false,
            sqpoll: false,
            iopoll: false,
            direct: DirectMode::Auto,
            durability: Durability::None,
            drop_behind: false,
            page_cache: true,
            staging_bytes: 8 << 20,
            device_staging_bytes: DEFAULT_DEVICE_STAGING_BYTES,
            throttle_bytes_per_second: None,
            pool: None,
            device_route: DeviceRoute::Auto,
            devices: None,
            tunings: None,
        }
    }
}

impl Options {
    /// The same options but for those that a drive does best with.
    pub(crate) fn tuned_to(self, tuning: Tuning) -> Self {
        let Tuning { engine, block_size, queue_depth, parallelism, single_submit, .. } = tuning;
        let least = STAGING_BYTES_MIN * parallelism;
        let device_staging_bytes =
            tuning.device_staging_bytes.unwrap_or(self.device_staging_bytes).max(least);
        Self {
            engine,
            block_size,
            queue_depth,
            parallelism,
            single_submit,
            staging_bytes: self.staging_bytes.max(least),
            device_staging_bytes,
            ..self
        }
    }

    /// Checks every bound.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] that names the option, its value and its bounds.
    pub fn validate(&self) -> Result<()> {
        const _: () = assert!(BLOCK_BYTES_MAX <= TRANSFER_BYTES_MAX);
        within("block_size", self.block_size, BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)?;
        within("queue_depth", self.queue_depth, 1, QUEUE_DEPTH_MAX)?;
        within("intra_op_parallelism", self.parallelism, 1, PARALLELISM_MAX)?;
        let staging_min = STAGING_BYTES_MIN * self.parallelism;
        within("staging_bytes", self.staging_bytes, staging_min, usize::MAX)?;
        within("device_staging_bytes", self.device_staging_bytes, staging_min, usize::MAX)?;
        if self.throttle_bytes_per_second == Some(0) {
            return Err(Error::new(ErrorKind::InvalidInput, "throttle is 0 bytes per second"));
        }
        Ok(())
    }
}

/// Where programs leave what isn't to stay: `TMPDIR`, or `/tmp`.
pub(crate) fn temporary_directory() -> PathBuf {
    std::env::temp_dir()
}

/// Where cuFile looks for its settings: where `CUFILE_ENV_PATH_JSON` says, or in `/etc` under a root.
pub(crate) fn cufile_settings(root: &Path) -> PathBuf {
    std::env::var_os("CUFILE_ENV_PATH_JSON")
        .map_or_else(|| root.join("etc/cufile.json"), PathBuf::from)
}

fn within(name: &str, value: usize, min: usize, max: usize) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let bounds =
        if max == usize::MAX { format!("at least {min}") } else { format!("{min} to {max}") };
    Err(Error::new(ErrorKind::InvalidInput, format!("{name} is {value}, it can be {bounds}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_within_bounds_and_as_documented() {
        let options = Options::default();
        options.validate().unwrap();
        // `forebay.Handle` names these in its docstring.
        assert_eq!((options.block_size, options.queue_depth), (2 << 20, 32));
        assert_eq!((options.parallelism, options.staging_bytes), (2, 8 << 20));
        assert_eq!(options.device_staging_bytes, 64 << 20);
    }

    #[test]
    fn a_value_out_of_bounds_is_named() {
        let options = Options { queue_depth: 0, ..Options::default() };
        let error = options.validate().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("queue_depth is 0"), "{error}");
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = "libaio".parse::<EngineChoice>().unwrap_err().to_string();
        assert!(
            error.contains("\"libaio\"") && error.contains("auto uring aio threads"),
            "{error}"
        );
    }
}
