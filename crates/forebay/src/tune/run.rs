//! One tuning: engine and submission mode, the grid for reading and for writing, both together.

use serde::Serialize;

use super::rounds::{Comparison, Round, Z_95, as_float, median, quantile};
use super::search::{Limits, Measure, Measured, Outcome, SAMPLE_BYTES_MIN, cheapest, search, tied};
use super::space::{Candidate, Space};
use crate::io::{Direction, Error, ErrorKind, Result};

/// A search may move one in this many of the bytes that a pass over the grid takes. With what it
/// does besides (filling the file, warming up, many short samples) it then takes less than a fifth
/// of that pass's time, from files of 1 GiB on.
pub(crate) const SAVING: u64 = 8;
/// But this many times the size of the file, so that a handful of candidates can be told apart.
const FILES_MIN: u64 = 6;
/// And so many of the shortest samples of each candidate, without which a search among many on a
/// small file couldn't tell them from chance.
const SAMPLES_MIN: u64 = 4;
/// One in this many of those bytes goes to the comparison of modes, and to that of both ways.
const JOINT_SHARE: u64 = 10;
/// Rounds of a comparison of both ways.
const JOINT_ROUNDS: u64 = 3;
/// Most candidates in the comparison of both ways, the two winners included.
const JOINT_MAX: usize = 6;
/// Samples of a comparison of both ways are at most one in this many of the file.
const SAMPLES_PER_FILE: u64 = 4;

/// What to tune.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What is searched.
    pub space: Space,
    /// Bytes of the file, and of one pass over it.
    pub io_bytes: u64,
    /// Passes over the grid that the search has to beat by a factor of five.
    pub loops: u32,
    /// Tune loads.
    pub read: bool,
    /// Tune stores.
    pub write: bool,
    /// What the order of samples is drawn by.
    pub seed: u64,
}

impl Settings {
    /// Bytes that a pass over the whole grid takes, as often as asked for.
    pub fn grid_bytes(&self) -> u64 {
        self.io_bytes.saturating_mul(self.points()).saturating_mul(u64::from(self.loops))
    }

    /// Candidates of the grid.
    fn points(&self) -> u64 {
        let space = &self.space;
        let points = if space.is_small() {
            space.product().len()
        } else {
            space.modes().first().map_or(0, |mode| space.grid(*mode).len())
        };
        points as u64
    }

    /// Bytes that tuning one way may move.
    pub fn budget_bytes(&self) -> u64 {
        let samples = SAMPLES_MIN * SAMPLE_BYTES_MIN.min(self.io_bytes);
        (self.grid_bytes() / SAVING)
            .max(FILES_MIN.saturating_mul(self.io_bytes))
            .max(samples.saturating_mul(self.points()))
    }

    fn directions(&self) -> Vec<Direction> {
        let wanted = [(Direction::Load, self.read), (Direction::Store, self.write)];
        wanted.into_iter().filter(|(_, wanted)| *wanted).map(|(direction, _)| direction).collect()
    }
}

/// Several samples of a candidate in one number, and how far they lie apart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The middle rate of the longest samples: those of at least half the longest.
    pub bytes_per_second: f64,
    /// The rate that a quarter of them stays below.
    pub low: f64,
    /// The rate that three quarters stay below.
    pub high: f64,
    /// Processor time per GiB.
    pub cpu_seconds_per_gib: f64,
    /// Samples that were taken, the short ones included.
    pub samples: usize,
    /// Bytes of the longest.
    pub sample_bytes: u64,
    /// The page cache had a part in it.
    pub buffered: bool,
}

impl Summary {
    /// Sums samples up; `None` without any.
    pub fn of(samples: &[Measured]) -> Option<Self> {
        let longest = samples.iter().map(|measured| measured.bytes).max()?;
        let long = samples.iter().filter(|measured| measured.bytes >= longest / 2);
        let rates: Vec<f64> = long.clone().map(|one| one.sample.bytes_per_second).collect();
        let costs: Vec<f64> = long.map(|one| one.sample.cpu_seconds_per_gib).collect();
        Some(Self {
            bytes_per_second: median(&rates),
            low: quantile(&rates, 0.25),
            high: quantile(&rates, 0.75),
            cpu_seconds_per_gib: median(&costs),
            samples: samples.len(),
            sample_bytes: longest,
            buffered: samples.iter().any(|measured| measured.sample.buffered),
        })
    }
}

/// What tuning one way came to.
#[derive(Clone, Debug)]
pub struct Way {
    /// The search, its indices into [`Tuning::candidates`].
    pub outcome: Outcome,
    /// Each candidate's samples in one number.
    pub summaries: Vec<Option<Summary>>,
}

