//! Checksums of parts: those of the bytes that moved, whatever blocks they moved in.
#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit requests")]

use std::path::Path;
use std::sync::Arc;

use forebay_io::device::{CallerStream, Context, Cuda, Search};
use forebay_io::{
    DeviceAccess, DirectMode, Direction, EngineChoice, EngineKind, Handle, Options, Part, Request,
    Target, crc32c,
};
use forebay_standin::Standin;
use forebay_testkit::fault::{FaultFactory, FaultPlan, Scope, When};
use forebay_testkit::memory::pattern;
use forebay_testkit::random::Random;

/// Shorter than the parts together, longer than most of them.
const BLOCK_BYTES: usize = 64 << 10;
const FILE_BYTES: usize = 3_000_000;

fn options(engine: EngineKind, direct: DirectMode) -> Options {
    Options {
        engine: EngineChoice::Named(engine),
        block_size: BLOCK_BYTES,
        queue_depth: 8,
        parallelism: 2,
        direct,
        staging_bytes: 1 << 20,
        ..Options::default()
    }
}

/// Where parts begin in the file and in memory, and how long they are: some follow each other, some
/// in the file only, some are empty.
fn places(random: &mut Random) -> Vec<(usize, usize, usize)> {
    let (mut offset, mut address) = (0, 0);
    let mut places = Vec::new();
    while offset < FILE_BYTES - 400_000 {
        let length = match random.below(6) {
            0 => 0,
            1 => 1 + random.below(100),
            2 => 4096,
            3 => 4095 + random.below(3),
            4 => 5_000 + random.below(60_000),
            _ => 100_000 + random.below(200_000),
        };
        let length = usize::try_from(length).unwrap();
        places.push((offset, address, length));
        let gap = usize::try_from(random.below(3)).unwrap();
        let gap = [0, 0, 777][gap];
        offset += length + gap;
        address += length + [gap, 0, 4096][usize::try_from(random.below(3)).unwrap()];
    }
    places
}

fn request(
    direction: Direction,
    path: &Path,
    memory: *mut u8,
    places: &[(usize, usize, usize)],
) -> Request {
    let target = Target::Path(path.to_path_buf());
    let mut request = Request::new(direction, target, 0, memory, 0);
    request.checksums = true;
    request.parts = places
        .iter()
        .map(|&(offset, address, length)| Part {
            file: 0,
            offset: offset as u64,
            address: memory.wrapping_add(address),
            length,
            device: None,
        })
        .collect();
    request
}

/// The checksums that a run of a request gave.
fn sums_of(handle: &Handle, request: Request) -> Vec<u32> {
    // SAFETY: the callers keep the memory until this returns.
    let operation = unsafe { handle.submit(request) }.unwrap();
    operation.wait().unwrap();
    operation.checksums().unwrap()
}

fn wanted(content: &[u8], places: &[(usize, usize, usize)]) -> Vec<u32> {
    places.iter().map(|&(offset, _, length)| crc32c(&content[offset..offset + length])).collect()
}

#[test]
fn loads_and_stores_give_the_checksum_of_every_part_whatever_happens_on_the_way() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("tensors");
    for engine in EngineKind::ALL {
        for direct in [DirectMode::Auto, DirectMode::Never] {
            for seed in 0..6 {
                let plan = FaultPlan::survivable(seed);
                let factory = Arc::new(FaultFactory::new(Arc::new(engine), plan.clone()));
                let page_cache = seed % 2 == 0;
                let options = Options { page_cache, ..options(engine, direct) };
                let Ok(handle) = Handle::with_factory(options, factory) else { continue };
                let content = pattern(seed, FILE_BYTES);
                std::fs::write(&path, &content).unwrap();
                let places = places(&mut Random::new(seed));
                let what = format!("{engine} {direct:?} {plan:?}");
                let mut memory = vec![0; 2 * FILE_BYTES];
                let address = memory.as_mut_ptr();
                let load = request(Direction::Load, &path, address, &places);
                assert_eq!(sums_of(&handle, load), wanted(&content, &places), "load, {what}");
                let store = request(Direction::Store, &path, address, &places);
                assert_eq!(sums_of(&handle, store), wanted(&content, &places), "store, {what}");
                assert!(std::fs::read(&path).unwrap() == content, "{what}");
            }
        }
    }
}

