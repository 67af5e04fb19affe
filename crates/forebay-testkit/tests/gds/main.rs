//! Device memory by GPUDirect Storage: right bytes in the order of the caller's streams, whichever
//! files cuFile takes and whatever it refuses. On the stand-in for CUDA and cuFile, and on made-up
//! facts about the machine.
#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit requests")]

mod moving;
mod refusals;
mod routes;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_io::device::{CallerStream, Context, Devices, Search};
use forebay_io::{
    DeviceAccess, DeviceRoute, Direction, Handle, Operation, Options, Request, Result, Target,
};
use forebay_standin::{Standin, Stream};
use forebay_testkit::memory::pattern;

/// Longer than all staging blocks of the handles here, and no whole number of anything.
const LENGTH: usize = (3 << 20) + 1234;
const BLOCK_BYTES: usize = 512 << 10;
const STAGING_BYTES: usize = 1 << 20;
const GRANULE: usize = 4096;
/// Bytes around a tensor that nobody may touch.
const GUARD: usize = 100;

struct Rig {
    // Fields are dropped in order: the stand-in is the last to go.
    contexts: Vec<Arc<Context>>,
    devices: Arc<Devices>,
    root: tempfile::TempDir,
    folder: tempfile::TempDir,
    standin: Standin,
}

impl Rig {
    /// A machine on which files are on an NVMe drive, as far as it says.
    fn new(settings: &str) -> Self {
        Self::with_storage(settings, "ext4", "nvme0n1")
    }

    fn with_storage(settings: &str, system: &str, drive: &str) -> Self {
        let standin = Standin::new().unwrap();
        standin.configure(settings);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let root = tempfile::tempdir().unwrap();
        make_up(root.path(), folder.path(), system, drive);
        std::fs::create_dir_all(root.path().join("proc/driver/nvidia-fs")).unwrap();
        std::fs::write(root.path().join("proc/modules"), "nvidia_fs 1 0 - Live 0x0\n").unwrap();
        let search = Search { folders: vec![standin.folder().to_path_buf()], system: false };
        let devices = Devices::load_under(&search, root.path()).unwrap();
        let contexts = (0..2).map(|ordinal| devices.context(ordinal).unwrap()).collect();
        Self { contexts, devices, root, folder, standin }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn options(&self) -> Options {
        Options {
            block_size: BLOCK_BYTES,
            queue_depth: 8,
            staging_bytes: STAGING_BYTES,
            device_staging_bytes: STAGING_BYTES,
            // Files that a test just wrote are in the page cache.
            page_cache: false,
            devices: Some(Arc::clone(&self.devices)),
            ..Options::default()
        }
    }

    fn handle(&self, route: DeviceRoute) -> Handle {
        Handle::new(Options { device_route: route, ..self.options() }).unwrap()
    }

    fn request(
        &self,
        direction: Direction,
        path: &Path,
        offset: u64,
        stream: Stream,
        (address, length): (usize, usize),
    ) -> Request {
        let address = std::ptr::without_provenance_mut(address);
        let target = Target::Path(path.to_path_buf());
        let mut request = Request::new(direction, target, offset, address, length);
        request.parts[0].device = Some(0);
        let context = Arc::clone(&self.contexts[usize::try_from(stream.device).unwrap()]);
        request.devices = vec![DeviceAccess { context, stream: CallerStream(stream.handle) }];
        request
    }

    fn load(
        &self,
        handle: &Handle,
        path: &Path,
        stream: Stream,
        tensor: (usize, usize),
    ) -> Result<()> {
        run(handle, self.request(Direction::Load, path, 0, stream, tensor))
    }

    fn store(
        &self,
        handle: &Handle,
        path: &Path,
        stream: Stream,
        tensor: (usize, usize),
    ) -> Result<()> {
        let request = self.request(Direction::Store, path, 0, stream, tensor);
        run(handle, Request { whole_file: true, ..request })
    }

    /// Stores a tensor, loads it again and looks at every byte on the way.
    fn moves_right(&self, handle: &Handle, seed: u64) {
        let stream = self.standin.stream(0);
        round_trip(self, handle, stream, (seed, 8, GUARD as u64), LENGTH);
        self.standin.end(stream);
    }

    /// What there is but for contexts: one stays held for registering pool memory.
    fn census(&self) -> String {
        let census = self.standin.census();
        census.split_once(' ').unwrap().1.to_owned()
    }

    fn no_violations(&self) {
        assert_eq!(self.standin.violations(), Vec::<String>::new());
    }
}

/// Facts about a machine on which files of `folder` are in a file system on a drive.
fn make_up(root: &Path, folder: &Path, system: &str, drive: &str) {
    let device = std::fs::metadata(folder).unwrap().dev();
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    std::fs::create_dir_all(root.join("proc/self")).unwrap();
    let line = format!("1 0 {number} / / rw - {system} /dev/{drive} rw\n");
    std::fs::write(root.join("proc/self/mountinfo"), line).unwrap();
    let drive = root.join("sys/devices").join(drive);
    std::fs::create_dir_all(&drive).unwrap();
    std::fs::create_dir_all(root.join("sys/dev/block")).unwrap();
    std::os::unix::fs::symlink(drive, root.join("sys/dev/block").join(number)).unwrap();
}

fn run(handle: &Handle, request: Request) -> Result<()> {
    start(handle, request)?.wait()
}

fn start(handle: &Handle, request: Request) -> Result<Operation> {
    // SAFETY: the tests free device memory, and end streams, after the operation.
    unsafe { handle.submit(request) }
}

/// Stores a tensor at `shift` of an allocation and an offset of a file, loads it again, and looks at
/// all bytes on the way and around.
fn round_trip(
    rig: &Rig,
    handle: &Handle,
    stream: Stream,
    (seed, shift, offset): (u64, usize, u64),
    length: usize,
) {
    let what = format!("{length} bytes at shift {shift} and offset {offset} of {stream:?}");
    let before = usize::try_from(offset).unwrap();
    let (path, bytes) = (rig.path("tensor"), pattern(seed, length));
    let around = pattern(seed + 1, before + length + GUARD);
    std::fs::write(&path, &around).unwrap();
    let memory = rig.standin.allocate(stream.device, shift + length + GUARD);
    let tensor = (memory + shift, length);
    if length > 0 {
        rig.standin.kernel_write(stream, tensor.0, &bytes);
    }
    run(handle, rig.request(Direction::Store, &path, offset, stream, tensor)).unwrap();
    let stored = std::fs::read(&path).unwrap();
    assert!(stored[before..before + length] == bytes[..], "{what}");
    assert!(stored[..before] == around[..before], "{what}");
    assert!(stored[before + length..] == around[before + length..], "{what}");

    rig.standin.kernel_write(stream, memory, &vec![7; shift + length + GUARD]);
    run(handle, rig.request(Direction::Load, &path, offset, stream, tensor)).unwrap();
    let loaded = rig.standin.kernel_read(stream, memory, shift + length + GUARD);
    assert!(loaded[shift..shift + length] == bytes[..], "{what}");
    assert!(loaded[..shift].iter().chain(&loaded[shift + length..]).all(|byte| *byte == 7));
    rig.standin.free(memory);
}

fn way_of(handle: &Handle) -> (&'static str, String) {
    let last = handle.stats().device_routes.pop().unwrap();
    (last.route, last.reason)
}
