//! Chores of this repository, run as `cargo xtask NAME`.
//!
//! `tidy` proves the rules of the house from `cargo metadata` and the sources; see [`tidy`].

mod tidy;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

const USAGE: &str = "usage: cargo xtask tidy\n\n  tidy   prove the rules of the house\n";

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => run_tidy(),
        ["--help" | "-h"] => {
            io::stdout().write_all(USAGE.as_bytes())?;
            Ok(ExitCode::SUCCESS)
        }
        _ => {
            io::stderr().write_all(USAGE.as_bytes())?;
            Ok(ExitCode::from(2))
        }
    }
}

fn run_tidy() -> Result<ExitCode> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent")?;
    let (files_count, findings) = tidy::check_repository(root)?;
    let mut out = io::stdout().lock();
    for finding in &findings {
        writeln!(out, "{finding}")?;
    }
    if findings.is_empty() {
        writeln!(out, "tidy: {files_count} files keep the rules")?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "tidy: {} findings in {files_count} files", findings.len())?;
    Ok(ExitCode::FAILURE)
}
