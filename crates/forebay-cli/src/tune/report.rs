//! What is found, as the JSON of the schema `forebay.tune/1` has it; text and page show the same.

use forebay::io::MemoryKind;
use forebay::tune::{AioBlock, Candidate, Dropped, Summary, Tuning, Way};
use serde::Serialize;

use super::place::Place;
use crate::gpu::Gpu;

/// The whole result.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    pub(super) io_bytes: u64,
    pub(super) loops: u32,
    pub(super) targets: Vec<Target>,
    pub(super) page: Option<String>,
}

impl Report {
    /// Whether the page is written, and what each directory does best with is stored.
    pub(super) fn is_kept(&self) -> bool {
        let mut alone = self.targets.iter().filter(|target| !target.striped);
        self.page.is_some() && alone.all(|target| target.profile.is_some())
    }

    pub(super) fn new(io_bytes: u64, loops: u32, targets: Vec<Target>) -> Self {
        Self { version: env!("CARGO_PKG_VERSION"), io_bytes, loops, targets, page: None }
    }
}

/// What was tuned at once: a directory, or several striped.
#[derive(Debug, Serialize)]
pub(super) struct Target {
    pub(super) directories: Vec<DirectoryReport>,
    pub(super) striped: bool,
    #[serde(flatten)]
    pub(super) memory: MemoryReport,
    /// `{"aio": …}`, for DeepSpeed's configuration.
    pub(super) block: Block,
    pub(super) read: Option<Winner>,
    pub(super) write: Option<Winner>,
    pub(super) both: Option<Winner>,
    pub(super) modes: Vec<Candidate>,
    pub(super) candidates: Vec<CandidateReport>,
    pub(super) warnings: Vec<String>,
    pub(super) moved_bytes: u64,
    /// What a pass over the whole grid would have moved.
    pub(super) grid_bytes: u64,
    pub(super) resumed_samples: usize,
    pub(super) seed: u64,
    /// Where the profile that handles go by is stored.
    pub(super) profile: Option<String>,
}

/// The memory that was moved from and to.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MemoryReport {
    /// `host`, `gpu` or `gds`.
    pub(super) memory: &'static str,
    /// The GPU that has it.
    pub(super) gpu: Option<Gpu>,
}

impl MemoryReport {
    /// What to say of it; nothing of the host's.
    pub(super) fn in_words(&self) -> Option<String> {
        let Gpu { ordinal, name } = self.gpu.as_ref()?;
        let route = if self.memory == MemoryKind::Gds.name() {
            "by GPUDirect Storage"
        } else {
            "through the host's"
        };
        Some(format!("memory of GPU {ordinal}, {name}, {route}"))
    }
}

/// A directory and what it is on.
#[derive(Debug, Serialize)]
pub(super) struct DirectoryReport {
    pub(super) path: String,
    pub(super) identity: String,
    pub(super) name: String,
    pub(super) memory: bool,
    /// What the links of its drives carry, where that is known.
    pub(super) carries_bytes_per_second: Option<f64>,
}

impl From<&Place> for DirectoryReport {
    fn from(place: &Place) -> Self {
        Self {
            path: place.path.display().to_string(),
            identity: place.location.identity(),
            name: place.name(),
            memory: place.location.is_memory(),
            carries_bytes_per_second: place.carries(),
        }
    }
}

/// What goes into a DeepSpeed configuration as it is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Block {
    pub(super) aio: Aio,
}

/// The options, and whether they are for GPUDirect Storage.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Aio {
    #[serde(flatten)]
    options: AioBlock,
    #[serde(skip_serializing_if = "Option::is_none")]
    use_gds: Option<bool>,
}

/// The candidate to take.
#[derive(Debug, Serialize)]
pub(super) struct Winner {
    pub(super) candidate: usize,
    #[serde(flatten)]
    pub(super) options: Candidate,
    pub(super) read: Option<Summary>,
    pub(super) write: Option<Summary>,
    pub(super) verdict: Option<Verdict>,
}

impl Winner {
    /// Whether nothing is known to be faster.
    pub(super) fn is_conclusive(&self) -> bool {
        self.verdict.is_some_and(|verdict| verdict.conclusive)
    }
}

/// How sure that is.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Verdict {
    /// It is within 3 % of the best with 95 % confidence.
    pub(super) conclusive: bool,
    /// With 95 % confidence nobody is faster by more than this share; `None`: nothing is known.
    pub(super) uncertainty: Option<f64>,
    /// Candidates that were left at the end.
    pub(super) finalists: usize,
}

/// One candidate.
#[derive(Debug, Serialize)]
pub(super) struct CandidateReport {
    #[serde(flatten)]
    pub(super) options: Candidate,
    pub(super) read: Option<Rate>,
    pub(super) write: Option<Rate>,
}

