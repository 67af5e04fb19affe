//! What a store does to files when others store there too, or when it ends early: nothing that was
//! right is lost, and nothing looks whole that isn't.

#![expect(clippy::unwrap_used, reason = "tests panic, and say what they skip")]

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_io::{
    DirectMode, Direction, Durability, EngineKind, ErrorKind, Handle, Operation, Options, Part,
    Pool, PoolOptions, Priority, Request, Target,
};
use forebay_testkit::fault::{FaultFactory, FaultPlan, Scope, When};
use forebay_testkit::memory::{Placed, pattern};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn slow() -> Options {
    Options {
        block_size: 64 << 10,
        queue_depth: 4,
        staging_bytes: 1 << 20,
        throttle_bytes_per_second: Some(16 << 20),
        ..Options::default()
    }
}

/// Starts a store of some tensors that the operation keeps alive: a file and an offset for each,
/// or whole files if there are no offsets.
#[expect(unsafe_code, reason = "requests name memory by address")]
fn submit(
    handle: &Handle,
    items: Vec<(PathBuf, Option<u64>, Vec<u8>)>,
) -> forebay_io::Result<Operation> {
    let whole_file = items.iter().all(|(_, offset, _)| offset.is_none());
    let files = items.iter().map(|(path, ..)| Target::Path(path.clone())).collect();
    let (offsets, mut memory): (Vec<_>, Vec<_>) =
        items.into_iter().map(|(_, offset, bytes)| (offset.unwrap_or(0), bytes)).unzip();
    let parts = memory.iter_mut().zip(&offsets).enumerate().map(|(file, (bytes, offset))| Part {
        file,
        offset: *offset,
        address: bytes.as_mut_ptr(),
        length: bytes.len(),
        device: None,
    });
    let request = Request {
        direction: Direction::Store,
        files,
        parts: parts.collect(),
        checksums: false,
        whole_file,
        priority: Priority::Demand,
        durability: None,
        devices: Vec::new(),
        commit: None,
        keep: None,
    };
    let request = Request { keep: Some(Box::new(memory)), ..request };
    // SAFETY: `keep` holds the memory until the operation is done.
    unsafe { handle.submit(request) }
}

fn store(handle: &Handle, path: &Path, content: Vec<u8>) -> Operation {
    submit(handle, vec![(path.to_path_buf(), None, content)]).unwrap()
}

#[test]
fn a_cancelled_store_never_undoes_a_later_one() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    for throttled in [false, true] {
        let options = if throttled { slow() } else { Options::default() };
        let handle = Handle::new(options).unwrap();
        for old in [None, Some(3000), Some(8 << 20)] {
            for round in 0..6 {
                let _ = std::fs::remove_file(&path);
                if let Some(length) = old {
                    std::fs::write(&path, vec![0xAA; length]).unwrap();
                }
                let long = if throttled { 4 << 20 } else { 64 << 20 };
                let cancelled = store(&handle, &path, vec![1; long]);
                std::thread::sleep(Duration::from_millis(round));
                cancelled.cancel();
                let content = pattern(round, 300_001);
                store(&handle, &path, content.clone()).wait().unwrap();
                assert!(std::fs::read(&path).unwrap() == content, "{throttled} {old:?} {round}");
                let _ = cancelled.wait();
                assert!(std::fs::read(&path).unwrap() == content, "{throttled} {old:?} {round}");
            }
        }
    }
}

