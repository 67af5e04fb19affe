//! Handles that leave their options to the drives.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_io::device::{DeviceMemory, Devices, Search};
use forebay_io::{
    Direction, EngineChoice, EngineKind, Handle, MemoryKind, Options, Tuning, Tunings,
};
use forebay_standin::Standin;

const BLOCK_BYTES: usize = 64 << 10;
const BYTES: usize = 10 * BLOCK_BYTES;

/// Says the same of every drive, for loads to one kind of memory alone.
#[derive(Debug)]
struct Fixed {
    tuning: Tuning,
    memory: MemoryKind,
    asked: AtomicUsize,
}

impl Fixed {
    fn new(queue_depth: usize) -> Arc<Self> {
        let tuning = Tuning {
            engine: EngineChoice::Named(EngineKind::Threads),
            block_size: BLOCK_BYTES,
            queue_depth,
            parallelism: 1,
            single_submit: false,
            device_staging_bytes: None,
        };
        Arc::new(Self { tuning, memory: MemoryKind::Host, asked: AtomicUsize::new(0) })
    }

    /// What is known of GPU memory, blocks and the memory that they are staged in.
    fn of_gpus(staging_bytes: usize) -> Arc<Self> {
        let fixed = Self::new(4);
        let tuning = Tuning { device_staging_bytes: Some(staging_bytes), ..fixed.tuning };
        Arc::new(Self { tuning, memory: MemoryKind::Gpu, asked: AtomicUsize::new(0) })
    }
}

impl Tunings for Fixed {
    fn tuning(&self, file: &Path, direction: Direction, memory: MemoryKind) -> Option<Tuning> {
        assert!(file.is_absolute() && file.is_file(), "{}", file.display());
        self.asked.fetch_add(1, Ordering::Relaxed);
        (direction == Direction::Load && memory == self.memory).then_some(self.tuning)
    }
}

fn handle(tunings: &Arc<Fixed>) -> Handle {
    let tunings = Arc::clone(tunings) as Arc<dyn Tunings>;
    Handle::new(Options { tunings: Some(tunings), page_cache: false, ..Options::default() })
        .unwrap()
}

#[test]
fn files_of_a_drive_are_moved_as_it_does_best_and_the_drive_is_asked_about_once() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tunings = Fixed::new(4);
    let handle = handle(&tunings);
    let bytes: Vec<u8> = (0..=250).cycle().take(BYTES).collect();
    for name in ["a", "b"] {
        let path = directory.path().join(name);
        let before = handle.stats().transfers;
        handle.store(&path, &bytes).unwrap();
        let stored = handle.stats().transfers - before;
        assert!(stored < 5, "{stored} transfers of the handle's own block size");
        let mut back = vec![0; BYTES];
        handle.load(&path, 0, &mut back).unwrap();
        assert!(back == bytes);
        let loaded = handle.stats().transfers - before - stored;
        assert!(loaded >= 10, "{loaded} transfers of the drive's block size");
    }
    assert_eq!(tunings.asked.load(Ordering::Relaxed), 2, "once for each direction");
}

#[test]
fn options_that_do_not_work_are_told_of_and_the_handles_own_are_used() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let handle = handle(&Fixed::new(0));
    let path = directory.path().join("w");
    handle.store(&path, &vec![7; BYTES]).unwrap();
    let mut back = vec![0; BYTES];
    handle.load(&path, 0, &mut back).unwrap();
    assert!(back == vec![7; BYTES]);
    let notices = handle.notices().join("\n");
    assert!(notices.contains("queue_depth is 0"), "{notices}");
}

#[test]
fn memory_of_a_gpu_is_moved_as_was_found_best_for_that_and_the_hosts_as_before() {
    let standin = Standin::new().unwrap();
    let search = Search { folders: vec![standin.folder().to_path_buf()], system: false };
    let devices = Devices::load(&search).unwrap();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("w");
    let tunings = Fixed::of_gpus(2 * BLOCK_BYTES);
    {
        let handle = handle(&tunings);
        let bytes: Vec<u8> = (0..=250).cycle().take(8 * BYTES).collect();
        handle.store(&path, &bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        handle.load(&path, 0, &mut back).unwrap();
        assert!(back == bytes);
        let without = handle.stats().staging_bytes;
        let memory = DeviceMemory::allocate(&devices.context(0).unwrap(), bytes.len()).unwrap();
        let loaded = handle.submit_owned(Direction::Load, &path, 0, memory, bytes.len());
        loaded.unwrap().wait().unwrap().copy_out(0, &mut back).unwrap();
        assert!(back == bytes);
        let staging = handle.stats().staging_bytes - without;
        assert!((1..=2 * BLOCK_BYTES as u64).contains(&staging), "{staging}");
    }
    assert_eq!(tunings.asked.load(Ordering::Relaxed), 3, "a store, and a load of each kind");
    assert_eq!(standin.violations(), Vec::<String>::new());
}
