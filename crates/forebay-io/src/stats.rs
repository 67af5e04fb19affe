//! What a handle did: bytes by route, transfers, latencies, and every fallback it took.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Latency classes: class `n` holds latencies below 2^n µs; the last one takes the rest (36 min).
const LATENCY_CLASSES: usize = 32;
/// Distinct fallback texts that are kept; more than that would be a leak, not information.
const FALLBACKS_MAX: usize = 64;
/// Files of which the way of their device memory is remembered.
const DEVICE_ROUTES_MAX: usize = 64;

/// A snapshot of what a handle did since it was made. All byte counts are of wanted bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The engine in use.
    pub engine: &'static str,
    /// Operations finished, well or badly.
    pub operations: u64,
    /// Operations that failed.
    pub failures: u64,
    /// Operations that were cancelled.
    pub cancelled: u64,
    /// Bytes loaded.
    pub bytes_read: u64,
    /// Bytes stored.
    pub bytes_written: u64,
    /// Bytes that went straight between drive and memory.
    pub bytes_direct: u64,
    /// Bytes that went through staging blocks.
    pub bytes_staged: u64,
    /// Bytes that went through the page cache: ragged ends of stores, and buffered files.
    pub bytes_buffered: u64,
    /// Bytes taken from the page cache because they were there already.
    pub bytes_cached: u64,
    /// Bytes that moved through registered memory.
    pub bytes_registered: u64,
    /// Bytes that went between drives and the memory of devices by GPUDirect Storage.
    pub bytes_gds: u64,
    /// Bytes that were copied between staging blocks and the memory of devices.
    pub bytes_device: u64,
    /// Transfers that were asked of the kernel, retries included.
    pub transfers: u64,
    /// Transfers asked again after an interruption or for want of resources.
    pub retries: u64,
    /// Transfers that moved less than asked and were continued.
    pub short_transfers: u64,
    /// Most transfers in flight on one worker.
    pub queue_depth_max: u64,
    /// Median latency of a transfer in µs, to a power of two.
    pub latency_us_p50: u64,
    /// 99th percentile of the latency in µs, to a power of two.
    pub latency_us_p99: u64,
    /// Longest latency in µs.
    pub latency_us_max: u64,
    /// Memory taken for staging blocks, in bytes.
    pub staging_bytes: u64,
    /// Fallbacks taken, in words, and how often.
    pub fallbacks: Vec<(String, u64)>,
    /// Which way the device memory of files went last, the newest files.
    pub device_routes: Vec<DeviceRouteTaken>,
}

/// Which way the device memory of a file went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRouteTaken {
    /// The file, as it was named.
    pub file: String,
    /// `"gds"`: between drive and device; `"host"`: through the host's memory; `"compat"`: the
    /// same, where cuFile would have done that too, and not have said so.
    pub route: &'static str,
    /// Why.
    pub reason: String,
}

/// The live counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) operations: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) bytes_direct: AtomicU64,
    pub(crate) bytes_staged: AtomicU64,
    pub(crate) bytes_buffered: AtomicU64,
    pub(crate) bytes_cached: AtomicU64,
    pub(crate) bytes_registered: AtomicU64,
    pub(crate) bytes_gds: AtomicU64,
    pub(crate) bytes_device: AtomicU64,
    pub(crate) transfers: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) short_transfers: AtomicU64,
    pub(crate) staging_bytes: AtomicU64,
    queue_depth_max: AtomicU64,
    latency_us_max: AtomicU64,
    latencies: [AtomicU64; LATENCY_CLASSES],
    fallbacks: Mutex<Fallbacks>,
    device_routes: Mutex<VecDeque<DeviceRouteTaken>>,
}

#[derive(Debug, Default)]
struct Fallbacks {
    counts: BTreeMap<String, u64>,
    unreported: Vec<String>,
}

