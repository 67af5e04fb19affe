//! Devices that come, break, are reset and go, and several of them at once. On the stand-in for CUDA.
#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit requests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_io::device::{CallerStream, Event, Stream as OurStream};
use forebay_io::memory::ALIGNMENT_DEFAULT;
use forebay_io::{
    Direction, ErrorKind, Handle, Operation, Options, Pool, PoolOptions, Request, Result,
};
use forebay_standin::Stream;
use forebay_testkit::device::DeviceRig;
use forebay_testkit::memory::pattern;

/// No whole number of anything, and more than a worker stages at once.
const LENGTH: usize = (1 << 20) + 333;

fn rig(settings: &str) -> DeviceRig {
    DeviceRig::new(settings, env!("CARGO_TARGET_TMPDIR"))
}

fn all_of(
    rig: &DeviceRig,
    direction: Direction,
    path: &Path,
    stream: Stream,
    memory: usize,
) -> Request {
    rig.request(direction, path, 0, stream, (memory, LENGTH))
}

/// A tensor on a device, and a file with other bytes.
fn tensor(rig: &DeviceRig, stream: Stream, name: &str) -> (usize, PathBuf) {
    let path = rig.path(name);
    std::fs::write(&path, pattern(9, LENGTH)).unwrap();
    (rig.standin.allocate(stream.device, LENGTH), path)
}

fn start(handle: &Handle, request: Request) -> Result<Operation> {
    // SAFETY: the tests free device memory after the operation.
    unsafe { handle.submit(request) }
}

fn run(handle: &Handle, request: Request) -> Result<()> {
    start(handle, request)?.wait()
}

fn options() -> Options {
    Options {
        block_size: 128 << 10,
        queue_depth: 4,
        parallelism: 2,
        device_staging_bytes: 1 << 20,
        ..Options::default()
    }
}

#[test]
fn threads_move_tensors_of_both_devices_whatever_context_they_have() {
    let rig = rig("delay_us=50");
    let handle = Handle::new(options()).unwrap();
    std::thread::scope(|scope| {
        for worker in 0..4i32 {
            let (rig, handle) = (&rig, &handle);
            scope.spawn(move || {
                let stream = rig.standin.stream(worker % 2);
                let (memory, path) = tensor(rig, stream, &format!("{worker}"));
                // Each second thread has the other device's context, as its user may.
                let _current = (worker < 2).then(|| rig.standin.make_current(1 - stream.device));
                let before = rig.standin.current();
                for round in 0..5u64 {
                    let bytes = pattern(round * 10 + u64::from(worker.unsigned_abs()), LENGTH);
                    rig.standin.kernel_write(stream, memory, &bytes);
                    let store = all_of(rig, Direction::Store, &path, stream, memory);
                    run(handle, store).unwrap();
                    assert_eq!(rig.standin.current(), before);
                    assert!(std::fs::read(&path).unwrap() == bytes, "{worker}, {round}");
                    rig.standin.kernel_write(stream, memory, &vec![0; LENGTH]);
                    let load = all_of(rig, Direction::Load, &path, stream, memory);
                    run(handle, load).unwrap();
                    assert_eq!(rig.standin.current(), before);
                    assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
                }
                rig.standin.free(memory);
                rig.standin.end(stream);
            });
        }
    });
    rig.no_violations();
}

#[test]
fn a_context_that_breaks_leaves_the_other_device_alone() {
    let rig = rig("delay_us=50");
    let streams = [rig.standin.stream(0), rig.standin.stream(1)];
    let (broken, broken_path) = tensor(&rig, streams[0], "broken");
    let (whole, whole_path) = tensor(&rig, streams[1], "whole");
    let handle = Handle::new(options()).unwrap();
    let held = [rig.standin.hold(streams[0]), rig.standin.hold(streams[1])];
    for (stream, memory) in streams.iter().zip([broken, whole]) {
        rig.standin.kernel_write(*stream, memory, &pattern(1, LENGTH));
    }
    let first = all_of(&rig, Direction::Store, &broken_path, streams[0], broken);
    let second = all_of(&rig, Direction::Store, &whole_path, streams[1], whole);
    let (first, second) = (start(&handle, first).unwrap(), start(&handle, second).unwrap());
    rig.standin.configure("broken=700@0");
    drop(held);
    let error = first.wait().unwrap_err();
    assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    second.wait().unwrap();
    assert!(std::fs::read(&whole_path).unwrap() == pattern(1, LENGTH));
    // The handle serves the device that is left, and goes on refusing the other.
    for _ in 0..3 {
        run(&handle, all_of(&rig, Direction::Load, &whole_path, streams[1], whole)).unwrap();
        let load = all_of(&rig, Direction::Load, &broken_path, streams[0], broken);
        assert_eq!(run(&handle, load).unwrap_err().device_code().unwrap().code, 700);
    }
    assert!(rig.standin.kernel_read(streams[1], whole, LENGTH) == pattern(1, LENGTH));
    drop(handle);
    rig.standin.configure("broken=0");
    rig.no_violations();
}

