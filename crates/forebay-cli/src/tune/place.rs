//! A directory to tune: what it is on, what that can carry, how much fits.

use std::path::{Path, PathBuf};

use forebay::ByteSize;
use forebay::io::directory::room;
use forebay::io::memory::limits::available_bytes;
use forebay::topology::{DeviceKind, Location, locate};

use crate::exit::Failure;

/// Bytes of the file where there is room for it.
const IO_BYTES_DEFAULT: u64 = 1 << 30;
/// Fewest bytes of the file unless asked for: less says little of a drive.
const IO_BYTES_MIN: u64 = 64 << 20;
/// Room that is left on the file system, for its own needs.
const ROOM_SPARED: u64 = 4 << 20;
/// Samples are a part of the file, and twice as much memory leaves the machine some.
const MEMORY_SHARE: u64 = 2;

/// A directory. See the [module documentation](self).
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    pub(super) location: Location,
}

impl Place {
    pub(super) fn find(directory: &Path) -> Result<Self, Failure> {
        let unusable =
            |text: String| Failure::environment(format!("{}: {text}", directory.display()));
        let location = locate(directory).map_err(|error| unusable(error.to_string()))?;
        if !location.path.is_dir() {
            return Err(unusable("is not a directory".to_owned()));
        }
        Ok(Self { path: location.path.clone(), location })
    }

    /// The name of what it is on, for people.
    pub(super) fn name(&self) -> String {
        let drives = self.location.drives();
        let models: Vec<String> = drives
            .iter()
            .map(|device| {
                let model = device.drive.as_ref().and_then(|drive| drive.model.clone());
                model.unwrap_or_else(|| device.name.clone())
            })
            .collect();
        let file_system = &self.location.mount.file_system;
        if models.is_empty() {
            return file_system.clone();
        }
        format!("{file_system} on {}", models.join(", "))
    }

    /// Bytes per second that the links of its drives carry together; `None` if any isn't known.
    pub(super) fn carries(&self) -> Option<f64> {
        let drives = self.location.drives();
        let each: Option<Vec<f64>> =
            drives.iter().map(|device| device.drive.as_ref()?.carries()).collect();
        each.filter(|each| !each.is_empty()).map(|each| each.iter().sum::<f64>() * 1e9)
    }

    /// What keeps its rates from being those of a drive.
    pub(super) fn doubts(&self) -> Vec<String> {
        let path = self.path.display();
        if self.location.is_memory() {
            return vec![format!("{path} is in memory: its rates are not those of a drive")];
        }
        let mut doubts = Vec::new();
        if self.location.is_remote() {
            doubts.push(format!("{path} is on a server: its caches and the network are measured"));
        }
        let cached = self
            .location
            .devices
            .iter()
            .any(|device| matches!(device.kind, DeviceKind::Loop { direct: false, .. }));
        if cached {
            doubts.push(format!("{path} is on a loop device that goes through the page cache"));
        }
        doubts
    }

    fn room(&self) -> Result<u64, Failure> {
        let found = room(&self.path).map_err(|error| Failure::environment(error.to_string()))?;
        Ok(found.available_bytes.saturating_sub(ROOM_SPARED))
    }
}

/// Bytes of the file: as asked for if that fits in every place and in memory, or what does.
pub(super) fn io_bytes(wanted: Option<ByteSize>, places: &[Place]) -> Result<u64, Failure> {
    let memory = available_bytes().map_or(u64::MAX, |available| available.bytes) / MEMORY_SHARE;
    let mut most = IO_BYTES_DEFAULT.min(memory);
    for place in places {
        let room = place.room()?;
        let needed = wanted.map_or(IO_BYTES_MIN, |wanted| wanted.0);
        if needed > room {
            return Err(Failure::environment(format!(
                "{}: {} are needed for the file, {} are free; try another directory or --io-size",
                place.path.display(),
                ByteSize(needed),
                ByteSize(room)
            )));
        }
        most = most.min(room / 2);
    }
    let most = (most >> 20 << 20).max(IO_BYTES_MIN);
    let bytes = wanted.map_or(most, |wanted| wanted.0);
    if bytes > memory {
        return Err(Failure::environment(format!(
            "{} don't fit in memory, of which {} can be used; try a smaller --io-size",
            ByteSize(bytes),
            ByteSize(memory)
        )));
    }
    if bytes < 1 << 20 {
        return Err(Failure::usage("--io-size is less than 1 MiB"));
    }
    Ok(bytes)
}
