//! Tests of the search on drives that are made up: noisy, drifting, stalling.
#![expect(clippy::cast_precision_loss, reason = "made-up rates")]

use super::rounds::normal;
use super::run::SAVING;
use super::search::{Dropped, Limits, Measure, Outcome, Sample, TOLERANCE, search};
use super::space::{Candidate, Space};
use crate::io::{Direction, EngineKind, Error, ErrorKind, Result};

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
        let chance = normal(&mut self.random) * self.noise / pieces.sqrt()
            + normal(&mut self.random) * self.long_noise;
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
    let limits = Limits { sample_bytes: IO_BYTES, budget_bytes: whole / SAVING * 8 / 10 };
    let mut random = fastrand::Rng::with_seed(seed);
    let outcome = search(&grid, Direction::Load, limits, &mut random, drive).unwrap();
    let best = grid.iter().map(|candidate| drive.truth(candidate)).fold(0.0, f64::max);
    let quality = drive.truth(&grid[outcome.winner.unwrap()]) / best;
    Run { outcome, quality, share: drive.moved_bytes as f64 / whole as f64 }
}

/// Runs every seed on drives that differ by it alone.
fn runs(drive: impl Fn(u64) -> MadeUp) -> Vec<Run> {
    (0..SEEDS).map(|seed| run(&mut drive(seed), seed + SEEDS)).collect()
}

fn count(runs: &[Run], holds: impl Fn(&Run) -> bool) -> u64 {
    runs.iter().filter(|run| holds(run)).count() as u64
}

/// 95 % of the seeds.
const MOST: u64 = SEEDS * 95 / 100;

#[test]
fn the_winner_is_within_three_percent_of_the_best_for_an_eighth_of_the_bytes() {
    for peaked in [false, true] {
        let noisy = |seed| MadeUp { noise: 0.05, long_noise: 0.03, peaked, ..MadeUp::new(seed) };
        let runs = runs(noisy);
        let good = count(&runs, |run| run.quality >= 1.0 - TOLERANCE);
        assert!(good >= MOST, "{good} of {SEEDS}, peaked: {peaked}");
        assert!(runs.iter().all(|run| run.share <= 1.0 / SAVING as f64));
    }
}

#[test]
fn a_drive_that_drifts_and_stalls_biases_nothing() {
    let drive =
        |seed| MadeUp { noise: 0.05, drift: (0.4, 60.0), stall: Some(50), ..MadeUp::new(seed) };
    let good = count(&runs(drive), |run| run.quality >= 1.0 - TOLERANCE);
    assert!(good >= MOST, "{good} of {SEEDS}");
}

#[test]
fn a_quiet_drive_gets_a_verdict_and_a_noisy_one_does_not() {
    let quiet = runs(|seed| MadeUp { long_noise: 0.02, ..MadeUp::new(seed) });
    let settled = count(&quiet, |run| run.outcome.is_conclusive());
    assert!(settled >= MOST, "{settled} of {SEEDS}");
    let noisy = runs(|seed| MadeUp { noise: 0.5, peaked: true, ..MadeUp::new(seed) });
    let settled = count(&noisy, |run| run.outcome.is_conclusive());
    assert!(settled <= SEEDS - MOST, "{settled} of {SEEDS}");
}

#[test]
fn a_verdict_that_is_given_is_right() {
    for noise in [0.0, 0.05, 0.1, 0.2] {
        let runs = runs(|seed| MadeUp { noise, peaked: true, ..MadeUp::new(seed) });
        let wrong =
            count(&runs, |run| run.outcome.is_conclusive() && run.quality < 1.0 - TOLERANCE);
        assert!(wrong <= SEEDS - MOST, "{wrong} of {SEEDS} at noise {noise}");
    }
}

#[test]
fn without_noise_the_search_ends_early() {
    let run = run(&mut MadeUp { peaked: true, ..MadeUp::new(1) }, 1);
    assert!(run.outcome.is_conclusive() && run.share < 0.05, "{}", run.share);
    assert!(run.outcome.dropped.contains(&Some(Dropped::Slower)));
}

/// A machine on which some candidates can't be had.
struct Lacking(MadeUp);

impl Measure for Lacking {
    fn measure(&mut self, candidate: &Candidate, way: Direction, bytes: u64) -> Result<Sample> {
        if candidate.queue_depth > 32 {
            return Err(Error::new(ErrorKind::Unsupported, "too deep"));
        }
        self.0.measure(candidate, way, bytes)
    }
}

#[test]
fn what_cannot_be_had_is_left_out_and_said() {
    let space = Space::standard(vec![EngineKind::Aio], 1);
    let grid = space.grid(space.modes()[0]);
    let limits = Limits { sample_bytes: 64 << 20, budget_bytes: 1 << 30 };
    let mut random = fastrand::Rng::with_seed(3);
    let mut drive = Lacking(MadeUp::new(3));
    let outcome = search(&grid, Direction::Store, limits, &mut random, &mut drive).unwrap();
    assert!(grid[outcome.winner.unwrap()].queue_depth <= 32);
    for (candidate, dropped) in grid.iter().zip(&outcome.dropped) {
        let unavailable = matches!(dropped, Some(Dropped::Unavailable(text)) if text == "too deep");
        assert_eq!(unavailable, candidate.queue_depth > 32);
    }
}

#[test]
fn a_search_with_nothing_to_be_had_has_no_winner() {
    let space = Space { queue_depths: vec![64], ..Space::standard(vec![EngineKind::Aio], 1) };
    let limits = Limits { sample_bytes: 64 << 20, budget_bytes: 1 << 30 };
    let mut random = fastrand::Rng::with_seed(3);
    let grid = space.product();
    let mut drive = Lacking(MadeUp::new(3));
    let outcome = search(&grid, Direction::Load, limits, &mut random, &mut drive).unwrap();
    assert_eq!((outcome.winner, outcome.moved_bytes), (None, 0));
    assert!(!outcome.is_conclusive());
}
