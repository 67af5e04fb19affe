//! Figures, medians, interleaving, CPU time and a cold cache.

use std::fmt;
use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::fs::Advice;
use rustix::time::{ClockId, clock_gettime};

/// The direction of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

impl Way {
    pub(crate) const BOTH: [Self; 2] = [Self::Read, Self::Write];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// What one run moved, in which time, at which cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figure {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    /// User and system time.
    pub(crate) cpu_seconds: f64,
}

impl Figure {
    /// Runs `work`, which moves `bytes`, and takes its time and this process's CPU time.
    pub(crate) fn of(bytes: u64, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let cpu_before = cpu_seconds();
        let started = Instant::now();
        work()?;
        let seconds = started.elapsed().as_secs_f64();
        Ok(Self { bytes, seconds, cpu_seconds: cpu_seconds() - cpu_before })
    }

    #[expect(clippy::cast_precision_loss, reason = "files of less than 2^53 bytes")]
    pub(crate) fn gigabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }

    #[expect(clippy::cast_precision_loss, reason = "files of less than 2^53 bytes")]
    pub(crate) fn cpu_seconds_per_gib(&self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / f64::from(1 << 30))
    }
}

/// User and system time of all threads of this process so far, the kernel's workers for it
/// included.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    #[expect(clippy::cast_precision_loss, reason = "seconds of CPU time are few")]
    let seconds = time.tv_sec as f64;
    #[expect(clippy::cast_precision_loss, reason = "below 1e9")]
    let nanoseconds = time.tv_nsec as f64;
    seconds + nanoseconds / 1e9
}

/// The median; of an even number of values, the mean of the middle two. NaN if there are none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// The smallest and the largest value.
pub(crate) fn spread(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    values.into_iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    })
}

/// Runs each of `count` candidates once a round, in an order that changes from round to round, so
/// that a drive which slows down or recovers does so for all. Returns each one's results.
pub(crate) fn interleave<T>(
    rounds_count: usize,
    count: usize,
    mut run: impl FnMut(usize) -> Result<T>,
) -> Result<Vec<Vec<T>>> {
    let mut results: Vec<Vec<T>> = (0..count).map(|_| Vec::new()).collect();
    for round in 0..rounds_count {
        for step in 0..count {
            let candidate = order(round, step, count);
            results[candidate].push(run(candidate)?);
        }
    }
    Ok(results)
}

/// Forwards in even rounds, backwards in odd ones.
fn order(round: usize, step: usize, count: usize) -> usize {
    if round.is_multiple_of(2) { step } else { count - 1 - step }
}

/// Empties the page cache of what is known of the file, and as root of everything clean.
pub(crate) fn chill(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    rustix::fs::fdatasync(&file).context("cannot write the file's pages back")?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)
        .context("cannot drop the file's pages")?;
    // Only root may; the advice above has done what matters.
    let _ = fs::write("/proc/sys/vm/drop_caches", "1");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle_whatever_the_order() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median([4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
        assert!(median([]).is_nan());
    }

    #[test]
    fn a_figure_is_a_rate_and_a_price() {
        let figure = Figure { bytes: 2 << 30, seconds: 2.0, cpu_seconds: 0.5 };
        assert!((figure.gigabytes_per_second() - 1.073_741_824).abs() < 1e-9);
        assert!((figure.cpu_seconds_per_gib() - 0.25).abs() < 1e-12);
    }

    #[test]
    fn rounds_run_every_candidate_and_turn_around() {
        let mut seen = Vec::new();
        let results = interleave(2, 3, |candidate| {
            seen.push(candidate);
            Ok(seen.len())
        })
        .unwrap();
        assert_eq!(seen, [0, 1, 2, 2, 1, 0]);
        assert_eq!(results, [vec![1, 6], vec![2, 5], vec![3, 4]]);
    }

    #[test]
    fn work_costs_cpu_time() {
        let figure = Figure::of(1, || {
            let mut sum = 0_u64;
            while cpu_seconds().to_bits() == 0 || sum < 1_000_000 {
                sum = std::hint::black_box(sum + 1);
            }
            Ok(())
        })
        .unwrap();
        assert!(figure.cpu_seconds > 0.0 && figure.seconds > 0.0);
    }
}
