//! A process that saves is killed at random moments: what it had saved is there, and what it left
//! is cleaned up by the next.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forebay::checkpoint::{CheckpointOptions, Checkpointer, Reader};
use forebay_io::{Handle, Options};
use forebay_testkit::crash::{Sample, leftovers};
use forebay_testkit::random::Random;

/// How often the process is killed.
const KILLS: usize = 110;
/// The longest time from its first save on: several saves.
const LIFE_US_MAX: u64 = 250_000;
/// As in the program that is killed.
const FACTOR: u64 = 40;

fn number(line: &str, word: &str) -> Option<u64> {
    line.strip_prefix(word)?.trim().parse().ok()
}

#[test]
fn killed_at_any_moment_what_was_saved_is_there_and_nothing_else_is() {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    eprintln!("seed: {seed}");
    let mut random = Random::new(seed);
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let handle = Handle::new(Options::default()).unwrap();
    let mut newest = 0;
    let mut left_count = 0;
    for kill in 0..KILLS {
        let mut child = Command::new(env!("CARGO_BIN_EXE_save-checkpoints"))
            .arg(directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        output.read_line(&mut text).unwrap();
        sleep(Duration::from_micros(random.below(LIFE_US_MAX)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert!(status.code().is_none(), "kill {kill}: it ended by itself, {status}: {text}");
        output.read_to_string(&mut text).unwrap();

        let began = text.lines().filter_map(|line| number(line, "began ")).max().unwrap();
        let returned = text.lines().filter_map(|line| number(line, "returned ")).max();
        newest = returned.unwrap_or(newest);
        left_count += usize::from(!leftovers(directory.path()).is_empty());
        match Reader::open(directory.path(), None, true) {
            Ok(reader) => {
                let step = reader.manifest().step;
                assert!(step == newest || step == began, "kill {kill}: {step} after {text}");
                let sample = Sample::new(step, FACTOR);
                assert!(sample.is_in(&reader, &handle).unwrap(), "kill {kill}: step {step}");
                newest = step;
            }
            Err(error) => assert!(newest == 0, "kill {kill}, seed {seed}: {error} after {text}"),
        }
        Checkpointer::open(directory.path(), CheckpointOptions::default()).unwrap();
        assert_eq!(leftovers(directory.path()), [""; 0], "kill {kill}");
    }
    assert!(newest > 0 && left_count > KILLS / 10, "step {newest}, {left_count} leftovers");
}