/// What tuning came to.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// What was searched.
    pub candidates: Vec<Candidate>,
    /// Engines and submission modes in the order of their worth, where they were compared first.
    pub modes: Vec<Candidate>,
    /// Loads.
    pub read: Option<Way>,
    /// Stores.
    pub write: Option<Way>,
    /// The candidate to take for both ways with the same options.
    pub both: Option<usize>,
    /// Bytes moved to find it.
    pub moved_bytes: u64,
}

impl Tuning {
    /// The candidate to take where there is one choice only.
    pub fn choice(&self) -> Option<usize> {
        let winner = |way: &Option<Way>| way.as_ref().and_then(|way| way.outcome.winner);
        self.both.or_else(|| winner(&self.read)).or_else(|| winner(&self.write))
    }
}

/// Tunes.
///
/// # Errors
///
/// Those of the [`Measure`]; that no candidate can be had here.
pub fn tune(settings: &Settings, measure: &mut dyn Measure) -> Result<Tuning> {
    let mut random = fastrand::Rng::with_seed(settings.seed);
    let directions = settings.directions();
    let budget = settings.budget_bytes();
    let joint_bytes = budget / JOINT_SHARE;
    let space = &settings.space;
    let mut spent = 0;
    let (modes, candidates) = if space.is_small() {
        (Vec::new(), space.product())
    } else {
        let all = space.modes();
        let indices: Vec<usize> = (0..all.len()).collect();
        let mut joint = Joint::new(&all, settings.io_bytes, joint_bytes, indices.len());
        joint.run(&indices, &directions, &mut random, measure)?;
        spent += joint.moved_bytes;
        let mut ranked: Vec<Candidate> =
            joint.ranking(&indices).into_iter().map(|index| all[index]).collect();
        let first = joint.preferred(&indices).map(|index| all[index]);
        let first = first.ok_or_else(|| nothing_works(joint.reason.as_deref()))?;
        ranked.retain(|mode| *mode != first);
        ranked.insert(0, first);
        (ranked, space.grid(first))
    };
    let reserved = if directions.len() > 1 { joint_bytes } else { 0 };
    let limits = Limits {
        sample_bytes: settings.io_bytes,
        budget_bytes: budget.saturating_sub(spent / directions.len().max(1) as u64 + reserved),
    };
    let mut ways: Vec<(Direction, Way)> = Vec::new();
    for direction in &directions {
        let outcome = search(&candidates, *direction, limits, &mut random, measure)?;
        if outcome.winner.is_none() {
            return Err(nothing_works(outcome.reason()));
        }
        spent += outcome.moved_bytes;
        let summaries =
            (0..candidates.len()).map(|index| Summary::of(&outcome.samples(index))).collect();
        ways.push((*direction, Way { outcome, summaries }));
    }
    let both = if let [(_, read), (_, write)] = &ways[..] {
        let among = promising(&read.outcome, &write.outcome);
        let mut joint = Joint::new(&candidates, settings.io_bytes, reserved, among.len());
        joint.run(&among, &directions, &mut random, measure)?;
        spent += joint.moved_bytes;
        joint.ranking(&among).first().copied()
    } else {
        None
    };
    let mut take = |direction| {
        let found = ways.iter().position(|(way, _)| *way == direction)?;
        Some(ways.swap_remove(found).1)
    };
    let (read, write) = (take(Direction::Load), take(Direction::Store));
    Ok(Tuning { candidates, modes, read, write, both, moved_bytes: spent })
}

fn nothing_works(reason: Option<&str>) -> Error {
    let detail = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    Error::new(ErrorKind::Unsupported, format!("none of the candidates can be had here{detail}"))
}

/// Those that may be best for both ways: the two winners, and who came furthest in both searches.
fn promising(read: &Outcome, write: &Outcome) -> Vec<usize> {
    let mut ranked: Vec<(usize, f64, usize)> = (0..read.dropped.len())
        .filter_map(|index| {
            let share = read.relative(index)? + write.relative(index)?;
            let rounds = read.samples(index).len().min(write.samples(index).len());
            Some((rounds, share, index))
        })
        .collect();
    ranked.sort_by(|one, other| other.0.cmp(&one.0).then(other.1.total_cmp(&one.1)));
    let mut among: Vec<usize> = [read.winner, write.winner].into_iter().flatten().collect();
    among.dedup();
    for (_, _, index) in ranked {
        if among.len() < JOINT_MAX && !among.contains(&index) {
            among.push(index);
        }
    }
    among
}

