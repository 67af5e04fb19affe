//! The bench: fio's best setting, then fio and Forebay in turns.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::arguments::{Bench, Section};
use crate::fio::{self, Engine, Setting};
use crate::measure::{Figure, Way, chill, interleave, median, spread};
use crate::place::{Payload, Place, check_stamps, stamp};
use crate::progress;
use crate::report::{Comparison, Reading, Report};
use crate::subject::{Memory, MemoryKind, Subject, Tensor, idle_cpu_seconds};

/// Runs of each setting of fio's, of which the median counts.
const SEARCH_RUNS: usize = 3;
/// Tensors of the vectored measurement, as far as the file has room for them.
const TENSORS_MAX: usize = 10_000;
/// Bytes of each.
const TENSOR_BYTES: usize = 64 << 10;
/// Bytes of the asynchronous submission.
const SUBMIT_BYTES: usize = 256 << 20;
const SUBMIT_RUNS: usize = 9;
const IDLE_TIME: Duration = Duration::from_secs(2);
const SETTLE_TIME: Duration = Duration::from_millis(200);

/// What is needed in every measurement.
struct Stage<'a> {
    bench: &'a Bench,
    place: &'a Place,
    payload: Payload,
    subject: Subject,
    has_fio: bool,
}

/// What a comparison is with, and what it should come to.
struct Terms {
    against: String,
    goal: &'static str,
    cpu_goal: &'static str,
}

/// Runs the measurements asked for on one place.
pub(crate) fn run(bench: &Bench, place: &Place, report: &mut Report) -> Result<()> {
    let version = fio::version();
    match &version {
        Ok(version) => progress(&format!("{}: {version}", place.name)),
        Err(error) => report.notes.push(format!("nothing to compare with: {error:#}")),
    }
    let payload = place.lay_out(bench.scope.size.0)?;
    let subject = Subject::new(bench.options()?)?;
    let stage = Stage { bench, place, payload, subject, has_fio: version.is_ok() };
    // Reads first: fio's writes leave bytes of its own, which can't be checked.
    if bench.has(Section::Read) {
        stage.whole_file(Way::Read, report)?;
    }
    if bench.has(Section::Vectored) {
        stage.vectored(report)?;
    }
    if bench.has(Section::Submit) {
        stage.submit(report)?;
    }
    if bench.has(Section::Write) {
        stage.whole_file(Way::Write, report)?;
    }
    if bench.has(Section::Idle) {
        stage.idle(report)?;
    }
    stage.say_how(report);
    Ok(())
}

