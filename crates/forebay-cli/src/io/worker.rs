//! One of the processes that do the work: `forebay io --as-process`.
//!
//! It does what its standard input says, line by line, and ends when that ends, at once, even in
//! the middle of a loop: whoever started it is gone, and so, soon, are the files.

use std::io::{self, BufRead, Write};
use std::process;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use anyhow::{Context, Result};
use forebay::io::{Error, ErrorKind};
use forebay::workload::{Job, Runner};

use super::protocol::{Command, Reply};
use crate::exit::Exit;
use crate::gpu::is_out_of_memory;

/// Codes that mean that a drive, a quota or the largest file is full (`errno(3)`).
const FULL: [i32; 3] = [28, 122, 27];
/// Codes that mean that a directory can't be used: `EPERM`, `EACCES`, `EROFS`.
const REFUSED: [i32; 3] = [1, 13, 30];

/// Does what standard input says.
pub(super) fn run() -> Result<u8> {
    let lines = read_lines();
    // Never set: the process is ended as a whole.
    let stop = AtomicBool::new(false);
    let job: Job = serde_json::from_str(&lines.recv()?).context("cannot read the job")?;
    let done = Runner::new(job).and_then(|mut runner| {
        answer(&Reply::Ready);
        while let Ok(line) = lines.recv() {
            match serde_json::from_str(&line) {
                Ok(Command::Prepare) => {
                    runner.prepare(&stop)?;
                    answer(&Reply::Ready);
                }
                Ok(Command::Loop { way, index }) => {
                    let report = runner.run_loop(way, index, &stop)?;
                    answer(&Reply::Loop(Box::new(report)));
                }
                Ok(Command::Finish) | Err(_) => break,
            }
        }
        answer(&Reply::Finished(runner.finish()));
        Ok(())
    });
    if let Err(error) = done {
        answer(&failed(&error));
        return Ok(Exit::Failed as u8);
    }
    Ok(Exit::Done as u8)
}

/// Hands lines of standard input over; its end ends the process.
fn read_lines() -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
        process::exit(Exit::Failed as i32);
    });
    lines
}

/// Writes a reply. Where nobody reads it, standard input has ended as well.
fn answer(reply: &Reply) {
    let mut stdout = io::stdout().lock();
    if let Ok(line) = serde_json::to_string(reply) {
        let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
    }
}

/// What a failure means for the command.
fn failed(error: &Error) -> Reply {
    let os = error.os_code();
    let is = |codes: [i32; 3]| os.is_some_and(|code| codes.contains(&code));
    let (exit, text) = if is(FULL) {
        let error = error.clone().hint("free some space, or pass a smaller --io-size");
        (Exit::Environment, format!("the drive is full: {error}"))
    } else if is(REFUSED) {
        (Exit::Environment, format!("{error}; pass another --dir"))
    } else {
        let exit = match error.kind() {
            ErrorKind::OutOfMemory | ErrorKind::Unsupported => Exit::Environment,
            ErrorKind::InvalidInput => Exit::Usage,
            _ if is_out_of_memory(error) => Exit::Environment,
            _ => Exit::Failed,
        };
        (exit, error.to_string())
    };
    Reply::Failed { exit: exit as u8, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_has_the_code_of_its_cause() {
        for (error, wanted, part) in [
            (Error::from_os(28, "cannot write"), Exit::Environment, "the drive is full"),
            (Error::from_os(13, "cannot open"), Exit::Environment, "another --dir"),
            (Error::from_os(5, "cannot read"), Exit::Failed, "cannot read"),
            (Error::new(ErrorKind::Unsupported, "no uring"), Exit::Environment, "no uring"),
            (Error::new(ErrorKind::InvalidInput, "odd"), Exit::Usage, "odd"),
        ] {
            let Reply::Failed { exit, text } = failed(&error) else { panic!("{error}") };
            assert_eq!(exit, wanted as u8, "{text}");
            assert!(text.contains(part), "{text}");
        }
    }
}