#[test]
fn a_failed_store_never_undoes_a_later_one() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    for n in 1..30 {
        let plan = FaultPlan::new(n).fail(When::Nth(n), Scope::Writes, libc::EIO);
        let factory = Arc::new(FaultFactory::new(Arc::new(EngineKind::Threads), plan));
        let handle = Handle::with_factory(slow(), factory).unwrap();
        let failed = store(&handle, &path, vec![1; 2 << 20]);
        let content = pattern(n, 300_001);
        let later = store(&handle, &path, content.clone());
        assert_eq!(failed.wait().unwrap_err().os_code(), Some(libc::EIO));
        later.wait().unwrap();
        assert!(std::fs::read(&path).unwrap() == content, "{n}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn whole_file_stores_of_one_file_take_effect_in_order() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let link = directory.path().join("link.bin");
    let handle = Handle::new(Options::default()).unwrap();
    for round in 0..30u64 {
        let lengths = [3_000_000usize, 10, 2 << 20, 70_001, 0, 500_000];
        let operations: Vec<_> = lengths
            .iter()
            .zip(0u64..)
            .map(|(length, n)| {
                let name = if n % 2 == 1 && link.exists() { &link } else { &path };
                store(&handle, name, pattern(round * 10 + n, *length))
            })
            .collect();
        for operation in &operations {
            operation.wait().unwrap();
        }
        assert!(std::fs::read(&path).unwrap() == pattern(round * 10 + 5, 500_000), "{round}");
        if !link.exists() {
            std::fs::hard_link(&path, &link).unwrap();
        }
    }
}

#[test]
fn stores_at_offsets_wait_for_a_whole_one_and_not_for_each_other() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = Handle::new(slow()).unwrap();
    for round in 0..10u64 {
        let whole = pattern(round, 200_000);
        let mut expected = whole.clone();
        let mut operations = vec![store(&handle, &path, whole)];
        for n in 0..4u64 {
            let piece = pattern(100 + n, 10_001);
            let start = usize::try_from(n * 40_000).unwrap();
            expected[start..start + piece.len()].copy_from_slice(&piece);
            operations
                .push(submit(&handle, vec![(path.clone(), Some(n * 40_000), piece)]).unwrap());
        }
        for operation in operations {
            operation.wait().unwrap();
        }
        assert!(std::fs::read(&path).unwrap() == expected, "{round}");
    }
}

#[test]
fn a_store_that_is_cancelled_before_its_turn_changes_nothing() {
    let directory = directory();
    let (busy, old, fresh) =
        (directory.path().join("busy"), directory.path().join("old"), directory.path().join("new"));
    let handle = Handle::new(Options { parallelism: 1, ..slow() }).unwrap();
    std::fs::write(&old, vec![0xAA; 2 << 20]).unwrap();
    let first = store(&handle, &busy, vec![1; 4 << 20]);
    for path in [&old, &fresh] {
        let waiting = store(&handle, path, vec![2; 1 << 20]);
        waiting.cancel();
        assert_eq!(waiting.wait().unwrap_err().kind(), ErrorKind::Cancelled);
        if waiting.bytes_done() == 0 && path == &old {
            let now = std::fs::read(&old).unwrap();
            assert!(now == vec![0xAA; 2 << 20] || now.is_empty(), "{} bytes", now.len());
        }
    }
    assert!(!fresh.exists());
    first.wait().unwrap();
}

#[test]
fn a_store_into_several_files_of_which_one_cannot_be_opened_changes_none() {
    let directory = directory();
    let old = directory.path().join("old");
    std::fs::write(&old, vec![0xAA; 2 << 20]).unwrap();
    let handle = Handle::new(Options::default()).unwrap();
    let fresh = directory.path().join("fresh");
    let items = vec![
        (old.clone(), None, vec![1; 1 << 20]),
        (fresh.clone(), None, vec![2; 1 << 20]),
        (directory.path().join("missing/x"), None, vec![3; 10]),
    ];
    let error = submit(&handle, items).unwrap_err();
    assert_eq!(error.os_code(), Some(libc::ENOENT));
    assert!(std::fs::read(&old).unwrap() == vec![0xAA; 2 << 20]);
    assert!(!fresh.exists());
}

#[test]
fn one_file_by_two_names_and_overlapping_tensors_are_refused() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    std::fs::write(&path, vec![0xAA; 100]).unwrap();
    let handle = Handle::new(Options::default()).unwrap();
    let other = directory.path().join("./w.bin");
    let twice = vec![(path.clone(), None, vec![1; 50]), (other, None, vec![2; 60])];
    let error = submit(&handle, twice).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(std::fs::read(&path).unwrap() == vec![0xAA; 100]);
}

