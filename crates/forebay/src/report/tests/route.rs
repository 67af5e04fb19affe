//! Findings about the route of tensors in GPU memory, and the links that it takes.

use super::*;
use crate::report::gpu::{CudaFacts, Gpu, GpuFacts};

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

fn route(change: impl FnOnce(&mut DirectoryFacts, &mut GpuFacts)) -> Vec<Finding> {
    let (mut found, mut gpu) = (directory(), gpu_facts());
    change(&mut found, &mut gpu);
    crate::report::route::findings(&found, &gpu)
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
    let words = "gds: NVMe, through nvidia-fs 2.22.3";
    assert_found(&route(|_, _| ()), ID, Level::Ok, words, None);
    let findings = route(|_, gpu| gpu.nvidia_fs = None);
    assert_found(&findings, ID, Level::Info, "(compat) through memory: nvidia-fs isn't", None);
    let findings = route(|_, gpu| gpu.libcufile = None);
    assert_found(&findings, ID, Level::Info, "host, through pinned blocks: cuFile", None);
    let findings = route(|_, gpu| gpu.modules_hidden = true);
    assert_found(&findings, ID, Level::Info, "host, through pinned blocks: /proc/modules", None);
    let findings = route(|_, gpu| {
        gpu.nvidia_fs = None;
        gpu.pci_p2pdma = true;
    });
    assert_found(&findings, ID, Level::Ok, "the kernel's own peer-to-peer", None);
    let findings = route(|_, gpu| {
        gpu.driver = None;
        gpu.cuda = Some(CudaFacts { devices: vec!["RTX".to_owned()], ..CudaFacts::default() });
    });
    assert_found(&findings, ID, Level::Info, "the kernel shows no NVIDIA driver", None);
}

#[test]
fn the_route_follows_from_what_the_directory_is_on() {
    let obstacle = "btrfs isn't a file system that cuFile reaches".to_owned();
    let findings = route(|found, _| {
        found.storage = Some(StorageFacts { kind: None, obstacle: Some(obstacle) });
    });
    assert_found(&findings, ID, Level::Info, "(compat) through memory: btrfs isn't", None);
    let findings = route(|found, _| found.storage = None);
    assert_found(&findings, ID, Level::Info, "isn't shown", None);
    let findings = route(|found, _| found.alignment.as_mut().unwrap().direct = false);
    assert_found(&findings, ID, Level::Info, "(compat) through memory: its files", None);
    let findings = route(|found, gpu| {
        found.location.as_mut().unwrap().mount.file_system = "lustre".to_owned();
        gpu.nvidia_fs = None;
        gpu.pci_p2pdma = true;
    });
    assert_found(&findings, ID, Level::Info, "nvidia-fs isn't loaded", None);
}

#[test]
fn the_narrowest_link_and_the_nearest_gpus_are_said() {
    let id = "directory.gpu_link";
    let words = "at most 7.9 GB/s, by the drives' links; under one root complex (pci0000:40) with \
        0000:42:00.0";
    assert_found(&route(|_, _| ()), id, Level::Ok, words, None);
    let findings = route(|found, gpu| {
        found.location.as_mut().unwrap().devices =
            (0..12).map(|index| drive(&format!("nvme{index}n1"))).collect();
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
    let findings = route(|found, _| found.location = None);
    assert_eq!(find(&findings, id), None);
}
