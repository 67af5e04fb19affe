//! Device memory by GPUDirect Storage: right bytes in the order of the caller's streams, whichever
//! files cuFile takes and whatever it refuses. On the stand-in for CUDA and cuFile, and on made-up
//! facts about the machine.
#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit requests")]

use std::any::Any;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_io::device::gds::DeviceRange;
use forebay_io::device::{CallerStream, Context, Devices, Search};
use forebay_io::{
    DeviceAccess, DeviceRoute, DirectMode, Direction, EngineChoice, EngineKind, Error, ErrorKind,
    Handle, Operation, Options, Part, Request, Result, Target,
};
use forebay_standin::{Standin, Stream};
use forebay_testkit::fault::{Cut, FaultFactory, FaultPlan, Scope, When};
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

#[test]
fn every_length_offset_and_address_comes_back_on_every_engine() {
    let rig = Rig::new("delay_us=40");
    let before = rig.census();
    for engine in EngineKind::ALL {
        let choice = EngineChoice::Named(engine);
        let route = DeviceRoute::Gds;
        let made = Handle::new(Options { engine: choice, device_route: route, ..rig.options() });
        let Ok(handle) = made else { continue };
        for device in 0..2 {
            let stream = rig.standin.stream(device);
            for length in [0, 1, 4095, 4096, 4097, 8191, 8192, 65_537, BLOCK_BYTES, LENGTH] {
                let shift = [0, 1, 64, 511, 4096][length % 5];
                let offset = [0, 1, 100, 4096, 4097][(length + 2) % 5];
                round_trip(&rig, &handle, stream, (length as u64, shift, offset), length);
            }
            rig.standin.end(stream);
        }
        let stats = handle.stats();
        // Whole granules, and nothing else, go by cuFile.
        assert!(stats.bytes_gds > stats.bytes_device && stats.bytes_device > 0, "{stats:?}");
        assert_eq!(stats.bytes_gds + stats.bytes_device, stats.bytes_read + stats.bytes_written);
        assert_eq!(stats.bytes_gds % GRANULE as u64, 0);
        assert_eq!(stats.fallbacks, []);
        assert_eq!(way_of(&handle), ("gds", "NVMe, through nvidia-fs".to_owned()));
    }
    rig.no_violations();
    assert_eq!(rig.census(), before);
}

#[test]
fn blocks_of_an_operation_are_no_longer_than_asked_for_and_share_one_registration() {
    let rig = Rig::new("delay_us=20");
    let handle = rig.handle(DeviceRoute::Auto);
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, 8 * BLOCK_BYTES);
    rig.standin.kernel_write(stream, memory, &pattern(3, 8 * BLOCK_BYTES));
    rig.store(&handle, &rig.path("a"), stream, (memory, 8 * BLOCK_BYTES)).unwrap();
    assert_eq!(rig.standin.count("cuFileWrite"), 8);
    assert_eq!(rig.standin.count("cuFileHandleRegister"), 1);
    assert_eq!(rig.standin.count("cuFileHandleDeregister"), 1);
    assert_eq!(rig.standin.count("cuFileDriverOpen"), 1);
    // Too short for registering its memory to pay.
    assert_eq!(rig.standin.count("cuFileBufRegister"), 0);
    assert!(std::fs::read(rig.path("a")).unwrap() == pattern(3, 8 * BLOCK_BYTES));
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn long_operations_have_their_memory_registered_for_as_long_as_they_run() {
    let rig = Rig::new("delay_us=20");
    let before = rig.census();
    let handle = rig.handle(DeviceRoute::Gds);
    let stream = rig.standin.stream(0);
    let length = 16 * BLOCK_BYTES + 5000;
    let memory = rig.standin.allocate(0, length);
    rig.standin.kernel_write(stream, memory, &pattern(4, length));
    rig.store(&handle, &rig.path("a"), stream, (memory, length)).unwrap();
    assert_eq!(rig.standin.count("cuFileBufRegister"), 1);
    assert_eq!(rig.standin.count("cuFileBufDeregister"), 1);
    assert_eq!(handle.stats().bytes_registered, handle.stats().bytes_gds);
    // What can't be registered moves all the same, and that is told.
    rig.standin.configure("fail=cuFileBufRegister:2+:5036");
    rig.standin.kernel_write(stream, memory, &vec![0; length]);
    rig.load(&handle, &rig.path("a"), stream, (memory, length)).unwrap();
    assert!(rig.standin.kernel_read(stream, memory, length) == pattern(4, length));
    let told = &handle.stats().fallbacks;
    assert!(told.len() == 1 && told[0].0.contains("CU_FILE_GPU_MEMORY_PINNING_FAILED"), "{told:?}");
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
    drop(handle);
    assert_eq!(rig.census(), before);
}

