//! What a handle asks of the kernel, read from a recording: durability, page cache, registration,
//! reservation, batches; and what it leaves in the page cache.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "tests panic, and say what they skip"
)]

use std::path::Path;
use std::sync::Arc;

use forebay_io::engine::record::{RecordFactory, RecordedTransfer, Recording};
use forebay_io::engine::{Command, EngineFactory, EngineKind};
use forebay_io::memory::piece_of;
use forebay_io::{DirectMode, Durability, Handle, Options, Pool, PoolOptions};
use forebay_testkit::memory::{Placed, pattern};
use forebay_testkit::usage::cached_bytes;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn recorded(kind: EngineKind, options: Options) -> Option<(Handle, Recording)> {
    let factory = Arc::new(RecordFactory::new(Arc::new(kind)));
    let recording = factory.recording();
    let shared: Arc<dyn EngineFactory> = factory;
    match Handle::with_factory(options, shared) {
        Ok(handle) => Some((handle, recording)),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn takes_direct(directory: &Path) -> bool {
    let facts = forebay_io::facts(directory).unwrap();
    if !facts.direct {
        eprintln!("skipped: no direct I/O here: {:?}", facts.reason);
    }
    facts.direct
}

/// `RWF_DONTCACHE` came with Linux 6.14; before it, the page of a ragged end stays.
fn uncached_works() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(14))
}

fn syncs(transfers: &[RecordedTransfer]) -> Vec<bool> {
    transfers
        .iter()
        .filter_map(|transfer| match transfer.command {
            Command::Sync { data_only } => Some(data_only),
            _ => None,
        })
        .collect()
}

#[test]
fn durability_is_what_was_asked_for_and_comes_after_all_bytes() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let expected = [
        (Durability::None, vec![]),
        (Durability::Data, vec![true]),
        (Durability::Full, vec![false; 2]),
    ];
    for kind in EngineKind::ALL {
        for (durability, expected) in &expected {
            let options = Options { durability: *durability, ..Options::default() };
            let Some((handle, recording)) = recorded(kind, options) else { continue };
            handle.store(&path, &pattern(1, (3 << 20) + 17)).unwrap();
            let transfers = recording.transfers();
            assert_eq!(syncs(&transfers), *expected, "{kind} {durability:?}");
            let last_write =
                transfers.iter().rposition(|transfer| transfer.command == Command::Write);
            let first_sync = transfers
                .iter()
                .position(|transfer| matches!(transfer.command, Command::Sync { .. }));
            assert!(first_sync.is_none() || first_sync > last_write, "{kind} {durability:?}");
            std::fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn a_long_new_file_is_reserved_before_it_is_written_and_a_rewrite_reserves_nothing() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let Some((handle, recording)) = recorded(EngineKind::Threads, Options::default()) else {
        return;
    };
    let content = pattern(1, (5 << 20) + 17);
    handle.store(&path, &content).unwrap();
    let first = recording.transfers()[0];
    assert_eq!((first.command, first.offset), (Command::Allocate { keep_size: false }, 0));
    assert_eq!(first.length, content.len());
    recording.clear();
    handle.store(&path, &content).unwrap();
    assert!(recording.transfers().iter().all(|transfer| transfer.command == Command::Write));
}

#[test]
fn direct_transfers_leave_nothing_in_the_page_cache() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    if !takes_direct(directory.path()) {
        return;
    }
    for kind in EngineKind::ALL {
        let Some((handle, _)) = recorded(kind, Options::default()) else { continue };
        let content = pattern(1, (4 << 20) + 1001);
        let options = Options { durability: Durability::Data, ..Options::default() };
        let Some((durable, _)) = recorded(kind, options) else { continue };
        durable.store(&path, &content).unwrap();
        // The ragged end is dropped by the kernel once it is on the drive, a moment later.
        let left = (0..100).find_map(|_| {
            let cached = cached_bytes(&path).unwrap_or(0);
            std::thread::sleep(std::time::Duration::from_millis(50));
            (cached == 0).then_some(cached)
        });
        if uncached_works() {
            assert_eq!(left, Some(0), "{kind}: after a store");
        }
        forebay_testkit::usage::drop_cached(&path);
        for shift in [0, 64] {
            let mut back = Placed::new(shift, content.len());
            handle.load(&path, 0, back.bytes_mut()).unwrap();
            assert!(back.bytes() == content);
            assert_eq!(cached_bytes(&path).unwrap_or(0), 0, "{kind}: after a load");
        }
    }
}

#[test]
fn buffered_transfers_leave_nothing_behind_when_told_so() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(1, (4 << 20) + 1001);
    for kind in EngineKind::ALL {
        let options =
            Options { direct: DirectMode::Never, drop_behind: true, ..Options::default() };
        let Some((handle, recording)) = recorded(kind, options) else { continue };
        handle.store(&path, &content).unwrap();
        assert_eq!(cached_bytes(&path).unwrap_or(0), 0, "{kind}: after a store");
        let mut back = vec![0; content.len()];
        handle.load(&path, 0, &mut back).unwrap();
        assert!(back == content);
        assert_eq!(cached_bytes(&path).unwrap_or(0), 0, "{kind}: after a load");
        assert!(recording.transfers().iter().all(|transfer| transfer.buffered));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn cached_bytes_are_taken_from_the_page_cache_and_no_others() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    if !takes_direct(directory.path()) {
        return;
    }
    let content = pattern(1, 8 << 20);
    std::fs::write(&path, &content).unwrap();
    if cached_bytes(&path).is_none() {
        return eprintln!("skipped: the kernel can't tell what is cached");
    }
    let Some((handle, recording)) = recorded(EngineKind::Uring, Options::default()) else { return };
    let mut back = vec![0; content.len()];
    handle.load(&path, 0, &mut back).unwrap();
    assert!(back == content);
    assert_eq!(handle.stats().bytes_cached, content.len() as u64);
    assert!(recording.transfers().iter().all(|transfer| transfer.buffered));

    forebay_testkit::usage::drop_cached(&path);
    recording.clear();
    back.fill(0);
    handle.load(&path, 0, &mut back).unwrap();
    assert!(back == content);
    assert!(recording.transfers().iter().all(|transfer| !transfer.buffered));
}

