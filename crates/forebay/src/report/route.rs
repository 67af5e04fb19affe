//! How tensors in GPU memory move to and from a directory: by which route, and what it can carry.
//!
//! Where GPUDirect Storage can be used at all is what NVIDIA's driver for it supports (release notes
//! and design guide of GPUDirect Storage): ext4 in ordered mode and XFS on NVMe drives, NFS over
//! RDMA, and some parallel file systems. Elsewhere cuFile copies through the host's memory itself,
//! its compatibility mode, which Forebay's own route does as well.

use super::gpu::GpuFacts;
use super::{Finding, Level};
use crate::topology::{Device, DeviceKind, Location, Meeting, PcieFunction};

/// File systems over a network that cuFile knows, with the transports of their own.
const PARALLEL: [&str; 4] = ["lustre", "gpfs", "wekafs", "beegfs"];

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// The drive itself.
    Gds,
    /// cuFile, through the host's memory.
    Compat,
    /// Forebay, through the host's memory.
    Host,
}

pub(super) fn findings(location: &Location, gpu: &GpuFacts) -> Vec<Finding> {
    if gpu.driver.is_none() {
        return Vec::new();
    }
    let (route, why) = judge(location, gpu);
    let say = |level, detail| Finding::new("directory.gpu_route", level, "GPU route", detail);
    let mut findings = vec![match route {
        Route::Gds => say(Level::Ok, format!("gds: {why}; stats() tell it of each file")),
        Route::Compat => {
            let detail =
                format!("host: GPUDirect Storage would itself copy (compat) through memory: {why}");
            say(Level::Info, detail)
        }
        Route::Host => say(Level::Info, format!("host, through pinned blocks: {why}")),
    }];
    findings.extend(links(location, gpu));
    findings
}

/// The route, and why it is that.
fn judge(location: &Location, gpu: &GpuFacts) -> (Route, String) {
    if gpu.libcufile.is_none() {
        return (Route::Host, "cuFile isn't here".to_owned());
    }
    if let Some(reason) = obstacle(location) {
        return (Route::Compat, reason);
    }
    let place = &location.mount.file_system;
    match &gpu.nvidia_fs {
        Some(version) => (Route::Gds, format!("{place}, through nvidia-fs {version}")),
        None if gpu.pci_p2pdma && !location.is_remote() => {
            let how = "by the kernel's own peer-to-peer transfers, where drive and board have them";
            (Route::Gds, format!("{place}, {how}"))
        }
        None => (Route::Compat, "nvidia-fs isn't loaded".to_owned()),
    }
}

/// What keeps GPUDirect Storage from a directory, if something does.
fn obstacle(location: &Location) -> Option<String> {
    let mount = &location.mount;
    let name = mount.file_system.as_str();
    if PARALLEL.contains(&name) {
        return None;
    }
    match name {
        "nfs" | "nfs4" if mount.value("proto") == Some("rdma") || mount.has("rdma") => None,
        "nfs" | "nfs4" => Some(format!("{name} without RDMA (mount option proto=rdma)")),
        "ext4" if mount.value("data").is_some_and(|mode| mode != "ordered") => {
            Some("ext4 that isn't in ordered mode (mount option data=ordered)".to_owned())
        }
        "ext4" | "xfs" => match location.devices.iter().find_map(drive_obstacle) {
            None if location.devices.is_empty() => Some("its drives aren't shown here".to_owned()),
            found => found,
        },
        _ => Some(format!("{name} isn't a file system that it supports")),
    }
}

/// What under a device isn't an NVMe drive, or keeps it from being reached.
fn drive_obstacle(device: &Device) -> Option<String> {
    let name = &device.name;
    match &device.kind {
        DeviceKind::Loop { .. } => return Some(format!("{name} is a file, not a drive")),
        DeviceKind::Memory => return Some(format!("{name} is memory, not a drive")),
        DeviceKind::Mapper { maker, .. } if maker.as_deref() == Some("CRYPT") => {
            return Some(format!("{name} is encrypted by the processor"));
        }
        _ => {}
    }
    if !device.members.is_empty() {
        return device.members.iter().find_map(drive_obstacle);
    }
    let transport = device.drive.as_ref().and_then(|drive| drive.transport.as_deref());
    match transport {
        Some("nvme" | "nvme-rdma") => None,
        Some(other) => Some(format!("{name} is {other}, not NVMe")),
        None => Some(format!("{name} isn't known to be NVMe")),
    }
}

/// What the links carry, and which GPUs are near the drives.
fn links(location: &Location, gpu: &GpuFacts) -> Option<Finding> {
    let drives = location.drives();
    let drives: Vec<&PcieFunction> =
        drives.iter().flat_map(|device| &device.drive).flat_map(|drive| &drive.functions).collect();
    let gpus: Vec<&PcieFunction> =
        gpu.gpus.iter().filter_map(|gpu| gpu.function.as_ref()).collect();
    let first = *drives.first()?;
    if gpus.is_empty() {
        return None;
    }
    let mut parts: Vec<String> = limit(&drives, &gpus).into_iter().collect();
    parts.extend(neighbours(first, &gpus));
    let meets = |drive: &PcieFunction| gpus.iter().any(|gpu| drive.meets(gpu) != Meeting::Apart);
    let level = if drives.iter().any(|drive| meets(drive)) {
        Level::Ok
    } else {
        parts.push("direct transfers cross processors: measure both routes".to_owned());
        Level::Info
    };
    Some(Finding::new("directory.gpu_link", level, "GPU link", parts.join("; ")))
}

/// The most that the links of all drives, and that of the slowest GPU, carry.
fn limit(drives: &[&PcieFunction], gpus: &[&PcieFunction]) -> Option<String> {
    let each: Option<Vec<f64>> = drives.iter().map(|drive| drive.carries()).collect();
    let drives = each.map(|each| each.iter().sum::<f64>());
    // GPUs slow an idle link down, so what it could be is what counts.
    let rates = gpus.iter().filter_map(|gpu| Some(gpu.link_max?.carries()));
    let gpu = rates.min_by(f64::total_cmp);
    let (rate, whose) = match (drives, gpu) {
        (Some(drives), Some(gpu)) if gpu < drives => (gpu, "GPU's link"),
        (Some(drives), _) => (drives, "drives' links"),
        (None, gpu) => (gpu?, "GPU's link"),
    };
    Some(format!("at most {rate:.1} GB/s, by the {whose}"))
}

/// The GPUs by where they meet a drive.
fn neighbours(drive: &PcieFunction, gpus: &[&PcieFunction]) -> Vec<String> {
    let mut found: Vec<(String, Vec<&str>)> = Vec::new();
    for gpu in gpus {
        let where_to = match drive.meets(gpu) {
            Meeting::Bridge(bridge) => format!("under one bridge ({bridge}) with"),
            Meeting::RootComplex(root) => format!("under one root complex ({root}) with"),
            Meeting::Apart => "under another root complex than".to_owned(),
        };
        match found.iter_mut().find(|(known, _)| *known == where_to) {
            Some((_, members)) => members.push(&gpu.address),
            None => found.push((where_to, vec![&gpu.address])),
        }
    }
    found.into_iter().map(|(where_to, gpus)| format!("{where_to} {}", gpus.join(", "))).collect()
}
