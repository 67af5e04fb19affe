//! GPUDirect Storage: whether a file has it ([`storage_of`], [`judge`]), and the device memory that
//! cuFile knows ([`Buffers`]).
//!
//! That cuFile takes a file means nothing: where it can't move bytes directly it goes through the
//! host's memory, and says so in its log at the most. So the mode of a file is judged here from
//! what its driver says it reaches and from what the file is stored on. Who goes which way is
//! decided in `routes`, and the transfers are made by the engine of the same name.

mod buffers;
mod mode;
mod storage;

use std::path::Path;
use std::sync::Arc;

pub use buffers::{BufferUse, Buffers, DeviceRange};
pub use mode::{FileMode, Judgement, judge};
pub use storage::{Storage, Whereabouts, storage_of};

use super::{CuFile, Cuda, Devices, Search};
use crate::config::cufile_settings;
use crate::error::{Error, Result};
use crate::syscalls::is_shortage;

/// cuFile in a process, and the device memory that it knows.
#[derive(Debug)]
pub struct Gds {
    cufile: Arc<CuFile>,
    buffers: Arc<Buffers>,
}

impl Gds {
    /// Loads cuFile.
    ///
    /// # Errors
    ///
    /// As for [`CuFile::load`].
    pub fn load(cuda: &Arc<Cuda>, search: &Search) -> Result<Arc<Self>> {
        let cufile = CuFile::load(cuda, search)?;
        Ok(Arc::new(Self { cufile, buffers: Arc::default() }))
    }

    /// The library.
    pub fn cufile(&self) -> &Arc<CuFile> {
        &self.cufile
    }

    /// The device memory that it knows.
    pub fn buffers(&self) -> &Arc<Buffers> {
        &self.buffers
    }
}

/// What keeps cuFile from being loaded where `/proc/modules` can't be read: cuFile 1.17 looks for a
/// line in it, whether or not it could open it.
pub const MODULES_HIDDEN: &str = "/proc/modules can't be read, and cuFile would read it for ever";

/// Why no file of this machine can go by GPUDirect Storage, if that can be seen without loading
/// anything: cuFile isn't to be loaded for nothing, as it starts threads and writes a log.
///
/// # Errors
///
/// What the process or the system has run out of; the next call may know more.
pub fn platform_gap(root: &Path) -> Result<Option<String>> {
    if !root.join("proc/driver/nvidia-fs").is_dir() {
        let settings = readable(std::fs::read_to_string(cufile_settings(root)))?;
        if !uses_p2pdma(&settings.unwrap_or_default()) {
            let text = "the kernel module nvidia-fs isn't loaded, and cufile.json doesn't switch \
                        use_pci_p2pdma on";
            return Ok(Some(text.to_owned()));
        }
    }
    let modules = readable(std::fs::File::open(root.join("proc/modules")))?;
    Ok(modules.is_none().then(|| MODULES_HIDDEN.to_owned()))
}

/// What was read or opened; `None` for what isn't there for this process.
fn readable<T>(read: std::io::Result<T>) -> Result<Option<T>> {
    match read {
        Err(error) if error.raw_os_error().is_some_and(is_shortage) => {
            Err(Error::from_io(error, "cannot look at what cuFile needs"))
        }
        read => Ok(read.ok()),
    }
}

/// Whether cuFile's settings, JSON with comments, switch the kernel's peer-to-peer transfers on.
pub fn uses_p2pdma(settings: &str) -> bool {
    let plain = settings.lines().map(|line| line.split("//").next().unwrap_or_default());
    let plain: String =
        plain.flat_map(|line| line.chars().filter(|char| !char.is_whitespace())).collect();
    plain.contains("\"use_pci_p2pdma\":true")
}

/// All that stands in the way of GPUDirect Storage in this process; empty if nothing does. The
/// libraries are loaded only where the machine has what they need.
pub fn missing() -> Vec<String> {
    let root = Devices::root();
    let mut gaps = Vec::new();
    if !root.join("proc/driver/nvidia").is_dir() {
        gaps.push("there is no NVIDIA driver here".to_owned());
    }
    gaps.extend(platform_gap(&root).unwrap_or_else(|error| Some(error.to_string())));
    if gaps.is_empty()
        && let Err(error) = Devices::global().and_then(|devices| devices.gds())
    {
        gaps.push(error.to_string());
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_module_needs_the_setting() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        std::fs::create_dir_all(root.join("proc")).unwrap();
        std::fs::write(root.join("proc/modules"), "").unwrap();
        assert!(platform_gap(root).unwrap().unwrap().contains("nvidia-fs isn't loaded"));
        std::fs::create_dir_all(root.join("etc")).unwrap();
        let settings = root.join("etc/cufile.json");
        std::fs::write(&settings, "{ // \"use_pci_p2pdma\": true\n}").unwrap();
        assert!(platform_gap(root).unwrap().is_some());
        std::fs::write(&settings, "{ \"properties\": { \"use_pci_p2pdma\" : true } }").unwrap();
        assert_eq!(platform_gap(root).unwrap(), None);
        assert!(!uses_p2pdma("{ \"use_pci_p2pdma\": false }"));
        std::fs::remove_file(settings).unwrap();
        std::fs::create_dir_all(root.join("proc/driver/nvidia-fs")).unwrap();
        assert_eq!(platform_gap(root).unwrap(), None);
        std::fs::remove_file(root.join("proc/modules")).unwrap();
        assert!(platform_gap(root).unwrap().unwrap().contains("/proc/modules"));
    }
}