impl Stage<'_> {
    fn path(&self) -> &Path {
        self.payload.path()
    }

    fn size(&self) -> u64 {
        self.bench.scope.size.0
    }

    /// fio's best settings, then in turns: fio, Forebay from pool memory, Forebay from ordinary
    /// memory.
    fn whole_file(&self, way: Way, report: &mut Report) -> Result<()> {
        let yardsticks = if self.has_fio { self.search(way)? } else { Vec::new() };
        let length = usize::try_from(self.size())?;
        let mut memories = Vec::new();
        for kind in MemoryKind::BOTH {
            let mut memory = Memory::new(kind, length)?;
            self.warm_up(way, &mut memory)?;
            memories.push(memory);
        }
        let rounds_count = self.bench.scope.pairs;
        progress(&format!("{}: {way}, {rounds_count} rounds", self.place.name));
        let candidates_count = memories.len() + yardsticks.len();
        let results = interleave(rounds_count, candidates_count, |candidate| {
            chill(self.path())?;
            match candidate.checked_sub(memories.len()) {
                Some(index) => fio::run(self.path(), way, yardsticks[index], self.size()),
                None => self.subject.run(self.path(), way, &mut memories[candidate]),
            }
        })?;
        let mut compare = |what: &str, base: &[Figure], subject: &[Figure], terms: Terms| {
            report.comparisons.push(Comparison {
                place: self.place.name,
                what: format!("{way}, {what}"),
                against: terms.against,
                goal: terms.goal,
                cpu_goal: terms.cpu_goal,
                base: base.to_vec(),
                subject: subject.to_vec(),
            });
        };
        let [pool, ordinary, fio @ ..] = &results[..] else { return Ok(()) };
        for (index, (setting, base)) in yardsticks.iter().zip(fio).enumerate() {
            let is_fixed = setting.engine == Engine::UringFixed;
            let terms = Terms {
                against: format!("fio {setting}"),
                goal: if index == 0 { "≥ 0.97" } else { "" },
                cpu_goal: if is_fixed { "≤ 1.3" } else { "" },
            };
            compare("pool", base, pool, terms);
        }
        let goal = if self.place.name == "loop" { "≥ 0.6" } else { "≥ 0.85" };
        let terms = Terms { against: "Forebay, pool".to_owned(), goal, cpu_goal: "" };
        compare("ordinary", pool, ordinary, terms);
        match yardsticks.first() {
            Some(best) if way == Way::Read => self.streamed(*best, report),
            _ => Ok(()),
        }
    }

    /// Reads into as much pool memory as fio takes, again and again as fio does: a few MiB stay in
    /// the processor's cache, a tensor of the file's size doesn't.
    fn streamed(&self, yardstick: Setting, report: &mut Report) -> Result<()> {
        let window = yardstick.memory_bytes().min(self.size());
        let mut memory = Memory::new(MemoryKind::Pool, usize::try_from(window)?)?;
        chill(self.path())?;
        self.subject.run_streamed(self.path(), &mut memory, self.size())?;
        self.check_last(&memory)?;
        progress(&format!("{}: read in {} MiB", self.place.name, window >> 20));
        let results = interleave(self.bench.scope.pairs, 2, |candidate| {
            chill(self.path())?;
            match candidate {
                0 => self.subject.run_streamed(self.path(), &mut memory, self.size()),
                _ => fio::run(self.path(), Way::Read, yardstick, self.size()),
            }
        })?;
        report.comparisons.push(Comparison {
            place: self.place.name,
            what: format!("read, pool of {} MiB", window >> 20),
            against: format!("fio {yardstick}"),
            goal: "≥ 0.97",
            cpu_goal: "",
            base: results[1].clone(),
            subject: results[0].clone(),
        });
        Ok(())
    }

    /// Checks what a streamed read left in memory: the last piece of the file.
    fn check_last(&self, memory: &Memory) -> Result<()> {
        let half = memory.bytes().len() / 2;
        let last = (usize::try_from(self.size())? - 1) / half;
        let start = last % 2 * half;
        let length = usize::try_from(self.size())? - last * half;
        check_stamps(&memory.bytes()[start..start + length], (last * half) as u64)
    }

    /// One run that isn't counted: memory gets registered, staging blocks get made, and the bytes
    /// are checked.
    fn warm_up(&self, way: Way, memory: &mut Memory) -> Result<()> {
        if way == Way::Write {
            stamp(memory.bytes_mut(), 0);
            self.subject.run(self.path(), way, memory)?;
            return check_stamps(&std::fs::read(self.path())?, 0);
        }
        memory.bytes_mut().fill(0);
        chill(self.path())?;
        self.subject.run(self.path(), way, memory)?;
        check_stamps(memory.bytes(), 0)
    }

    /// fio's best setting and, should that be another, its best one with registered buffers, the
    /// measure for CPU time.
    fn search(&self, way: Way) -> Result<Vec<Setting>> {
        let settings = Setting::all();
        let results = interleave(SEARCH_RUNS, settings.len(), |candidate| {
            chill(self.path())?;
            fio::run(self.path(), way, settings[candidate], self.size())
        })?;
        let mut ranking: Vec<(f64, Setting)> = results
            .iter()
            .map(|figures| median(figures.iter().map(Figure::gigabytes_per_second)))
            .zip(settings)
            .collect();
        ranking.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        for (rate, setting) in &ranking {
            progress(&format!("{}: {way}: fio {setting}: {rate:.2} GB/s", self.place.name));
        }
        let fixed = ranking.iter().position(|(_, setting)| setting.engine == Engine::UringFixed);
        let mut best = vec![0];
        best.extend(fixed.filter(|&index| index > 0));
        Ok(best.into_iter().map(|index| ranking[index].1).collect())
    }

    fn vectored(&self, report: &mut Report) -> Result<()> {
        let tensors = shuffled_tensors(self.size());
        let total_bytes = (tensors.len() * TENSOR_BYTES) as u64;
        let setting = Setting {
            engine: Engine::UringFixed,
            block_bytes: TENSOR_BYTES as u64,
            depth: self.subject.depth(),
        };
        for kind in MemoryKind::BOTH {
            let mut memory = Memory::new(kind, tensors.len() * TENSOR_BYTES)?;
            chill(self.path())?;
            self.subject.run_vectored(self.path(), &mut memory, &tensors)?;
            for tensor in &tensors {
                let bytes = &memory.bytes()[tensor.position..tensor.position + tensor.length];
                check_stamps(bytes, tensor.offset)?;
            }
            progress(&format!("{}: vectored, {}", self.place.name, kind.name()));
            let candidates_count = if self.has_fio { 2 } else { 1 };
            let results = interleave(self.bench.scope.pairs, candidates_count, |candidate| {
                chill(self.path())?;
                match candidate {
                    0 => self.subject.run_vectored(self.path(), &mut memory, &tensors),
                    _ => fio::run_random(self.path(), setting, total_bytes),
                }
            })?;
            report.comparisons.push(Comparison {
                place: self.place.name,
                what: format!("{} × 64 KiB, {}", tensors.len(), kind.name()),
                against: if self.has_fio {
                    format!("fio randread {setting}")
                } else {
                    "no fio".into()
                },
                goal: if kind == MemoryKind::Pool { "≥ 0.9" } else { "" },
                cpu_goal: "",
                base: results.get(1).cloned().unwrap_or_default(),
                subject: results[0].clone(),
            });
        }
        Ok(())
    }

    fn submit(&self, report: &mut Report) -> Result<()> {
        let length = SUBMIT_BYTES.min(usize::try_from(self.size())?);
        for way in Way::BOTH {
            for kind in MemoryKind::BOTH {
                let mut memory = Memory::new(kind, length)?;
                stamp(memory.bytes_mut(), 0);
                let mut latencies_us = Vec::new();
                for _ in 0..SUBMIT_RUNS {
                    let latency = self.subject.time_submit(self.path(), way, &mut memory)?;
                    latencies_us.push(latency.as_secs_f64() * 1e6);
                }
                let (low, high) = spread(latencies_us.iter().copied());
                report.readings.push(Reading {
                    place: self.place.name,
                    what: format!("submit {} MiB, {way}, {}", length >> 20, kind.name()),
                    value: format!("{:.0} µs ({low:.0}–{high:.0})", median(latencies_us)),
                    goal: "< 1000 µs",
                });
            }
        }
        Ok(())
    }

    fn idle(&self, report: &mut Report) -> Result<()> {
        // A handle that never worked would have nothing to keep it busy.
        let mut memory = Memory::new(MemoryKind::Pool, 1 << 20)?;
        self.subject.run(self.path(), Way::Read, &mut memory)?;
        // Its workers are on their way to sleep.
        std::thread::sleep(SETTLE_TIME);
        let busy = idle_cpu_seconds(IDLE_TIME);
        report.readings.push(Reading {
            place: self.place.name,
            what: format!("CPU of an idle handle in {} s", IDLE_TIME.as_secs()),
            value: format!("{:.2} ms", busy * 1e3),
            goal: "0",
        });
        Ok(())
    }

    fn say_how(&self, report: &mut Report) {
        report.readings.push(Reading {
            place: self.place.name,
            what: "staging memory".to_owned(),
            value: format!("{} MiB", self.subject.staging_bytes() >> 20),
            goal: "≤ 64 MiB",
        });
        report.notes.push(format!("{}: Forebay: {}", self.place.name, self.subject.describe()));
        let notices = self.subject.notices();
        report.notes.extend(notices.iter().map(|notice| format!("{}: {notice}", self.place.name)));
    }
}

