//! Power cuts at every point of several saves: the newest checkpoint whose save had returned is
//! there, or a newer one that is whole; nothing else looks like one.
#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::path::Path;
use std::sync::Arc;

use forebay::checkpoint::storage::FileSystem;
use forebay::checkpoint::{CheckpointOptions, Checkpointer, Meanwhile, Reader};
use forebay_io::engine::{EngineFactory, EngineKind};
use forebay_io::{Durability, ErrorKind, Handle, Options};
use forebay_testkit::crash::{Event, Journal, JournalEngines, Kept, Sample, image, leftovers};
use forebay_testkit::random::Random;

/// Random parts of what wasn't synced that are tried at each point.
const PARTS: u64 = 2;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options(durability: Durability) -> CheckpointOptions {
    CheckpointOptions {
        keep: Some(2),
        durability,
        budget_bytes: Some(16 << 20),
        shard_bytes: 100_000,
        ..CheckpointOptions::default()
    }
}

/// What each save of a test is of: its step, and what its content follows from.
const SAVES: [(u64, u64); 6] = [(1, 1), (2, 2), (3, 3), (3, 33), (4, 4), (2, 22)];

/// Saves all of them, and returns everything that was done.
fn saved(root: &Path, durability: Durability) -> Vec<Event> {
    let journal = Journal::default();
    let engines = JournalEngines { inner: Arc::new(EngineKind::Threads), journal: journal.clone() };
    let engines: Arc<dyn EngineFactory> = Arc::new(engines);
    let storage = Arc::new(journal.clone());
    let handle = Handle::with_factory(Options::default(), engines).unwrap();
    let checkpointer = Checkpointer::with(root, options(durability), storage, handle).unwrap();
    for (step, content) in SAVES {
        let sample = Sample::new(content, 1);
        let ticket = sample
            .with(|state| checkpointer.save(step, state, Meanwhile::GoesOn, &mut || Ok(())))
            .unwrap();
        ticket.unwrap().wait().unwrap();
        journal.add(Event::Returned(step));
    }
    journal.events()
}

/// What is wrong with what a power cut has left after `returned` of the saves had returned.
fn fault(directory: &Path, returned: usize, handle: &Handle) -> Option<String> {
    let before = returned.checked_sub(1).map(|index| SAVES[index]);
    let allowed: Vec<(u64, u64)> = before.into_iter().chain(SAVES.get(returned).copied()).collect();
    match Reader::open(directory, None, true) {
        Err(error) if returned == 0 && error.os_code() == Some(2) => {}
        Err(error) => return Some(error.to_string()),
        Ok(reader) => {
            let step = reader.manifest().step;
            let mut contents = allowed.iter().filter(|(allowed, _)| *allowed == step);
            let is_right = contents.any(|(_, content)| {
                Sample::new(*content, 1).is_in(&reader, handle).is_ok_and(|is_in| is_in)
            });
            if !is_right {
                return Some(format!("step {step} isn't one of {allowed:?}"));
            }
        }
    }
    let idle = Handle::new(Options { parallelism: 1, ..Options::default() }).unwrap();
    let storage = Arc::new(FileSystem);
    let opened = Checkpointer::with(directory, options(Durability::None), storage, idle);
    let checkpointer = match opened {
        Ok(checkpointer) => checkpointer,
        Err(error) => return Some(error.to_string()),
    };
    let left = leftovers(directory);
    if !left.is_empty() {
        return Some(format!("leftovers: {left:?}"));
    }
    // What is kept beside the newest is whole as well.
    for step in checkpointer.steps().unwrap() {
        let reader = checkpointer.reader(Some(step), true);
        let known = |reader: &Reader| {
            SAVES.iter().any(|(of, content)| {
                *of == step
                    && Sample::new(*content, 1).is_in(reader, handle).is_ok_and(|is_in| is_in)
            })
        };
        match reader {
            Ok(reader) if known(&reader) => {}
            Ok(_) => return Some(format!("step {step} has other content")),
            Err(error) => return Some(error.to_string()),
        }
    }
    None
}

/// Plays power cuts back at each point; what was wrong with which.
fn faults(root: &Path, events: &[Event], parts: u64) -> Vec<String> {
    let handle = Handle::new(Options::default()).unwrap();
    let mut faults = Vec::new();
    for count in 0..=events.len() {
        let returned =
            events[..count].iter().filter(|event| matches!(event, Event::Returned(_))).count();
        let random = (0..parts).map(|part| Kept::Any(Random::new(count as u64 * parts + part)));
        let kinds = [Kept::Nothing, Kept::Everything].into_iter().chain(random);
        for kept in kinds {
            let target = directory();
            let text = format!("after {count} of {} events, {kept:?}", events.len());
            image(root, &events[..count], kept, target.path()).unwrap();
            if let Some(fault) = fault(target.path(), returned, &handle) {
                let before = &events[count.saturating_sub(3)..count];
                let names: Vec<String> = before.iter().map(brief).collect();
                faults.push(format!("{text} ({}): {fault}", names.join(", ")));
            }
        }
    }
    faults
}

fn brief(event: &Event) -> String {
    format!("{event:?}").chars().take(120).collect()
}

#[test]
fn whatever_a_power_cut_loses_the_newest_saved_state_is_there() {
    let root = directory();
    let root = root.path().canonicalize().unwrap();
    let events = saved(&root, Durability::Full);
    let writes = events.iter().filter(|event| matches!(event, Event::Write { .. })).count();
    assert!(writes > 2 * SAVES.len(), "{writes} writes were seen");
    assert!(events.iter().any(|event| matches!(event, Event::Exchange(..))));
    let faults = faults(&root, &events, PARTS);
    assert!(faults.is_empty(), "{} faults: {:#?}", faults.len(), &faults[..faults.len().min(5)]);
}

#[test]
fn without_syncs_the_same_cuts_do_harm_which_is_noticed() {
    let root = directory();
    let root = root.path().canonicalize().unwrap();
    let events = saved(&root, Durability::None);
    assert!(!events.iter().any(|event| matches!(event, Event::SyncFile(_))));
    let found = faults(&root, &events, 1);
    assert!(!found.is_empty());
    // Not one of them was taken for something else.
    let wrong: Vec<&String> = found.iter().filter(|text| text.contains("other content")).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn what_is_damaged_is_refused_with_its_name_and_older_steps_stay() {
    let root = directory();
    saved(&root.path().canonicalize().unwrap(), Durability::None);
    let handle = Handle::new(Options::default()).unwrap();
    let shard = root.path().join("step-00000002").join("shard-00001.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&shard, &bytes).unwrap();
    let reader = Reader::open(root.path(), None, true).unwrap();
    let error = Sample::new(22, 1).is_in(&reader, &handle).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_eq!(error.path_ref(), Some(shard.as_path()));
    assert!(error.to_string().contains("tensor \"layers.0\" differs"), "{error}");
    let older = Reader::open(root.path(), Some(4), true).unwrap();
    assert!(Sample::new(4, 1).is_in(&older, &handle).unwrap());
}
