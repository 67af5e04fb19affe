//! Device memory through staging blocks: right bytes, in the order of the caller's streams, whatever
//! fails. On the stand-in for CUDA, whose checker finds uses of memory that nothing orders.
#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit requests")]

use std::sync::Arc;

use forebay_io::{
    DirectMode, Direction, EngineChoice, EngineKind, ErrorKind, Handle, Operation, Options, Part,
    Request, Result, Target,
};
use forebay_standin::Stream;
use forebay_testkit::device::DeviceRig;
use forebay_testkit::fault::{FaultFactory, FaultPlan, Scope, When};
use forebay_testkit::memory::pattern;

/// Longer than all staging blocks of the handles here, and no whole number of anything.
const LENGTH: usize = (3 << 20) + 1234;
const STAGING_BYTES: usize = 1 << 20;
/// Bytes around a tensor that nobody may touch.
const GUARD: usize = 64;

fn rig(settings: &str) -> DeviceRig {
    DeviceRig::new(settings, env!("CARGO_TARGET_TMPDIR"))
}

fn start(handle: &Handle, request: Request) -> Result<Operation> {
    // SAFETY: the tests free device memory, and end streams, after the operation.
    unsafe { handle.submit(request) }
}

fn run(handle: &Handle, request: Request) -> Result<()> {
    // SAFETY: as above.
    unsafe { handle.run(request) }
}

fn options() -> Options {
    Options {
        block_size: 256 << 10,
        queue_depth: 8,
        parallelism: 2,
        device_staging_bytes: STAGING_BYTES,
        ..Options::default()
    }
}

/// Stores a tensor at `shift` of an allocation, loads it again, and looks at all bytes on the way.
fn round_trip(rig: &DeviceRig, handle: &Handle, stream: Stream, shift: usize, length: usize) {
    let what = format!("{length} bytes at shift {shift} of {stream:?}");
    let (path, bytes) = (rig.path("tensor"), pattern(length as u64, length));
    std::fs::write(&path, pattern(0, length + 2 * GUARD)).unwrap();
    let memory = rig.standin.allocate(stream.device, shift + length + GUARD);
    let tensor = (memory + shift, length);
    if length > 0 {
        rig.standin.kernel_write(stream, tensor.0, &bytes);
    }
    let offset = GUARD as u64;
    run(handle, rig.request(Direction::Store, &path, offset, stream, tensor)).unwrap();
    let stored = std::fs::read(&path).unwrap();
    let around = pattern(0, length + 2 * GUARD);
    assert!(stored[GUARD..GUARD + length] == bytes[..], "{what}");
    assert_eq!(stored[..GUARD], around[..GUARD], "{what}");
    assert_eq!(stored[GUARD + length..], around[GUARD + length..], "{what}");

    rig.standin.kernel_write(stream, memory, &vec![7; shift + length + GUARD]);
    run(handle, rig.request(Direction::Load, &path, offset, stream, tensor)).unwrap();
    let loaded = rig.standin.kernel_read(stream, memory, shift + length + GUARD);
    assert!(loaded[shift..shift + length] == bytes[..], "{what}");
    assert!(loaded[..shift].iter().chain(&loaded[shift + length..]).all(|byte| *byte == 7));
    rig.standin.free(memory);
    rig.no_violations();
}

#[test]
fn every_length_and_address_comes_back_on_every_engine_direct_and_buffered() {
    let rig = rig("delay_us=40");
    let before = rig.standin.census();
    for engine in EngineKind::ALL {
        for direct in [DirectMode::Auto, DirectMode::Never] {
            let choice = EngineChoice::Named(engine);
            let made = Handle::new(Options { engine: choice, direct, ..options() });
            let Ok(handle) = made else { continue };
            for device in 0..2 {
                let stream = rig.standin.stream(device);
                for length in [0, 1, 511, 4095, 4096, 65_537, (1 << 20) + 1] {
                    round_trip(&rig, &handle, stream, [1, 64, 4096][length % 3], length);
                }
                rig.standin.end(stream);
            }
            let stats = handle.stats();
            assert_eq!(stats.bytes_device, stats.bytes_read + stats.bytes_written);
            assert_eq!(stats.bytes_direct, 0);
        }
    }
    assert!(rig.standin.count("cuMemcpyHtoDAsync_v2") > 0);
    assert_eq!(rig.standin.census().split(' ').nth(1), before.split(' ').nth(1), "streams");
}

