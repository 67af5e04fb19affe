//! Forebay's options side by side, to choose defaults by measurement.

use anyhow::{Result, bail};
use forebay_io::Options;

use crate::arguments::{Section, Sweep};
use crate::fio::{self, Engine, Setting};
use crate::measure::{Way, chill, interleave};
use crate::place::Place;
use crate::progress;
use crate::report::{Comparison, Report};
use crate::subject::{Memory, MemoryKind, Subject, set_option};

/// What all sets are compared with.
const YARDSTICK: Setting = Setting { engine: Engine::UringFixed, block_bytes: 1 << 20, depth: 32 };

/// Runs every set of options once a round, next to fio, on one place.
pub(crate) fn run(sweep: &Sweep, place: &Place, report: &mut Report) -> Result<()> {
    if let Err(error) = fio::version() {
        bail!("a sweep compares with fio: {error:#}");
    }
    let payload = place.lay_out(sweep.scope.size.0)?;
    let subjects = sets(sweep)?.into_iter().map(Subject::new).collect::<Result<Vec<_>>>()?;
    for way in ways(sweep)? {
        for kind in MemoryKind::BOTH {
            progress(&format!("{}: {way}, {}", place.name, kind.name()));
            let mut memory = Memory::new(kind, usize::try_from(sweep.scope.size.0)?)?;
            for subject in &subjects {
                subject.run(payload.path(), way, &mut memory)?;
            }
            let results = interleave(sweep.scope.pairs, subjects.len() + 1, |candidate| {
                chill(payload.path())?;
                match candidate.checked_sub(1) {
                    None => fio::run(payload.path(), way, YARDSTICK, sweep.scope.size.0),
                    Some(index) => subjects[index].run(payload.path(), way, &mut memory),
                }
            })?;
            for (subject, figures) in subjects.iter().zip(&results[1..]) {
                report.comparisons.push(Comparison {
                    place: place.name,
                    what: format!("{way}, {}, {}", kind.name(), subject.describe()),
                    against: format!("fio {YARDSTICK}"),
                    goal: "",
                    cpu_goal: "",
                    base: results[0].clone(),
                    subject: figures.clone(),
                });
            }
        }
    }
    Ok(())
}

fn ways(sweep: &Sweep) -> Result<Vec<Way>> {
    let way = |section: &Section| match section {
        Section::Read => Ok(Way::Read),
        Section::Write => Ok(Way::Write),
        _ => bail!("a sweep reads and writes, nothing else"),
    };
    sweep.only.iter().map(way).collect()
}

fn sets(sweep: &Sweep) -> Result<Vec<Options>> {
    let mut sets = vec![sweep.scope.options()?];
    let axes = [
        ("engine", &sweep.engine),
        ("block_size", &sweep.block_size),
        ("queue_depth", &sweep.queue_depth),
        ("parallelism", &sweep.parallelism),
    ];
    for (key, values) in axes {
        let mut wider = Vec::new();
        for options in &sets {
            for value in values {
                let mut options = options.clone();
                set_option(&mut options, key, value)?;
                wider.push(options);
            }
        }
        sets = wider;
    }
    Ok(sets)
}