#[test]
fn a_stream_of_another_device_is_refused_with_what_to_look_at() {
    let rig = rig("");
    let handle = Handle::new(options()).unwrap();
    let (theirs, other) = (rig.standin.stream(0), rig.standin.stream(1));
    let (memory, path) = tensor(&rig, theirs, "tensor");
    let mut request = all_of(&rig, Direction::Store, &path, theirs, memory);
    request.devices[0].stream = CallerStream(other.handle);
    let error = run(&handle, request).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_INVALID_HANDLE");
    assert!(error.to_string().contains("is the stream one of another device"), "{error}");
    assert!(std::fs::read(&path).unwrap() == pattern(9, LENGTH), "nothing was stored");
    rig.standin.free(memory);
    rig.standin.end(theirs);
    rig.standin.end(other);
}

#[test]
fn the_callers_stream_may_end_as_soon_as_the_request_is_submitted() {
    let rig = rig("delay_us=2000");
    let handle = Handle::new(options()).unwrap();
    let bytes = pattern(4, LENGTH);
    for direction in [Direction::Store, Direction::Load] {
        let stream = rig.standin.stream(1);
        let (memory, path) = tensor(&rig, stream, "tensor");
        rig.standin.kernel_write(stream, memory, &bytes);
        let operation = start(&handle, all_of(&rig, direction, &path, stream, memory)).unwrap();
        rig.standin.end(stream);
        operation.wait().unwrap();
        let found = match direction {
            Direction::Store => std::fs::read(&path).unwrap() == bytes,
            Direction::Load => rig.standin.peek(memory, LENGTH) == pattern(9, LENGTH),
        };
        assert!(found, "{direction:?}");
        rig.standin.free(memory);
    }
    rig.no_violations();
}

#[test]
fn a_thousand_operations_leave_nothing_behind() {
    // One block, so that no two copies of an operation meet, which would each have an event.
    const EACH: usize = 64 << 10;
    let rig = rig("delay_us=0");
    // One worker, so that it has met all there is to meet after a few.
    let handle = Handle::new(Options { parallelism: 1, ..options() }).unwrap();
    let streams = [rig.standin.stream(0), rig.standin.stream(1)];
    let (first, path) = tensor(&rig, streams[0], "tensor");
    let (second, _) = tensor(&rig, streams[1], "other");
    let token = Arc::new(());
    let round = |number: usize| {
        let (stream, memory) = [(streams[0], first), (streams[1], second)][number % 2];
        let direction = if number % 4 < 2 { Direction::Store } else { Direction::Load };
        let mut request = all_of(&rig, direction, &path, stream, memory);
        request.parts[0].length = EACH;
        request.keep = Some(Box::new(Arc::clone(&token)));
        // Every tenth is cancelled, every seventh fails: they leave nothing either.
        if number.is_multiple_of(7) {
            request.parts[0].offset = 1 << 61;
        }
        let started = start(&handle, request);
        assert!(started.is_ok() || number.is_multiple_of(7), "{started:?}");
        if let Ok(operation) = started {
            if number.is_multiple_of(10) {
                operation.cancel();
            }
            let _ = operation.wait();
        }
        // A worker may hold the operation for a moment longer; what it keeps goes last.
        while Arc::strong_count(&token) > 1 {
            std::thread::yield_now();
        }
    };
    (0..40).for_each(round);
    let (census, stats) = (rig.standin.census(), handle.stats());
    (40..1040).for_each(round);
    assert_eq!(rig.standin.census(), census);
    assert_eq!(handle.stats().staging_bytes, stats.staging_bytes);
    assert!(handle.stats().bytes_device > stats.bytes_device + (500 * EACH) as u64);
    for (stream, memory) in streams.iter().zip([first, second]) {
        rig.standin.free(memory);
        rig.standin.end(*stream);
    }
    rig.no_violations();
}

