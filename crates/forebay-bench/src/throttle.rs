//! Devices slowed down by the kernel: the throttle of the blkio controller (control groups,
//! version 1), for this process alone.
//!
//! The kernel holds back transfers on their way to the device, wherever in the stack they come
//! from; nothing of Forebay knows of it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const CONTROLLER: &str = "/sys/fs/cgroup/blkio";

/// A control group with limits. It goes with this value.
#[derive(Debug)]
pub(crate) struct Throttle {
    group: PathBuf,
}

impl Throttle {
    /// Limits this process's reads and writes of the devices that `directories` are on to
    /// `bytes_per_second` each.
    pub(crate) fn of_devices(directories: &[&Path], bytes_per_second: u64) -> Result<Self> {
        let group = Path::new(CONTROLLER).join(format!("forebay-bench-{}", std::process::id()));
        fs::create_dir(&group)
            .with_context(|| format!("no blkio controller at {CONTROLLER}, or no right to it"))?;
        let throttle = Self { group };
        for directory in directories {
            let device = fs::metadata(directory)?.dev();
            let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
            let limit = format!("{major}:{minor} {bytes_per_second}");
            for file in ["blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"] {
                fs::write(throttle.group.join(file), &limit)
                    .with_context(|| format!("cannot set {file} to {limit}"))?;
            }
        }
        let own = std::process::id().to_string();
        fs::write(throttle.group.join("cgroup.procs"), own).context("cannot enter the group")?;
        Ok(throttle)
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // Only an empty group can be removed. What fails here leaves an empty group behind.
        let own = std::process::id().to_string();
        let _ = fs::write(Path::new(CONTROLLER).join("cgroup.procs"), own);
        let _ = fs::remove_dir(&self.group);
    }
}
