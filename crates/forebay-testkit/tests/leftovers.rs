//! What stores that fail leave behind: nothing that looks whole, and all that others stored.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_io::{Direction, ErrorKind, Handle, Operation, Options, Part, Request, Target};
use forebay_testkit::memory::pattern;
use forebay_testkit::random::Random;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A handle on which a store of some MiB takes long enough to do something meanwhile.
fn slow() -> Handle {
    let options = Options {
        parallelism: 1,
        block_size: 64 << 10,
        queue_depth: 4,
        staging_bytes: 1 << 20,
        throttle_bytes_per_second: Some(16 << 20),
        ..Options::default()
    };
    Handle::new(options).unwrap()
}

/// Starts a store of one piece for each file, which the operation keeps alive: at offsets, or, if
/// there are none, as whole files.
#[expect(unsafe_code, reason = "requests name memory by address")]
fn submit(
    handle: &Handle,
    items: &[(&Path, Option<u64>)],
    mut memory: Vec<Vec<u8>>,
) -> forebay_io::Result<Operation> {
    let parts = items.iter().zip(&mut memory).enumerate();
    let parts = parts.map(|(file, ((_, offset), bytes))| Part {
        file,
        offset: offset.unwrap_or(0),
        address: bytes.as_mut_ptr(),
        length: bytes.len(),
        device: None,
    });
    let target = |(path, _): &(&Path, Option<u64>)| Target::Path(PathBuf::from(path));
    let request = Request {
        files: items.iter().map(target).collect(),
        parts: parts.collect(),
        whole_file: items.iter().all(|(_, offset)| offset.is_none()),
        ..Request::new(Direction::Store, Target::Descriptor(-1), 0, std::ptr::null_mut(), 0)
    };
    let request = Request { keep: Some(Box::new(memory)), ..request };
    // SAFETY: `keep` holds the memory until the operation is done.
    unsafe { handle.submit(request) }
}

fn store(handle: &Handle, path: &Path, content: Vec<u8>) -> Operation {
    submit(handle, &[(path, None)], vec![content]).unwrap()
}

fn store_at(handle: &Handle, path: &Path, offset: u64, content: Vec<u8>) -> Operation {
    submit(handle, &[(path, Some(offset))], vec![content]).unwrap()
}

fn wait_for_bytes(operation: &Operation) {
    while operation.bytes_done() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn cancel(operation: &Operation) {
    operation.cancel();
    assert_eq!(operation.wait().unwrap_err().kind(), ErrorKind::Cancelled);
}

#[test]
fn a_file_in_which_another_store_succeeded_outlives_the_failure_of_the_one_that_made_it() {
    let directory = directory();
    let path = directory.path().join("swap.bin");
    let handle = slow();
    let failed = store_at(&handle, &path, 1 << 20, vec![1; 8 << 20]);
    let content = pattern(1, 10_001);
    store_at(&handle, &path, 0, content.clone()).wait().unwrap();
    cancel(&failed);
    assert!(std::fs::read(&path).unwrap()[..content.len()] == content);
}

#[test]
fn a_failed_store_leaves_nothing_to_the_store_at_an_offset_that_follows_it() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = slow();
    for old in [None, Some(300_001)] {
        if let Some(length) = old {
            std::fs::write(&path, vec![0xAA; length]).unwrap();
        }
        let failed = store(&handle, &path, vec![1; 8 << 20]);
        wait_for_bytes(&failed);
        let later = store_at(&handle, &path, 1000, vec![2; 500]);
        cancel(&failed);
        later.wait().unwrap();
        let expected = [vec![0; 1000], vec![2; 500]].concat();
        let now = std::fs::read(&path).unwrap();
        assert!(now == expected, "{old:?}: {} bytes", now.len());
        std::fs::remove_file(&path).unwrap();
    }
}

type Rename = fn(&Path, &Path) -> std::io::Result<()>;

#[test]
fn a_file_that_got_another_name_does_not_look_whole_after_a_failure() {
    let directory = directory();
    let (path, other) = (directory.path().join("a"), directory.path().join("b"));
    let ways: [Rename; 2] =
        [|from, to| std::fs::rename(from, to), |from, to| std::fs::hard_link(from, to)];
    let handle = slow();
    for rename in ways {
        let failed = store(&handle, &path, vec![1; 8 << 20]);
        wait_for_bytes(&failed);
        rename(&path, &other).unwrap();
        cancel(&failed);
        assert!(!path.exists());
        assert_eq!(std::fs::metadata(&other).unwrap().len(), 0);
        std::fs::remove_file(&other).unwrap();
    }
}

#[test]
fn the_name_that_a_store_made_is_removed_and_no_other() {
    let directory = directory();
    let (made, linked) = (directory.path().join("made"), directory.path().join("linked"));
    let handle = slow();
    let first = store(&handle, &made, vec![1; 8 << 20]);
    std::fs::hard_link(&made, &linked).unwrap();
    let second = store(&handle, &linked, vec![2; 1 << 20]);
    second.cancel();
    cancel(&first);
    cancel(&second);
    assert!(!made.exists());
    assert_eq!(std::fs::metadata(&linked).unwrap().len(), 0);
}

