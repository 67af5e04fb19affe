//! What is under a directory: the mount, the block devices down to the drives, their links.
//!
//! All of it is read from `/proc` and `/sys`, so it takes no root and changes nothing. What a
//! kernel or a container doesn't show is `None` or left out; it is never guessed.
//!
//! ```
//! let location = forebay::topology::locate(std::path::Path::new("/"))?;
//! assert!(!location.mount.file_system.is_empty());
//! println!("{} is on {}", location.path.display(), location.identity());
//! # Ok::<(), forebay::io::Error>(())
//! ```

mod device;
mod drive;
mod identity;
mod mount;
mod pcie;
mod queue;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use forebay_io::{Error, Result};
use serde::Serialize;

use crate::lossy;

pub use device::{Device, DeviceKind};
pub use drive::Drive;
pub use mount::Mount;
pub use pcie::{Link, Meeting, PcieFunction};
pub use queue::Queue;

/// Files on loop devices on files on loop devices: deeper than this is a circle, or a prank.
const DEPTH_MAX: usize = 8;

/// A directory or file, and what it is on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Location {
    /// Its path, absolute and without symbolic links.
    #[serde(serialize_with = "lossy::path")]
    pub path: PathBuf,
    /// The mount it is in.
    pub mount: Mount,
    /// The devices that the file system is on: one, but for file systems over several (btrfs), and
    /// none for memory, for networks, and where a container hides them.
    pub devices: Vec<Device>,
}

/// Finds what a directory or file is on.
///
/// # Errors
///
/// What the system says of the path, or that there is no `/proc`.
pub fn locate(path: &Path) -> Result<Location> {
    let whole =
        path.canonicalize().map_err(|error| Error::from_io(error, "cannot look at").path(path))?;
    locate_under(Path::new("/"), &whole)
}

/// Finds what an absolute path without symbolic links is on, by the `proc`, `sys` and `dev` in
/// another directory than `/`.
///
/// # Errors
///
/// As for [`locate`].
pub fn locate_under(root: &Path, path: &Path) -> Result<Location> {
    locate_at_depth(root, path, DEPTH_MAX)
}

fn locate_at_depth(root: &Path, path: &Path, depth: usize) -> Result<Location> {
    let table = root.join("proc/self/mountinfo");
    let text = std::fs::read(&table)
        .map_err(|error| Error::from_io(error, "cannot read the mounts").path(&table))?;
    let mount = mount::containing(&String::from_utf8_lossy(&text), path)
        .ok_or_else(|| Error::from_os(NOT_FOUND, "no mount contains").path(path))?;
    let devices = match (depth.checked_sub(1), mount.upper_directory()) {
        (None, _) => Vec::new(),
        // Another file system has the bytes of an overlay, unless a container hides that.
        (Some(depth), Some(upper)) if root.join(strip_root(upper)).exists() => {
            match locate_at_depth(root, upper, depth) {
                Ok(below) if below.mount.point != mount.point => below.devices,
                _ => Vec::new(),
            }
        }
        (Some(depth), _) => device::under_mount(root, &mount, depth),
    };
    Ok(Location { path: path.to_path_buf(), mount, devices })
}

/// `ENOENT`.
const NOT_FOUND: i32 = 2;

/// An absolute path as one relative to a root.
fn strip_root(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

impl Location {
    /// The devices at the bottom: drives, and what can't be looked under.
    pub fn drives(&self) -> Vec<&Device> {
        let mut found = Vec::new();
        for device in &self.devices {
            device.collect_lowest(&mut found);
        }
        found
    }

    /// Whether it is in memory: nothing of it reaches a drive, and its speed says nothing of one.
    pub fn is_memory(&self) -> bool {
        let drives = self.drives();
        let on_memory = !drives.is_empty() && drives.iter().all(|drive| drive.kind.is_memory());
        self.mount.is_memory() || on_memory
    }

    /// Whether it is on a server that a network leads to.
    pub fn is_remote(&self) -> bool {
        self.mount.is_remote()
    }

    /// The NUMA node that all its drives are attached to; `None` where they differ or don't say.
    pub fn numa_node(&self) -> Option<u32> {
        let mut nodes = self
            .drives()
            .into_iter()
            .map(|device| device.drive.as_ref().and_then(|drive| drive.numa_node));
        let first = nodes.next()??;
        nodes.all(|node| node == Some(first)).then_some(first)
    }

    /// A name of what it is on that stays the same after a restart and wherever the drives are
    /// plugged in: for what was measured here once.
    pub fn identity(&self) -> String {
        identity::of(self)
    }
}