/// As many tensors as the file has room for, in random order, each elsewhere in memory than in
/// the file.
fn shuffled_tensors(file_bytes: u64) -> Vec<Tensor> {
    let room = usize::try_from(file_bytes).unwrap_or(usize::MAX) / TENSOR_BYTES;
    let mut slots: Vec<usize> = (0..room).collect();
    // xorshift64*, with a fixed seed: every run of the bench moves the same tensors.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for index in (1..slots.len()).rev() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let draw = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        slots.swap(index, usize::try_from(draw).unwrap_or(0) % (index + 1));
    }
    slots.truncate(TENSORS_MAX);
    let tensor = |(index, slot): (usize, &usize)| Tensor {
        offset: (slot * TENSOR_BYTES) as u64,
        position: index * TENSOR_BYTES,
        length: TENSOR_BYTES,
    };
    slots.iter().enumerate().map(tensor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_shuffled_and_each_there_once() {
        let tensors = shuffled_tensors(1 << 30);
        assert_eq!(tensors.len(), TENSORS_MAX);
        let mut offsets: Vec<u64> = tensors.iter().map(|tensor| tensor.offset).collect();
        assert!(!offsets.is_sorted());
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(offsets.len(), TENSORS_MAX);
        assert!(offsets.last().unwrap() + TENSOR_BYTES as u64 <= 1 << 30);
    }
}