#[test]
fn pool_memory_is_registered_once_and_let_go_with_its_last_buffer() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    if !takes_direct(directory.path()) {
        return;
    }
    let pool = Pool::new(PoolOptions::default());
    let options = Options { pool: Some(Arc::clone(&pool)), ..Options::default() };
    let Some((handle, recording)) = recorded(EngineKind::Uring, options) else { return };
    for round in 0..5 {
        let mut buffer = pool.allocate(100 << 20, 4096).unwrap();
        buffer.as_mut_slice().fill(round);
        handle.store(&path, buffer.as_slice()).unwrap();
        let stats = handle.stats();
        if stats.bytes_registered == 0 {
            return eprintln!("skipped: memory can't be registered: {:?}", stats.fallbacks);
        }
        let registered = recording
            .transfers()
            .iter()
            .filter(|transfer| transfer.command == Command::Write)
            .all(|transfer| transfer.buffer_slot.is_some());
        assert!(registered);
        recording.clear();
    }
    drop(handle);
    assert_eq!(pool.stats().mapped_bytes, 0);
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 4));
}

#[test]
fn a_kept_region_stays_registered_and_moves_what_its_next_buffer_holds() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    if !takes_direct(directory.path()) {
        return;
    }
    let pool = Pool::new(PoolOptions { retain_bytes: usize::MAX, ..PoolOptions::default() });
    let options = Options { pool: Some(Arc::clone(&pool)), parallelism: 1, ..Options::default() };
    let Some((handle, recording)) = recorded(EngineKind::Uring, options) else { return };
    let length = 20 << 20;
    let (mut regions, mut slots) = (Vec::new(), Vec::new());
    for round in 0..4 {
        let mut buffer = pool.allocate(length, 4096).unwrap();
        let content = pattern(round, length);
        buffer.as_mut_slice().copy_from_slice(&content);
        handle.store(&path, buffer.as_slice()).unwrap();
        assert!(std::fs::read(&path).unwrap() == content, "round {round}");
        buffer.as_mut_slice().fill(0);
        handle.load(&path, 0, buffer.as_mut_slice()).unwrap();
        assert!(buffer.as_slice() == content, "round {round}");
        regions.push(piece_of(buffer.as_ptr(), length).unwrap().region);
        let moved = recording.transfers();
        slots.extend(moved.iter().filter(|t| t.command == Command::Write).map(|t| t.buffer_slot));
        recording.clear();
    }
    assert!(regions.iter().all(|region| *region == regions[0]), "{regions:?}");
    if handle.stats().bytes_registered == 0 {
        return eprintln!("skipped: memory can't be registered: {:?}", handle.stats().fallbacks);
    }
    assert!(slots.iter().all(|slot| slot.is_some() && *slot == slots[0]), "{slots:?}");
    // Once it is really gone, what comes in its place is registered anew.
    assert_eq!(pool.trim(), length);
    let mut buffer = pool.allocate(length, 4096).unwrap();
    assert_ne!(piece_of(buffer.as_ptr(), length).unwrap().region, regions[0]);
    handle.load(&path, 0, buffer.as_mut_slice()).unwrap();
    assert!(buffer.as_slice() == pattern(3, length));
}

#[test]
fn staging_memory_stays_within_its_limit_and_ordinary_memory_pins_nothing() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    if !takes_direct(directory.path()) {
        return;
    }
    let pool = Pool::new(PoolOptions::default());
    let options = Options { pool: Some(Arc::clone(&pool)), ..Options::default() };
    let limit = options.staging_bytes;
    let handle = Handle::new(options).unwrap();
    assert_eq!(pool.stats().peak_bytes, 0, "memory is taken before it is needed");
    let mut placed = Placed::new(64, 64 << 20);
    placed.bytes_mut().copy_from_slice(&pattern(2, 64 << 20));
    handle.store(&path, placed.bytes()).unwrap();
    let mut back = Placed::new(64, 64 << 20);
    handle.load(&path, 0, back.bytes_mut()).unwrap();
    assert!(back.bytes() == placed.bytes());
    assert!(pool.stats().peak_bytes <= limit, "{:?}", pool.stats());
    assert!(handle.stats().bytes_staged > 0);
}

#[test]
fn a_pool_too_small_for_staging_gives_fewer_blocks_or_an_error_but_never_a_hang() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    if !takes_direct(directory.path()) {
        return;
    }
    for budget in [4096, 64 << 10, 300 << 10, 1 << 20, 5 << 20] {
        let pool = Pool::new(PoolOptions { budget_bytes: Some(budget), ..PoolOptions::default() });
        let handle = Handle::new(Options { pool: Some(pool), ..Options::default() }).unwrap();
        let mut placed = Placed::new(64, 20 << 20);
        placed.bytes_mut().copy_from_slice(&pattern(3, 20 << 20));
        match handle.store(&path, placed.bytes()) {
            Ok(()) => assert!(std::fs::read(&path).unwrap() == placed.bytes(), "{budget}"),
            Err(error) => {
                assert_eq!(error.kind(), forebay_io::ErrorKind::OutOfMemory, "{error}");
                assert!(budget < 2 << 20, "{budget}: {error}");
            }
        }
    }
}
