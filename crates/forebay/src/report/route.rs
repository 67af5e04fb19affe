//! How tensors in GPU memory move to and from a directory: by which route, and what it can carry.
//!
//! On what GPUDirect Storage can be used is known to [`forebay_io::device::gds`]; whether its driver
//! reaches that, cuFile says to handles, which look at each file. Here cuFile isn't loaded. Elsewhere
//! it copies through the host's memory itself, its compatibility mode, which Forebay's own route does
//! as well.

use forebay_io::device::gds::MODULES_HIDDEN;

use super::directory::DirectoryFacts;
use super::gpu::GpuFacts;
use super::{Finding, Level};
use crate::topology::{Location, Meeting, PcieFunction};

pub(super) fn findings(found: &DirectoryFacts, gpu: &GpuFacts) -> Vec<Finding> {
    if !gpu.is_driven() {
        return Vec::new();
    }
    let mut findings = vec![route(found, gpu)];
    findings.extend(found.location.as_ref().and_then(|location| links(location, gpu)));
    findings
}

/// The route, and why it is that.
fn route(found: &DirectoryFacts, gpu: &GpuFacts) -> Finding {
    let say = |level, detail| Finding::new("directory.gpu_route", level, "GPU route", detail);
    let direct = |how: String| say(Level::Ok, format!("gds: {how}; stats() tell it of each file"));
    let host = |why: &str| say(Level::Info, format!("host, through pinned blocks: {why}"));
    let compat = |why: &str| {
        let detail = "host: GPUDirect Storage would itself copy (compat) through memory";
        say(Level::Info, format!("{detail}: {why}"))
    };
    if gpu.libcufile.is_none() {
        return host("cuFile isn't here");
    }
    if gpu.driver.is_none() {
        return host("the kernel shows no NVIDIA driver");
    }
    if gpu.modules_hidden {
        return host(MODULES_HIDDEN);
    }
    let Some(storage) = &found.storage else {
        return host("what the directory is on isn't shown here");
    };
    let Some(kind) = &storage.kind else {
        return compat(storage.obstacle.as_deref().unwrap_or("it is on nothing that is known"));
    };
    if found.alignment.as_ref().is_some_and(|alignment| !alignment.direct) {
        return compat("its files aren't open for direct I/O");
    }
    let is_remote = found.location.as_ref().is_none_or(Location::is_remote);
    match &gpu.nvidia_fs {
        Some(version) => direct(format!("{kind}, through nvidia-fs {version}")),
        None if gpu.pci_p2pdma && !is_remote => direct(format!(
            "{kind}, by the kernel's own peer-to-peer transfers, where drive and board have them"
        )),
        None => compat("nvidia-fs isn't loaded"),
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