#[test]
fn a_store_of_nothing_that_is_cancelled_leaves_no_file() {
    let directory = directory();
    let (busy, fresh) = (directory.path().join("busy"), directory.path().join("fresh"));
    let handle = slow();
    let first = store(&handle, &busy, vec![1; 2 << 20]);
    let items: [(&Path, _); 2] = [(&busy, None), (&fresh, None)];
    let second = submit(&handle, &items, vec![vec![], vec![]]).unwrap();
    second.cancel();
    first.wait().unwrap();
    assert_eq!(second.wait().unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(!fresh.exists());
    assert_eq!(std::fs::metadata(&busy).unwrap().len(), 2 << 20);
}

#[test]
fn a_store_that_cannot_begin_never_undoes_another() {
    let directory = directory();
    let missing = directory.path().join("missing/x");
    let handle = Handle::new(Options::default()).unwrap();
    let stop = AtomicBool::new(false);
    let path = directory.path().join("w.bin");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let items: [(&Path, _); 2] = [(&path, None), (&missing, None)];
                    submit(&handle, &items, vec![vec![1; 100], vec![2; 100]]).unwrap_err();
                }
            });
        }
        let mut lost = 0;
        for round in 0..3000 {
            let content = pattern(round, 301);
            handle.store(&path, &content).unwrap();
            lost += usize::from(std::fs::read(&path).ok() != Some(content));
            let _ = std::fs::remove_file(&path);
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(lost, 0);
    });
}

#[test]
fn waiting_for_everything_ends_while_names_change_hands() {
    let directory = directory();
    let (path, fresh) = (directory.path().join("w.bin"), directory.path().join("fresh"));
    let handle = Handle::new(Options::default()).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::fs::write(&fresh, b"x").unwrap();
                std::fs::rename(&fresh, &path).unwrap();
            }
        });
        scope.spawn(|| {
            for _ in 0..5000 {
                handle.store(&path, &[1; 100]).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        while !stop.load(Ordering::Relaxed) {
            assert!(handle.drain(Some(Duration::from_secs(30))).unwrap(), "stranded");
        }
    });
}

/// What is known of a file's bytes; `None` for a byte that a failed store may have changed.
#[derive(Default)]
struct Model {
    bytes: Vec<Option<u8>>,
    /// No failed store can have changed the length.
    length_is_known: bool,
}

impl Model {
    fn store(&mut self, offset: Option<u64>, content: &[u8], stored: bool) {
        match (offset, stored) {
            (None, true) => {
                self.bytes = content.iter().copied().map(Some).collect();
                self.length_is_known = true;
            }
            // As it was, or empty.
            (None, false) => *self = Self::default(),
            (Some(offset), _) => {
                let start = usize::try_from(offset).unwrap();
                let end = start + content.len();
                self.length_is_known &= stored || end <= self.bytes.len();
                if stored && self.bytes.len() < end {
                    self.bytes.resize(end, self.length_is_known.then_some(0));
                }
                let (start, end) = (start.min(self.bytes.len()), end.min(self.bytes.len()));
                for (known, byte) in self.bytes[start..end].iter_mut().zip(content) {
                    *known = stored.then_some(*byte);
                }
            }
        }
    }

    fn check(&self, now: &[u8], about: &str) {
        let known = |(place, byte): (usize, &Option<u8>)| byte.map(|byte| (place, byte));
        for (place, byte) in self.bytes.iter().enumerate().filter_map(known) {
            assert_eq!(now.get(place), Some(&byte), "{about}: byte {place} of {}", now.len());
        }
        assert!(!self.length_is_known || now.len() == self.bytes.len(), "{about}: {}", now.len());
    }
}

#[test]
fn stores_of_all_kinds_some_cancelled_leave_what_the_others_stored() {
    const SLOT: usize = 70_001;
    let directory = directory();
    let path = directory.path().join("w.bin");
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let mut random = Random::new(seed);
    let options = Options {
        block_size: 16 << 10,
        queue_depth: 4,
        throttle_bytes_per_second: Some(16 << 20),
        ..Options::default()
    };
    let handle = Handle::new(options).unwrap();
    for round in 0..60u64 {
        let _ = std::fs::remove_file(&path);
        let mut stores: Vec<(Operation, Option<u64>, Vec<u8>)> = Vec::new();
        let mut slots: Vec<usize> = Vec::new();
        for number in 0..8u64 {
            let (whole, slot) = (random.one_in(3), random.index(8));
            let length = 1 + (random.index(SLOT) >> random.index(8));
            // Stores at offsets that are under way together don't overlap.
            if whole {
                slots.clear();
            } else if slots.contains(&slot) {
                continue;
            } else {
                slots.push(slot);
            }
            let offset = (!whole).then_some((slot * SLOT) as u64);
            let length = if whole { length * 8 } else { length };
            let content = pattern(round * 8 + number, length);
            let operation = submit(&handle, &[(&path, offset)], vec![content.clone()]).unwrap();
            stores.push((operation, offset, content));
            match random.below(3) {
                0 => stores[random.index(stores.len())].0.cancel(),
                1 => drop(stores[random.index(stores.len())].0.wait()),
                _ => {}
            }
        }
        let mut model = Model::default();
        for (operation, offset, content) in &stores {
            model.store(*offset, content, operation.wait().is_ok());
        }
        let now = std::fs::read(&path).unwrap_or_default();
        model.check(&now, &format!("seed {seed}, round {round}"));
    }
}