#[test]
fn memory_is_bounded_by_the_staging_budget() {
    let rig = rig("delay_us=100");
    let handle = Handle::new(options()).unwrap();
    let stream = rig.standin.stream(0);
    let (path, bytes) = (rig.path("tensor"), pattern(3, LENGTH));
    std::fs::write(&path, &bytes).unwrap();
    let memory = rig.standin.allocate(0, LENGTH);
    for _ in 0..3 {
        let request = rig.request(Direction::Load, &path, 0, stream, (memory, LENGTH));
        run(&handle, request).unwrap();
    }
    assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
    let stats = handle.stats();
    assert!(stats.staging_bytes <= STAGING_BYTES as u64, "{stats:?}");
    assert_eq!(stats.bytes_device, 3 * LENGTH as u64);
    assert_eq!(stats.fallbacks, Vec::new());
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn a_store_waits_for_the_kernel_that_makes_the_tensor() {
    let rig = rig("");
    let handle = Handle::new(options()).unwrap();
    let stream = rig.standin.stream(1);
    let (path, bytes) = (rig.path("tensor"), pattern(5, LENGTH));
    let memory = rig.standin.allocate(1, LENGTH);
    let held = rig.standin.hold(stream);
    rig.standin.kernel_write(stream, memory, &bytes);
    let request = rig.request(Direction::Store, &path, 0, stream, (memory, LENGTH));
    let operation = start(&handle, Request { whole_file: true, ..request }).unwrap();
    assert!(!operation.wait_timeout(std::time::Duration::from_millis(50)).unwrap());
    assert_eq!(operation.bytes_done(), 0);
    drop(held);
    operation.wait().unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn a_load_waits_for_the_kernel_that_still_reads_and_comes_before_the_next_one() {
    let rig = rig("");
    let handle = Handle::new(options()).unwrap();
    // The default stream of a device, by its handle.
    let stream = Stream { device: 0, handle: 0 };
    let (path, old, new) = (rig.path("tensor"), pattern(5, LENGTH), pattern(6, LENGTH));
    std::fs::write(&path, &new).unwrap();
    let memory = rig.standin.allocate(0, LENGTH);
    rig.standin.poke(memory, &old);
    let held = rig.standin.hold(stream);
    let reading = rig.standin.start_kernel_read(stream, memory, LENGTH);
    let request = rig.request(Direction::Load, &path, 0, stream, (memory, LENGTH));
    let operation = start(&handle, request).unwrap();
    assert!(!operation.wait_timeout(std::time::Duration::from_millis(50)).unwrap());
    drop(held);
    operation.wait().unwrap();
    // The host has seen the last copy: any stream may use the memory now.
    let other = rig.standin.stream(0);
    assert!(rig.standin.kernel_read(other, memory, LENGTH) == new);
    assert!(reading.wait(&rig.standin) == old);
    rig.standin.free(memory);
    rig.standin.end(other);
    rig.no_violations();
}

#[test]
fn one_request_moves_memory_of_the_host_and_of_both_devices() {
    let rig = rig("delay_us=50");
    let handle = Handle::new(options()).unwrap();
    let streams = [rig.standin.stream(0), rig.standin.stream(1)];
    let (path, bytes) = (rig.path("tensors"), pattern(8, 3 * LENGTH));
    let memory: Vec<usize> =
        streams.iter().map(|stream| rig.standin.allocate(stream.device, LENGTH)).collect();
    let mut host = bytes[2 * LENGTH..].to_vec();
    for (index, stream) in streams.iter().enumerate() {
        rig.standin.kernel_write(*stream, memory[index], &bytes[index * LENGTH..][..LENGTH]);
    }
    let request = |direction, host: &mut Vec<u8>| {
        let address = host.as_mut_ptr();
        let mut request =
            Request::new(direction, Target::Path(path.clone()), 2 * LENGTH as u64, address, LENGTH);
        request.parts.extend((0..2).map(|index| Part {
            file: 0,
            offset: (index * LENGTH) as u64,
            address: std::ptr::without_provenance_mut(memory[index]),
            length: LENGTH,
            device: Some(index),
        }));
        request.devices = streams.iter().map(|stream| rig.access(*stream)).collect();
        request
    };
    let store = Request { whole_file: true, ..request(Direction::Store, &mut host) };
    run(&handle, store).unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    host.fill(0);
    for (index, stream) in streams.iter().enumerate() {
        rig.standin.kernel_write(*stream, memory[index], &vec![0; LENGTH]);
    }
    run(&handle, request(Direction::Load, &mut host)).unwrap();
    assert!(host == bytes[2 * LENGTH..]);
    for (index, stream) in streams.iter().enumerate() {
        let loaded = rig.standin.kernel_read(*stream, memory[index], LENGTH);
        assert!(loaded == bytes[index * LENGTH..][..LENGTH], "device {index}");
        rig.standin.free(memory[index]);
        rig.standin.end(*stream);
    }
    rig.no_violations();
}

#[test]
fn a_request_waits_for_each_of_the_streams_that_it_names_on_a_device() {
    let rig = rig("");
    let handle = Handle::new(Options { parallelism: 1, ..options() }).unwrap();
    let streams = [rig.standin.stream(0), rig.standin.stream(0)];
    let (path, bytes) = (rig.path("tensors"), pattern(12, 2 * LENGTH));
    let memory = streams.map(|_| rig.standin.allocate(0, LENGTH));
    rig.standin.kernel_write(streams[0], memory[0], &bytes[..LENGTH]);
    let held = rig.standin.hold(streams[1]);
    rig.standin.kernel_write(streams[1], memory[1], &bytes[LENGTH..]);
    let mut store = rig.request(Direction::Store, &path, 0, streams[0], (memory[0], LENGTH));
    store.parts.push(Part {
        file: 0,
        offset: LENGTH as u64,
        address: std::ptr::without_provenance_mut(memory[1]),
        length: LENGTH,
        device: Some(1),
    });
    store.devices.push(rig.access(streams[1]));
    let operation = start(&handle, store).unwrap();
    assert!(!operation.wait_timeout(std::time::Duration::from_millis(50)).unwrap());
    drop(held);
    operation.wait().unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    for (memory, stream) in memory.into_iter().zip(streams) {
        rig.standin.free(memory);
        rig.standin.end(stream);
    }
    rig.no_violations();
}

#[test]
fn many_operations_of_many_streams_keep_apart() {
    const EACH: usize = 300_007;
    let rig = rig("delay_us=100 seed=11");
    let handle = Handle::new(options()).unwrap();
    let streams: Vec<Stream> = (0..6).map(|index| rig.standin.stream(index % 2)).collect();
    let memory: Vec<usize> =
        streams.iter().map(|stream| rig.standin.allocate(stream.device, EACH)).collect();
    for round in 0..4u64 {
        let bytes = |index: usize| pattern(round * 10 + index as u64, EACH);
        let path = |index: usize| rig.path(&format!("{round}-{index}"));
        let start = |direction, index: usize| {
            let place = (memory[index], EACH);
            let request = rig.request(direction, &path(index), 0, streams[index], place);
            start(&handle, request).unwrap()
        };
        let all = 0..streams.len();
        for index in all.clone() {
            rig.standin.kernel_write(streams[index], memory[index], &bytes(index));
        }
        let stores: Vec<_> = all.clone().map(|index| start(Direction::Store, index)).collect();
        for store in stores {
            store.wait().unwrap();
        }
        for index in all.clone() {
            assert!(std::fs::read(path(index)).unwrap() == bytes(index));
            rig.standin.kernel_write(streams[index], memory[index], &vec![0; EACH]);
        }
        let loads: Vec<_> = all.clone().map(|index| start(Direction::Load, index)).collect();
        for load in loads {
            load.wait().unwrap();
        }
        for index in all {
            let loaded = rig.standin.kernel_read(streams[index], memory[index], EACH);
            assert!(loaded == bytes(index), "round {round}, stream {index}");
        }
    }
    for (memory, stream) in memory.into_iter().zip(streams) {
        rig.standin.free(memory);
        rig.standin.end(stream);
    }
    rig.no_violations();
}

#[test]
fn cancelled_and_dropped_operations_let_go_of_memory_only_when_copies_are_over() {
    for (direction, copy) in
        [(Direction::Load, "cuMemcpyHtoDAsync_v2"), (Direction::Store, "cuMemcpyDtoHAsync_v2")]
    {
        let rig = rig("delay_us=2000");
        let before = rig.standin.census();
        let stream = rig.standin.stream(0);
        let path = rig.path("tensor");
        std::fs::write(&path, pattern(1, LENGTH)).unwrap();
        let handle = Handle::new(options()).unwrap();
        let memory = rig.standin.allocate(0, LENGTH);
        let start_one = || {
            let request = rig.request(direction, &path, 0, stream, (memory, LENGTH));
            start(&handle, request).unwrap()
        };
        // Copies wait for the stream, and the staging blocks don't hold the whole tensor.
        let held = rig.standin.hold(stream);
        let operation = start_one();
        while rig.standin.count(copy) == 0 {
            std::thread::yield_now();
        }
        operation.cancel();
        drop(held);
        assert_eq!(operation.wait().unwrap_err().kind(), ErrorKind::Cancelled);
        // The stand-in says so if a copy may still be using what is freed.
        rig.standin.free(memory);
        let memory = rig.standin.allocate(0, LENGTH);
        let request = rig.request(direction, &path, 0, stream, (memory, LENGTH));
        drop(start(&handle, request).unwrap());
        drop((handle, operation));
        rig.standin.free(memory);
        rig.standin.end(stream);
        rig.no_violations();
        let pinned =
            |census: &str| census.split(' ').take(4).map(str::to_owned).collect::<Vec<_>>();
        let (now, then) = (pinned(&rig.standin.census()), pinned(&before));
        // One context more is held for the registration of staging blocks.
        assert_eq!(now[1..], then[1..], "streams, events and allocations");
    }
}

#[test]
fn whatever_call_of_the_driver_fails_is_an_error_and_the_next_operation_works() {
    let symbols = [
        "cuCtxPushCurrent_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamCreate",
        "cuStreamWaitEvent",
    ];
    for symbol in symbols {
        // One block, and many.
        for (length, number) in [(1000, 1), (1000, 2), (LENGTH, 1), (LENGTH, 2), (LENGTH, 7)] {
            let rig = rig(&format!("delay_us=30 fail={symbol}:{number}:719"));
            let stream = rig.standin.stream(0);
            let (path, bytes) = (rig.path("tensor"), pattern(2, length));
            let mut failures = 0;
            let handle = Handle::new(options()).unwrap();
            for direction in [Direction::Store, Direction::Load, Direction::Store, Direction::Load]
            {
                let memory = rig.standin.allocate(0, length);
                if direction == Direction::Store {
                    rig.standin.kernel_write(stream, memory, &bytes);
                } else {
                    std::fs::write(&path, &bytes).unwrap();
                }
                let request = rig.request(direction, &path, 0, stream, (memory, length));
                match run(&handle, request) {
                    Err(error) => {
                        failures += 1;
                        assert_eq!(error.device_code().unwrap().code, 719, "{symbol}: {error}");
                        rig.standin.synchronize(stream);
                    }
                    Ok(()) if direction == Direction::Store => {
                        assert!(std::fs::read(&path).unwrap() == bytes, "{symbol} {number}");
                    }
                    Ok(()) => {
                        assert!(rig.standin.kernel_read(stream, memory, length) == bytes);
                    }
                }
                rig.standin.free(memory);
            }
            let planned = rig.standin.count(symbol) >= number;
            assert!(failures <= usize::from(planned), "{symbol} {number}: {failures} failures");
            assert!(planned || number > 2, "{symbol} was called too seldom for the test");
            rig.standin.end(stream);
            rig.no_violations();
        }
    }
}

#[test]
fn a_context_that_breaks_ends_operations_with_its_error() {
    let rig = rig("");
    let stream = rig.standin.stream(0);
    let path = rig.path("tensor");
    std::fs::write(&path, pattern(1, LENGTH)).unwrap();
    let memory = rig.standin.allocate(0, LENGTH);
    let handle = Handle::new(options()).unwrap();
    let held = rig.standin.hold(stream);
    rig.standin.kernel_write(stream, memory, &[0]);
    let request = rig.request(Direction::Load, &path, 0, stream, (memory, LENGTH));
    let operation = start(&handle, request).unwrap();
    rig.standin.configure("broken=700");
    drop(held);
    let error = operation.wait().unwrap_err();
    assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(error.operation_name(), Some("load"));
    drop(handle);
    rig.standin.configure("broken=0");
    rig.standin.synchronize(stream);
    rig.standin.end(stream);
}

#[test]
fn a_drive_that_fails_ends_operations_when_their_copies_are_over() {
    for (direction, scope) in [(Direction::Load, Scope::Reads), (Direction::Store, Scope::Writes)] {
        let rig = rig("delay_us=500");
        let stream = rig.standin.stream(0);
        let path = rig.path("tensor");
        std::fs::write(&path, pattern(1, LENGTH)).unwrap();
        let memory = rig.standin.allocate(0, LENGTH);
        let plan = FaultPlan::new(1).fail(When::Nth(5), scope, 5);
        let factory = Arc::new(FaultFactory::new(Arc::new(EngineKind::Threads), plan));
        // Nothing is taken from the page cache without the engine.
        let handle =
            Handle::with_factory(Options { page_cache: false, ..options() }, factory).unwrap();
        let request = rig.request(direction, &path, 0, stream, (memory, LENGTH));
        assert_eq!(run(&handle, request).unwrap_err().os_code(), Some(5));
        rig.standin.free(memory);
        rig.standin.end(stream);
        rig.no_violations();
    }
}

#[test]
fn staging_that_cannot_be_registered_is_slower_and_told() {
    let rig = rig("delay_us=30 fail=cuMemHostRegister_v2:1+:2");
    let handle = Handle::new(options()).unwrap();
    let stream = rig.standin.stream(0);
    let (path, bytes) = (rig.path("tensor"), pattern(3, 500_000));
    std::fs::write(&path, &bytes).unwrap();
    let memory = rig.standin.allocate(0, bytes.len());
    let request = rig.request(Direction::Load, &path, 0, stream, (memory, bytes.len()));
    run(&handle, request).unwrap();
    assert!(rig.standin.kernel_read(stream, memory, bytes.len()) == bytes);
    let fallbacks = handle.stats().fallbacks;
    assert!(fallbacks[0].0.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{fallbacks:?}");
    assert!(rig.standin.violations().iter().all(|text| text.contains("unregistered")));
    rig.standin.free(memory);
    rig.standin.end(stream);
}

#[test]
fn a_part_of_a_device_that_the_request_does_not_name_is_refused() {
    let rig = rig("");
    let handle = Handle::new(options()).unwrap();
    let stream = rig.standin.stream(0);
    let path = rig.path("tensor");
    let mut request = rig.request(Direction::Store, &path, 0, stream, (4096, 10));
    request.parts[0].device = Some(1);
    let error = run(&handle, request).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("device 1, but there are 1"), "{error}");
    assert!(!path.exists());
    rig.standin.end(stream);
}
