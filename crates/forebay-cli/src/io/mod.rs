//! `forebay io`: one workload on one or more drives, measured.
//!
//! The command makes scratch directories, starts the processes that do the work (each of them this
//! command again, see [`worker`]), has them do loop after loop, and shows what it came to.
//!
//! # Invariants
//!
//! - Nothing is left behind, whatever ends the command; what a killed one left, the next removes.
//! - The processes do nothing but what they are told, and end when nobody is left to tell them.

mod arguments;
mod crew;
mod place;
mod plan;
mod protocol;
mod show;
mod worker;

use anyhow::Result;
use forebay::workload::{Summary, Way};

pub(crate) use arguments::Io;
use crew::Crew;
use plan::Plan;
use protocol::{Command, Reply};
use show::{Progress, Result as Shown};

use crate::exit::{Exit, Failure};
use crate::gpu;
use crate::host::Host;
use crate::output::Output;
use crate::scratch::{self, Scratch};
use crate::signals::Signals;

/// Whose scratch directories these are.
const SUBCOMMAND: &str = "io";

/// Runs the subcommand.
pub(crate) fn run(options: &Io, host: &dyn Host, output: &Output) -> Result<u8> {
    if options.as_process {
        return worker::run();
    }
    options.refuse_bounce_buffers()?;
    let gpus = options.gpu_option().map(gpu::all).transpose()?;
    let mut plan = Plan::new(options, gpus.as_deref())?;
    let directories = place::check_directories(&plan.directories)?;
    for directory in &plan.directories {
        scratch::remove_leftovers(directory, SUBCOMMAND);
    }
    place::check_room(&plan)?;
    let signals = Signals::take()?;
    let mut scratches = Vec::new();
    for directory in &plan.directories {
        scratches.push(Scratch::new(directory, SUBCOMMAND).map_err(|error| {
            let text = format!("cannot write in {}: {error}", directory.display());
            Failure::environment(format!("{text}; pass another --dir"))
        })?);
    }
    plan.put_files(&scratches);
    match measure(&plan, host, &signals) {
        Ok(shown) => show::show(options, &plan, directories, &shown, output),
        Err(error) => match signals.exit_code() {
            Some(code) => Ok(code),
            None => Err(error),
        },
    }
}

/// What all loops came to, or the failure of a process.
fn measure(plan: &Plan, host: &dyn Host, signals: &Signals) -> Result<Shown> {
    let mut crew = Crew::start(plan, host, signals)?;
    let mut progress = Progress::new(plan);
    let mut shown = Shown::default();
    if plan.ways == [Way::Read] {
        progress.step("making the files");
        crew.all_do(&Command::Prepare)?;
    }
    for way in &plan.ways {
        let mut loops = Vec::new();
        for index in 0..plan.warmup_loops + plan.loops {
            let is_warmup = index < plan.warmup_loops;
            progress.step(&format!("{} {}", way.name(), if is_warmup { "(warm-up)" } else { "" }));
            let replies = crew.all_do(&Command::Loop { way: *way, index })?;
            let reports: Vec<_> = replies.into_iter().filter_map(Reply::into_loop).collect();
            shown.add_differences(*way, index, &reports);
            if !is_warmup || plan.include_warmup {
                loops.push(reports);
            }
        }
        shown.runs.push(Summary::new(*way, &loops));
    }
    let replies = crew.all_do(&Command::Finish)?;
    shown.processes = replies.into_iter().filter_map(Reply::into_process).collect();
    Ok(shown)
}

/// The code of a run whose contents were checked.
fn code_of(shown: &Shown) -> u8 {
    if shown.differences.is_empty() { Exit::Done as u8 } else { Exit::Failed as u8 }
}