#[test]
fn a_store_far_behind_the_end_reserves_no_more_than_it_writes() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = Handle::new(Options::default()).unwrap();
    let content = pattern(1, 2 << 20);
    // More than any drive has free.
    handle.store_at(&path, 8 << 40, &content).unwrap();
    let status = std::fs::metadata(&path).unwrap();
    assert_eq!(status.len(), (8 << 40) + (2 << 20));
    assert!(status.blocks() * 512 < 16 << 20, "{} bytes reserved", status.blocks() * 512);
    let mut back = vec![0; content.len()];
    handle.load(&path, 8 << 40, &mut back).unwrap();
    assert!(back == content);
}

#[test]
fn a_cancelled_store_behind_the_end_leaves_no_file_of_the_final_size() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    std::fs::write(&path, vec![0xAA; 4096]).unwrap();
    let handle = Handle::new(Options { parallelism: 1, ..slow() }).unwrap();
    let operation = submit(&handle, vec![(path.clone(), Some(4096), vec![1; 8 << 20])]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    operation.cancel();
    operation.wait().unwrap_err();
    let now = std::fs::read(&path).unwrap();
    assert!(now.len() < 4 << 20, "{} bytes", now.len());
    assert!(now[..4096] == [0xAA; 4096]);
}

#[test]
fn a_directory_that_cannot_be_synced_keeps_the_store_from_beginning_or_changes_nothing() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let old = vec![0xAA; 100];
    let options = || Options { durability: Durability::Full, ..Options::default() };
    for kind in EngineKind::ALL {
        std::fs::write(&path, &old).unwrap();
        // The last sync is the directory's.
        let plan = FaultPlan::new(0).fail(When::Nth(2), Scope::Syncs, libc::EIO);
        let factory = Arc::new(FaultFactory::new(Arc::new(kind), plan));
        let Ok(handle) = Handle::with_factory(options(), factory) else { continue };
        let content = pattern(1, 300_000);
        let error = handle.store(&path, &content).unwrap_err();
        assert!(error.to_string().contains("directory"), "{error}");
        assert!(std::fs::read(&path).unwrap() == content, "the bytes are there and durable");

        let plan = FaultPlan::new(0).fail(When::Nth(2), Scope::Syncs, libc::EINVAL);
        let factory = Arc::new(FaultFactory::new(Arc::new(kind), plan));
        let handle = Handle::with_factory(options(), factory).unwrap();
        handle.store(&path, &content).unwrap();
    }
}

#[test]
fn block_sizes_that_are_no_multiple_of_a_page_stay_direct() {
    let directory = directory();
    if !forebay_io::facts(directory.path()).unwrap().direct {
        return;
    }
    let path = directory.path().join("w.bin");
    for block_size in [4097, 5000, 6000, 10_000, 1_000_003] {
        let options = Options { block_size, direct: DirectMode::Always, ..Options::default() };
        let handle = Handle::new(options).unwrap();
        let mut content = Placed::new(0, 300_000);
        content.bytes_mut().copy_from_slice(&pattern(1, 300_000));
        handle.store(&path, content.bytes()).unwrap();
        let mut back = Placed::new(0, 300_000);
        handle.load(&path, 0, back.bytes_mut()).unwrap();
        assert!(back.bytes() == content.bytes(), "{block_size}");
        let stats = handle.stats();
        assert!(stats.bytes_direct > 500_000, "{block_size}: {stats:?}");
        assert_eq!(stats.bytes_cached, 0, "direct means direct");
    }
}

#[test]
fn a_full_pool_sends_what_needs_staging_through_the_page_cache() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let pool = Pool::new(PoolOptions { budget_bytes: Some(1 << 20), ..PoolOptions::default() });
    let mut all = pool.allocate(1 << 20, 4096).unwrap();
    let options =
        Options { pool: Some(Arc::clone(&pool)), page_cache: false, ..Options::default() };
    let handle = Handle::new(options).unwrap();
    let length = (1 << 20) - 100;
    all.as_mut_slice().copy_from_slice(&pattern(1, 1 << 20));
    handle.store(&path, &all.as_slice()[..length]).unwrap();
    all.as_mut_slice().fill(0);
    handle.load(&path, 0, &mut all.as_mut_slice()[..length]).unwrap();
    assert!(all.as_slice()[..length] == pattern(1, 1 << 20)[..length]);
    let mut placed = Placed::new(64, 500_000);
    handle.load(&path, 0, placed.bytes_mut()).unwrap();
    assert!(placed.bytes() == &pattern(1, 1 << 20)[..500_000]);
}

