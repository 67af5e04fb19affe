//! Runs a command to which some system calls are refused, as in a container.
//!
//! ```text
//! deny-syscalls [--errno N] NUMBER[,NUMBER…] COMMAND [ARGUMENT…]
//! ```
//!
//! The numbers are those of this architecture (`io_uring_setup` is 425 everywhere, `io_setup` is
//! 206 on x86-64); the calls fail with EPERM, or with the `errno` given. Exit code 2 is wrong use,
//! 126 a command that can't be run.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use forebay_testkit::seccomp;

/// `EPERM`, what Docker's default filter answers.
const ERRNO_DEFAULT: i32 = 1;

fn main() -> ExitCode {
    let Some((code, calls, command)) = parse(std::env::args_os().skip(1).collect()) else {
        complain("usage: deny-syscalls [--errno N] NUMBER[,NUMBER...] COMMAND [ARGUMENT...]");
        return ExitCode::from(2);
    };
    if let Err(error) = seccomp::deny(&calls, code) {
        complain(&format!("cannot install the filter: {error}"));
        return ExitCode::from(126);
    }
    let error = Command::new(&command[0]).args(&command[1..]).exec();
    complain(&format!("cannot run {}: {error}", command[0].display()));
    ExitCode::from(126)
}

/// The errno, the calls and the command, which isn't empty.
fn parse(mut arguments: Vec<OsString>) -> Option<(i32, Vec<i64>, Vec<OsString>)> {
    let mut code = ERRNO_DEFAULT;
    if arguments.first()? == "--errno" {
        code = arguments.get(1)?.to_str()?.parse().ok()?;
        arguments.drain(..2);
    }
    let calls = arguments.first()?.to_str()?.split(',').map(str::parse).collect::<Result<_, _>>();
    let command = arguments.split_off(1);
    (!command.is_empty()).then_some((code, calls.ok()?, command))
}

fn complain(text: &str) {
    // Nothing is left to do when stderr is closed.
    let _ = writeln!(std::io::stderr(), "deny-syscalls: {text}");
}