#[test]
fn pinned_memory_is_used_as_it_is_registered() {
    let rig = Rig::new("delay_us=20");
    let handle = rig.handle(DeviceRoute::Gds);
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    let gds = rig.devices.gds().unwrap();
    let owner: Box<dyn Any + Send> = Box::new(());
    let range = DeviceRange { start: memory, length: LENGTH };
    // SAFETY: it is unpinned before it is freed.
    unsafe { gds.buffers().pin(gds.cufile(), &rig.contexts[0], range, owner) }.unwrap();
    rig.standin.kernel_write(stream, memory, &pattern(5, LENGTH));
    // A part of what is registered.
    rig.store(&handle, &rig.path("a"), stream, (memory + 77, LENGTH - 77)).unwrap();
    assert!(std::fs::read(rig.path("a")).unwrap() == pattern(5, LENGTH)[77..]);
    assert_eq!(handle.stats().bytes_registered, handle.stats().bytes_gds);
    assert!(gds.buffers().unpin(memory));
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn transfers_come_between_the_callers_kernels() {
    let rig = Rig::new("");
    let handle = rig.handle(DeviceRoute::Gds);
    let stream = rig.standin.stream(1);
    let (path, old, new) = (rig.path("tensor"), pattern(5, LENGTH), pattern(6, LENGTH));
    let memory = rig.standin.allocate(1, LENGTH);
    let held = rig.standin.hold(stream);
    rig.standin.kernel_write(stream, memory, &old);
    let request = rig.request(Direction::Store, &path, 0, stream, (memory, LENGTH));
    let operation = start(&handle, Request { whole_file: true, ..request }).unwrap();
    assert!(!operation.wait_timeout(std::time::Duration::from_millis(50)).unwrap());
    assert_eq!(operation.bytes_done(), 0);
    drop(held);
    operation.wait().unwrap();
    assert!(std::fs::read(&path).unwrap() == old);

    std::fs::write(&path, &new).unwrap();
    let held = rig.standin.hold(stream);
    let reading = rig.standin.start_kernel_read(stream, memory, LENGTH);
    let request = rig.request(Direction::Load, &path, 0, stream, (memory, LENGTH));
    let operation = start(&handle, request).unwrap();
    assert!(!operation.wait_timeout(std::time::Duration::from_millis(50)).unwrap());
    drop(held);
    operation.wait().unwrap();
    // The host has seen its end: any stream may use the memory now.
    let other = rig.standin.stream(1);
    assert!(rig.standin.kernel_read(other, memory, LENGTH) == new);
    assert!(reading.wait(&rig.standin) == old);
    for stream in [stream, other] {
        rig.standin.end(stream);
    }
    rig.standin.free(memory);
    rig.no_violations();
}

#[test]
fn a_file_that_cufile_would_take_through_the_host_is_not_given_to_it() {
    for (settings, system, drive, reason) in [
        ("gds=compat", "ext4", "nvme0n1", "nvidia-fs isn't loaded"),
        ("", "overlay", "nvme0n1", "overlay isn't a file system"),
        ("", "xfs", "vda", "neither NVMe nor SCSI"),
        ("", "ext4", "sda", "doesn't reach SCSI here"),
    ] {
        let rig = Rig::with_storage(settings, system, drive);
        let handle = rig.handle(DeviceRoute::Auto);
        rig.moves_right(&handle, 1);
        rig.moves_right(&handle, 2);
        let (route, why) = way_of(&handle);
        assert_eq!(route, "compat", "{why}");
        assert!(why.contains(reason), "{why}");
        let stats = handle.stats();
        assert_eq!(stats.bytes_gds, 0);
        let told = format!("{:?}", stats.fallbacks);
        assert!(stats.fallbacks.len() == 1 && stats.fallbacks[0].1 == 1, "{told}");
        assert!(told.contains("no GPUDirect Storage on") && told.contains(reason), "{told}");
        assert_eq!(rig.standin.count("cuFileHandleRegister"), 0);

        // Asked for, it is an error, before a byte has moved.
        let stream = rig.standin.stream(0);
        let memory = rig.standin.allocate(0, LENGTH);
        let Ok(strict) = Handle::new(Options { device_route: DeviceRoute::Gds, ..rig.options() })
        else {
            panic!("what is missing is missing for this file only");
        };
        let error = rig.store(&strict, &rig.path("new"), stream, (memory, LENGTH)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(text.contains(reason) && text.contains("device_route=\"auto\""), "{text}");
        assert!(!rig.path("new").exists());
        rig.standin.free(memory);
        rig.standin.end(stream);
        rig.no_violations();
    }
}

#[test]
fn peer_to_peer_transfers_are_direct_without_nvidia_fs() {
    let rig = Rig::new("gds=p2pdma");
    std::fs::remove_dir(rig.root.path().join("proc/driver/nvidia-fs")).unwrap();
    std::fs::create_dir(rig.root.path().join("etc")).unwrap();
    let settings = "{ \"properties\": { \"use_pci_p2pdma\": true } }";
    std::fs::write(rig.root.path().join("etc/cufile.json"), settings).unwrap();
    let handle = rig.handle(DeviceRoute::Gds);
    rig.moves_right(&handle, 1);
    assert_eq!(way_of(&handle).1, "NVMe, by the kernel's peer-to-peer transfers");
    assert!(handle.stats().bytes_gds > 0);
    rig.no_violations();
}

#[test]
fn without_what_it_takes_cufile_is_not_even_loaded() {
    let rig = Rig::new("");
    std::fs::remove_dir(rig.root.path().join("proc/driver/nvidia-fs")).unwrap();
    let handle = rig.handle(DeviceRoute::Auto);
    rig.moves_right(&handle, 1);
    let (route, reason) = way_of(&handle);
    assert!(route == "host" && reason.contains("nvidia-fs isn't loaded"), "{reason}");
    assert_eq!(handle.stats().fallbacks, [], "most machines have none, which is nothing to tell");
    let refused = Handle::new(Options { device_route: DeviceRoute::Gds, ..rig.options() });
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("nvidia-fs isn't loaded"), "{error}");
    assert_eq!(rig.standin.count("cuFileDriverOpen"), 0);
    rig.no_violations();
}

#[test]
fn the_host_route_never_touches_cufile() {
    let rig = Rig::new("");
    let handle = rig.handle(DeviceRoute::Host);
    rig.moves_right(&handle, 1);
    assert_eq!(way_of(&handle), ("host", "device_route is \"host\"".to_owned()));
    assert_eq!(handle.stats().bytes_gds, 0);
    let calls = rig.standin.calls();
    assert!(calls.iter().all(|call| !call.starts_with("cuFile")), "{calls:?}");
    rig.no_violations();
}

#[test]
fn a_driver_that_does_not_open_is_tried_once_and_named() {
    let rig = Rig::new("gds=absent");
    let handle = rig.handle(DeviceRoute::Auto);
    rig.moves_right(&handle, 1);
    rig.moves_right(&handle, 2);
    assert_eq!(rig.standin.count("cuFileDriverOpen"), 1);
    let (route, reason) = way_of(&handle);
    assert!(route == "host" && reason.contains("CU_FILE_DRIVER_NOT_INITIALIZED"), "{reason}");
    let refused = Handle::new(Options { device_route: DeviceRoute::Gds, ..rig.options() });
    let error = refused.unwrap_err();
    assert_eq!(error.device_code().unwrap().code, 5001);
    assert!(error.to_string().contains("is nvidia-fs loaded?"), "{error}");
    assert_eq!(rig.standin.count("cuFileDriverOpen"), 1);
    rig.no_violations();
}

#[test]
fn a_file_that_cufile_refuses_goes_through_the_host_or_is_an_error_with_its_code() {
    let rig = Rig::new("gds=unsupported");
    let before = rig.census();
    let handle = rig.handle(DeviceRoute::Auto);
    for seed in 0..3 {
        rig.moves_right(&handle, seed);
    }
    // What cuFile said of the file system isn't asked again.
    assert_eq!(rig.standin.count("cuFileHandleRegister"), 1);
    let (route, reason) = way_of(&handle);
    assert!(route == "host" && reason.contains("CU_FILE_IO_NOT_SUPPORTED"), "{reason}");
    assert_eq!(handle.stats().fallbacks.len(), 1);
    let strict = rig.handle(DeviceRoute::Gds);
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    let error = rig.store(&strict, &rig.path("new"), stream, (memory, LENGTH)).unwrap_err();
    assert_eq!(error.device_code().unwrap().name, "CU_FILE_IO_NOT_SUPPORTED");
    assert_eq!(error.path_ref(), Some(rig.path("new").as_path()));
    assert!(!rig.path("new").exists());
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
    drop((handle, strict));
    assert_eq!(rig.census(), before);
}

/// The n-th transfer of an operation fails with a code, and what that does.
fn refuse_nth(symbol: &str, number: usize, code: i32, route: DeviceRoute) -> (Rig, Option<Error>) {
    let rig = Rig::new("delay_us=20");
    let before = rig.census();
    let handle = rig.handle(route);
    let stream = rig.standin.stream(0);
    let (path, bytes) = (rig.path("tensor"), pattern(9, LENGTH));
    let memory = rig.standin.allocate(0, LENGTH);
    rig.standin.configure(&format!("fail={symbol}:{number}+:{code}"));
    let error = if symbol == "cuFileRead" {
        std::fs::write(&path, &bytes).unwrap();
        rig.load(&handle, &path, stream, (memory, LENGTH)).err()
    } else {
        rig.standin.kernel_write(stream, memory, &bytes);
        rig.store(&handle, &path, stream, (memory, LENGTH)).err()
    };
    if error.is_none() {
        assert!(std::fs::read(&path).unwrap() == bytes, "{symbol} {number}");
        assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes, "{symbol} {number}");
        let stats = handle.stats();
        let done = stats.bytes_gds + stats.bytes_device;
        assert_eq!(done, LENGTH as u64, "every byte is counted once");
        assert!(stats.staging_bytes <= STAGING_BYTES as u64);
        let (taken, reason) = way_of(&handle);
        assert!(taken == "host" && reason.contains("CU_FILE_"), "{reason}");
        assert!(!stats.fallbacks.is_empty());
    }
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
    drop(handle);
    assert_eq!(rig.census(), before);
    (rig, error)
}