#[test]
fn device_memory_has_the_same_checksums() {
    let standin = Standin::new().unwrap();
    standin.configure("delay_us=20");
    let search = Search { folders: vec![standin.folder().to_path_buf()], system: false };
    let context = Context::retain(&Cuda::load(&search).unwrap(), 0).unwrap();
    let stream = standin.stream(0);
    let memory = standin.allocate(0, 2 * FILE_BYTES);
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("tensors");
    for direct in [DirectMode::Auto, DirectMode::Never] {
        for seed in 0..4 {
            let factory =
                FaultFactory::new(Arc::new(EngineKind::Threads), FaultPlan::survivable(seed));
            let options = Options { page_cache: false, ..options(EngineKind::Threads, direct) };
            let handle = Handle::with_factory(options, Arc::new(factory)).unwrap();
            let content = pattern(seed, FILE_BYTES);
            std::fs::write(&path, &content).unwrap();
            let places = places(&mut Random::new(seed));
            for direction in [Direction::Load, Direction::Store] {
                let address = std::ptr::without_provenance_mut(memory);
                let mut request = request(direction, &path, address, &places);
                request.parts.iter_mut().for_each(|part| part.device = Some(0));
                request.devices = vec![DeviceAccess {
                    context: Arc::clone(&context),
                    stream: CallerStream(stream.handle),
                }];
                let found = sums_of(&handle, request);
                assert_eq!(found, wanted(&content, &places), "{direction:?} {direct:?} {seed}");
            }
            assert!(std::fs::read(&path).unwrap() == content);
            for &(offset, address, length) in &places {
                if length > 0 {
                    let loaded = standin.kernel_read(stream, memory + address, length);
                    assert!(loaded == content[offset..offset + length], "{offset} {length}");
                }
            }
        }
    }
    standin.free(memory);
    standin.end(stream);
    assert_eq!(standin.violations(), Vec::<String>::new());
}

#[test]
fn what_failed_or_did_not_ask_has_no_checksums() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("tensors");
    std::fs::write(&path, pattern(1, FILE_BYTES)).unwrap();
    let places = [(0, 0, FILE_BYTES)];
    let mut memory = vec![0; FILE_BYTES];
    let address = memory.as_mut_ptr();
    let handle = Handle::new(options(EngineKind::Threads, DirectMode::Auto)).unwrap();
    let silent = Request { checksums: false, ..request(Direction::Load, &path, address, &places) };
    // SAFETY: the memory is there until the end of the test.
    let operation = unsafe { handle.submit(silent) }.unwrap();
    operation.wait().unwrap();
    assert_eq!(operation.checksums(), None);

    let plan = FaultPlan::new(1).fail(When::Nth(5), Scope::Reads, 5);
    let factory = Arc::new(FaultFactory::new(Arc::new(EngineKind::Threads), plan));
    let page_cache = false;
    let options = Options { page_cache, ..options(EngineKind::Threads, DirectMode::Auto) };
    let handle = Handle::with_factory(options, factory).unwrap();
    let request = request(Direction::Load, &path, address, &places);
    // SAFETY: as above.
    let operation = unsafe { handle.submit(request) }.unwrap();
    assert_eq!(operation.wait().unwrap_err().os_code(), Some(5));
    assert_eq!(operation.checksums(), None);
}

#[test]
fn a_short_load_from_the_page_cache_has_a_checksum_too() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("tensors");
    let content = pattern(1, 1000);
    std::fs::write(&path, &content).unwrap();
    let handle = Handle::new(Options::default()).unwrap();
    let mut memory = vec![0; 1000];
    let request = request(Direction::Load, &path, memory.as_mut_ptr(), &[(0, 0, 1000)]);
    // SAFETY: the memory is there until the end of the test.
    assert!(!unsafe { handle.load_quickly(&request) }.unwrap());
    assert_eq!(sums_of(&handle, request), [crc32c(&content)]);
}

#[test]
fn thousands_of_neighbours_move_in_few_transfers() {
    const EACH: usize = 100;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("tensors");
    let content = pattern(1, FILE_BYTES);
    std::fs::write(&path, &content).unwrap();
    let places: Vec<_> =
        (0..FILE_BYTES / EACH).map(|index| (index * EACH, index * EACH, EACH)).collect();
    let handle = Handle::new(options(EngineKind::Threads, DirectMode::Auto)).unwrap();
    let mut memory = vec![0; FILE_BYTES];
    let request = request(Direction::Load, &path, memory.as_mut_ptr(), &places);
    assert_eq!(sums_of(&handle, request), wanted(&content, &places));
    assert!(memory == content);
    let transfers = handle.stats().transfers;
    assert!(transfers < 2 * (FILE_BYTES / BLOCK_BYTES) as u64 + 4, "{transfers} transfers");
}
