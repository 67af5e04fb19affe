//! Saves checkpoints until it is killed: for tests of what is left then.
//!
//! ```text
//! save-checkpoints DIRECTORY
//! ```
//!
//! It goes on behind the latest step that is there. A line `began N` is printed before each save and
//! `returned N` after it. Every other one is replaced once, with the same content.

use std::convert::Infallible;
use std::io::Write;
use std::process::ExitCode;

use forebay::checkpoint::{CheckpointOptions, Checkpointer, Meanwhile};
use forebay::io::Result;
use forebay_testkit::crash::Sample;

/// How many times as long as a small one a state is: some MiB, in two shards.
const FACTOR: u64 = 40;
/// Bytes of tensors in a shard.
const SHARD_BYTES: u64 = 4 << 20;
/// Memory for states that are captured.
const BUDGET_BYTES: usize = 32 << 20;

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1) else {
        say("usage: save-checkpoints DIRECTORY");
        return ExitCode::from(2);
    };
    let options = CheckpointOptions {
        keep: Some(2),
        budget_bytes: Some(BUDGET_BYTES),
        shard_bytes: SHARD_BYTES,
        ..CheckpointOptions::default()
    };
    match Checkpointer::open(directory, options).and_then(|checkpointer| run(&checkpointer)) {
        Ok(never) => match never {},
        Err(error) => {
            say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run(checkpointer: &Checkpointer) -> Result<Infallible> {
    let mut step = checkpointer.latest()?.unwrap_or(0);
    loop {
        step += 1;
        let sample = Sample::new(step, FACTOR);
        say(&format!("began {step}"));
        for _ in 0..=step % 2 {
            let saved = sample
                .with(|state| checkpointer.save(step, state, Meanwhile::GoesOn, &mut || Ok(())))?;
            saved.map_or(Ok(()), |ticket| ticket.wait())?;
            say(&format!("returned {step}"));
        }
    }
}

fn say(text: &str) {
    // Whoever listened is gone: there is nobody left to tell.
    let _ = writeln!(std::io::stdout(), "{text}");
}