#[test]
fn a_transfer_that_cufile_refuses_on_the_way_is_made_through_the_host() {
    for symbol in ["cuFileRead", "cuFileWrite"] {
        for number in [1, 2, 4, 6] {
            for code in [5008, 5012, 5030] {
                let (_, error) = refuse_nth(symbol, number, code, DeviceRoute::Auto);
                assert!(error.is_none(), "{symbol} {number} {code}: {error:?}");
            }
        }
    }
}

#[test]
fn where_it_was_asked_for_a_refusal_is_an_error_with_code_hint_and_place() {
    for symbol in ["cuFileRead", "cuFileWrite"] {
        let (rig, error) = refuse_nth(symbol, 3, 5010, DeviceRoute::Gds);
        let error = error.unwrap();
        assert_eq!(error.device_code().unwrap().name, "CU_FILE_NVFS_DRIVER_ERROR");
        assert_eq!(error.path_ref(), Some(rig.path("tensor").as_path()));
        assert!(error.offset_bytes().is_some());
        assert_eq!(error.engine_name(), Some("gds"));
        assert!(error.to_string().contains("dmesg"), "{error}");
    }
}

#[test]
fn whatever_call_fails_bytes_are_right_or_an_error_says_so_and_nothing_is_left() {
    let symbols = [
        "cuFileHandleRegister",
        "cuFileBufRegister",
        "cuFileBufDeregister",
        "cuPointerGetAttributes",
        "cuEventSynchronize",
        "cuCtxPushCurrent_v2",
    ];
    let length = 16 * BLOCK_BYTES + 77;
    for (symbol, number) in symbols.into_iter().flat_map(|it| (1..=4).map(move |n| (it, n))) {
        let rig = Rig::new("delay_us=10");
        let before = rig.census();
        let handle = rig.handle(DeviceRoute::Auto);
        let stream = rig.standin.stream(0);
        let memory = rig.standin.allocate(0, length);
        let (path, bytes) = (rig.path("tensor"), pattern(number, length));
        rig.standin.kernel_write(stream, memory, &bytes);
        let number = rig.standin.count(symbol) + number;
        let code = if symbol.starts_with("cuFile") { 5030 } else { 700 };
        rig.standin.configure(&format!("fail={symbol}:{number}:{code}"));
        let what = format!("{symbol} {number}");
        // The call is one of the first operation or of a later one; the handle goes on.
        let failed = (0..4).filter(|_| match rig.store(&handle, &path, stream, (memory, length)) {
            Ok(()) => {
                assert!(std::fs::read(&path).unwrap() == bytes, "{what}");
                false
            }
            Err(error) => {
                assert!(error.device_code().is_some(), "{what}: {error}");
                true
            }
        });
        assert!(failed.count() <= 1, "{what}");
        rig.standin.synchronize(stream);
        drop(handle);
        // A registration that cuFile doesn't end stays.
        if symbol != "cuFileBufDeregister" {
            rig.standin.free(memory);
            rig.standin.end(stream);
            rig.no_violations();
            assert_eq!(rig.census(), before, "{what}");
        }
    }
}

