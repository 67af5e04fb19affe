//! What all loops and processes of one way came to.

use serde::Serialize;

use super::latency::{Latencies, Percentiles};
use super::rates::{INTERVAL, Rates};
use super::report::{LoopReport, Moved, Way};

const GIB: f64 = 1_073_741_824.0;

/// A median with its extremes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// The spread of at least one value; of none, all are 0.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(at(middle.saturating_sub(1)), at(middle))
        } else {
            at(middle)
        };
        Self { median, min: at(0), max: at(sorted.len().saturating_sub(1)) }
    }
}

/// One loop of all processes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Loop {
    /// From the first request to the end of the last, of the slowest process.
    pub seconds: f64,
    /// Bytes of all processes.
    pub bytes: u64,
    /// Of all processes.
    pub bytes_per_second: f64,
}

/// Latencies in microseconds; `null` where there were none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// From submitting a request to its end.
    pub request: Option<Percentiles>,
    /// From handing a transfer to the kernel to its completion.
    pub transfer: Option<Percentiles>,
}

/// Bandwidth over time, of all measured loops one after the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bandwidth {
    /// Time between two samples. The last sample of a loop may cover less.
    pub interval_seconds: f64,
    /// The samples.
    pub bytes_per_second: Vec<f64>,
}

/// The sum of one way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Which way.
    pub way: Way,
    /// Bytes of all loops.
    pub bytes: u64,
    /// Of the loops.
    pub bytes_per_second: Spread,
    /// Each loop.
    pub loops: Vec<Loop>,
    /// Latencies of all loops.
    pub latency_us: Latency,
    /// Bandwidth over time.
    pub bandwidth: Bandwidth,
    /// Processor time of all processes, user and system.
    pub cpu_seconds_per_gib: f64,
    /// How the bytes moved.
    pub moved: Moved,
    /// The share of them that went through staging blocks.
    pub staged_share: f64,
    /// The most of the files that was in the page cache before a loop that read them; `null` where
    /// that isn't known.
    pub cached_before_bytes: Option<u64>,
}

impl Summary {
    /// Joins the reports of loops, each of which has one for each process.
    pub fn new(way: Way, loops: &[Vec<LoopReport>]) -> Self {
        let (mut request, mut transfer) = (Latencies::default(), Latencies::default());
        let mut moved = Moved::default();
        let mut bandwidth = Vec::new();
        let (mut cpu_seconds, mut cached) = (0.0, None);
        for reports in loops {
            let mut rates = Rates::default();
            for report in reports {
                request.add(&report.request_ns);
                transfer.add(&report.transfer_ns);
                moved.add(&report.moved);
                rates.add(&report.rates);
                cpu_seconds += report.cpu_seconds;
            }
            bandwidth.extend(rates.per_second());
            let before: Option<u64> = reports.iter().map(|report| report.cached_before_bytes).sum();
            cached = cached.max(before);
        }
        let loops: Vec<Loop> = loops.iter().map(|reports| join(reports)).collect();
        let rates: Vec<f64> = loops.iter().map(|each| each.bytes_per_second).collect();
        let bytes = loops.iter().map(|each| each.bytes).sum();
        Self {
            way,
            bytes,
            bytes_per_second: Spread::of(&rates),
            loops,
            latency_us: Latency {
                request: request.percentiles(),
                transfer: transfer.percentiles(),
            },
            bandwidth: Bandwidth {
                interval_seconds: INTERVAL.as_secs_f64(),
                bytes_per_second: bandwidth,
            },
            cpu_seconds_per_gib: cpu_seconds / (wide(bytes) / GIB).max(f64::MIN_POSITIVE),
            moved,
            staged_share: wide(moved.staged_bytes) / wide(moved.total_bytes().max(1)),
            cached_before_bytes: cached,
        }
    }
}

fn join(reports: &[LoopReport]) -> Loop {
    let seconds = reports.iter().map(|report| report.seconds).fold(0.0, f64::max);
    let bytes: u64 = reports.iter().map(|report| report.bytes).sum();
    Loop { seconds, bytes, bytes_per_second: wide(bytes) / seconds.max(1e-9) }
}

#[expect(clippy::cast_precision_loss, reason = "bytes, for a rate or a share")]
fn wide(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bytes: u64, seconds: f64, cached: Option<u64>) -> LoopReport {
        LoopReport {
            way: Way::Read,
            bytes,
            seconds,
            cpu_seconds: 0.5,
            request_ns: vec![(1000, 2)],
            transfer_ns: Vec::new(),
            rates: Rates::from_samples(&[(INTERVAL, bytes)]),
            moved: Moved {
                staged_bytes: bytes / 4,
                direct_bytes: bytes - bytes / 4,
                ..Moved::default()
            },
            cached_before_bytes: cached,
            difference: None,
        }
    }

    #[test]
    fn processes_add_up_and_the_slowest_counts() {
        let gib = 1 << 30;
        let loops = [
            vec![report(gib, 1.0, Some(1)), report(gib, 2.0, Some(2))],
            vec![report(gib, 1.0, Some(0)), report(gib, 0.5, Some(0))],
        ];
        let summary = Summary::new(Way::Read, &loops);
        assert_eq!(summary.bytes, 4 * gib);
        assert!((summary.bytes_per_second.min - GIB).abs() < 1.0);
        assert!((summary.bytes_per_second.max - 2.0 * GIB).abs() < 1.0);
        assert!((summary.cpu_seconds_per_gib - 0.5).abs() < 1e-9);
        assert!((summary.staged_share - 0.25).abs() < 1e-9);
        assert_eq!(summary.latency_us.request.unwrap().count, 8);
        assert_eq!(summary.latency_us.transfer, None);
        assert_eq!(summary.bandwidth.bytes_per_second.len(), 2);
        assert_eq!(summary.cached_before_bytes, Some(3));
    }

    #[test]
    fn a_spread_has_the_middle_and_both_ends() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert!((Spread::of(&[1.0, 2.0]).median - 1.5).abs() < 1e-12);
        assert!(Spread::of(&[]).median.abs() < 1e-12);
    }
}
