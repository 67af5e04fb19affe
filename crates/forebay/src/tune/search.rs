//! The search: successive halving over interleaved rounds.
//!
//! All candidates start. In each rung those that are left are sampled in rounds; then those go that
//! are slower than the leader with confidence (Gupta's subset selection, "On some multiple decision
//! rules", Technometrics 7, 1965, with a pooled variance), and of the rest the better third stays
//! (sequential halving: Karnin, Koren, Somekh, "Almost optimal exploration in multi-armed bandits",
//! ICML 2013, with a third for a half, and more of the budget for the first rungs, which decide
//! among most). Samples double in length from rung to rung.
//!
//! What may be lost by each cut is drawn from the estimates and their error. The last few are
//! sampled until that, summed, is at most [`TOLERANCE`] in 95 % of the draws, or the budget is
//! spent: then the search is inconclusive.
//!
//! The search knows nothing of drives: what a candidate comes to is a [`Measure`]'s affair. With
//! the same seed and the same samples it takes the same course, which is how an interrupted run
//! goes on.

use serde::{Deserialize, Serialize};

use super::rounds::{Comparison, DRAWS, Round, Z_MANY, as_float, quantile};
use super::space::Candidate;
use crate::io::{Direction, ErrorKind, Result};

/// How much slower than the best the winner may be, as a share.
pub const TOLERANCE: f64 = 0.03;
/// Candidates within this share of the fastest are told apart by what they cost.
const TIE: f64 = 0.01;
/// Processor times within this factor are taken as the same.
const CPU_TIE: f64 = 1.1;
/// One in this many stays in each rung.
const CUT: usize = 3;
/// From this many candidates on nobody goes by rank alone.
const FINALISTS_MAX: usize = 4;
/// Rounds before anything is concluded.
const ROUNDS_MIN: u64 = 2;
/// Samples are at most one in this many of the file: more and shorter ones say more where chance
/// is a matter of moments.
const SAMPLES_PER_FILE: u64 = 4;
/// Shortest sample, in bytes, where that many are moved at all.
pub(crate) const SAMPLE_BYTES_MIN: u64 = 4 << 20;
/// The length of a sample is a multiple of this, so that direct I/O needs no ragged end.
const SAMPLE_GRANULE: u64 = 1 << 20;

/// What moving some bytes came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The rate.
    pub bytes_per_second: f64,
    /// Processor time of this process, user and system.
    pub cpu_seconds_per_gib: f64,
    /// The page cache had a part in it.
    pub buffered: bool,
}

/// What measures candidates.
pub trait Measure {
    /// Moves `bytes` with the options of a candidate.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] where the candidate can't be had here, which takes it out of the
    /// search; any other error ends the search.
    fn measure(
        &mut self,
        candidate: &Candidate,
        direction: Direction,
        bytes: u64,
    ) -> Result<Sample>;

    /// Hears how far a search is, before each sample.
    fn progress(&mut self, _: &Progress) {}
}

/// How far a search is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is searched for.
    pub direction: Direction,
    /// Candidates that are left.
    pub candidates: usize,
    /// Bytes moved so far.
    pub moved_bytes: u64,
    /// Bytes that may be moved.
    pub budget_bytes: u64,
}

/// How much a search may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes in one sample.
    pub sample_bytes: u64,
    /// Most bytes in all samples together.
    pub budget_bytes: u64,
}

/// Why a candidate is out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "why", content = "detail")]
pub enum Dropped {
    /// It is slower than the leader, with confidence.
    Slower,
    /// Others came out ahead.
    Rank,
    /// It can't be had here.
    Unavailable(String),
}

/// A sample with its length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Bytes that were moved.
    pub bytes: u64,
    /// What that came to.
    #[serde(flatten)]
    pub sample: Sample,
}

/// What became of a search.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub(crate) rounds: Vec<Round>,
    /// For each candidate why it is out, if it is.
    pub dropped: Vec<Option<Dropped>>,
    /// The candidate to take; `None` if none can be had here.
    pub winner: Option<usize>,
    /// Candidates that the winner can't be told from, itself included.
    pub finalists: Vec<usize>,
    /// With 95 % confidence no candidate is faster than the winner by more than this share.
    pub uncertainty: f64,
    /// Bytes moved.
    pub moved_bytes: u64,
}

impl Outcome {
    /// Whether the winner is as good as the best, within [`TOLERANCE`].
    pub fn is_conclusive(&self) -> bool {
        self.uncertainty <= TOLERANCE
    }

    /// Why a candidate can't be had here, if one can't.
    pub fn reason(&self) -> Option<&str> {
        self.dropped.iter().find_map(|dropped| match dropped {
            Some(Dropped::Unavailable(reason)) => Some(reason.as_str()),
            _ => None,
        })
    }

