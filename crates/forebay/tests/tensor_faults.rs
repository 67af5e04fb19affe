//! Files of tensors on engines that fail as planned: right bytes, or an error that leaves the old
//! file as it was and nothing beside it.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay::io::{EngineKind, Handle, Lent, Options, Result};
use forebay::safetensors::{
    Dtype, LoadOptions, LoadPlan, PlanOptions, SaveOptions, Source, Stop, Stream, StreamOptions,
    TensorData, load, save, verify,
};
use forebay_testkit::fault::{FaultFactory, FaultPlan, Scope, When};
use forebay_testkit::memory::pattern;

/// `EIO` of `errno(3)`.
const EIO: i32 = 5;
/// More than a few pieces of a save, and a ragged end.
const LENGTH: usize = (40 << 20) + 12_345;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn faulty(plan: FaultPlan) -> Handle {
    let factory = Arc::new(FaultFactory::new(Arc::new(EngineKind::Threads), plan));
    Handle::with_factory(Options { page_cache: false, ..Options::default() }, factory).unwrap()
}

fn save_one(handle: &Handle, path: &Path, bytes: &[u8]) -> Result<()> {
    let shape = [bytes.len() as u64];
    let tensor =
        TensorData { name: "w", dtype: Dtype::U8, shape: &shape, bytes: Lent::Host(bytes) };
    save(handle, path, &[tensor], None, &SaveOptions::default())
}

fn load_one(handle: &Handle, path: &Path) -> Result<Vec<u8>> {
    let plan = LoadPlan::new(Arc::new(Source::of(path).open()?), &PlanOptions::default())?;
    let regions = load(handle, &plan, &LoadOptions::default())?;
    let start = usize::try_from(plan.tensors()[0].position).unwrap();
    let length = usize::try_from(plan.tensor_bytes()).unwrap();
    Ok(regions[0].as_slice()[start..start + length].to_vec())
}

#[test]
fn a_save_that_fails_anywhere_leaves_the_old_file_and_nothing_else() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let sound = Handle::new(Options::default()).unwrap();
    let (before, after) = (pattern(1, 5000), pattern(2, LENGTH));
    let mut failures = 0;
    for number in 1.. {
        save_one(&sound, &path, &before).unwrap();
        let handle = faulty(FaultPlan::new(number).fail(When::Nth(number), Scope::All, EIO));
        let saved = save_one(&handle, &path, &after);
        assert!(handle.take_unseen_failures().is_empty());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        let found = load_one(&sound, &path).unwrap();
        match saved {
            Ok(()) => {
                assert!(found == after);
                break;
            }
            Err(error) => {
                assert_eq!((error.os_code(), error.path_ref()), (Some(EIO), Some(&*path)));
                assert!(found == before, "{number}: {error}");
            }
        }
        failures += 1;
    }
    // Every block of the tensors, the header, the sync.
    assert!(failures >= LENGTH / (2 << 20) + 2, "{failures}");
}

#[test]
fn a_load_that_fails_anywhere_names_the_file_and_the_next_one_works() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let content = pattern(3, LENGTH);
    save_one(&Handle::new(Options::default()).unwrap(), &path, &content).unwrap();
    for number in [1, 2, 7, 15, 20] {
        let handle = faulty(FaultPlan::new(number).fail(When::Nth(number), Scope::Reads, EIO));
        let error = load_one(&handle, &path).unwrap_err();
        assert_eq!((error.os_code(), error.path_ref()), (Some(EIO), Some(&*path)));
        assert!(load_one(&handle, &path).unwrap() == content);
        assert!(handle.take_unseen_failures().is_empty());

        let handle = faulty(FaultPlan::new(number).fail(When::Nth(number), Scope::Reads, EIO));
        let opened = Source::of(&path).open().unwrap();
        let error = verify(&handle, &opened, &Stop::default()).unwrap_err();
        assert_eq!((error.os_code(), error.path_ref()), (Some(EIO), Some(&*path)));
        assert!(handle.take_unseen_failures().is_empty());
    }
}

#[test]
fn short_late_and_interrupted_transfers_lose_nothing() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    for seed in 0..6 {
        let content = pattern(seed, LENGTH - usize::try_from(seed).unwrap() * 4099);
        let handle = faulty(FaultPlan::survivable(seed));
        save_one(&handle, &path, &content).unwrap();
        assert!(load_one(&handle, &path).unwrap() == content, "seed {seed}");
        let options = StreamOptions {
            names: None,
            budget_bytes: 64 << 20,
            verify: true,
            timeout: Duration::ZERO,
        };
        let opened = Arc::new(Source::of(&path).open().unwrap());
        let mut stream = Stream::new(&handle, opened, options).unwrap();
        let tensor = stream.next(&handle, &Stop::default()).unwrap().unwrap();
        assert!(tensor.bytes() == content, "seed {seed}");
    }
}