/// Adds to a counter that orders nothing else.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn depth(&self, in_flight: usize) {
        self.queue_depth_max.fetch_max(in_flight as u64, Ordering::Relaxed);
    }

    pub(crate) fn latency(&self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        let class = (u64::BITS - micros.leading_zeros()) as usize;
        add(&self.latencies[class.min(LATENCY_CLASSES - 1)], 1);
        self.latency_us_max.fetch_max(micros, Ordering::Relaxed);
    }

    /// Counts a fallback; the first of its text is also logged and kept for [`Self::notices`].
    pub(crate) fn fallback(&self, text: &str) {
        let mut fallbacks = self.lock_fallbacks();
        if let Some(count) = fallbacks.counts.get_mut(text) {
            *count += 1;
        } else if fallbacks.counts.len() < FALLBACKS_MAX {
            fallbacks.counts.insert(text.to_owned(), 1);
            fallbacks.unreported.push(text.to_owned());
            tracing::warn!(target: "forebay", "{text}");
        }
    }

    /// The fallbacks that were not asked for before.
    pub(crate) fn notices(&self) -> Vec<String> {
        std::mem::take(&mut self.lock_fallbacks().unreported)
    }

    /// Remembers which way the device memory of a file goes.
    pub(crate) fn device_route(&self, file: &str, route: &'static str, reason: &str) {
        let mut routes = self.lock_device_routes();
        routes.retain(|known| known.file != file);
        if routes.len() == DEVICE_ROUTES_MAX {
            routes.pop_front();
        }
        routes.push_back(DeviceRouteTaken {
            file: file.to_owned(),
            route,
            reason: reason.to_owned(),
        });
    }

    fn lock_device_routes(&self) -> MutexGuard<'_, VecDeque<DeviceRouteTaken>> {
        self.device_routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_fallbacks(&self) -> MutexGuard<'_, Fallbacks> {
        self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn snapshot(&self, engine: &'static str) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let classes: Vec<u64> = self.latencies.iter().map(read).collect();
        let latency_us_max = read(&self.latency_us_max);
        let counts = self.lock_fallbacks().counts.clone();
        Stats {
            engine,
            operations: read(&self.operations),
            failures: read(&self.failures),
            cancelled: read(&self.cancelled),
            bytes_read: read(&self.bytes_read),
            bytes_written: read(&self.bytes_written),
            bytes_direct: read(&self.bytes_direct),
            bytes_staged: read(&self.bytes_staged),
            bytes_buffered: read(&self.bytes_buffered),
            bytes_cached: read(&self.bytes_cached),
            bytes_registered: read(&self.bytes_registered),
            bytes_gds: read(&self.bytes_gds),
            bytes_device: read(&self.bytes_device),
            transfers: read(&self.transfers),
            retries: read(&self.retries),
            short_transfers: read(&self.short_transfers),
            queue_depth_max: read(&self.queue_depth_max),
            latency_us_p50: percentile(&classes, 50).min(latency_us_max),
            latency_us_p99: percentile(&classes, 99).min(latency_us_max),
            latency_us_max,
            staging_bytes: read(&self.staging_bytes),
            fallbacks: counts.into_iter().collect(),
            device_routes: self.lock_device_routes().iter().cloned().collect(),
        }
    }
}

/// The upper bound in µs of the class that holds the given percentile; 0 without samples.
fn percentile(classes: &[u64], percent: u64) -> u64 {
    let total: u64 = classes.iter().sum();
    let rank = (total * percent).div_ceil(100);
    let mut seen = 0;
    for (class, count) in classes.iter().enumerate() {
        seen += count;
        if seen >= rank && total > 0 {
            return 1 << class;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_upper_bounds_of_their_class() {
        let counters = Counters::default();
        assert_eq!(counters.snapshot("uring").latency_us_p99, 0);
        for _ in 0..99 {
            counters.latency(Duration::from_micros(100));
        }
        counters.latency(Duration::from_millis(5));
        let stats = counters.snapshot("uring");
        assert_eq!(stats.latency_us_p50, 128);
        assert_eq!(stats.latency_us_p99, 128);
        assert_eq!(stats.latency_us_max, 5000);
    }

    #[test]
    fn the_newest_files_have_their_way_told() {
        let counters = Counters::default();
        for index in 0..=DEVICE_ROUTES_MAX {
            counters.device_route(&format!("/{index}"), "host", "nvidia-fs isn't loaded");
        }
        counters.device_route("/1", "gds", "NVMe");
        let routes = counters.snapshot("uring").device_routes;
        assert_eq!(routes.len(), DEVICE_ROUTES_MAX);
        assert_eq!(routes[0].file, "/2");
        let last = routes.last().unwrap();
        assert_eq!((last.file.as_str(), last.route), ("/1", "gds"));
    }

    #[test]
    fn a_fallback_is_counted_each_time_and_reported_once() {
        let counters = Counters::default();
        counters.fallback("no direct I/O");
        counters.fallback("no direct I/O");
        assert_eq!(counters.notices(), ["no direct I/O"]);
        assert!(counters.notices().is_empty());
        assert_eq!(counters.snapshot("aio").fallbacks, [("no direct I/O".to_owned(), 2)]);
    }
}
