//! What a file is stored on, as GPUDirect Storage tells kinds of storage apart: read from `/proc`
//! and `/sys` under a root.
//!
//! cuFile takes files of any file system and moves their bytes through the host's memory where it
//! can't do better, without a word. So what it could do better with is found out here.
//!
//! # Invariants
//!
//! - What can't be read because the process or the system has run out of something is an error, and
//!   no answer: a layer that wasn't seen could be one that changes bytes.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::error::{Error, Result};
use crate::syscalls::is_shortage;

/// The most layers of devices on each other that are followed: md on dm on dm on partitions is 4.
const LAYERS_MAX: usize = 8;

/// A kind of storage that cuFile may reach from a device, by the bits of
/// `CUfileDriverStatusFlags_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Lustre.
    Lustre,
    /// `WekaFS`.
    WekaFs,
    /// NFS over RDMA.
    Nfs,
    /// IBM Storage Scale.
    Gpfs,
    /// ext4 or XFS on NVMe drives in this machine.
    Nvme,
    /// ext4 or XFS on NVMe drives elsewhere.
    NvmeOverFabrics,
    /// ext4 or XFS on SCSI drives.
    Scsi,
    /// `BeeGFS`.
    BeeGfs,
    /// `ScateFS`.
    ScateFs,
    /// virtiofs.
    VirtioFs,
}

impl Storage {
    /// Its bit in the driver's status flags.
    pub fn status_flag(self) -> u32 {
        1 << match self {
            Self::Lustre => 0,
            Self::WekaFs => 1,
            Self::Nfs => 2,
            Self::Gpfs => 3,
            Self::Nvme => 4,
            Self::NvmeOverFabrics => 5,
            Self::Scsi => 6,
            Self::BeeGfs => 9,
            Self::ScateFs => 12,
            Self::VirtioFs => 13,
        }
    }

    /// What messages call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lustre => "Lustre",
            Self::WekaFs => "WekaFS",
            Self::Nfs => "NFS over RDMA",
            Self::Gpfs => "GPFS",
            Self::Nvme => "NVMe",
            Self::NvmeOverFabrics => "NVMe over fabrics",
            Self::Scsi => "SCSI",
            Self::BeeGfs => "BeeGFS",
            Self::ScateFs => "ScateFS",
            Self::VirtioFs => "virtiofs",
        }
    }
}

/// Where a file is, as `statx(2)` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Whereabouts {
    /// Number of the device that it is on; a block device's own.
    pub device: (u32, u32),
    /// Number of the mount; `None` for a block device.
    pub mount: Option<u64>,
}

/// What keeps the kind of storage from being told.
enum Obstacle {
    /// It is none that cuFile reaches.
    Kind(String),
    /// Something has run out at the moment.
    Shortage(io::Error),
}

impl Obstacle {
    fn of(error: io::Error, what: &str) -> Self {
        if error.raw_os_error().is_some_and(is_shortage) {
            return Self::Shortage(error);
        }
        Self::Kind(format!("{what}: {error}"))
    }
}

impl From<String> for Obstacle {
    fn from(reason: String) -> Self {
        Self::Kind(reason)
    }
}

impl From<&str> for Obstacle {
    fn from(reason: &str) -> Self {
        Self::Kind(reason.to_owned())
    }
}

/// The kind of storage of a file, or why it is none that cuFile reaches.
///
/// # Errors
///
/// What the process or the system has run out of; the next call may know more.
pub fn storage_of(root: &Path, place: Whereabouts) -> Result<std::result::Result<Storage, String>> {
    match look(root, place) {
        Ok(storage) => Ok(Ok(storage)),
        Err(Obstacle::Kind(reason)) => Ok(Err(reason)),
        Err(Obstacle::Shortage(error)) => {
            Err(Error::from_io(error, "cannot look at what the file is stored on"))
        }
    }
}

fn look(root: &Path, place: Whereabouts) -> Found {
    let Some(mount) = place.mount else { return drive(root, place.device) };
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo"))
        .map_err(|error| Obstacle::of(error, "the mounts can't be read"))?;
    let Mounted { kind, options } =
        find(&mounts, mount, place.device).ok_or("its mount isn't in /proc/self/mountinfo")?;
    match kind {
        "ext4" | "xfs" => {
            let journals = |option: &str| matches!(option, "data=journal" | "data=writeback");
            if let Some(option) = options.iter().find(|option| journals(option)) {
                let text =
                    format!("{kind} is mounted with {option}, and must be with data=ordered");
                return Err(text.into());
            }
            drive(root, place.device)
        }
        "nfs" | "nfs4" if options.contains(&"proto=rdma") => Ok(Storage::Nfs),
        "nfs" | "nfs4" => Err("NFS is mounted without proto=rdma".into()),
        "lustre" => Ok(Storage::Lustre),
        "wekafs" => Ok(Storage::WekaFs),
        "gpfs" => Ok(Storage::Gpfs),
        "beegfs" => Ok(Storage::BeeGfs),
        "scatefs" => Ok(Storage::ScateFs),
        "virtiofs" => Ok(Storage::VirtioFs),
        other => Err(format!("{other} isn't a file system that cuFile reaches").into()),
    }
}

