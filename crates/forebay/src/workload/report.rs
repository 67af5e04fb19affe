//! What a process says of a loop, and of all of them: plain data for a pipe.

use forebay_io::{Direction, Stats};
use serde::{Deserialize, Serialize};

use super::contents::Difference;
use super::rates::Rates;

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// From files to memory.
    Read,
    /// From memory to files.
    Write,
}

impl Way {
    /// As the core has it.
    pub fn direction(self) -> Direction {
        match self {
            Self::Read => Direction::Load,
            Self::Write => Direction::Store,
        }
    }

    /// Its name, as options and results have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Bytes by the way they took, and what the kernel was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes straight between drive and memory.
    pub direct_bytes: u64,
    /// Bytes through staging blocks.
    pub staged_bytes: u64,
    /// Bytes through the page cache.
    pub buffered_bytes: u64,
    /// Bytes from the page cache, being there already.
    pub cached_bytes: u64,
    /// Bytes through memory that is registered with the engine.
    pub registered_bytes: u64,
    /// Bytes between drives and the memory of GPUs, by GPUDirect Storage.
    pub gds_bytes: u64,
    /// Bytes copied to or from the memory of GPUs.
    pub device_bytes: u64,
    /// Transfers asked of the kernel.
    pub transfers: u64,
    /// Transfers asked again.
    pub retries: u64,
    /// Transfers that moved less than asked.
    pub short_transfers: u64,
}

impl Moved {
    /// What moved between two snapshots of a handle.
    pub fn between(before: &Stats, after: &Stats) -> Self {
        Self {
            direct_bytes: after.bytes_direct - before.bytes_direct,
            staged_bytes: after.bytes_staged - before.bytes_staged,
            buffered_bytes: after.bytes_buffered - before.bytes_buffered,
            cached_bytes: after.bytes_cached - before.bytes_cached,
            registered_bytes: after.bytes_registered - before.bytes_registered,
            gds_bytes: after.bytes_gds - before.bytes_gds,
            device_bytes: after.bytes_device - before.bytes_device,
            transfers: after.transfers - before.transfers,
            retries: after.retries - before.retries,
            short_transfers: after.short_transfers - before.short_transfers,
        }
    }

    /// Adds what moved elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.direct_bytes += other.direct_bytes;
        self.staged_bytes += other.staged_bytes;
        self.buffered_bytes += other.buffered_bytes;
        self.cached_bytes += other.cached_bytes;
        self.registered_bytes += other.registered_bytes;
        self.gds_bytes += other.gds_bytes;
        self.device_bytes += other.device_bytes;
        self.transfers += other.transfers;
        self.retries += other.retries;
        self.short_transfers += other.short_transfers;
    }

    /// Bytes by all ways.
    pub fn total_bytes(&self) -> u64 {
        [
            self.direct_bytes,
            self.staged_bytes,
            self.gds_bytes,
            self.buffered_bytes,
            self.cached_bytes,
        ]
        .iter()
        .sum()
    }
}

/// What one loop of one process came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoopReport {
    /// Which way.
    pub way: Way,
    /// Bytes moved.
    pub bytes: u64,
    /// From the first request to the end of the last.
    pub seconds: f64,
    /// Processor time, user and system.
    pub cpu_seconds: f64,
    /// Latencies of requests in nanoseconds, and how often each was seen.
    pub request_ns: Vec<(u64, u64)>,
    /// Latencies of transfers in nanoseconds, and how often each was seen.
    pub transfer_ns: Vec<(u64, u64)>,
    /// Bandwidth over time.
    pub rates: Rates,
    /// How the bytes moved.
    pub moved: Moved,
    /// Bytes of the file that were in the page cache before, where that is known.
    pub cached_before_bytes: Option<u64>,
    /// The file, and its first byte that isn't what it should be, when contents were checked.
    pub difference: Option<(String, Difference)>,
}

/// What one process says at its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessReport {
    /// The engine in use.
    pub engine: String,
    /// The most memory it had resident at once.
    pub peak_resident_bytes: Option<u64>,
    /// Of that, what the workload asked for: the memory that is moved.
    pub payload_bytes: u64,
    /// Fallbacks taken, in words, and how often.
    pub fallbacks: Vec<(String, u64)>,
}
