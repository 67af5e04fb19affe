//! What one process of a workload does, as plain data.

use std::path::PathBuf;
use std::str::FromStr;

use forebay_io::{DirectMode, Durability, EngineChoice, MemoryKind, Options};
use serde::{Deserialize, Serialize};

/// Most requests of a loop: their order and, when contents are checked, their memory are held.
pub const REQUESTS_MAX: u64 = 1 << 22;

/// Options of the handle, named as the command names them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches, named by their fields")]
pub struct HandleOptions {
    /// `auto`, `uring`, `aio` or `threads`.
    pub engine: String,
    /// Most bytes in one transfer.
    pub block_size: usize,
    /// Transfers in flight per worker.
    pub queue_depth: usize,
    /// Workers.
    pub parallelism: usize,
    /// Each transfer is handed over by a call of its own.
    pub single_submit: bool,
    /// A kernel thread polls for submissions.
    pub sqpoll: bool,
    /// Completions are polled for.
    pub iopoll: bool,
    /// `auto`, `never` or `always`.
    pub direct: String,
    /// `none`, `data` or `full`.
    pub durability: String,
    /// Loads take from the page cache what is there.
    pub page_cache: bool,
}

impl HandleOptions {
    /// The options as the core has them.
    ///
    /// # Errors
    ///
    /// A name that isn't known, or a number out of bounds.
    pub fn to_options(&self) -> forebay_io::Result<Options> {
        let options = Options {
            engine: EngineChoice::from_str(&self.engine)?,
            block_size: self.block_size,
            queue_depth: self.queue_depth,
            parallelism: self.parallelism,
            single_submit: self.single_submit,
            sqpoll: self.sqpoll,
            iopoll: self.iopoll,
            direct: DirectMode::from_str(&self.direct)?,
            durability: Durability::from_str(&self.durability)?,
            page_cache: self.page_cache,
            ..Options::default()
        };
        // Staging memory grows with what shares it.
        let staging_bytes = options.staging_bytes.max(options.parallelism << 20);
        let options = Options { staging_bytes, ..options };
        options.validate()?;
        Ok(options)
    }
}

/// What the bytes are moved from and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Pinned memory of the pool, registered with the engine.
    Pool,
    /// Memory of the allocator, this many bytes behind the beginning of a page.
    Ordinary {
        /// Bytes.
        shift: usize,
    },
    /// Memory of a GPU.
    Gpu {
        /// Its number.
        ordinal: u32,
        /// By GPUDirect Storage, or fail; else through the host's.
        gds: bool,
    },
}

impl Memory {
    /// Its kind, and the route that it goes.
    pub fn kind(self) -> MemoryKind {
        match self {
            Self::Pool | Self::Ordinary { .. } => MemoryKind::Host,
            Self::Gpu { gds: false, .. } => MemoryKind::Gpu,
            Self::Gpu { gds: true, .. } => MemoryKind::Gds,
        }
    }
}

/// What one process does in each loop.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The files: loop `n` uses the one at `n` modulo their number.
    pub files: Vec<PathBuf>,
    /// Where this process's bytes begin in each file.
    pub offset: u64,
    /// Bytes of a loop.
    pub io_bytes: u64,
    /// Bytes of a request; the last one may be shorter.
    pub request_bytes: usize,
    /// Requests that are under way at once.
    pub in_flight: usize,
    /// Requests are made in a random order, another one in each loop.
    pub random: bool,
    /// What contents and order follow from.
    pub seed: u64,
    /// Check every byte after each loop.
    pub validate: bool,
    /// Leave in the page cache what is there.
    pub keep_cache: bool,
    /// Where the bytes are in memory.
    pub memory: Memory,
    /// How the bytes are moved.
    pub handle: HandleOptions,
}

impl Job {
    /// Requests of a loop.
    pub fn requests_count(&self) -> u64 {
        self.io_bytes.div_ceil(self.request_bytes.max(1) as u64)
    }

    /// Pieces of memory, of [`Self::request_bytes`] each, that the process holds: one for each
    /// request under way or, when contents are checked, for each request of a loop, so that the
    /// clock doesn't run while they are made and compared.
    pub fn pieces_count(&self) -> u64 {
        let requests = self.requests_count();
        if self.validate { requests } else { requests.min(self.in_flight as u64) }
    }

    /// Bytes of all pieces.
    pub fn memory_bytes(&self) -> u64 {
        let whole = self.pieces_count().saturating_mul(self.request_bytes as u64);
        if self.validate { whole.min(self.io_bytes) } else { whole }
    }

    /// Those of them that are in the host's memory.
    pub fn host_memory_bytes(&self) -> u64 {
        if self.memory.kind() == MemoryKind::Host { self.memory_bytes() } else { 0 }
    }
}