/// A comparison over one or both ways, in interleaved rounds.
struct Joint<'a> {
    candidates: &'a [Candidate],
    bytes: u64,
    rounds: Vec<(Direction, Vec<Round>)>,
    unavailable: Vec<usize>,
    reason: Option<String>,
    moved_bytes: u64,
}

impl<'a> Joint<'a> {
    /// A comparison of `count` candidates that moves about `budget` bytes each way.
    fn new(candidates: &'a [Candidate], io_bytes: u64, budget: u64, count: usize) -> Self {
        let fair = budget / JOINT_ROUNDS / count.max(1) as u64;
        let most = (io_bytes / SAMPLES_PER_FILE).max(io_bytes.min(1 << 20));
        let bytes = (fair >> 20 << 20).clamp((1 << 20).min(most), most);
        let (rounds, unavailable) = (Vec::new(), Vec::new());
        Self { candidates, bytes, rounds, unavailable, reason: None, moved_bytes: 0 }
    }

    fn run(
        &mut self,
        among: &[usize],
        directions: &[Direction],
        random: &mut fastrand::Rng,
        measure: &mut dyn Measure,
    ) -> Result<()> {
        self.rounds = directions.iter().map(|direction| (*direction, Vec::new())).collect();
        for _ in 0..JOINT_ROUNDS {
            for (way, direction) in directions.iter().enumerate() {
                let round = self.round(among, *direction, random, measure)?;
                self.rounds[way].1.push(round);
            }
        }
        Ok(())
    }

