//! Bandwidth over time: bytes by intervals of one length, added up over processes and loops.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Time between two samples.
pub const INTERVAL: Duration = Duration::from_millis(100);

/// Bars of a sparkline, from nothing to the most.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The bytes of each interval of a loop. The last interval is from half as long to one and a half
/// times as long as the others: what completes together in a shorter one would be a rate that no
/// drive has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    bytes: Vec<f64>,
    seconds: f64,
}

impl Rates {
    /// The bytes of a loop, from samples of when how many had moved, the last one at its end.
    pub fn from_samples(samples: &[(Duration, u64)]) -> Self {
        let seconds = samples.last().map_or(0.0, |(time, _)| time.as_secs_f64());
        let mut rates = Self { bytes: vec![0.0; intervals(seconds)], seconds };
        let mut before = (0.0, 0);
        for (time, bytes) in samples {
            let time = time.as_secs_f64();
            rates.spread(before.0, time, bytes.saturating_sub(before.1));
            before = (time, *bytes);
        }
        rates
    }

    /// Spreads bytes evenly over a time, which may lie in several intervals.
    fn spread(&mut self, start: f64, end: f64, bytes: u64) {
        #[expect(clippy::cast_precision_loss, reason = "bytes of a sample, for a rate")]
        let bytes = bytes as f64;
        let step = INTERVAL.as_secs_f64();
        let last = self.bytes.len().saturating_sub(1);
        for (index, sum) in self.bytes.iter_mut().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "a number of intervals")]
            let from = index as f64 * step;
            let to = if index == last { f64::INFINITY } else { from + step };
            let shared = (end.min(to) - start.max(from)).max(0.0);
            let is_last = end <= start && (from..to).contains(&start);
            *sum += if end > start { bytes * shared / (end - start) } else { 0.0 };
            *sum += if is_last { bytes } else { 0.0 };
        }
    }

    /// Adds what another process moved at the same time.
    pub fn add(&mut self, other: &Self) {
        let count = self.bytes.len().max(other.bytes.len());
        self.bytes.resize(count, 0.0);
        self.seconds = self.seconds.max(other.seconds);
        for (sum, bytes) in self.bytes.iter_mut().zip(&other.bytes) {
            *sum += bytes;
        }
    }

    /// Bytes per second in each interval.
    pub fn per_second(&self) -> Vec<f64> {
        let step = INTERVAL.as_secs_f64();
        let last = self.bytes.len().saturating_sub(1);
        let rate = |(index, bytes): (usize, &f64)| {
            #[expect(clippy::cast_precision_loss, reason = "a number of intervals")]
            let length = if index == last { self.seconds - last as f64 * step } else { step };
            bytes / length.max(1e-9)
        };
        self.bytes.iter().enumerate().map(rate).collect()
    }
}

fn intervals(seconds: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a time that was measured"
    )]
    let count = (seconds / INTERVAL.as_secs_f64()).round() as usize;
    count.max(1)
}

/// Rates as a line of bars from zero to the highest, at most `width` of them.
pub fn sparkline(rates: &[f64], width: usize) -> String {
    let count = rates.len().min(width);
    let means: Vec<f64> = (0..count).map(|bar| mean_of(rates, bar, count)).collect();
    let highest = means.iter().copied().fold(0.0, f64::max);
    means.iter().map(|mean| BARS[level_of(*mean, highest)]).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a number of samples")]
fn mean_of(rates: &[f64], bar: usize, bars_count: usize) -> f64 {
    let part = &rates[bar * rates.len() / bars_count..(bar + 1) * rates.len() / bars_count];
    part.iter().sum::<f64>() / part.len() as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index of eight bars"
)]
fn level_of(value: f64, highest: f64) -> usize {
    let top = BARS.len() - 1;
    if highest <= 0.0 { 0 } else { ((value / highest * top as f64).round() as usize).min(top) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(millis: u64, bytes: u64) -> (Duration, u64) {
        (Duration::from_millis(millis), bytes)
    }

    fn close(found: &[f64], wanted: &[f64]) -> bool {
        let near = |(found, wanted): (&f64, &f64)| (found - wanted).abs() <= 1e-6 * wanted.abs();
        found.len() == wanted.len() && found.iter().zip(wanted).all(near)
    }

    #[test]
    fn samples_that_come_late_are_spread_over_the_intervals_they_cover() {
        let rates = Rates::from_samples(&[millis(100, 10), millis(300, 50), millis(390, 68)]);
        let found = rates.per_second();
        assert!(close(&found, &[100.0, 200.0, 200.0, 200.0]), "{found:?}");
    }

    #[test]
    fn what_completes_together_at_the_end_is_no_higher_rate_than_the_loops() {
        let rates = Rates::from_samples(&[millis(100, 10), millis(200, 20), millis(201, 30)]);
        let found = rates.per_second();
        assert!(close(&found, &[100.0, 20.0 / 0.101]), "{found:?}");
        let found = Rates::from_samples(&[millis(20, 5), millis(20, 6)]).per_second();
        assert!(close(&found, &[300.0]), "{found:?}");
    }

    #[test]
    fn processes_add_up_and_a_short_loop_has_one_rate() {
        let mut rates = Rates::from_samples(&[millis(50, 100)]);
        assert!(close(&rates.per_second(), &[2000.0]));
        rates.add(&Rates::from_samples(&[millis(200, 400)]));
        let found = rates.per_second();
        assert!(close(&found, &[3000.0, 2000.0]), "{found:?}");
    }

    #[test]
    fn a_sparkline_reaches_from_the_least_to_the_most() {
        assert_eq!(sparkline(&[0.0, 50.0, 100.0], 10), "▁▅█");
        assert_eq!(sparkline(&[0.0, 0.0], 10), "▁▁");
        assert_eq!(sparkline(&[], 10), "");
        assert_eq!(sparkline(&[1.0; 1000], 40).chars().count(), 40);
    }
}
