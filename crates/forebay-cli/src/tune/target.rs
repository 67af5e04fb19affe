//! One tuning, of a directory or of several striped: files, journal, search, profile.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use forebay::io::Direction;
use forebay::tune::{Drive, DriveOptions, Journal, Progress, SampleMemory, Settings, Space, tune};
use forebay::{Best, ByteSize, Profile, Profiles};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::Options;
use super::place::Place;
use super::report::{MemoryReport, Target, Winner, target_of};
use crate::exit::Failure;
use crate::gpu::Gpu;
use crate::output::complain;
use crate::scratch::Scratch;
use crate::signals::Signals;

/// Whose scratch directories these are.
pub(super) const SUBCOMMAND: &str = "tune";

/// What all targets of a command have in common.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) options: &'a Options,
    pub(super) space: &'a Space,
    pub(super) memory: SampleMemory,
    pub(super) gpu: Option<Gpu>,
    pub(super) io_bytes: u64,
    pub(super) log: &'a Path,
    pub(super) signals: &'a Signals,
    pub(super) seed: u64,
}

impl Run<'_> {
    /// Tunes one place, or several striped.
    pub(super) fn tune(&self, places: &[Place]) -> anyhow::Result<Target> {
        let about = self.about(places);
        let path = self.log.join(format!("tune-{:016x}.jsonl", fnv(&about.to_string())));
        let mut journal = Journal::open(&path, &about, self.seed, self.options.restart)?;
        let earlier = journal.earlier_count();
        if earlier > 0 {
            let count =
                if earlier == 1 { "1 sample".to_owned() } else { format!("{earlier} samples") };
            complain(&format!("going on after {count} of an interrupted run"));
        }
        let settings = Settings {
            space: self.space.clone(),
            io_bytes: self.io_bytes,
            loops: self.options.loops,
            read: !self.options.no_read,
            write: !self.options.no_write,
            seed: journal.seed(),
        };
        let bar = bar(places);
        let scratches: Vec<Scratch> = places
            .iter()
            .map(|place| {
                Scratch::new(&place.path, SUBCOMMAND).map_err(|error| {
                    let path = place.path.display();
                    Failure::environment(format!("{path}: cannot make a directory in it: {error}"))
                })
            })
            .collect::<Result<_, _>>()?;
        let is_interrupted = || self.signals.exit_code().is_some();
        let on_progress = |progress: &Progress| show_progress(&bar, progress);
        let mut drive = Drive::new(DriveOptions {
            files: scratches.iter().map(|scratch| scratch.path().join("sample.bin")).collect(),
            io_bytes: self.io_bytes,
            memory: self.memory.clone(),
            flush_page_cache: self.options.flush_page_cache,
            is_interrupted: &is_interrupted,
            on_progress: &on_progress,
        })?;
        let tuning = tune(&settings, &mut journal.keep(&mut drive))?;
        bar.finish_and_clear();
        let memory = MemoryReport { memory: self.memory.kind().name(), gpu: self.gpu.clone() };
        let mut target = target_of(&tuning, places, memory, settings.grid_bytes())
            .context("no candidate came out best")?;
        target.resumed_samples = earlier;
        target.seed = settings.seed;
        if let [place] = places {
            match self.store(place, &target) {
                Ok(path) => target.profile = Some(path),
                Err(error) => {
                    // The journal stays: the same command stores it without measuring again.
                    target.warnings.push(format!("not stored for handles: {error:#}"));
                    return Ok(target);
                }
            }
        }
        journal.finish()?;
        Ok(target)
    }

    /// What makes a tuning the same as an interrupted one.
    fn about(&self, places: &[Place]) -> Value {
        let engines: Vec<&str> = self.space.engines.iter().map(|engine| engine.name()).collect();
        let drives: Vec<Value> = places
            .iter()
            .map(|place| json!([place.path.to_string_lossy(), place.location.identity()]))
            .collect();
        json!({
            "engines": engines,
            "single_submit": self.space.single_submits,
            "block_size": self.space.block_sizes,
            "queue_depth": self.space.queue_depths,
            "intra_op_parallelism": self.space.parallelisms,
            "io_bytes": self.io_bytes,
            "loops": self.options.loops,
            "read": !self.options.no_read,
            "write": !self.options.no_write,
            "flush_page_cache": self.options.flush_page_cache,
            "device_staging_bytes": self.space.device_staging_bytes,
            "memory": self.memory.kind().name(),
            "gpu": self.gpu,
            "drives": drives,
        })
    }

    /// Stores what handles go by; returns where.
    fn store(&self, place: &Place, target: &Target) -> anyhow::Result<String> {
        Profiles::store(
            &place.location.identity(),
            self.memory.kind(),
            profile_of(self.gpu.as_ref(), place, target),
        )?;
        Ok(forebay::config::profiles_path().unwrap_or_default().display().to_string())
    }
}

fn profile_of(gpu: Option<&Gpu>, place: &Place, target: &Target) -> Profile {
    let rate = |winner: &Winner| {
        let rates = [winner.read, winner.write].into_iter().flatten();
        rates.map(|summary| summary.bytes_per_second).fold(f64::INFINITY, f64::min)
    };
    let own = |winner: &Option<Winner>, read: bool| -> Option<Best> {
        let winner = winner.as_ref()?;
        let summary = if read { winner.read } else { winner.write };
        Some(winner.options.best(summary?.bytes_per_second, winner.is_conclusive()))
    };
    let ways = [&target.read, &target.write];
    let sure = ways.into_iter().flatten().all(Winner::is_conclusive);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let gpu = gpu.map(|gpu| format!(" with {}", gpu.name)).unwrap_or_default();
    Profile {
        name: format!("{}{gpu}", place.name()),
        measured_at: now.as_secs(),
        read: own(&target.read, true),
        write: own(&target.write, false),
        both: target.both.as_ref().map(|winner| winner.options.best(rate(winner), sure)),
    }
}

/// A bar on standard error, shown if that is a terminal.
fn bar(places: &[Place]) -> ProgressBar {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let names: Vec<String> = places.iter().map(|place| place.path.display().to_string()).collect();
    bar.set_prefix(names.join(" + "));
    bar
}

fn show_progress(bar: &ProgressBar, progress: &Progress) {
    let way = match progress.direction {
        Direction::Load => "reading",
        Direction::Store => "writing",
    };
    bar.set_length(progress.budget_bytes);
    bar.set_position(progress.moved_bytes);
    let moved = ByteSize(progress.moved_bytes >> 20 << 20);
    bar.set_message(format!("{way}, {} candidates left, {moved}", progress.candidates));
}

/// A name for a text that is the same tomorrow: FNV-1a, 64 bits (Fowler, Noll and Vo).
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::fnv;

    #[test]
    fn names_are_those_of_the_published_function() {
        assert_eq!(fnv(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv("foobar"), 0x8594_4171_f739_67e8);
    }
}
