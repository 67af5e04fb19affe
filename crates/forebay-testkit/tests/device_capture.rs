//! Operations beside graphs that somebody captures, on the stand-in for CUDA: none of them becomes
//! part of a graph, and none breaks one.
#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit requests")]

use std::path::Path;
use std::sync::Arc;

use forebay_io::device::{CallerStream, Context, Cuda, Search};
use forebay_io::{DeviceAccess, Direction, ErrorKind, Handle, Options, Request, Result, Target};
use forebay_standin::{Standin, Stream};
use forebay_testkit::memory::pattern;

const LENGTH: usize = (3 << 20) + 77;

fn context(standin: &Standin) -> Arc<Context> {
    let folders = vec![standin.folder().to_path_buf()];
    let cuda = Cuda::load(&Search { folders, system: false }).unwrap();
    Context::retain(&cuda, 0).unwrap()
}

fn run(
    handle: &Handle,
    direction: Direction,
    path: &Path,
    (context, stream): (&Arc<Context>, Stream),
    memory: usize,
) -> Result<()> {
    let target = Target::Path(path.to_path_buf());
    let address = std::ptr::without_provenance_mut(memory);
    let mut request = Request::new(direction, target, 0, address, LENGTH);
    request.parts[0].device = Some(0);
    let stream = CallerStream(stream.handle);
    request.devices = vec![DeviceAccess { context: Arc::clone(context), stream }];
    // SAFETY: the tests free device memory, and end streams, after the operation.
    unsafe { handle.run(request) }
}

#[test]
fn an_operation_on_a_stream_that_is_captured_is_refused_and_the_next_one_works() {
    let standin = Standin::new().unwrap();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("tensor");
    let stream = standin.stream(0);
    let memory = standin.allocate(0, LENGTH);
    {
        let context = context(&standin);
        let on = (&context, stream);
        let handle = Handle::new(Options::default()).unwrap();
        standin.begin_capture(stream);
        let error = run(&handle, Direction::Store, &path, on, memory).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("before or after"), "{error}");
        assert!(!path.exists());
        standin.end_capture(stream);
        let bytes = pattern(1, LENGTH);
        standin.kernel_write(stream, memory, &bytes);
        run(&handle, Direction::Store, &path, on, memory).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
    standin.end(stream);
    standin.free(memory);
    assert_eq!(standin.violations(), Vec::<String>::new());
}

#[test]
fn operations_on_other_streams_go_on_beside_a_capture() {
    let standin = Standin::new().unwrap();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("tensor");
    let (captured, stream) = (standin.stream(0), standin.stream(0));
    let memory = standin.allocate(0, LENGTH);
    let bytes = pattern(2, LENGTH);
    {
        // Made while nothing is captured or while it is: both are common.
        let context = context(&standin);
        let on = (&context, stream);
        standin.kernel_write(stream, memory, &bytes);
        standin.begin_capture(captured);
        let handle = Handle::new(Options::default()).unwrap();
        run(&handle, Direction::Store, &path, on, memory).unwrap();
        standin.kernel_write(stream, memory, &vec![0; LENGTH]);
        run(&handle, Direction::Load, &path, on, memory).unwrap();
        assert_eq!(standin.kernel_read(stream, memory, LENGTH), bytes);
    }
    standin.end_capture(captured);
    standin.end(captured);
    standin.end(stream);
    standin.free(memory);
    assert_eq!(standin.violations(), Vec::<String>::new());
}
