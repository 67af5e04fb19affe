//! A striped file beside a plain one: what two drives give, and what striping costs.
//!
//! The drives are loop devices in memory. For what two give, the kernel throttles each to a rate
//! far below what the software can do; for what striping costs, both files are on one device,
//! which isn't throttled.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use forebay::stripe::Stripe;
use forebay_io::Options;

use crate::arguments::StripeBench;
use crate::loop_device::LoopDevice;
use crate::measure::{Figure, Way, chill, interleave, median, spread};
use crate::place::{check_stamps, stamp};
use crate::progress;
use crate::report::{Comparison, Reading, Report};
use crate::subject::{Memory, MemoryKind, Subject};
use crate::throttle::Throttle;

const NAME: &str = "striped.bin";
/// What one device holds at most: the plain file, and two members of half of it.
const FILES_PER_DEVICE: u64 = 2;
/// Runs from which the rate of a device that isn't throttled is taken.
const RATE_RUNS: usize = 3;
const SUBMIT_RUNS: usize = 9;

/// A plain file and a striped one of the same bytes.
struct Pair<'a> {
    subject: &'a Subject,
    plain: PathBuf,
    stripe: Stripe,
}

/// Runs it all.
pub(crate) fn run(bench: &StripeBench, report: &mut Report) -> Result<()> {
    let room = FILES_PER_DEVICE * bench.size.0;
    let one = LoopDevice::mount(bench.dir.join("loop-one"), room)?;
    let two = LoopDevice::mount(bench.dir.join("loop-two"), bench.size.0)?;
    let (one, two) = (one.directory(), two.directory());
    let halves = [one.join("half-one"), one.join("half-two")];
    for half in &halves {
        fs::create_dir(half)?;
    }
    let subject = Subject::new(Options::default())?;
    let mut memory = Memory::new(MemoryKind::Pool, usize::try_from(bench.size.0)?)?;
    let stripe_bytes = bench.stripe_size.0;

    let plain = one.join("plain.bin");
    let same = Pair {
        subject: &subject,
        plain: plain.clone(),
        stripe: Stripe::new(&halves, stripe_bytes)?,
    };
    same.check(&mut memory)?;
    same.time_submissions(report, &mut memory)?;
    let goal = ("", "");
    same.compare(bench, report, "one device, both files", goal, &mut memory)?;
    let unthrottled = same.rate(&mut memory)?;
    same.stripe.remove(NAME)?;

    let both = Pair { subject: &subject, plain, stripe: Stripe::new(&[one, two], stripe_bytes)? };
    both.check(&mut memory)?;
    let rate = bench.rate.map_or(unthrottled / 2, |rate| rate.0);
    report.notes.push(format!(
        "a device does {} MB/s unthrottled, and is throttled to {} MB/s",
        unthrottled / 1_000_000,
        rate / 1_000_000
    ));
    let _throttle = Throttle::of_devices(&[one, two], rate)?;
    both.compare(bench, report, "two throttled devices", ("≥ 1.9", ""), &mut memory)?;
    report.notes.push(format!("Forebay: {}, stripes of {}", subject.describe(), bench.stripe_size));
    report.notes.extend(subject.notices());
    Ok(())
}

impl Pair<'_> {
    fn chill(&self) -> Result<()> {
        chill(&self.plain)?;
        self.stripe.directories().try_for_each(|directory| chill(&directory.join(NAME)))
    }

    fn run(&self, is_striped: bool, way: Way, memory: &mut Memory) -> Result<Figure> {
        if is_striped {
            self.subject.run_striped(&self.stripe, Path::new(NAME), way, memory)
        } else {
            self.subject.run(&self.plain, way, memory)
        }
    }

    /// Makes both files, and checks that each gives its bytes back.
    fn check(&self, memory: &mut Memory) -> Result<()> {
        for is_striped in [false, true] {
            stamp(memory.bytes_mut(), 0);
            self.run(is_striped, Way::Write, memory)?;
        }
        self.chill()?;
        for is_striped in [false, true] {
            memory.bytes_mut().fill(0);
            self.run(is_striped, Way::Read, memory)?;
            check_stamps(memory.bytes(), 0)?;
        }
        Ok(())
    }

    fn compare(
        &self,
        bench: &StripeBench,
        report: &mut Report,
        what: &str,
        (goal, cpu_goal): (&'static str, &'static str),
        memory: &mut Memory,
    ) -> Result<()> {
        ensure!(bench.pairs > 0, "no rounds, nothing to compare");
        for way in Way::BOTH {
            progress(&format!("{way}, {what}, {} rounds", bench.pairs));
            let results = interleave(bench.pairs, 2, |candidate| {
                self.chill()?;
                self.run(candidate == 1, way, memory)
            })?;
            report.comparisons.push(Comparison {
                place: "loop",
                what: format!("{way}, striped, {what}"),
                against: "a plain file".to_owned(),
                goal: if way == Way::Read { goal } else { "" },
                cpu_goal,
                base: results[0].clone(),
                subject: results[1].clone(),
            });
        }
        Ok(())
    }

    /// Bytes per second that the plain file is read at.
    fn rate(&self, memory: &mut Memory) -> Result<u64> {
        let mut rates = Vec::new();
        for _ in 0..RATE_RUNS {
            self.chill()?;
            rates.push(self.run(false, Way::Read, memory)?.gigabytes_per_second() * 1e9);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate is positive, and far below 2^64"
        )]
        Ok(median(rates) as u64)
    }

    fn time_submissions(&self, report: &mut Report, memory: &mut Memory) -> Result<()> {
        for way in Way::BOTH {
            let mut plain = Vec::new();
            let mut striped = Vec::new();
            for _ in 0..SUBMIT_RUNS {
                let latency = self.subject.time_submit(&self.plain, way, memory)?;
                plain.push(latency.as_secs_f64() * 1e6);
                let (stripe, name) = (&self.stripe, Path::new(NAME));
                let latency = self.subject.time_striped_submit(stripe, name, way, memory)?;
                striped.push(latency.as_secs_f64() * 1e6);
            }
            for (what, latencies_us) in [("plain", plain), ("striped", striped)] {
                let (low, high) = spread(latencies_us.iter().copied());
                let size = memory.bytes().len() >> 20;
                report.readings.push(Reading {
                    place: "loop",
                    what: format!("submit {size} MiB, {way}, {what}"),
                    value: format!("{:.0} µs ({low:.0}–{high:.0})", median(latencies_us)),
                    goal: "",
                });
            }
        }
        Ok(())
    }
}
