//! The command `forebay`.
//!
//! The definitions of all subcommands are here ([`definition`]), so that help, completions and the
//! man page come from one source. What a subcommand needs of Python, whether its facts or all of
//! its work, goes through a [`Host`]: the Python package is one, [`NoPython`] another.
//!
//! # Invariants
//!
//! - Results go to standard output, as text or with `--json` as one JSON object; everything else
//!   goes to standard error. Progress is shown only where that is a terminal.
//! - The exit code is one of [`Exit`]. A reader that goes away ends the command in silence.

#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod config;
mod deepspeed;
mod exit;
mod files;
mod gpu;
mod host;
mod io;
mod output;
mod pages;
mod report;
mod scratch;
mod signals;
mod tune;

use std::ffi::OsString;

pub use arguments::definition;
use arguments::{Arguments, Subcommand, names};
pub use exit::{Exit, Failure};
pub use host::{Host, NoPython};
use output::Output;

/// Runs the command with its name and arguments; returns its exit code.
pub fn run(arguments: impl IntoIterator<Item = OsString>, host: &dyn Host) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let output = Output::new(names(&arguments, "--json"), names(&arguments, "--no-color"));
    match Arguments::read(&arguments) {
        Ok(arguments) => {
            let output = Output::new(arguments.json, arguments.no_color);
            output.end(carry_out(arguments.subcommand, host, &output))
        }
        Err(error) => output.usage(&error),
    }
}

fn carry_out(subcommand: Subcommand, host: &dyn Host, output: &Output) -> anyhow::Result<u8> {
    match subcommand {
        Subcommand::Report(options) => report::run(&options, host, output),
        Subcommand::Quickstart(options) => host.call("quickstart", &output.with_form(&options)?),
        Subcommand::Deepspeed(options) => deepspeed::run(&options, host, output),
        Subcommand::Bench(options) => bench::run(&options, host, output),
        Subcommand::Io(options) => io::run(&options, host, output),
        Subcommand::Ls(options) => files::ls(&options, host, output),
        Subcommand::Verify(options) => files::verify(&options, host, output),
        Subcommand::Convert(options) => files::convert(&options, host, output),
        Subcommand::Cat(options) => files::cat(&options, host, output),
        Subcommand::Tune(options) => tune::run(&options, output),
        Subcommand::Completions { shell } => pages::completions(shell, output),
        Subcommand::Man { dir } => pages::man(dir.as_deref(), output),
    }
}
