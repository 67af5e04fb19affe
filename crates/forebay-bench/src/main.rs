//! `forebay-bench`: Forebay beside fio, on the same files, in the same minutes.
//!
//! Measures and reports; it never judges. [`mod@bench`] is the comparison that `make bench` prints,
//! [`sweep`] compares Forebay's own options. Both run on each [`place`]: the drive, and an ext4
//! file system in memory. [`stripe`] compares a striped file with a plain one, on two such file
//! systems. Nothing is asserted about time.

mod arguments;
mod bench;
mod fio;
mod loop_device;
mod measure;
mod place;
mod report;
mod stripe;
mod subject;
mod sweep;
mod table;
mod throttle;

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;

use crate::arguments::{Arguments, Command, Scope};
use crate::place::Place;
use crate::report::Report;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut report = Report::default();
    let json = match &arguments.command {
        Some(Command::Stripe(bench)) => {
            stripe::run(bench, &mut report)?;
            &bench.json
        }
        Some(Command::Sweep(sweep)) => {
            for place in places(&sweep.scope, &mut report)? {
                sweep::run(sweep, &place, &mut report)?;
            }
            &sweep.scope.json
        }
        None => {
            for place in places(&arguments.bench.scope, &mut report)? {
                bench::run(&arguments.bench, &place, &mut report)?;
            }
            &arguments.bench.scope.json
        }
    };
    if let Some(path) = json {
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