#[test]
fn a_held_stream_keeps_waits_cancels_and_closing_from_nothing_but_the_end() {
    let rig = rig("");
    let stream = rig.standin.stream(0);
    let (memory, path) = tensor(&rig, stream, "tensor");
    let (other, other_path) = tensor(&rig, stream, "other");
    let handle = Handle::new(options()).unwrap();
    let held = rig.standin.hold(stream);
    rig.standin.kernel_write(stream, memory, &[1]);
    let load = all_of(&rig, Direction::Load, &path, stream, memory);
    let store = all_of(&rig, Direction::Store, &other_path, stream, other);
    let (load, store) = (start(&handle, load).unwrap(), start(&handle, store).unwrap());
    assert!(!load.wait_timeout(Duration::from_millis(30)).unwrap());
    load.cancel();
    assert!(!handle.drain(Some(Duration::from_millis(30))).unwrap());
    // What is cancelled isn't over while a copy may still write to its memory.
    assert!(!load.is_done());
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| handle.close());
        let nothing = || {
            let mut request = all_of(&rig, Direction::Load, &path, stream, memory);
            request.parts[0].length = 0;
            request
        };
        while start(&handle, nothing()).is_ok() {
            std::thread::yield_now();
        }
        assert!(!closing.is_finished());
        drop(held);
        closing.join().unwrap().ok();
    });
    assert_eq!(load.wait().unwrap_err().kind(), ErrorKind::Cancelled);
    store.wait().unwrap();
    rig.standin.free(memory);
    rig.standin.free(other);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn a_device_that_is_reset_is_an_error_with_a_reason_and_nothing_hangs() {
    let rig = rig("delay_us=300");
    let (lost, kept) = (rig.standin.stream(0), rig.standin.stream(1));
    let (memory, path) = tensor(&rig, lost, "lost");
    let (other, other_path) = tensor(&rig, kept, "kept");
    let handle = Handle::new(options()).unwrap();
    run(&handle, all_of(&rig, Direction::Load, &path, lost, memory)).unwrap();
    run(&handle, all_of(&rig, Direction::Load, &other_path, kept, other)).unwrap();
    let under_way = start(&handle, all_of(&rig, Direction::Load, &path, lost, memory)).unwrap();
    rig.standin.reset_device(0);
    // It may have been done before; what comes after is told.
    let _ = under_way.wait();
    let error = run(&handle, all_of(&rig, Direction::Load, &path, lost, memory)).unwrap_err();
    assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_CONTEXT_IS_DESTROYED");
    assert!(error.to_string().contains("cudaDeviceReset"), "{error}");
    drop(handle);
    // Registered memory went with the context: it is unmapped without a word to the driver.
    rig.standin.free(other);
    rig.standin.end(kept);
    assert!(!rig.standin.violations().iter().any(|text| text.contains("unmapped")));
}

#[test]
fn everything_goes_quietly_after_the_driver_has_gone() {
    let rig = rig("delay_us=300");
    let stream = rig.standin.stream(0);
    let (memory, path) = tensor(&rig, stream, "tensor");
    let pool = Pool::new(PoolOptions { touch: false, ..PoolOptions::default() });
    let context = &rig.contexts[0];
    context.cuda().pin_pools(context).unwrap();
    let buffer = pool.allocate(3 << 20, ALIGNMENT_DEFAULT).unwrap();
    let (ours, event) = (OurStream::new(context).unwrap(), Event::new(context).unwrap());
    let handle = Handle::new(options()).unwrap();
    run(&handle, all_of(&rig, Direction::Load, &path, stream, memory)).unwrap();
    let under_way = start(&handle, all_of(&rig, Direction::Load, &path, stream, memory)).unwrap();
    rig.standin.configure("deinitialised=1");
    let _ = under_way.wait();
    let error = run(&handle, all_of(&rig, Direction::Load, &path, stream, memory)).unwrap_err();
    assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_DEINITIALIZED");
    let late = pool.allocate(3 << 20, ALIGNMENT_DEFAULT).unwrap();
    let unregistered = rig.standin.count("cuMemHostUnregister");
    drop((handle, under_way, event, ours, buffer, late, pool));
    assert_eq!(rig.standin.count("cuMemHostUnregister"), unregistered);
    let DeviceRig { contexts, standin, .. } = rig;
    drop(contexts);
    standin.configure("deinitialised=0");
    standin.free(memory);
    standin.end(stream);
    assert_eq!(standin.violations(), Vec::<String>::new());
}