    /// The samples of a candidate, in the order in which they were taken.
    pub fn samples(&self, candidate: usize) -> Vec<Measured> {
        let taken = |round: &Round| {
            Some(Measured { bytes: round.bytes, sample: round.samples[candidate]? })
        };
        self.rounds.iter().filter_map(taken).collect()
    }
}

/// Searches for the fastest candidate.
///
/// # Errors
///
/// Those of the [`Measure`].
pub fn search(
    candidates: &[Candidate],
    direction: Direction,
    limits: Limits,
    random: &mut fastrand::Rng,
    measure: &mut dyn Measure,
) -> Result<Outcome> {
    let alive = (0..candidates.len()).collect();
    let dropped = vec![None; candidates.len()];
    let least = SAMPLE_BYTES_MIN.min(limits.sample_bytes);
    let mut search = Search {
        candidates,
        direction,
        limits,
        measure,
        random,
        alive,
        dropped,
        rounds: Vec::new(),
        moved_bytes: 0,
        bytes: least,
        losses: vec![0.0; DRAWS],
        true_variance: None,
    };
    while search.alive.len() > FINALISTS_MAX {
        if !search.rung()? {
            break;
        }
    }
    search.finals()?;
    Ok(search.conclude())
}

struct Search<'a> {
    candidates: &'a [Candidate],
    direction: Direction,
    limits: Limits,
    measure: &'a mut dyn Measure,
    random: &'a mut fastrand::Rng,
    alive: Vec<usize>,
    dropped: Vec<Option<Dropped>>,
    rounds: Vec<Round>,
    moved_bytes: u64,
    /// Length of the last samples; later ones aren't shorter.
    bytes: u64,
    /// What the cuts so far have lost, drawn.
    losses: Vec<f64>,
    /// How widely those that were left at the last cut differ.
    true_variance: Option<f64>,
}

impl Search<'_> {
    fn left_bytes(&self) -> u64 {
        self.limits.budget_bytes.saturating_sub(self.moved_bytes)
    }

    /// Samples everybody who is left a few times, and sends most home. `false` if the budget is
    /// spent.
    fn rung(&mut self) -> Result<bool> {
        // Shares fall off evenly: of n rungs the first gets n parts, the last one part.
        let share = self.left_bytes() / (rungs_of(self.alive.len()) + 1) * 2;
        let count = self.alive.len() as u64;
        let fitting = share / ROUNDS_MIN / count;
        self.lengthen(if self.rounds.is_empty() { fitting } else { fitting.min(2 * self.bytes) });
        for _ in 0..(share / (count * self.bytes)).max(ROUNDS_MIN) {
            if !self.round()? {
                return Ok(false);
            }
        }
        let comparison = Comparison::new(&self.rounds, &self.alive);
        self.drop_slower(&comparison);
        let fast = self.alive.clone();
        self.true_variance = comparison.true_variance(&fast).or(self.true_variance);
        let places = fast.len().min(comparison.estimates.len().div_ceil(CUT));
        self.drop_behind(&comparison, places);
        let losses = comparison.draw_losses(&fast, &self.alive, self.true_variance, self.random);
        self.losses = sums(&self.losses, &losses);
        Ok(true)
    }

    fn lengthen(&mut self, bytes: u64) {
        let whole = bytes - bytes % SAMPLE_GRANULE;
        let most = (self.limits.sample_bytes / SAMPLES_PER_FILE).max(self.bytes);
        self.bytes = whole.clamp(self.bytes, most);
    }

    /// Samples the last few until they are told apart, or are as good as each other.
    fn finals(&mut self) -> Result<()> {
        self.lengthen(2 * self.bytes);
        let before = self.rounds.len();
        loop {
            if (self.rounds.len() - before) as u64 >= ROUNDS_MIN {
                let comparison = Comparison::new(&self.rounds, &self.alive);
                if let Some(winner) = self.choose(&comparison)
                    && self.uncertainty(&comparison, winner) <= TOLERANCE
                {
                    return Ok(());
                }
                self.drop_slower(&comparison);
            }
            if self.alive.len() <= 1 && !self.rounds.is_empty() || !self.round()? {
                return Ok(());
            }
        }
    }

    /// Samples everybody who is left once. `false` if the budget doesn't reach for that.
    fn round(&mut self) -> Result<bool> {
        let cost = (self.alive.len() as u64).saturating_mul(self.bytes);
        // Without the first round there would be nothing to go by.
        if cost > self.left_bytes() && !self.rounds.is_empty() {
            return Ok(false);
        }
        let mut order = self.alive.clone();
        self.random.shuffle(&mut order);
        let mut samples = vec![None; self.candidates.len()];
        for candidate in order {
            self.measure.progress(&Progress {
                direction: self.direction,
                candidates: self.alive.len(),
                moved_bytes: self.moved_bytes,
                budget_bytes: self.limits.budget_bytes,
            });
            let options = &self.candidates[candidate];
            match self.measure.measure(options, self.direction, self.bytes) {
                Ok(sample) => samples[candidate] = Some(sample),
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    self.dropped[candidate] = Some(Dropped::Unavailable(error.to_string()));
                    self.alive.retain(|other| *other != candidate);
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.moved_bytes += self.bytes;
        }
        self.rounds.push(Round { bytes: self.bytes, samples });
        Ok(true)
    }

    fn drop_slower(&mut self, comparison: &Comparison) {
        let Some((_, best)) = comparison.leader() else { return };
        let error = comparison.error(Z_MANY);
        for (candidate, estimate) in &comparison.estimates {
            if best - estimate > error {
                self.drop(*candidate, Dropped::Slower);
            }
        }
    }

    fn drop_behind(&mut self, comparison: &Comparison, places: usize) {
        let mut ranked = comparison.estimates.clone();
        ranked.sort_by(|one, other| other.1.total_cmp(&one.1));
        for (candidate, _) in ranked.iter().skip(places) {
            self.drop(*candidate, Dropped::Rank);
        }
    }

    fn drop(&mut self, candidate: usize, why: Dropped) {
        if self.alive.contains(&candidate) {
            self.alive.retain(|other| *other != candidate);
            self.dropped[candidate] = Some(why);
        }
    }

    /// The least costly of the fastest.
    fn choose(&self, comparison: &Comparison) -> Option<usize> {
        let tied = tied(&comparison.estimates);
        cheapest(&tied, self.candidates, &self.rounds)
    }

    /// What may be lost by taking `winner`, with 95 % confidence, as a share.
    fn uncertainty(&mut self, comparison: &Comparison, winner: usize) -> f64 {
        let last = if comparison.estimates.len() > 1 {
            let all: Vec<usize> = comparison.estimates.iter().map(|(index, _)| *index).collect();
            comparison.draw_losses(&all, &[winner], self.true_variance, self.random)
        } else {
            vec![0.0; DRAWS]
        };
        quantile(&sums(&self.losses, &last), 0.95).exp_m1()
    }

    fn conclude(mut self) -> Outcome {
        let last = Comparison::new(&self.rounds, &self.alive);
        let winner = self.choose(&last);
        let uncertainty = winner.map_or(f64::INFINITY, |winner| self.uncertainty(&last, winner));
        Outcome {
            rounds: self.rounds,
            dropped: self.dropped,
            winner,
            finalists: self.alive,
            uncertainty,
            moved_bytes: self.moved_bytes,
        }
    }
}

