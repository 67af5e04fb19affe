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
mod exit;
mod host;
mod output;
mod pages;

use std::ffi::OsString;

use clap::Parser;

pub use arguments::definition;
use arguments::{Arguments, Subcommand};
pub use exit::{Exit, Failure};
pub use host::{Host, NoPython};
pub use output::Output;

/// Runs the command with its name and arguments; returns its exit code.
pub fn run(arguments: impl IntoIterator<Item = OsString>, host: &dyn Host) -> u8 {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => return output::print_usage(&error),
    };
    let mut output = Output::new(arguments.json, arguments.no_color);
    output::end(carry_out(arguments.subcommand, host, &mut output))
}

fn carry_out(subcommand: Subcommand, host: &dyn Host, output: &mut Output) -> anyhow::Result<u8> {
    match subcommand {
        Subcommand::Quickstart(options) => host.call("quickstart", &serde_json::to_value(options)?),
        Subcommand::Completions { shell } => pages::completions(shell, output),
        Subcommand::Man { dir } => pages::man(dir.as_deref(), output),
    }
}
