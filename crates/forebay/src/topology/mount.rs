//! Mounts, from `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::lossy;

/// File systems whose bytes are in memory.
const IN_MEMORY: &[&str] = &["tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"];

/// File systems of servers, whose drives aren't here.
const REMOTE: &[&str] = &[
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "9p",
    "virtiofs",
    "wekafs",
    "orangefs",
    "afs",
    "glusterfs",
    "pvfs2",
];

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mount {
    /// Its number in this process's mounts.
    pub number: u64,
    /// Where it is mounted.
    #[serde(serialize_with = "lossy::path")]
    pub point: PathBuf,
    /// The kind of file system.
    pub file_system: String,
    /// What is mounted: a device, a server, or any word.
    pub source: String,
    /// Its options: those of the mount, then those of the file system that aren't the same.
    pub options: Vec<String>,
    /// Major and minor number of its device; the major is 0 for a file system of no one device.
    pub device: (u32, u32),
}

impl Mount {
    /// Whether the file system keeps its bytes in memory.
    pub fn is_memory(&self) -> bool {
        IN_MEMORY.contains(&self.file_system.as_str())
    }

    /// Whether the file system is a server's. One in user space counts as such: what it does isn't
    /// known here.
    pub fn is_remote(&self) -> bool {
        let name = self.file_system.as_str();
        let of_blocks = name == "fuseblk";
        REMOTE.contains(&name) || (name.starts_with("fuse") && !of_blocks)
    }

    /// Whether an option is set.
    pub fn has(&self, option: &str) -> bool {
        self.options.iter().any(|set| set == option)
    }

    /// The value of an option `name=value`.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.options.iter().find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
    }

    /// Where an overlay writes.
    pub(super) fn upper_directory(&self) -> Option<&Path> {
        let is_overlay = self.file_system == "overlay";
        is_overlay.then(|| self.value("upperdir").map(Path::new)).flatten()
    }
}

/// The mount that an absolute path without symbolic links is in: the deepest one, and of several
/// at one point the last, which hides the others.
pub(super) fn containing(table: &str, path: &Path) -> Option<Mount> {
    let mounts = table.lines().filter_map(parse);
    mounts
        .filter(|mount| path.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.components().count())
}

fn parse(line: &str) -> Option<Mount> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ');
    let number = place.next()?.parse().ok()?;
    let mut place = place.skip(1);
    let (major, minor) = place.next()?.split_once(':')?;
    let point = unescape(place.nth(1)?);
    let mount_options = place.next()?;
    let mut kind = kind.split(' ');
    let file_system = kind.next()?.to_owned();
    let source = unescape(kind.next()?).to_string_lossy().into_owned();
    let mut options: Vec<String> = Vec::new();
    for option in mount_options.split(',').chain(kind.next().unwrap_or_default().split(',')) {
        let option = unescape(option).to_string_lossy().into_owned();
        // A file system that can be written to says so of itself, whatever its mount can be.
        let contradicts = option == "rw" && !options.is_empty();
        if !option.is_empty() && !contradicts && !options.contains(&option) {
            options.push(option);
        }
    }
    let device = (major.parse().ok()?, minor.parse().ok()?);
    Some(Mount { number, point: point.into(), file_system, source, options, device })
}

/// Blanks and backslashes are written as three octal digits.
fn unescape(field: &str) -> OsString {
    let bytes = field.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let code =
            digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        plain.push(code.unwrap_or(bytes[at]));
        at += if code.is_some() { 4 } else { 1 };
    }
    OsString::from_vec(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
        27 1 254:0 / / rw,relatime - ext4 /dev/root rw,discard\n\
        30 27 0:27 / /dev/shm rw,nosuid shared:3 master:1 - tmpfs tmpfs rw,size=10k\n\
        31 27 8:1 /sub /mnt/a\\040b ro,noatime - xfs /dev/sd\\134a rw,attr2\n\
        32 27 0:30 / /mnt rw - nfs4 server:/export rw,vers=4.2\n\
        33 27 8:2 / /mnt rw - ext4 /dev/sdb rw\n\
        nonsense\n";

    fn mount_of(path: &str) -> Mount {
        containing(TABLE, Path::new(path)).unwrap()
    }

    #[test]
    fn the_deepest_mount_has_the_path() {
        assert_eq!(mount_of("/dev/shm/x").file_system, "tmpfs");
        assert_eq!(mount_of("/dev/shmx").file_system, "ext4");
        assert_eq!((mount_of("/").number, mount_of("/").device), (27, (254, 0)));
    }

    #[test]
    fn the_last_of_several_mounts_at_a_point_has_the_path() {
        assert_eq!(mount_of("/mnt").source, "/dev/sdb");
    }

    #[test]
    fn blanks_and_backslashes_are_read() {
        let mount = mount_of("/mnt/a b/c");
        assert_eq!((mount.file_system.as_str(), mount.source.as_str()), ("xfs", "/dev/sd\\a"));
    }

    #[test]
    fn a_read_only_mount_of_a_writable_file_system_is_read_only() {
        let mount = mount_of("/mnt/a b");
        assert!(mount.has("ro") && !mount.has("rw") && mount.has("attr2"), "{mount:?}");
        assert_eq!(mount_of("/dev/shm").value("size"), Some("10k"));
        assert_eq!(mount_of("/dev/shm").value("mode"), None);
    }

    #[test]
    fn memory_and_servers_are_told_from_drives() {
        let of = |file_system: &str| Mount { file_system: file_system.to_owned(), ..mount_of("/") };
        assert!(of("tmpfs").is_memory() && !of("ext4").is_memory());
        assert!(of("nfs4").is_remote() && of("fuse.sshfs").is_remote());
        assert!(!of("fuseblk").is_remote() && !of("xfs").is_remote());
    }
}
