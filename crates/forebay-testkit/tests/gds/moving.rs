//! Bytes on their way: exactness, order, blocks, and device memory that is registered.

use std::any::Any;

use forebay_io::device::gds::DeviceRange;
use forebay_io::{
    DeviceRoute, Direction, EngineChoice, EngineKind, Handle, Options, Part, Request,
};
use forebay_testkit::memory::pattern;

use crate::{BLOCK_BYTES, GRANULE, LENGTH, Rig, round_trip, run, start, way_of};

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
