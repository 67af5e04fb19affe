//! Tests of the search on drives that are made up: noisy, drifting, stalling.

use super::rounds::normal;
use super::search::{Limits, Measure, Outcome, Sample, search};
use super::space::{Candidate, Space};
use crate::io::{Direction, EngineKind, Result};

const IO_BYTES: u64 = 1 << 30;
const SEEDS: u64 = 200;

/// A drive of which everything is known.
struct MadeUp {
    random: fastrand::Rng,
    /// Standard deviation of the logarithm of a rate over 64 MiB.
    noise: f64,
    /// Standard deviation that is the same for samples of any length.
    long_noise: f64,
    /// How far the rate swings up and down, and in how many seconds.
    drift: (f64, f64),
    /// One sample in so many takes four times as long.
    stall: Option<u64>,
    peaked: bool,
    seconds: f64,
    moved_bytes: u64,
}

impl MadeUp {
    fn new(seed: u64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            noise: 0.0,
            long_noise: 0.0,
            drift: (0.0, 60.0),
            stall: None,
            peaked: false,
            seconds: 0.0,
            moved_bytes: 0,
        }
    }

    /// What a candidate really does, in bytes per second.
    fn truth(&self, candidate: &Candidate) -> f64 {
        let window = candidate.window_bytes() as f64 / f64::from(1 << 20);
        let filled = 1.0 - (-window / 24.0).exp();
        let small_blocks = (candidate.block_size as f64 / 131_072.0).log2() * 0.01 + 0.9;
        let deep = if self.peaked { (window / 64.0).log2().abs() * 0.02 } else { 0.0 };
        3e9 * filled * small_blocks * (1.0 - deep)
    }

}

impl Measure for MadeUp {
    fn measure(&mut self, candidate: &Candidate, _: Direction, bytes: u64) -> Result<Sample> {
        let pieces = bytes as f64 / f64::from(64 << 20);
        let chance = normal(&mut self.random) * self.noise / pieces.sqrt() + normal(&mut self.random) * self.long_noise;
        let (swing, period) = self.drift;
        let drift = 1.0 + swing * (self.seconds / period * std::f64::consts::TAU).sin();
        let stalled = self.stall.is_some_and(|share| self.random.u64(0..share) == 0);
        let rate = self.truth(candidate) * drift * chance.exp() / if stalled { 4.0 } else { 1.0 };
        self.seconds += bytes as f64 / rate;
        self.moved_bytes += bytes;
        Ok(Sample { bytes_per_second: rate, cpu_seconds_per_gib: 0.1, buffered: false })
    }
}

struct Run {
    outcome: Outcome,
    /// The winner's rate as a share of the best.
    quality: f64,
    /// Bytes moved as a share of what the whole grid takes.
    share: f64,
}

fn run(drive: &mut MadeUp, seed: u64) -> Run {
    let space = Space::standard(vec![EngineKind::Uring], 2);
    let grid = space.grid(space.modes()[0]);
    let whole = grid.len() as u64 * IO_BYTES;
    let limits = Limits { sample_bytes: IO_BYTES, budget_bytes: whole / 5 * 8 / 10 };
    let mut random = fastrand::Rng::with_seed(seed);
    let outcome = search(&grid, Direction::Load, limits, &mut random, drive).unwrap();
    let best = grid.iter().map(|candidate| drive.truth(candidate)).fold(0.0, f64::max);
    let quality = drive.truth(&grid[outcome.winner.unwrap()]) / best;
    Run { outcome, quality, share: drive.moved_bytes as f64 / whole as f64 }
}

#[test]
fn explore() {
    for peaked in [false, true] {
        for noise in [0.0, 0.05, 0.1, 0.2, 0.5] {
            for long_noise in [0.0, 0.03, 0.1] {
                for (drift, stall) in [((0.0, 60.0), None), ((0.4, 60.0), Some(50))] {
                    let (mut good, mut conclusive, mut wrong, mut share) = (0, 0, 0, 0.0);
                    for seed in 0..60 {
                        let mut drive = MadeUp { noise, long_noise, drift, stall, peaked, ..MadeUp::new(seed) };
                        let run = run(&mut drive, seed + 1000);
                        good += u64::from(run.quality >= 0.97);
                        conclusive += u64::from(run.outcome.is_conclusive());
                        wrong += u64::from(run.outcome.is_conclusive() && run.quality < 0.97);
                        share += run.share / 60.0;
                    }
                    println!("peaked {peaked} noise {noise} long {long_noise} drift {:?} stall {stall:?}: good {good} conclusive {conclusive} wrong {wrong} share {share:.3}", drift.0);
                }
            }
        }
    }
}
