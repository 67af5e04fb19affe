//! Block devices: partitions, arrays, mapped and loop devices, down to the drives.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::drive::Drive;
use super::mount::Mount;
use super::queue::Queue;
use super::{locate_at_depth, strip_root};
use crate::kernel_files::{entries, name_of, number, text};
use crate::lossy;

/// Bytes of what sysfs counts as a sector, whatever the drive's are.
const SECTOR_BYTES: u64 = 512;

/// Which sort of block device it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "sort")]
pub enum DeviceKind {
    /// A part of a drive.
    Partition,
    /// A software array.
    Raid {
        /// `raid0`, `raid1`, …, `linear`.
        level: String,
        /// Bytes on a member before the next one's turn; 0 where there are no stripes.
        chunk_bytes: u64,
    },
    /// A device of the device-mapper.
    Mapper {
        /// Its name under `/dev/mapper`.
        name: String,
        /// What made it: `LVM`, `CRYPT`, `mpath`, …
        maker: Option<String>,
    },
    /// A file as a device.
    Loop {
        /// The file.
        #[serde(serialize_with = "lossy::path")]
        file: PathBuf,
        /// It goes around the page cache.
        direct: bool,
        /// The file is in memory.
        memory: bool,
    },
    /// Memory as a device.
    Memory,
    /// A drive.
    Drive,
}

impl DeviceKind {
    /// Whether its bytes are in memory, as far as the device itself says.
    pub fn is_memory(&self) -> bool {
        matches!(self, Self::Memory | Self::Loop { memory: true, .. })
    }
}

/// A block device and what it is made of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Its name under `/dev`.
    pub name: String,
    /// Which sort it is.
    pub kind: DeviceKind,
    /// Bytes.
    pub size_bytes: u64,
    /// How requests get to it; a partition's are its drive's.
    pub queue: Option<Queue>,
    /// What the drive says of itself, for a drive.
    pub drive: Option<Drive>,
    /// What it is made of: a partition's drive, an array's members, what a loop device's file is on.
    pub members: Vec<Device>,
}

impl Device {
    /// Adds the devices below which there is nothing.
    pub(super) fn collect_lowest<'a>(&'a self, found: &mut Vec<&'a Self>) {
        if self.members.is_empty() {
            found.push(self);
        }
        for member in &self.members {
            member.collect_lowest(found);
        }
    }

    /// Reads a device by its directory in `sys/devices`.
    fn read(root: &Path, block: &Path, depth: usize) -> Self {
        let name = name_of(block);
        let (kind, members) = match depth.checked_sub(1) {
            Some(depth) => kind_and_members(root, block, &name, depth),
            None => (DeviceKind::Drive, Vec::new()),
        };
        let sectors: u64 = number(block.join("size")).unwrap_or(0);
        Self {
            kind: kind.clone(),
            size_bytes: sectors.saturating_mul(SECTOR_BYTES),
            queue: Queue::read(&block.join("queue")),
            drive: (kind == DeviceKind::Drive).then(|| Drive::read(block)),
            members,
            name,
        }
    }
}

fn kind_and_members(
    root: &Path,
    block: &Path,
    name: &str,
    depth: usize,
) -> (DeviceKind, Vec<Device>) {
    let slaves = || {
        let links = entries(block.join("slaves"));
        let found = links.into_iter().filter_map(|link| link.canonicalize().ok());
        found.map(|slave| Device::read(root, &slave, depth)).collect()
    };
    if block.join("partition").exists() {
        let drive = block.parent().map(|drive| Device::read(root, drive, depth));
        return (DeviceKind::Partition, drive.into_iter().collect());
    }
    if let Some(level) = text(block.join("md/level")) {
        let chunk_bytes = number(block.join("md/chunk_size")).unwrap_or(0);
        return (DeviceKind::Raid { level, chunk_bytes }, slaves());
    }
    if let Some(mapped) = text(block.join("dm/name")) {
        let maker =
            text(block.join("dm/uuid")).and_then(|uuid| Some(uuid.split_once('-')?.0.to_owned()));
        return (DeviceKind::Mapper { name: mapped, maker }, slaves());
    }
    if let Some(file) = text(block.join("loop/backing_file")) {
        return looped(root, block, &file, depth);
    }
    // /dev/ram0 of brd, /dev/zram0.
    let memory = ["ram", "zram"].iter().any(|kind| {
        let rest = name.strip_prefix(kind).unwrap_or_default();
        !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit())
    });
    (if memory { DeviceKind::Memory } else { DeviceKind::Drive }, Vec::new())
}

fn looped(root: &Path, block: &Path, file: &str, depth: usize) -> (DeviceKind, Vec<Device>) {
    let file = PathBuf::from(file.strip_suffix(" (deleted)").unwrap_or(file));
    let direct = number::<u32>(block.join("loop/dio")) == Some(1);
    let below = locate_at_depth(root, &file, depth).ok();
    let memory = below.as_ref().is_some_and(super::Location::is_memory);
    let devices = below.map(|below| below.devices).unwrap_or_default();
    (DeviceKind::Loop { file, direct, memory }, devices)
}

/// The devices that a mount is on.
pub(super) fn under_mount(root: &Path, mount: &Mount, depth: usize) -> Vec<Device> {
    let (major, minor) = mount.device;
    let numbered = root.join(format!("sys/dev/block/{major}:{minor}"));
    let blocks: Vec<PathBuf> = if major != 0 && numbered.exists() {
        vec![numbered]
    } else {
        // Of no one device: the source names one, or several with colons between (bcachefs).
        let names = mount.source.split(':').filter(|name| name.starts_with("/dev/"));
        names.filter_map(|name| named(root, Path::new(name))).collect()
    };
    let blocks = match (mount.file_system.as_str(), blocks.first()) {
        ("btrfs", Some(first)) => btrfs_members(root, first).unwrap_or(blocks),
        _ => blocks,
    };
    let whole = blocks.into_iter().filter_map(|block| block.canonicalize().ok());
    whole.map(|block| Device::read(root, &block, depth)).collect()
}

/// The directory of a device by its name under `/dev`, which can be a link (`/dev/mapper/…`).
fn named(root: &Path, name: &Path) -> Option<PathBuf> {
    let target = root.join(strip_root(name)).canonicalize().ok();
    let candidates = [target.as_deref().map(name_of), Some(name_of(name))];
    let found =
        candidates.into_iter().flatten().map(|name| root.join("sys/class/block").join(name));
    let mut found = found.filter(|directory| directory.exists());
    found.next().or_else(|| {
        let mapped = name_of(name);
        entries(root.join("sys/class/block"))
            .into_iter()
            .find(|block| text(block.join("dm/name")).is_some_and(|name| name == mapped))
    })
}

/// All devices of the btrfs that has one of them.
fn btrfs_members(root: &Path, one: &Path) -> Option<Vec<PathBuf>> {
    let name = name_of(&one.canonicalize().ok()?);
    entries(root.join("sys/fs/btrfs")).into_iter().find_map(|file_system| {
        let members = entries(file_system.join("devices"));
        members.iter().any(|member| name_of(member) == name).then_some(members)
    })
}
