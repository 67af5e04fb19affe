//! What is refused, fails, is cut short or cancelled on the way.

use std::sync::Arc;
use std::time::Duration;

use forebay_io::engine::{
    AutoFactory, Capabilities, Completion, Engine, EngineFactory, EngineOptions, Transfer,
};
use forebay_io::{
    DeviceRoute, Direction, EngineKind, Error, ErrorKind, Handle, Options, Request, Result, Target,
};
use forebay_testkit::fault::{Cut, FaultFactory, FaultPlan, Scope, When};
use forebay_testkit::memory::pattern;
use forebay_testkit::seccomp;

use crate::{BLOCK_BYTES, GRANULE, LENGTH, Rig, STAGING_BYTES, start, way_of};

/// The n-th transfer of an operation fails with a code, and what that does.
fn refuse_nth(
    settings: &str,
    (symbol, number, code): (&str, usize, i32),
    route: DeviceRoute,
) -> (Rig, Option<Error>) {
    let rig = Rig::new(&format!("delay_us=20 {settings}"));
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
            for (settings, code) in [("", 5008), ("documented=1", 5012), ("", 5030)] {
                let nth = (symbol, number, code);
                let (_, error) = refuse_nth(settings, nth, DeviceRoute::Auto);
                assert!(error.is_none(), "{symbol} {number} {code}: {error:?}");
            }
        }
    }
}

