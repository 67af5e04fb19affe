//! What is under a directory: layers of devices, the drives, their links and queues.

use super::{Finding, Level};
use crate::ByteSize;
use crate::topology::{Device, DeviceKind, Drive, Location, PcieFunction};

pub(super) fn findings(location: &Location, nodes: usize) -> Vec<Finding> {
    let mut findings: Vec<Finding> = location.devices.iter().flat_map(layers).collect();
    for device in location.drives() {
        findings.extend(drive(device));
    }
    findings.extend(node(location, nodes));
    findings
}

/// What is between the file system and the drives.
fn layers(device: &Device) -> Vec<Finding> {
    let say = |level, detail: String| Finding::new("directory.layer", level, &device.name, detail);
    let members: Vec<&str> = device.members.iter().map(|member| &*member.name).collect();
    let members = members.join(", ");
    let own = match &device.kind {
        DeviceKind::Partition => Some(say(Level::Ok, format!("a partition of {members}"))),
        DeviceKind::Raid { level, chunk_bytes } => {
            let stripes = match chunk_bytes {
                0 => String::new(),
                bytes => format!(", stripes of {}", ByteSize(*bytes)),
            };
            Some(say(Level::Ok, format!("{level} over {members}{stripes}")))
        }
        DeviceKind::Mapper { name, maker } if maker.as_deref().is_some_and(is_crypt) => Some(say(
            Level::Warning,
            format!("{name}, encrypted, on {members}: the processor works on every byte"),
        )),
        DeviceKind::Mapper { name, maker } => {
            let maker = maker.as_deref().unwrap_or("device-mapper");
            Some(say(Level::Ok, format!("{name} ({maker}) on {members}")))
        }
        DeviceKind::Loop { file, direct: true, .. } => {
            Some(say(Level::Ok, format!("the file {}, around the page cache", file.display())))
        }
        DeviceKind::Loop { file, memory: true, .. } => {
            Some(say(Level::Ok, format!("the file {}, in memory", file.display())))
        }
        DeviceKind::Loop { file, .. } => Some(
            say(
                Level::Warning,
                format!("the file {}, through the page cache: memory fills twice", file.display()),
            )
            .fix_as_root(format!("losetup --direct-io=on /dev/{}", device.name)),
        ),
        DeviceKind::Memory => Some(say(Level::Info, "memory, not a drive".to_owned())),
        DeviceKind::Drive => None,
    };
    own.into_iter().chain(device.members.iter().flat_map(layers)).collect()
}

fn is_crypt(maker: &str) -> bool {
    maker == "CRYPT"
}

fn drive(device: &Device) -> Vec<Finding> {
    let Some(drive) = &device.drive else { return Vec::new() };
    let mut findings = vec![model(device, drive)];
    findings.extend(drive.functions.iter().filter_map(link));
    findings.extend(queue(device, drive));
    findings
}

fn model(device: &Device, drive: &Drive) -> Finding {
    let kind = drive.transport.as_deref().unwrap_or("of a kind that isn't shown");
    let model = drive.model.as_deref().map(|model| format!("{model}, ")).unwrap_or_default();
    let size = ByteSize(device.size_bytes);
    let turns = device.queue.as_ref().and_then(|queue| queue.rotational) == Some(true);
    let (level, rest) = match (drive.is_nvme(), turns) {
        (true, _) => (Level::Ok, ""),
        // What a virtual machine is told of this is whatever its host makes up.
        (false, true) if kind != "virtio" => (Level::Warning, ": it turns, so it seeks"),
        (false, _) => (Level::Info, ": not an NVMe drive of this machine"),
    };
    let detail = format!("{model}{kind}, {size}{rest}");
    Finding::new("directory.drive", level, &device.name, detail)
}

fn link(function: &PcieFunction) -> Option<Finding> {
    let link = function.link?;
    let say = |level, detail: String| {
        Finding::new("directory.link", level, &format!("PCIe {}", short(&function.address)), detail)
    };
    let own = format!(
        "×{} at {} GT/s, which carries {:.1} GB/s",
        link.width,
        link.gigatransfers,
        link.carries()
    );
    if let Some((bridge, narrow)) = &function.bottleneck {
        let detail = format!("{own}, but {bridge} on the way carries {:.1} GB/s", narrow.carries());
        return Some(say(Level::Warning, detail));
    }
    match function.link_max.filter(|_| function.is_degraded()) {
        Some(max) => {
            let detail = format!(
                "{own} of the {:.1} that it could (×{} at {} GT/s): another slot, or the firmware's \
                 settings",
                max.carries(),
                max.width,
                max.gigatransfers
            );
            let command = format!("lspci -vv -s {}", function.address);
            Some(say(Level::Warning, detail).fix_as_root(command))
        }
        None => Some(say(Level::Ok, own)),
    }
}

/// An address without the domain that nearly all devices are in.
fn short(address: &str) -> &str {
    address.strip_prefix("0000:").unwrap_or(address)
}

fn queue(device: &Device, drive: &Drive) -> Option<Finding> {
    let queue = device.queue.as_ref()?;
    let title = format!("{} queue", device.name);
    let say = |level, detail| Finding::new("directory.queue", level, &title, detail);
    let scheduler = queue.scheduler.as_deref().unwrap_or("unknown");
    let number = |value: Option<u32>| value.map_or("unknown".to_owned(), |value| value.to_string());
    let detail = format!(
        "scheduler {scheduler}, {} requests of up to {} KiB, blocks of {} bytes, polling {}",
        number(queue.nr_requests),
        number(queue.max_sectors_kb),
        number(queue.logical_block_bytes),
        if queue.io_poll == Some(true) { "on" } else { "off" },
    );
    if drive.is_nvme() && !matches!(scheduler, "none" | "unknown") {
        let detail = format!("{detail}: an NVMe drive is faster without a scheduler");
        let command = format!("echo none > /sys/block/{}/queue/scheduler", device.name);
        return Some(say(Level::Warning, detail).fix_as_root(command));
    }
    Some(say(Level::Ok, detail))
}

fn node(location: &Location, nodes: usize) -> Option<Finding> {
    let say = |detail: String| Finding::new("directory.numa", Level::Info, "NUMA node", detail);
    if nodes < 2 || location.drives().iter().all(|device| device.drive.is_none()) {
        return None;
    }
    Some(match location.numa_node() {
        Some(node) => say(format!("{node}: processors of other nodes are further from the drive"))
            .fix(format!("numactl --cpunodebind={node} --membind={node} COMMAND")),
        None => say("the drives are on several, or don't say".to_owned()),
    })
}
