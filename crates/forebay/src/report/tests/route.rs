//! Findings about the route of tensors in GPU memory, and the links that it takes.

use super::*;
use crate::report::gpu::{Gpu, GpuFacts};

/// A machine with a GPU, and all that GPUDirect Storage takes.
fn gpu_facts() -> GpuFacts {
    let link = Link { width: 16, gigatransfers: 32.0 };
    GpuFacts {
        driver: Some("570.86.10".to_owned()),
        gpus: vec![Gpu {
            model: "NVIDIA H200".to_owned(),
            function: Some(PcieFunction {
                address: "0000:42:00.0".to_owned(),
                link: Some(Link { gigatransfers: 2.5, ..link }),
                link_max: Some(link),
                bottleneck: None,
                numa_node: Some(1),
                upstream: vec!["pci0000:40".to_owned()],
            }),
        }],
        libcufile: Some("/usr/lib64/libcufile.so.0".into()),
        nvidia_fs: Some("2.22.3".to_owned()),
        ..GpuFacts::default()
    }
}

fn route(change: impl FnOnce(&mut Location, &mut GpuFacts)) -> Vec<Finding> {
    let (mut location, mut gpu) = (directory().location.unwrap(), gpu_facts());
    change(&mut location, &mut gpu);
    crate::report::route::findings(&location, &gpu)
}

const ID: &str = "directory.gpu_route";

#[test]
fn without_a_gpu_nothing_is_said_of_one() {
    assert_eq!(route(|_, gpu| gpu.driver = None), []);
    let findings = crate::report::directory::findings(&directory(), &facts());
    assert_eq!(find(&findings, ID), None);
}

#[test]
fn the_route_follows_from_what_is_loaded() {
    let words = "gds: ext4, through nvidia-fs 2.22.3";
    assert_found(&route(|_, _| ()), ID, Level::Ok, words, None);
    let findings = route(|_, gpu| gpu.nvidia_fs = None);
    assert_found(&findings, ID, Level::Info, "(compat) through memory: nvidia-fs isn't", None);
    let findings = route(|_, gpu| gpu.libcufile = None);
    assert_found(&findings, ID, Level::Info, "host, through pinned blocks: cuFile", None);
    let findings = route(|_, gpu| {
        gpu.nvidia_fs = None;
        gpu.pci_p2pdma = true;
    });
    assert_found(&findings, ID, Level::Ok, "the kernel's own peer-to-peer", None);
}

#[test]
fn the_route_follows_from_the_file_system_and_its_options() {
    let of = |file_system: &str, options: &[&str]| {
        route(|location, _| {
            location.mount.file_system = file_system.to_owned();
            location.mount.options = options.iter().map(|&option| option.to_owned()).collect();
        })
    };
    for (file_system, options) in [
        ("xfs", &["rw"][..]),
        ("ext4", &["rw", "data=ordered"]),
        ("nfs4", &["vers=4.2", "proto=rdma"]),
        ("lustre", &[]),
        ("beegfs", &[]),
    ] {
        assert_found(&of(file_system, options), ID, Level::Ok, "gds: ", None);
    }
    for (file_system, options, words) in [
        ("ext4", &["data=journal"][..], "ordered mode"),
        ("nfs4", &["proto=tcp"], "without RDMA"),
        ("btrfs", &[], "btrfs isn't a file system"),
        ("tmpfs", &[], "tmpfs isn't"),
    ] {
        assert_found(&of(file_system, options), ID, Level::Info, words, None);
    }
    let remote = route(|location, gpu| {
        location.mount.file_system = "lustre".to_owned();
        gpu.nvidia_fs = None;
        gpu.pci_p2pdma = true;
    });
    assert_found(&remote, ID, Level::Info, "nvidia-fs isn't loaded", None);
}

#[test]
fn the_route_follows_from_every_drive_below() {
    let of = |devices: Vec<Device>| route(|location, _| location.devices = devices);
    let on =
        |kind, members| vec![Device { kind, members, drive: None, queue: None, ..drive("x0") }];
    let other = |transport: &str| {
        let mut device = drive("sda");
        device.drive.as_mut().unwrap().transport = Some(transport.to_owned());
        device
    };
    let raid = || DeviceKind::Raid { level: "raid0".to_owned(), chunk_bytes: 524_288 };
    let good = of(on(raid(), vec![drive("nvme0n1"), drive("nvme1n1")]));
    assert_found(&good, ID, Level::Ok, "gds: ", None);
    let mixed = of(on(raid(), vec![drive("nvme0n1"), other("sata")]));
    assert_found(&mixed, ID, Level::Info, "sda is sata, not NVMe", None);
    let mapped =
        |maker: &str| DeviceKind::Mapper { name: "d".to_owned(), maker: Some(maker.into()) };
    let crypt = of(on(mapped("CRYPT"), vec![drive("nvme0n1")]));
    assert_found(&crypt, ID, Level::Info, "encrypted", None);
    assert_found(&of(on(mapped("LVM"), vec![drive("nvme0n1")])), ID, Level::Ok, "gds", None);
    let looped = DeviceKind::Loop { file: "/a.img".into(), direct: true, memory: false };
    assert_found(&of(on(looped, Vec::new())), ID, Level::Info, "x0 is a file", None);
    assert_found(&of(Vec::new()), ID, Level::Info, "aren't shown", None);
    assert_found(&of(vec![other("nvme-rdma")]), ID, Level::Ok, "gds", None);
    assert_found(&of(vec![other("virtio")]), ID, Level::Info, "virtio, not NVMe", None);
}

#[test]
fn the_narrowest_link_and_the_nearest_gpus_are_said() {
    let id = "directory.gpu_link";
    let words = "at most 7.9 GB/s, by the drives' links; under one root complex (pci0000:40) with \
        0000:42:00.0";
    assert_found(&route(|_, _| ()), id, Level::Ok, words, None);
    let findings = route(|location, gpu| {
        location.devices = (0..12).map(|index| drive(&format!("nvme{index}n1"))).collect();
        let mut far = gpu.gpus[0].clone();
        let function = far.function.as_mut().unwrap();
        function.address = "0000:82:00.0".to_owned();
        function.upstream = vec!["pci0000:80".to_owned()];
        gpu.gpus.push(far);
    });
    assert_found(&findings, id, Level::Ok, "at most 63.0 GB/s, by the GPU's link", None);
    let words = "under another root complex than 0000:82:00.0";
    assert_found(&findings, id, Level::Ok, words, None);
    let findings = route(|_, gpu| {
        gpu.gpus[0].function.as_mut().unwrap().upstream = vec!["pci0000:80".to_owned()];
    });
    assert_found(&findings, id, Level::Info, "cross processors", None);
    let findings = route(|location, _| location.devices.clear());
    assert_eq!(find(&findings, id), None);
}