#[test]
fn where_it_was_asked_for_a_refusal_is_an_error_with_code_hint_and_place() {
    let ways = ["", "documented=1"].into_iter();
    for (symbol, settings) in ["cuFileRead", "cuFileWrite"].into_iter().zip(ways) {
        let (rig, error) = refuse_nth(settings, (symbol, 3, 5010), DeviceRoute::Gds);
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
fn errors_of_the_system_end_the_operation_and_short_transfers_go_on() {
    let rig = Rig::new("delay_us=20");
    let plan = FaultPlan::new(7).fail(When::Nth(3), Scope::Direct, libc::ENOSPC);
    let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
    let options = Options { device_route: DeviceRoute::Auto, ..rig.options() };
    let handle = Handle::with_factory(options.clone(), Arc::new(factory)).unwrap();
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    std::fs::write(rig.path("tensor"), pattern(1, LENGTH)).unwrap();
    let error = rig.load(&handle, &rig.path("tensor"), stream, (memory, LENGTH)).unwrap_err();
    assert_eq!(error.os_code(), Some(libc::ENOSPC));
    assert_eq!(way_of(&handle).0, "gds", "a drive's failure isn't cuFile's");
    // What says that it isn't supported is cuFile's way of saying so, and there is another way.
    // So may be what it has for each system call that fails.
    let told =
        [(When::Every(3), libc::EINVAL), (When::Nth(3), libc::EPERM), (When::Nth(3), libc::EIO)];
    for (when, code) in told {
        let plan = FaultPlan::new(7).fail(when, Scope::Direct, code);
        let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
        let handle = Handle::with_factory(options.clone(), Arc::new(factory)).unwrap();
        rig.moves_right(&handle, 2);
        assert_ne!(handle.stats().fallbacks, []);
    }
    let plan = FaultPlan::new(7).fail(When::Nth(3), Scope::Direct, libc::EPERM);
    let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
    let required = Options { device_route: DeviceRoute::Gds, ..rig.options() };
    let handle = Handle::with_factory(required, Arc::new(factory)).unwrap();
    let error = rig.load(&handle, &rig.path("tensor"), stream, (memory, LENGTH)).unwrap_err();
    assert!(error.to_string().contains("it doesn't say how: cannot read /"), "{error}");
    assert_eq!(error.os_code(), None, "nobody lacks a permission");
    assert!(error.to_string().contains("is the drive full"), "{error}");
    // The drive's own failure is met again, and told by the system.
    let plan = FaultPlan::new(7).fail(When::Every(1), Scope::Direct, libc::EIO);
    let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
    let handle = Handle::with_factory(options.clone(), Arc::new(factory)).unwrap();
    let error = rig.load(&handle, &rig.path("tensor"), stream, (memory, LENGTH)).unwrap_err();
    assert_eq!(error.os_code(), Some(libc::EIO));
    assert_eq!(error.engine_name(), Some("threads"));
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

/// Engines whose owners can start no thread from the first transfer of cuFile's on.
#[derive(Debug, Default)]
struct Alone(AutoFactory);

#[derive(Debug)]
struct EngineOfOne {
    inner: Box<dyn Engine>,
    is_alone: bool,
}

impl EngineFactory for Alone {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        Ok(Box::new(EngineOfOne { inner: self.0.build(options)?, is_alone: false }))
    }
}

impl Engine for EngineOfOne {
    fn kind(&self) -> EngineKind {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        if !self.is_alone && transfers.iter().any(|transfer| transfer.channel.is_some()) {
            seccomp::deny(&[libc::SYS_clone3, libc::SYS_clone], libc::EAGAIN).unwrap();
            self.is_alone = true;
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.submit(transfers) }
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        self.inner.reap(timeout, completions)
    }
}

#[test]
fn where_no_thread_can_be_started_the_host_moves_the_bytes_or_an_error_says_why() {
    let rig = Rig::new("");
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    let (path, bytes) = (rig.path("tensor"), pattern(1, LENGTH));
    std::fs::write(&path, &bytes).unwrap();
    let handle = |route| {
        let options = Options { device_route: route, parallelism: 1, ..rig.options() };
        Handle::with_factory(options, Arc::new(Alone::default())).unwrap()
    };
    let auto = handle(DeviceRoute::Auto);
    // The host's way, while the stand-in can still start the threads of streams.
    for direction in [Direction::Load, Direction::Store] {
        let request = rig.request(direction, &path, 0, stream, (memory, LENGTH));
        start(&auto, Request { checksums: true, ..request }).unwrap().wait().unwrap();
    }
    rig.moves_right(&auto, 4);
    rig.moves_right(&auto, 5);
    let stats = auto.stats();
    assert!(stats.bytes_gds == 0 && stats.bytes_device == 6 * LENGTH as u64, "{stats:?}");
    assert!(way_of(&auto).1.contains("no thread can be started"), "{:?}", way_of(&auto));

    std::fs::write(&path, &bytes).unwrap();
    let required = handle(DeviceRoute::Gds);
    for _ in 0..2 {
        let load = rig.load(&required, &path, stream, (memory, LENGTH));
        let error = load.unwrap_err();
        assert_eq!(error.path_ref(), Some(path.as_path()));
        assert!(error.to_string().contains("ulimit -u"), "{error}");
    }
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

/// Runs something while the process can have no more than so many descriptors in addition.
fn with_descriptors_left<T>(count: usize, run: impl FnOnce() -> T) -> T {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let null = || std::fs::File::open("/dev/null");
    let before = getrlimit(Resource::Nofile);
    let highest = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&null().unwrap())).unwrap();
    let limit = Rlimit { current: Some(highest + 8), ..before };
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut taken: Vec<_> = std::iter::from_fn(|| null().ok()).collect();
    taken.truncate(taken.len() - count);
    let result = run();
    drop(taken);
    setrlimit(Resource::Nofile, before).unwrap();
    result
}

#[test]
fn a_moment_without_descriptors_refuses_gds_for_that_moment_only() {
    for (settings, has_module) in [("", true), ("gds=p2pdma", false)] {
        let rig = Rig::new(settings);
        if !has_module {
            let root = rig.root.path();
            std::fs::remove_dir(root.join("proc/driver/nvidia-fs")).unwrap();
            std::fs::create_dir_all(root.join("etc")).unwrap();
            let settings = "{ \"properties\": { \"use_pci_p2pdma\": true } }";
            std::fs::write(root.join("etc/cufile.json"), settings).unwrap();
        }
        refused_for_a_moment(&rig);
    }
}

fn refused_for_a_moment(rig: &Rig) {
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    let (path, bytes) = (rig.path("tensor"), pattern(2, LENGTH));
    std::fs::write(&path, &bytes).unwrap();
    for left in 0..4 {
        let error = with_descriptors_left(left, || rig.devices.gds()).unwrap_err();
        assert_eq!(error.os_code(), Some(libc::EMFILE), "{left}: {error}");
    }
    for route in [DeviceRoute::Auto, DeviceRoute::Gds] {
        let handle = rig.handle(route);
        let load = || rig.load(&handle, &path, stream, (memory, LENGTH));
        let checked = || {
            let request = rig.request(Direction::Load, &path, 0, stream, (memory, LENGTH));
            start(&handle, Request { checksums: true, ..request }).and_then(|it| it.wait())
        };
        // Two are for the file; there is none to look at the machine, nor, once that was looked at
        // for what goes another way, at what the file is stored on.
        for known in [false, true] {
            if known {
                assert_eq!(checked().is_ok(), route == DeviceRoute::Auto);
            }
            let loaded = with_descriptors_left(2, load);
            assert_eq!(handle.stats().bytes_gds, 0);
            match (route, loaded) {
                (DeviceRoute::Auto, loaded) => loaded.unwrap(),
                (_, loaded) => assert_eq!(loaded.unwrap_err().os_code(), Some(libc::EMFILE)),
            }
        }
        load().unwrap();
        let by_gds = handle.stats().bytes_gds;
        assert!(by_gds > 0, "{route:?}");
        assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
        // Nor is there one for cuFile to open the file with, once all else is known.
        match (route, with_descriptors_left(2, load)) {
            (DeviceRoute::Auto, loaded) => loaded.unwrap(),
            (_, loaded) => assert_eq!(loaded.unwrap_err().os_code(), Some(libc::EMFILE)),
        }
        assert_eq!(handle.stats().bytes_gds, by_gds);
        load().unwrap();
        assert!(handle.stats().bytes_gds > by_gds, "{route:?}");
    }
    rig.standin.free(memory);
    rig.standin.end(stream);
    rig.no_violations();
}

#[test]
fn a_file_without_a_name_goes_through_the_host_or_is_an_error_that_says_what_cufile_lacks() {
    let rig = Rig::new("");
    let stream = rig.standin.stream(0);
    let memory = rig.standin.allocate(0, LENGTH);
    let (path, bytes) = (rig.path("tensor"), pattern(3, LENGTH));
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let load = |handle: &Handle| {
        let request = rig.request(Direction::Load, &path, 0, stream, (memory, LENGTH));
        start(handle, Request { files: vec![Target::from(&file)], ..request })?.wait()
    };
    let auto = rig.handle(DeviceRoute::Auto);
    load(&auto).unwrap();
    assert!(rig.standin.kernel_read(stream, memory, LENGTH) == bytes);
    assert_eq!(auto.stats().bytes_gds, 0);
    let error = load(&rig.handle(DeviceRoute::Gds)).unwrap_err();
    assert_eq!(error.device_code().unwrap().name, "CU_FILE_GETNEWFD_FAILED");
    assert!(error.to_string().contains("by its name"), "{error}");
    // It says nothing of other files.
    rig.moves_right(&auto, 3);
    assert!(auto.stats().bytes_gds > 0);
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
