//! Distributions of latencies, which can be sent and added up.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Significant digits that are kept: percentiles are right to 0.1 %.
const DIGITS: u8 = 3;

/// A distribution of latencies in nanoseconds.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        Self::from_pairs(&[])
    }
}

impl Latencies {
    /// The distribution of latencies and how often each was seen.
    pub fn from_pairs(pairs: &[(u64, u64)]) -> Self {
        let mut latencies = Self(
            Histogram::new(DIGITS).unwrap_or_else(|_| unreachable!("3 digits are within bounds")),
        );
        latencies.add(pairs);
        latencies
    }

    /// Adds one latency.
    pub fn record(&mut self, latency: Duration) {
        let nanoseconds = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX >> 1);
        self.add(&[(nanoseconds, 1)]);
    }

    /// Adds latencies in nanoseconds and how often each was seen.
    pub fn add(&mut self, pairs: &[(u64, u64)]) {
        for (nanoseconds, count) in pairs {
            // It grows with its values; what it has no memory for is left out.
            let _ = self.0.record_n(*nanoseconds, *count);
        }
    }

    /// Latencies in nanoseconds and how often each was seen.
    pub fn to_pairs(&self) -> Vec<(u64, u64)> {
        let seen = self.0.iter_recorded();
        seen.map(|value| (value.value_iterated_to(), value.count_at_value())).collect()
    }

    /// Its percentiles; `None` where there is no latency.
    pub fn percentiles(&self) -> Option<Percentiles> {
        #[expect(clippy::cast_precision_loss, reason = "3 digits are kept")]
        let us = |nanoseconds: u64| nanoseconds as f64 / 1e3;
        let at = |quantile: f64| us(self.0.value_at_quantile(quantile));
        (!self.0.is_empty()).then(|| Percentiles {
            count: self.0.len(),
            mean: self.0.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            max: us(self.0.max()),
        })
    }
}

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Latencies seen.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Half are at most this long.
    pub p50: f64,
    /// Nine in ten are.
    pub p90: f64,
    /// 99 in 100 are.
    pub p99: f64,
    /// 999 in 1000 are.
    pub p99_9: f64,
    /// The longest.
    pub max: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_survive_the_pipe_and_add_up() {
        let (mut one, mut other) = (Latencies::default(), Latencies::default());
        for micros in 1..=500 {
            one.record(Duration::from_micros(micros));
            other.record(Duration::from_micros(500 + micros));
        }
        let mut both = Latencies::from_pairs(&one.to_pairs());
        both.add(&other.to_pairs());
        let percentiles = both.percentiles().unwrap();
        assert_eq!(percentiles.count, 1000);
        for (found, wanted) in [
            (percentiles.p50, 500.0),
            (percentiles.p90, 900.0),
            (percentiles.p99_9, 999.0),
            (percentiles.max, 1000.0),
        ] {
            assert!((found - wanted).abs() / wanted < 0.002, "{found} {wanted}");
        }
    }

    #[test]
    fn nothing_seen_has_no_percentiles_and_an_hour_is_taken() {
        assert_eq!(Latencies::default().percentiles(), None);
        let mut long = Latencies::default();
        long.record(Duration::from_secs(3600));
        let max = long.percentiles().unwrap().max;
        assert!((max / 3.6e9 - 1.0).abs() < 0.002, "{max}");
    }
}
