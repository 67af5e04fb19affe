//! `forebay-bench`: Forebay beside fio, on the same files, in the same minutes.
//!
//! Measures and reports; it never judges. [`mod@bench`] is the comparison that `make bench` prints,
//! [`sweep`] compares Forebay's own options. Both run on each [`place`]: the drive, and an ext4
//! file system in memory. Nothing is asserted about time.

mod arguments;
mod bench;
mod fio;
mod loop_device;
mod measure;
mod place;
mod report;
mod subject;
mod sweep;
mod table;

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;

use crate::arguments::{Arguments, Command, Scope};
use crate::place::Place;
use crate::report::Report;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let scope = match &arguments.command {
        Some(Command::Sweep(sweep)) => &sweep.scope,
        None => &arguments.bench.scope,
    };
    let mut report = Report::default();
    for place in places(scope, &mut report)? {
        match &arguments.command {
            Some(Command::Sweep(sweep)) => sweep::run(sweep, &place, &mut report)?,
            None => bench::run(&arguments.bench, &place, &mut report)?,
        }
    }
    if let Some(path) = &scope.json {
        report.write_json(path)?;
    }
    writeln!(io::stdout(), "\n{}", report.text())?;
    Ok(())
}

/// The places to measure; a place that this machine can't have is noted with its reason.
fn places(scope: &Scope, report: &mut Report) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    if !scope.skip_drive {
        places.push(Place::drive(&scope.dir)?);
    }
    if !scope.skip_loop {
        match Place::memory(&scope.dir, scope.size.0) {
            Ok(place) => places.push(place),
            Err(error) => report.notes.push(format!("no loop device: {error:#}")),
        }
    }
    Ok(places)
}

/// Says what is going on, where it is in nobody's way.
fn progress(text: &str) {
    // Nobody there to read it is no reason to stop measuring.
    let _ = writeln!(io::stderr(), "{text}");
}