/// What a candidate came to, one way.
#[derive(Debug, Serialize)]
pub(super) struct Rate {
    #[serde(flatten)]
    pub(super) summary: Option<Summary>,
    pub(super) dropped: Option<Dropped>,
    /// The rate is more than the device can do.
    pub(super) above_device: bool,
}

/// What a tuning came to, for its target.
pub(super) fn target_of(
    tuning: &Tuning,
    places: &[Place],
    memory: MemoryReport,
    grid_bytes: u64,
) -> Option<Target> {
    let carries: Option<f64> = places.iter().map(Place::carries).sum();
    let choice = tuning.candidates[tuning.choice()?];
    let winner = |way: &Option<Way>| {
        let way = way.as_ref()?;
        winner_of(tuning, way.outcome.winner?, Some(verdict_of(way)))
    };
    let read = winner(&tuning.read);
    let write = winner(&tuning.write);
    let both = tuning.both.and_then(|index| winner_of(tuning, index, None));
    let candidates = (0..tuning.candidates.len())
        .map(|index| CandidateReport {
            options: tuning.candidates[index],
            read: tuning.read.as_ref().map(|way| rate_of(way, index, carries)),
            write: tuning.write.as_ref().map(|way| rate_of(way, index, carries)),
        })
        .collect();
    let mut target = Target {
        directories: places.iter().map(DirectoryReport::from).collect(),
        striped: places.len() > 1,
        block: Block {
            aio: Aio {
                options: choice.into(),
                use_gds: (memory.memory == MemoryKind::Gds.name()).then_some(true),
            },
        },
        memory,
        read,
        write,
        both,
        modes: tuning.modes.clone(),
        candidates,
        warnings: Vec::new(),
        moved_bytes: tuning.moved_bytes,
        grid_bytes,
        resumed_samples: 0,
        seed: 0,
        profile: None,
    };
    target.warnings = warnings_of(&target, places, carries);
    Some(target)
}

fn winner_of(tuning: &Tuning, candidate: usize, verdict: Option<Verdict>) -> Option<Winner> {
    let summary = |way: &Option<Way>| way.as_ref().and_then(|way| way.summaries[candidate]);
    Some(Winner {
        candidate,
        options: *tuning.candidates.get(candidate)?,
        read: summary(&tuning.read),
        write: summary(&tuning.write),
        verdict,
    })
}

fn verdict_of(way: &Way) -> Verdict {
    let uncertainty = way.outcome.uncertainty;
    Verdict {
        conclusive: way.outcome.is_conclusive(),
        uncertainty: uncertainty.is_finite().then_some(uncertainty),
        finalists: way.outcome.finalists.len(),
    }
}

fn rate_of(way: &Way, index: usize, carries: Option<f64>) -> Rate {
    let summary = way.summaries[index];
    let above = summary.zip(carries).is_some_and(|(found, most)| found.bytes_per_second > most);
    Rate { summary, dropped: way.outcome.dropped[index].clone(), above_device: above }
}

fn warnings_of(target: &Target, places: &[Place], carries: Option<f64>) -> Vec<String> {
    let mut warnings: Vec<String> = places.iter().flat_map(Place::doubts).collect();
    let mut identities: Vec<&str> =
        target.directories.iter().map(|directory| directory.identity.as_str()).collect();
    identities.sort_unstable();
    if identities.windows(2).any(|pair| pair[0] == pair[1]) {
        warnings.push("two of the directories are on the same drive".to_owned());
    }
    let rates = |candidate: &CandidateReport| {
        [candidate.read.as_ref(), candidate.write.as_ref()]
            .map(|rate| rate.map(|rate| (rate.above_device, rate.summary)))
    };
    let all = || target.candidates.iter().flat_map(rates).flatten();
    if let Some(most) = carries
        && all().any(|(above, _)| above)
    {
        let most = most / 1e9;
        warnings.push(format!(
            "some rates are above the {most:.1} GB/s that the links of the drive carry: a cache \
             answers in its place"
        ));
    }
    if all().any(|(_, summary)| summary.is_some_and(|summary| summary.buffered)) {
        warnings
            .push("the file system doesn't take direct I/O: the page cache is measured".to_owned());
    }
    for (name, winner) in [("reading", &target.read), ("writing", &target.write)] {
        let verdict = winner.as_ref().and_then(|winner| winner.verdict);
        if let Some(verdict) = verdict.filter(|verdict| !verdict.conclusive) {
            warnings.push(inconclusive(name, verdict));
        }
    }
    warnings
}

fn inconclusive(name: &str, verdict: Verdict) -> String {
    let extent = verdict
        .uncertainty
        .map_or("by any amount".to_owned(), |share| format!("by {:.0} %", share * 100.0));
    format!(
        "{name} is inconclusive: the drive is too noisy, another candidate may be faster {extent}; \
         try a larger --io-size, more --loops, or a quieter machine"
    )
}
