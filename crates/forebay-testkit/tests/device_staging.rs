//! Staging blocks for devices: as large as planned, the drive busy while copies wait and the other
//! way round, and operations over memory of the host and of devices that end with as little staging
//! as there can be. On the stand-in for CUDA, which says in which order things were done, not how fast.
#![expect(unsafe_code, reason = "these are tests, and submit requests")]

use std::sync::Arc;

use forebay_io::engine::record::RecordFactory;
use forebay_io::{
    Direction, EngineChoice, EngineKind, Handle, Options, Part, Pool, PoolOptions, Request, Target,
};
use forebay_standin::Stream;
use forebay_testkit::device::DeviceRig;
use forebay_testkit::memory::pattern;

/// Staging blocks of a worker by default.
const BLOCKS: usize = 16;
/// Bytes of one of them.
const BLOCK_BYTES: usize = 2 << 20;

fn rig(settings: &str) -> DeviceRig {
    DeviceRig::new(settings, env!("CARGO_TARGET_TMPDIR"))
}

fn all_of(
    rig: &DeviceRig,
    direction: Direction,
    stream: Stream,
    memory: usize,
    bytes: usize,
) -> Request {
    rig.request(direction, &rig.path("tensor"), 0, stream, (memory, bytes))
}

fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..20_000 {
        if done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("{what}: it didn't come to that");
}

