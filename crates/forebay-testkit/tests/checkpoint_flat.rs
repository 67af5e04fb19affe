//! Fifty saves take no more memory and descriptors than one: alone in its process, which it counts.
#![expect(clippy::unwrap_used, reason = "tests panic")]

use forebay::checkpoint::{CheckpointOptions, Checkpointer, Meanwhile};
use forebay_testkit::crash::Sample;
use forebay_testkit::usage::descriptors;

fn save(checkpointer: &Checkpointer, step: u64) {
    let saved = Sample::new(step, 20)
        .with(|state| checkpointer.save(step, state, Meanwhile::GoesOn, &mut || Ok(())));
    saved.unwrap().unwrap().wait().unwrap();
}

#[test]
fn memory_and_descriptors_stay_flat_over_many_saves() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = CheckpointOptions {
        keep: Some(2),
        budget_bytes: Some(16 << 20),
        shard_bytes: 1 << 20,
        ..CheckpointOptions::default()
    };
    let checkpointer = Checkpointer::open(directory.path(), options).unwrap();
    for step in 0..10 {
        save(&checkpointer, step);
    }
    let (before, mapped) = (descriptors(), checkpointer.pool().stats().mapped_bytes);
    for step in 10..=60 {
        save(&checkpointer, step);
    }
    assert_eq!(checkpointer.steps().unwrap(), [59, 60]);
    assert!(descriptors() <= before, "{} descriptors, {before} before", descriptors());
    // How many buffers are out at once depends on who is faster; all of a state at the most.
    let most = mapped.max(Sample::new(0, 20).bytes() + (2 << 20));
    let stats = checkpointer.pool().stats();
    assert!(stats.peak_bytes <= most, "{stats:?}, {mapped} bytes before");
    assert_eq!(stats.used_bytes, 0);
    let reader = checkpointer.reader(None, true).unwrap();
    assert!(Sample::new(60, 20).is_in(&reader, checkpointer.handle()).unwrap());
}