fn sums(one: &[f64], other: &[f64]) -> Vec<f64> {
    one.iter().zip(other).map(|(one, other)| one + other).collect()
}

/// Those of candidates and their estimates that are as fast as the fastest.
pub(crate) fn tied(estimates: &[(usize, f64)]) -> Vec<usize> {
    let best = estimates.iter().map(|(_, estimate)| *estimate).fold(f64::NEG_INFINITY, f64::max);
    let close = estimates.iter().filter(|(_, estimate)| best - estimate <= TIE);
    close.map(|(candidate, _)| *candidate).collect()
}

/// Of candidates that are equally fast, the one that takes least processor time; of those that
/// take the same, the one with the fewest bytes in flight.
pub(crate) fn cheapest(
    tied: &[usize],
    candidates: &[Candidate],
    rounds: &[Round],
) -> Option<usize> {
    let costs: Vec<(usize, f64)> =
        tied.iter().map(|candidate| (*candidate, cpu_of(rounds, *candidate))).collect();
    let least = costs.iter().map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min);
    costs
        .iter()
        .filter(|(_, cost)| *cost <= least * CPU_TIE)
        .map(|(candidate, _)| *candidate)
        .min_by_key(|candidate| candidates[*candidate].window_bytes())
}

/// Processor time per GiB, over all samples of a candidate.
fn cpu_of(rounds: &[Round], candidate: usize) -> f64 {
    let (mut cost, mut bytes) = (0.0, 0.0);
    for round in rounds {
        if let Some(sample) = round.samples[candidate] {
            cost += sample.cpu_seconds_per_gib * as_float(round.bytes);
            bytes += as_float(round.bytes);
        }
    }
    cost / bytes
}

/// How many rungs there are for so many candidates, the finals included.
fn rungs_of(candidates: usize) -> u64 {
    let mut left = candidates;
    let mut rungs = 1;
    while left > FINALISTS_MAX {
        left = left.div_ceil(CUT);
        rungs += 1;
    }
    rungs
}