#[test]
#[expect(unsafe_code, reason = "requests name memory by address")]
fn an_operation_may_keep_its_own_handle_alive() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(1, 1 << 20);
    let handle = Arc::new(Handle::new(slow()).unwrap());
    let mut memory = Box::new(content.clone());
    let (address, length) = (memory.as_mut_ptr(), memory.len());
    let target = Target::Path(path.clone());
    let request = Request {
        whole_file: true,
        keep: Some(Box::new((memory, Arc::clone(&handle)))),
        ..Request::new(Direction::Store, target, 0, address, length)
    };
    // SAFETY: `keep` holds the memory until the operation is done.
    drop(unsafe { handle.submit(request) }.unwrap());
    drop(handle);
    let whole = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        std::fs::read(&path).is_ok_and(|bytes| bytes == content)
    });
    assert!(whole);
}

/// Starts a whole-file store of 4 MiB whose first piece comes last.
#[expect(unsafe_code, reason = "requests name memory by address")]
fn store_end_first(handle: &Handle, path: &Path) -> Operation {
    let mut memory = vec![1u8; 4 << 20];
    let address = memory.as_mut_ptr();
    let part = |offset: u64, length| Part { file: 0, offset, address, length, device: None };
    let request = Request {
        parts: vec![part(1 << 20, 3 << 20), part(0, 1 << 20)],
        whole_file: true,
        keep: Some(Box::new(memory)),
        ..Request::new(Direction::Store, Target::Path(path.to_path_buf()), 0, address, 0)
    };
    // SAFETY: `keep` holds the memory until the operation is done.
    unsafe { handle.submit(request) }.unwrap()
}

/// A block device of 16 MiB, or `None` where this process may not make one.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn new(directory: &Path) -> Option<Self> {
        let image = directory.join("image");
        std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let made =
            std::process::Command::new("losetup").args(["-f", "--show"]).arg(&image).output();
        let made = made.ok().filter(|output| output.status.success())?;
        Some(Self(String::from_utf8(made.stdout).ok()?.trim().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

#[test]
fn stores_to_a_block_device_take_effect_in_order_whichever_node_names_it() {
    let directory = directory();
    let Some(device) = LoopDevice::new(directory.path()) else {
        eprintln!("skipped: no loop device to be had");
        return;
    };
    let node = directory.path().join("node");
    let number = std::fs::metadata(&device.0).unwrap().rdev();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &node, rustix::fs::FileType::BlockDevice, mode, number)
        .unwrap();
    let handle = Handle::new(slow()).unwrap();
    for other in [&device.0, &node] {
        let first = store_end_first(&handle, &device.0);
        let content = pattern(1, 1 << 20);
        let second = store(&handle, other, content.clone());
        first.wait().unwrap();
        second.wait().unwrap();
        let mut back = vec![0; content.len()];
        handle.load(&device.0, 0, &mut back).unwrap();
        assert!(back == content, "{}", other.display());
    }
    let twice = vec![(device.0.clone(), None, vec![1; 50]), (node, None, vec![2; 60])];
    assert_eq!(submit(&handle, twice).unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_store_through_a_link_makes_the_name_durable_that_the_link_leads_to() {
    let directory = directory();
    let (target, link) = (directory.path().join("there"), directory.path().join("link"));
    std::fs::create_dir(&target).unwrap();
    std::os::unix::fs::symlink("there/w.bin", &link).unwrap();
    let handle = Handle::new(Options { durability: Durability::Full, ..slow() }).unwrap();
    let operation = store(&handle, &link, vec![1; 4 << 20]);
    let open: Vec<PathBuf> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .collect();
    assert!(!operation.is_done());
    operation.wait().unwrap();
    assert!(open.contains(&target), "{open:?}");
}