/// A line of `/proc/self/mountinfo` (`proc(5)`).
struct Mounted<'a> {
    kind: &'a str,
    options: Vec<&'a str>,
}

/// The mount with a number; where numbers differ (kernels before 5.8 don't tell them), the last one
/// of the device.
fn find(mounts: &str, number: u64, (major, minor): (u32, u32)) -> Option<Mounted<'_>> {
    let numbered = |line: &&str| line.split(' ').next() == Some(&number.to_string());
    let device = format!("{major}:{minor}");
    let of_device = |line: &&str| line.split(' ').nth(2) == Some(&device);
    let line = mounts.lines().find(numbered).or_else(|| mounts.lines().rev().find(of_device))?;
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    let kind = after.next()?;
    let of_mount = before.split(' ').nth(5).unwrap_or_default();
    let of_system = after.nth(1).unwrap_or_default();
    Some(Mounted { kind, options: of_mount.split(',').chain(of_system.split(',')).collect() })
}

type Found = std::result::Result<Storage, Obstacle>;

fn drive(root: &Path, (major, minor): (u32, u32)) -> Found {
    under(&root.join(format!("sys/dev/block/{major}:{minor}")), LAYERS_MAX)
}

/// The kind of the drives under a device.
fn under(device: &Path, layers: usize) -> Found {
    let layers = layers.checked_sub(1).ok_or("its devices are stacked too high")?;
    let device = device
        .canonicalize()
        .map_err(|error| Obstacle::of(error, "its device can't be looked at in /sys"))?;
    let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if device.join("partition").exists() {
        return under(&device.join(".."), layers);
    }
    if let Some(reason) = layer_refusal(&device)? {
        return Err(format!("{name} {reason}").into());
    }
    let mut kinds = Vec::new();
    for member in members(&device)? {
        kinds.push(under(&member, layers)?);
    }
    match kinds.first() {
        Some(first) if kinds.iter().all(|kind| kind == first) => Ok(*first),
        Some(_) => Err(format!("{name} is over drives of several kinds").into()),
        None => of_name(&device, &name),
    }
}

/// Why what a layer does to the bytes takes the host's memory, if it does.
fn layer_refusal(device: &Path) -> std::result::Result<Option<String>, Obstacle> {
    let level = there(fs::read_to_string(device.join("md/level")))?.unwrap_or_default();
    if ["raid4", "raid5", "raid6"].contains(&level.trim()) {
        let text = format!("is {}, whose parity is computed by the processor", level.trim());
        return Ok(Some(text));
    }
    let layer = there(fs::read_to_string(device.join("dm/uuid")))?.unwrap_or_default();
    Ok(layer.starts_with("CRYPT-").then(|| "is encrypted by the processor".to_owned()))
}

/// What was read; `None` for what isn't there for this process.
fn there<T>(read: io::Result<T>) -> std::result::Result<Option<T>, Obstacle> {
    match read {
        Err(error) if error.raw_os_error().is_some_and(is_shortage) => {
            Err(Obstacle::Shortage(error))
        }
        read => Ok(read.ok()),
    }
}

fn members(device: &Path) -> std::result::Result<Vec<PathBuf>, Obstacle> {
    let entries = there(fs::read_dir(device.join("slaves")))?.into_iter().flatten();
    Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
}

