//! Writes results to standard output and complaints to standard error, whatever those can take.

use std::io::{self, ErrorKind, IsTerminal, Write};

use serde::Serialize;

use crate::exit::{Exit, Failure};

/// Where results go, and in what form.
#[derive(Debug)]
pub struct Output {
    json: bool,
    color: bool,
}

impl Output {
    pub(crate) fn new(json: bool, no_color: bool) -> Self {
        Self { json, color: !no_color && io::stdout().is_terminal() }
    }

    /// Whether results are JSON.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Whether text may have colours.
    pub fn has_color(&self) -> bool {
        self.color
    }

    /// Writes text as it is.
    pub fn text(&mut self, text: &str) -> anyhow::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        Ok(stdout.flush()?)
    }

    /// Writes one JSON object.
    pub fn object(&mut self, object: &impl Serialize) -> anyhow::Result<()> {
        self.text(&format!("{}\n", serde_json::to_string_pretty(object)?))
    }
}

/// Turns what the command came to into its exit code, and says what went wrong.
pub(crate) fn end(done: anyhow::Result<u8>) -> u8 {
    let error = match done {
        Ok(code) => return code,
        Err(error) => error,
    };
    if is_broken_pipe(&error) {
        // Whoever read the output has seen enough.
        return Exit::Done as u8;
    }
    complain(&format!("forebay: {error:#}"));
    error.downcast_ref::<Failure>().map_or(Exit::Failed, Failure::exit) as u8
}

/// Writes a line to standard error, if that can be done: there is nowhere else to say so.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints help, the version, or what is wrong with the arguments.
pub(crate) fn print_usage(error: &clap::Error) -> u8 {
    let printed = error.print();
    match (error.use_stderr(), printed) {
        (true, _) => Exit::Usage as u8,
        (false, Err(error)) if error.kind() != ErrorKind::BrokenPipe => Exit::Failed as u8,
        (false, _) => Exit::Done as u8,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == ErrorKind::BrokenPipe)
}