    fn round(
        &mut self,
        among: &[usize],
        direction: Direction,
        random: &mut fastrand::Rng,
        measure: &mut dyn Measure,
    ) -> Result<Round> {
        let mut order = among.to_vec();
        random.shuffle(&mut order);
        let mut samples = vec![None; self.candidates.len()];
        for candidate in order {
            if self.unavailable.contains(&candidate) {
                continue;
            }
            match measure.measure(&self.candidates[candidate], direction, self.bytes) {
                Ok(sample) => {
                    samples[candidate] = Some(sample);
                    self.moved_bytes += self.bytes;
                }
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    self.unavailable.push(candidate);
                    self.reason.get_or_insert(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Round { bytes: self.bytes, samples })
    }

    /// The candidates by what they came to over all ways: the first is the least costly of those
    /// that are as fast as the fastest.
    fn ranking(&self, among: &[usize]) -> Vec<usize> {
        let (ranked, _) = self.scores(among);
        let all: Vec<Round> =
            self.rounds.iter().flat_map(|(_, rounds)| rounds.iter().cloned()).collect();
        let first = cheapest(&tied(&ranked), self.candidates, &all);
        let mut order: Vec<usize> = ranked.into_iter().map(|(index, _)| index).collect();
        if let Some(first) = first {
            order.retain(|index| *index != first);
            order.insert(0, first);
        }
        order
    }

    /// The first of the candidates that isn't slower than the fastest with confidence: they are in
    /// the order in which they are preferred.
    fn preferred(&self, among: &[usize]) -> Option<usize> {
        let (ranked, error) = self.scores(among);
        let (_, best) = *ranked.first()?;
        let close = ranked.iter().filter(|(_, score)| best - score <= error);
        close.map(|(index, _)| *index).min()
    }

    /// The candidates with the sum of their estimates over all ways, the fastest first; and how far
    /// the difference of two sums may be off.
    fn scores(&self, among: &[usize]) -> (Vec<(usize, f64)>, f64) {
        let among: Vec<usize> =
            among.iter().copied().filter(|index| !self.unavailable.contains(index)).collect();
        let comparisons: Vec<Comparison> =
            self.rounds.iter().map(|(_, rounds)| Comparison::new(rounds, &among)).collect();
        let score = |index: usize| -> f64 {
            comparisons.iter().filter_map(|comparison| comparison.estimate(index)).sum()
        };
        let mut ranked: Vec<(usize, f64)> =
            among.iter().map(|index| (*index, score(*index))).collect();
        ranked.sort_by(|one, other| other.1.total_cmp(&one.1));
        let squares: f64 =
            comparisons.iter().map(|comparison| comparison.error(Z_95).powi(2)).sum();
        (ranked, squares.sqrt())
    }
}

impl Outcome {
    /// How a candidate's rate compares with the winner's over the rounds of both, in logarithms.
    fn relative(&self, candidate: usize) -> Option<f64> {
        let winner = self.winner?;
        let mut logs = Vec::new();
        let mut weights = 0.0;
        for round in &self.rounds {
            if let (Some(own), Some(best)) = (round.samples[candidate], round.samples[winner]) {
                let weight = as_float(round.bytes).sqrt();
                logs.push(weight * (own.bytes_per_second / best.bytes_per_second).ln());
                weights += weight;
            }
        }
        (weights > 0.0).then(|| logs.iter().sum::<f64>() / weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::EngineKind;
    use crate::tune::Sample;

    /// Loads like depth, stores don't; threads are slow.
    struct Simple {
        moved_bytes: u64,
    }

    impl Measure for Simple {
        fn measure(
            &mut self,
            candidate: &Candidate,
            direction: Direction,
            bytes: u64,
        ) -> Result<Sample> {
            if candidate.engine == EngineKind::Aio {
                return Err(Error::new(ErrorKind::Unsupported, "no aio here"));
            }
            self.moved_bytes += bytes;
            let depth = as_float(candidate.queue_depth as u64);
            let rate = match direction {
                Direction::Load => depth.min(64.0),
                Direction::Store => 64.0 / depth.max(16.0),
            };
            let engine = if candidate.engine == EngineKind::Threads { 0.5 } else { 1.0 };
            let single = if candidate.single_submit { 0.9 } else { 1.0 };
            Ok(Sample { bytes_per_second: 1e8 * rate * engine * single, ..Sample::default() })
        }
    }

    fn settings() -> Settings {
        Settings {
            space: Space::standard(EngineKind::ALL.to_vec(), 2),
            io_bytes: 1 << 30,
            loops: 1,
            read: true,
            write: true,
            seed: 5,
        }
    }

    #[test]
    fn each_way_has_its_winner_and_both_has_one_between() {
        let mut drive = Simple { moved_bytes: 0 };
        let tuning = tune(&settings(), &mut drive).unwrap();
        let depth = |index: Option<usize>| tuning.candidates[index.unwrap()].queue_depth;
        assert_eq!(depth(tuning.read.as_ref().unwrap().outcome.winner), 64);
        assert!(depth(tuning.write.as_ref().unwrap().outcome.winner) <= 16);
        assert!((16..=64).contains(&depth(tuning.both)));
        assert_eq!(tuning.choice(), tuning.both);
        assert_eq!(tuning.modes.len(), 4, "those without aio");
        assert!(tuning.candidates.iter().all(|one| one.engine == EngineKind::Uring));
        assert!(tuning.candidates.iter().all(|one| !one.single_submit));
        assert_eq!(tuning.moved_bytes, drive.moved_bytes);
        assert!(drive.moved_bytes <= 2 * settings().grid_bytes() / SAVING);
    }

    #[test]
    fn a_small_file_is_sampled_often_enough_to_tell_candidates_apart() {
        for io_bytes in [1 << 20, 16 << 20, 64 << 20] {
            let settings = Settings { io_bytes, write: false, ..settings() };
            let tuning = tune(&settings, &mut Simple { moved_bytes: 0 }).unwrap();
            let read = tuning.read.unwrap();
            assert!(read.outcome.is_conclusive(), "{io_bytes}: {}", read.outcome.uncertainty);
        }
    }

    #[test]
    fn one_way_alone_has_no_both() {
        for (read, write) in [(true, false), (false, true)] {
            let settings = Settings { read, write, ..settings() };
            let tuning = tune(&settings, &mut Simple { moved_bytes: 0 }).unwrap();
            assert_eq!((tuning.read.is_some(), tuning.write.is_some()), (read, write));
            assert_eq!(tuning.both, None);
            assert!(tuning.choice().is_some());
        }
    }

    #[test]
    fn a_machine_on_which_nothing_works_says_why() {
        let space = Space::standard(vec![EngineKind::Aio], 2);
        let error =
            tune(&Settings { space, ..settings() }, &mut Simple { moved_bytes: 0 }).unwrap_err();
        assert!(error.to_string().contains("no aio here"), "{error}");
    }

    #[test]
    fn short_samples_do_not_count_beside_long_ones() {
        let measured = |bytes, rate| Measured {
            bytes,
            sample: Sample { bytes_per_second: rate, ..Sample::default() },
        };
        let samples = [measured(10, 1.0), measured(100, 8.0), measured(100, 10.0)];
        let summary = Summary::of(&samples).unwrap();
        assert_eq!(summary.bytes_per_second.to_bits(), 9.0_f64.to_bits());
        assert_eq!((summary.samples, summary.sample_bytes), (3, 100));
        assert_eq!(Summary::of(&[]), None);
    }
}
