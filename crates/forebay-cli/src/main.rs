//! The command without Python around it.

use std::process::ExitCode;

use forebay_cli::NoPython;

fn main() -> ExitCode {
    ExitCode::from(forebay_cli::run(std::env::args_os(), &NoPython))
}
