//! Operations beside graphs that somebody captures, on the stand-in for CUDA: none of them becomes
//! part of a graph, and none breaks one.
#![expect(unsafe_code, reason = "these are tests, and submit requests")]

use std::path::Path;

use forebay_io::{Direction, ErrorKind, Handle, Options, Result};
use forebay_standin::Stream;
use forebay_testkit::device::DeviceRig;
use forebay_testkit::memory::pattern;

const LENGTH: usize = (3 << 20) + 77;

fn rig() -> DeviceRig {
    DeviceRig::new("", env!("CARGO_TARGET_TMPDIR"))
}

fn run(
    rig: &DeviceRig,
    handle: &Handle,
    direction: Direction,
    path: &Path,
    (stream, memory): (Stream, usize),
) -> Result<()> {
    let request = rig.request(direction, path, 0, stream, (memory, LENGTH));
    // SAFETY: the tests free device memory, and end streams, after the operation.
    unsafe { handle.run(request) }
}

#[test]
fn an_operation_on_a_stream_that_is_captured_is_refused_and_the_next_one_works() {
    let rig = rig();
    let standin = &rig.standin;
    let path = rig.path("tensor");
    let stream = standin.stream(0);
    let memory = standin.allocate(0, LENGTH);
    let handle = Handle::new(Options::default()).unwrap();
    standin.begin_capture(stream);
    let refused = run(&rig, &handle, Direction::Store, &path, (stream, memory));
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("before or after"), "{error}");
    assert!(!path.exists());
    standin.end_capture(stream);
    let bytes = pattern(1, LENGTH);
    standin.kernel_write(stream, memory, &bytes);
    run(&rig, &handle, Direction::Store, &path, (stream, memory)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    drop(handle);
    standin.end(stream);
    standin.free(memory);
    rig.no_violations();
}

#[test]
fn operations_on_other_streams_go_on_beside_a_capture() {
    let rig = rig();
    let standin = &rig.standin;
    let path = rig.path("tensor");
    let (captured, stream) = (standin.stream(0), standin.stream(0));
    let memory = standin.allocate(0, LENGTH);
    let bytes = pattern(2, LENGTH);
    standin.kernel_write(stream, memory, &bytes);
    standin.begin_capture(captured);
    // Made while a graph is captured, so that all that is made for it is too.
    let handle = Handle::new(Options::default()).unwrap();
    run(&rig, &handle, Direction::Store, &path, (stream, memory)).unwrap();
    standin.kernel_write(stream, memory, &vec![0; LENGTH]);
    run(&rig, &handle, Direction::Load, &path, (stream, memory)).unwrap();
    assert_eq!(standin.kernel_read(stream, memory, LENGTH), bytes);
    drop(handle);
    standin.end_capture(captured);
    standin.end(captured);
    standin.end(stream);
    standin.free(memory);
    rig.no_violations();
}