fn of_name(device: &Path, name: &str) -> Found {
    if name.starts_with("nvme") {
        let transport = there(fs::read_to_string(device.join("device/transport")))?;
        let transport = transport.unwrap_or_default();
        // A drive with several paths names none of them here; those in a machine are PCIe.
        return Ok(match transport.trim() {
            "" | "pcie" => Storage::Nvme,
            _ => Storage::NvmeOverFabrics,
        });
    }
    if name.starts_with("sd") {
        return Ok(Storage::Scsi);
    }
    Err(format!("its drive {name} is neither NVMe nor SCSI").into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const EXT4: &str = "31 1 259:2 / /data rw,noatime shared:1 - ext4 /dev/nvme0n1p2 rw";

    /// A made-up root with the lines of its mounts.
    fn root(mounts: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        file(root.path(), "proc/self/mountinfo", mounts);
        root
    }

    fn file(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A device of that number, by its name.
    fn device(root: &Path, number: &str, path: &str) {
        let device = root.join("sys/devices").join(path);
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(root.join("sys/dev/block")).unwrap();
        symlink(device, root.join("sys/dev/block").join(number)).unwrap();
    }

    fn at(root: &Path, device: (u32, u32), mount: u64) -> std::result::Result<Storage, String> {
        storage_of(root, Whereabouts { device, mount: Some(mount) }).unwrap()
    }

    #[test]
    fn a_partition_of_an_nvme_drive_is_nvme() {
        let root = root(EXT4);
        let root = root.path();
        device(root, "259:2", "pci0/nvme/nvme0/nvme0n1/nvme0n1p2");
        file(root, "sys/devices/pci0/nvme/nvme0/nvme0n1/nvme0n1p2/partition", "2\n");
        assert_eq!(at(root, (259, 2), 31), Ok(Storage::Nvme));
        assert_eq!(at(root, (259, 2), 999), Ok(Storage::Nvme), "found by the device's number");
        let itself = Whereabouts { device: (259, 2), mount: None };
        assert_eq!(storage_of(root, itself).unwrap(), Ok(Storage::Nvme));
        file(root, "sys/devices/pci0/nvme/nvme0/nvme0n1/device/transport", "tcp\n");
        assert_eq!(at(root, (259, 2), 31), Ok(Storage::NvmeOverFabrics));
    }

    #[test]
    fn layers_are_followed_to_the_drives_and_refused_where_they_change_bytes() {
        let root = root("40 1 9:0 / /raid rw - xfs /dev/md0 rw,attr2");
        let root = root.path();
        device(root, "9:0", "virtual/block/md0");
        let slaves = root.join("sys/devices/virtual/block/md0/slaves");
        fs::create_dir_all(&slaves).unwrap();
        for name in ["nvme0n1", "nvme1n1"] {
            let member = root.join("sys/devices/pci").join(name);
            fs::create_dir_all(&member).unwrap();
            symlink(member, slaves.join(name)).unwrap();
        }
        file(root, "sys/devices/virtual/block/md0/md/level", "raid0\n");
        assert_eq!(at(root, (9, 0), 40), Ok(Storage::Nvme));
        file(root, "sys/devices/virtual/block/md0/md/level", "raid5\n");
        assert!(at(root, (9, 0), 40).unwrap_err().contains("md0 is raid5"));
        file(root, "sys/devices/virtual/block/md0/md/level", "raid0\n");
        file(root, "sys/devices/virtual/block/md0/dm/uuid", "CRYPT-LUKS2-1\n");
        assert!(at(root, (9, 0), 40).unwrap_err().contains("encrypted"));
        file(root, "sys/devices/virtual/block/md0/dm/uuid", "LVM-1\n");
        let odd = root.join("sys/devices/pci/sdb");
        fs::create_dir_all(&odd).unwrap();
        symlink(odd, slaves.join("sdb")).unwrap();
        assert!(at(root, (9, 0), 40).unwrap_err().contains("several kinds"));
    }

    #[test]
    fn file_systems_are_told_apart_with_their_options() {
        let mounts = "50 1 0:50 / /n rw - nfs4 server:/n rw,vers=4.2,proto=tcp\n\
                      51 1 0:51 / /m rw - nfs server:/m rw,proto=rdma\n\
                      52 1 0:52 / /l rw - lustre mgs:/l rw\n\
                      53 1 0:53 / / rw - overlay overlay rw\n\
                      54 1 259:2 / /j rw - ext4 /dev/nvme0n1 rw,data=journal\n\
                      55 1 253:1 / /v rw - ext4 /dev/vda1 rw\n";
        let root = root(mounts);
        let root = root.path();
        device(root, "253:1", "virtio/block/vda");
        assert!(at(root, (0, 50), 50).unwrap_err().contains("proto=rdma"));
        assert_eq!(at(root, (0, 51), 51), Ok(Storage::Nfs));
        assert_eq!(at(root, (0, 52), 52), Ok(Storage::Lustre));
        assert!(at(root, (0, 53), 53).unwrap_err().contains("overlay"));
        assert!(at(root, (259, 2), 54).unwrap_err().contains("data=journal"));
        assert!(at(root, (253, 1), 55).unwrap_err().contains("vda"));
        assert!(at(root, (7, 7), 77).unwrap_err().contains("mountinfo"));
        assert!(at(Path::new("/nowhere"), (0, 52), 52).unwrap_err().contains("can't be read"));
    }
}