#[test]
fn the_drive_reads_ahead_of_copies_in_whole_blocks_up_to_the_budget() {
    const LENGTH: usize = (BLOCKS + 4) * BLOCK_BYTES;
    let rig = rig("delay_us=0");
    let stream = rig.standin.stream(0);
    let bytes = pattern(1, LENGTH);
    std::fs::write(rig.path("tensor"), &bytes).unwrap();
    let memory = rig.standin.allocate(0, LENGTH);
    let factory = RecordFactory::new(Arc::new(EngineKind::Threads));
    let recording = factory.recording();
    let options = Options { parallelism: 1, device_staging_bytes: 32 << 20, ..Options::default() };
    let handle = Handle::with_factory(options, Arc::new(factory)).unwrap();
    let held = rig.standin.hold(stream);
    rig.standin.kernel_write(stream, memory, &[0]);
    // SAFETY: the memory is freed after the operation.
    let operation =
        unsafe { handle.submit(all_of(&rig, Direction::Load, stream, memory, LENGTH)) }.unwrap();
    // No copy can land, yet every block is read and its copy enqueued.
    until("all blocks are read", || recording.completions().len() == BLOCKS);
    until("all copies are enqueued", || rig.standin.count("cuMemcpyHtoDAsync_v2") == BLOCKS as u64);
    assert_eq!(operation.bytes_done(), 0);
    assert_eq!(recording.transfers().len(), BLOCKS, "there is no block for more");
    drop(held);
    operation.wait().unwrap();
    assert!(recording.transfers().iter().all(|transfer| transfer.length == BLOCK_BYTES));
    assert_eq!(rig.standin.count("cuMemcpyHtoDAsync_v2"), (LENGTH / BLOCK_BYTES) as u64);
    assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
    assert_eq!(handle.stats().staging_bytes, (BLOCKS * BLOCK_BYTES) as u64);
    assert_eq!(handle.stats().fallbacks, Vec::new());
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn copies_from_a_device_are_enqueued_ahead_of_the_drive() {
    const LENGTH: usize = 6 * BLOCK_BYTES;
    let rig = rig("delay_us=0");
    let stream = rig.standin.stream(1);
    let bytes = pattern(2, LENGTH);
    let memory = rig.standin.allocate(1, LENGTH);
    let factory = RecordFactory::new(Arc::new(EngineKind::Threads));
    let recording = factory.recording();
    let options = Options { parallelism: 1, ..Options::default() };
    let handle = Handle::with_factory(options, Arc::new(factory)).unwrap();
    let held = rig.standin.hold(stream);
    rig.standin.kernel_write(stream, memory, &bytes);
    // SAFETY: the memory is freed after the operation.
    let operation =
        unsafe { handle.submit(all_of(&rig, Direction::Store, stream, memory, LENGTH)) }.unwrap();
    until("all copies are enqueued", || rig.standin.count("cuMemcpyDtoHAsync_v2") == 6);
    let is_write = |length: &usize| *length == BLOCK_BYTES;
    let writes = || recording.transfers().iter().map(|it| it.length).filter(is_write).count();
    // That room is reserved for the file meanwhile is no transfer of a block.
    assert_eq!(writes(), 0);
    drop(held);
    operation.wait().unwrap();
    assert_eq!(writes(), 6);
    assert!(std::fs::read(rig.path("tensor")).unwrap() == bytes);
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn operations_over_host_and_devices_end_with_the_least_staging() {
    const EACH: usize = 300_007;
    for engine in EngineKind::ALL {
        for (queue_depth, budget) in [(1, None), (2, None), (7, None), (7, Some(512 << 10))] {
            let rig = rig("delay_us=20");
            let pool = Pool::new(PoolOptions { budget_bytes: budget, ..PoolOptions::default() });
            let options = Options {
                engine: EngineChoice::Named(engine),
                queue_depth,
                parallelism: 1,
                staging_bytes: 128 << 10,
                device_staging_bytes: 128 << 10,
                page_cache: false,
                pool: Some(pool),
                ..Options::default()
            };
            let Ok(handle) = Handle::new(options) else { continue };
            let streams = [rig.standin.stream(0), rig.standin.stream(1)];
            let memory = streams.map(|stream| rig.standin.allocate(stream.device, EACH));
            let bytes = pattern(5, 4 * EACH);
            // Off by one, so that the host's bytes are staged too.
            let mut host = vec![0; 2 * EACH + 1];
            host[1..].copy_from_slice(&bytes[2 * EACH..]);
            let request = |direction, host: &mut [u8]| {
                let mut request = Request::new(
                    direction,
                    Target::Path(rig.path("tensor")),
                    0,
                    host.as_mut_ptr(),
                    0,
                );
                let part = |index: usize, address, device| Part {
                    file: 0,
                    offset: (index * EACH) as u64,
                    address,
                    length: EACH,
                    device,
                };
                let on = |index: usize| std::ptr::without_provenance_mut(memory[index]);
                request.parts = vec![
                    part(2, host[1..].as_mut_ptr(), None),
                    part(0, on(0), Some(0)),
                    part(3, host[1 + EACH..].as_mut_ptr(), None),
                    part(1, on(1), Some(1)),
                ];
                request.devices = streams.iter().map(|stream| rig.access(*stream)).collect();
                request
            };
            for (index, stream) in streams.iter().enumerate() {
                rig.standin.kernel_write(*stream, memory[index], &bytes[index * EACH..][..EACH]);
            }
            // SAFETY: the memory is freed after the operations.
            unsafe { handle.run(request(Direction::Store, &mut host)) }.unwrap();
            assert!(
                std::fs::read(rig.path("tensor")).unwrap() == bytes,
                "{engine:?} {queue_depth}"
            );
            host.fill(0);
            for (index, stream) in streams.iter().enumerate() {
                rig.standin.kernel_write(*stream, memory[index], &vec![0; EACH]);
            }
            // SAFETY: as above.
            unsafe { handle.run(request(Direction::Load, &mut host)) }.unwrap();
            assert!(host[1..] == bytes[2 * EACH..], "{engine:?} {queue_depth}");
            for (index, stream) in streams.iter().enumerate() {
                let loaded = rig.standin.kernel_read(*stream, memory[index], EACH);
                assert!(loaded == bytes[index * EACH..][..EACH], "{engine:?} {queue_depth}");
                rig.standin.free(memory[index]);
                rig.standin.end(*stream);
            }
            assert!(handle.stats().staging_bytes <= 256 << 10);
            rig.no_violations();
        }
    }
}