#[test]
fn a_registration_that_fails_once_fails_nothing_under_auto() {
    let rig = Rig::new("fail=cuFileHandleRegister:1:5031");
    let handle = rig.handle(DeviceRoute::Auto);
    rig.moves_right(&handle, 1);
    // A want of descriptors passes; the load went by cuFile again.
    assert_eq!(rig.standin.count("cuFileHandleRegister"), 2);
    assert_eq!(way_of(&handle).0, "gds");
    rig.no_violations();
}

#[test]
fn errors_of_the_system_end_the_operation_and_short_transfers_go_on() {
    let rig = Rig::new("delay_us=20");
    let plan =
        FaultPlan::new(7).fail(When::Nth(3), Scope::Direct, rustix::io::Errno::IO.raw_os_error());
    let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
    let options = Options { device_route: DeviceRoute::Auto, ..rig.options() };
    let handle = Handle::with_factory(options.clone(), Arc::new(factory)).unwrap();
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    std::fs::write(rig.path("tensor"), pattern(1, LENGTH)).unwrap();
    let error = rig.load(&handle, &rig.path("tensor"), stream, (memory, LENGTH)).unwrap_err();
    assert_eq!(error.os_code(), Some(rustix::io::Errno::IO.raw_os_error()));
    assert_eq!(way_of(&handle).0, "gds", "a drive's failure isn't cuFile's");
    // What says that it isn't supported is cuFile's way of saying so, and there is another way.
    let plan = FaultPlan::new(7).fail(
        When::Every(3),
        Scope::Direct,
        rustix::io::Errno::INVAL.raw_os_error(),
    );
    let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
    let handle = Handle::with_factory(options.clone(), Arc::new(factory)).unwrap();
    rig.moves_right(&handle, 2);
    for cut in [Cut::Aligned, Cut::Ragged] {
        let plan = FaultPlan::new(8).shorten(When::Every(2), Scope::Direct, cut);
        let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
        let handle = Handle::with_factory(options.clone(), Arc::new(factory)).unwrap();
        rig.moves_right(&handle, 3);
        let stats = handle.stats();
        assert!(stats.short_transfers > 0 && stats.bytes_gds > 0, "{stats:?}");
    }
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn what_is_in_the_page_cache_comes_from_there_unless_gds_is_asked_for() {
    let rig = Rig::new("delay_us=20");
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    let (path, bytes) = (rig.path("tensor"), pattern(2, LENGTH));
    std::fs::write(&path, &bytes).unwrap();
    let options = Options { page_cache: true, ..rig.options() };
    let handle = Handle::new(options.clone()).unwrap();
    rig.load(&handle, &path, stream, (memory, LENGTH)).unwrap();
    assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
    let stats = handle.stats();
    if stats.bytes_cached > 0 {
        assert_eq!((stats.bytes_cached, stats.bytes_gds), (LENGTH as u64, 0));
        assert_eq!(way_of(&handle), ("host", "all of it is in the page cache".to_owned()));
        assert_eq!(stats.fallbacks, []);
    }
    let strict = Handle::new(Options { device_route: DeviceRoute::Gds, ..options }).unwrap();
    rig.load(&strict, &path, stream, (memory, LENGTH)).unwrap();
    assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
    assert!(strict.stats().bytes_gds > 0);
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn refused_blocks_that_are_in_the_page_cache_fit_into_staging_blocks() {
    let rig = Rig::new("delay_us=20");
    let stream = rig.standin.stream(0);
    let (path, bytes) = (rig.path("tensor"), pattern(7, LENGTH));
    std::fs::write(&path, &bytes).unwrap();
    // All but the last bytes stay in the page cache.
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    let last = (LENGTH - GRANULE) as u64;
    rustix::fs::fadvise(&file, last, None, rustix::fs::Advice::DontNeed).unwrap();
    let options = Options { page_cache: true, parallelism: 1, ..rig.options() };
    let handle = Handle::new(options).unwrap();
    let memory = rig.standin.allocate(0, LENGTH);
    rig.standin.configure("fail=cuFileRead:2+:5012");
    rig.load(&handle, &path, stream, (memory, LENGTH)).unwrap();
    assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
    let stats = handle.stats();
    assert!(stats.bytes_gds > 0, "{stats:?}");
    assert_eq!(stats.bytes_gds + stats.bytes_device, LENGTH as u64);
    assert!(stats.staging_bytes <= STAGING_BYTES as u64);
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn short_neighbours_go_by_cufile_together_and_are_registered_as_one() {
    const EACH: usize = 3001;
    let rig = Rig::new("delay_us=20");
    let handle = rig.handle(DeviceRoute::Gds);
    let stream = rig.standin.stream(0);
    // One long enough to be registered by itself, and many that aren't.
    let lengths: Vec<usize> = [16 * BLOCK_BYTES + 77].into_iter().chain([EACH; 1500]).collect();
    let total = lengths.iter().sum();
    let (path, bytes) = (rig.path("tensors"), pattern(11, total));
    let memory = rig.standin.allocate(0, total);
    rig.standin.kernel_write(stream, memory, &bytes);
    let request = |direction| {
        let mut request = rig.request(direction, &path, 0, stream, (memory, lengths[0]));
        let mut start = lengths[0];
        for &length in &lengths[1..] {
            request.parts.push(Part {
                offset: start as u64,
                address: std::ptr::without_provenance_mut(memory + start),
                length,
                ..request.parts[0]
            });
            start += length;
        }
        request
    };
    run(&handle, Request { whole_file: true, ..request(Direction::Store) }).unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes);
    rig.standin.kernel_write(stream, memory, &vec![0; total]);
    run(&handle, request(Direction::Load)).unwrap();
    assert!(rig.standin.kernel_read(stream, memory, total) == bytes);
    let stats = handle.stats();
    // All but the ragged end of either.
    assert_eq!(stats.bytes_gds, 2 * (total - total % GRANULE) as u64);
    assert!(stats.bytes_registered >= stats.bytes_gds, "{stats:?}");
    assert_eq!(rig.standin.count("cuFileBufRegister"), 2);

    // The short ones alone, which have no whole granule each.
    let mut short = request(Direction::Load);
    short.parts.remove(0);
    run(&handle, short).unwrap();
    assert!(handle.stats().bytes_gds > stats.bytes_gds + (1500 * EACH - 2 * GRANULE) as u64);
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn a_file_that_is_cut_short_on_the_way_is_said_to_be_too_short_by_either_route() {
    for route in [DeviceRoute::Auto, DeviceRoute::Gds] {
        for left in [5 * GRANULE, 5 * GRANULE + 100, 100, 0] {
            let rig = Rig::new("");
            let handle = rig.handle(route);
            let stream = rig.standin.stream(0);
            let memory = rig.standin.allocate(0, LENGTH);
            let path = rig.path("tensor");
            std::fs::write(&path, pattern(1, LENGTH)).unwrap();
            let held = rig.standin.hold(stream);
            let request = rig.request(Direction::Load, &path, 0, stream, (memory, LENGTH));
            let operation = start(&handle, request).unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(left as u64).unwrap();
            drop(held);
            let error = operation.wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ShortFile, "{route:?} {left}: {error}");
            assert_eq!(error.path_ref(), Some(path.as_path()));
            // What a file lacks isn't cuFile's fault.
            assert_eq!(handle.stats().fallbacks, [], "{route:?} {left}");
            rig.standin.free(memory);
            rig.standin.end(stream);
            rig.no_violations();
        }
    }
}

#[test]
fn files_without_direct_io_go_through_the_host() {
    let rig = Rig::new("");
    let options = Options { direct: DirectMode::Never, ..rig.options() };
    let handle = Handle::new(options.clone()).unwrap();
    rig.moves_right(&handle, 1);
    let (route, reason) = way_of(&handle);
    assert!(route == "compat" && reason.contains("direct I/O is switched off"), "{reason}");
    rig.no_violations();
}

#[test]
fn two_handles_share_the_driver_and_many_operations_leave_nothing_behind() {
    let rig = Rig::new("delay_us=10");
    let before = rig.census();
    {
        let handles = [rig.handle(DeviceRoute::Auto), rig.handle(DeviceRoute::Gds)];
        let streams = [rig.standin.stream(0), rig.standin.stream(1)];
        for round in 0..20 {
            let mut running = Vec::new();
            let mut tensors = Vec::new();
            for (index, (handle, stream)) in handles.iter().zip(streams).enumerate() {
                let (path, bytes) = (rig.path(&format!("{index}")), pattern(round, LENGTH));
                let memory = rig.standin.allocate(stream.device, LENGTH);
                rig.standin.kernel_write(stream, memory, &bytes);
                let request = rig.request(Direction::Store, &path, 0, stream, (memory, LENGTH));
                running.push(start(handle, Request { whole_file: true, ..request }).unwrap());
                tensors.push((path, bytes, memory));
            }
            for operation in running {
                operation.wait().unwrap();
            }
            for (path, bytes, memory) in tensors {
                assert!(std::fs::read(path).unwrap() == bytes);
                rig.standin.free(memory);
            }
        }
        for stream in streams {
            rig.standin.end(stream);
        }
    }
    assert_eq!(rig.standin.count("cuFileDriverOpen"), 1);
    assert_eq!(rig.standin.count("cuFileHandleRegister"), 40);
    assert_eq!(rig.census(), before);
    rig.no_violations();
}

#[test]
fn a_cancelled_operation_and_one_in_a_context_that_breaks_end() {
    let rig = Rig::new("");
    let handle = rig.handle(DeviceRoute::Gds);
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, 40 * BLOCK_BYTES);
    std::fs::write(rig.path("tensor"), pattern(1, 40 * BLOCK_BYTES)).unwrap();
    let held = rig.standin.hold(stream);
    let tensor = (memory, 40 * BLOCK_BYTES);
    let request = || rig.request(Direction::Load, &rig.path("tensor"), 0, stream, tensor);
    let operation = start(&handle, request()).unwrap();
    operation.cancel();
    drop(held);
    assert_eq!(operation.wait().unwrap_err().kind(), ErrorKind::Cancelled);
    rig.no_violations();
    let held = rig.standin.hold(stream);
    let operation = start(&handle, request()).unwrap();
    rig.standin.configure("broken=700");
    drop(held);
    let error = operation.wait().unwrap_err();
    assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    handle.close().unwrap();
}
