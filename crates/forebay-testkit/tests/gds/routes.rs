//! Which files go by GPUDirect Storage, and what the others do.

use forebay_io::{DeviceRoute, DirectMode, ErrorKind, Handle, Options};
use forebay_testkit::memory::pattern;

use crate::{LENGTH, Rig, way_of};

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
fn files_without_direct_io_go_through_the_host() {
    let rig = Rig::new("");
    let options = Options { direct: DirectMode::Never, ..rig.options() };
    let handle = Handle::new(options.clone()).unwrap();
    rig.moves_right(&handle, 1);
    let (route, reason) = way_of(&handle);
    assert!(route == "compat" && reason.contains("direct I/O is switched off"), "{reason}");
    rig.no_violations();
}
