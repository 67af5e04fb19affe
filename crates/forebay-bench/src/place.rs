//! Where to measure: a directory, and the files in it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::loop_device::LoopDevice;

const PAGE_BYTES: usize = 4096;
const BLOCK_BYTES: usize = 1 << 20;
/// What the name of a payload starts with; its owner's process id follows.
const PREFIX: &str = "payload-";
/// Tells a stamp from bytes that happen to be a small number.
const MARK: u64 = 0x5eed_f00d_0000_0000;

/// A file system to measure on.
#[derive(Debug)]
pub(crate) struct Place {
    /// What it is called in tables.
    pub(crate) name: &'static str,
    directory: PathBuf,
    /// Keeps a device of our own mounted.
    _device: Option<LoopDevice>,
}

impl Place {
    /// The drive that `directory`, made if need be, is on.
    pub(crate) fn drive(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        Ok(Self { name: "drive", directory: directory.to_path_buf(), _device: None })
    }

    /// An ext4 file system in memory, with room for `payload_bytes`, mounted below `directory`:
    /// what the drive costs is gone, what the software costs stays.
    pub(crate) fn memory(directory: &Path, payload_bytes: u64) -> Result<Self> {
        let directory = directory.join("loop");
        let device = LoopDevice::mount(directory.clone(), payload_bytes)?;
        Ok(Self { name: "loop", directory, _device: Some(device) })
    }

    /// A file of `bytes` written bytes, there before anything is measured. It goes with the
    /// returned value.
    pub(crate) fn lay_out(&self, bytes: u64) -> Result<Payload> {
        remove_leftovers(&self.directory);
        let path = self.directory.join(format!("{PREFIX}{}", std::process::id()));
        let payload = Payload { path };
        payload.write(bytes).with_context(|| format!("cannot write {}", payload.path.display()))?;
        Ok(payload)
    }
}

/// Removes the payloads of benches that were killed; those of living ones stay.
fn remove_leftovers(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if owner.is_some_and(|owner| !Path::new("/proc").join(owner).exists()) {
            // Somebody else may have been quicker.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A file that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Payload {
    path: PathBuf,
}

impl Payload {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn write(&self, bytes: u64) -> Result<()> {
        let mut block = vec![0; BLOCK_BYTES];
        let mut file = File::create(&self.path)?;
        let mut offset = 0;
        while offset < bytes {
            let length = usize::try_from(bytes - offset)?.min(block.len());
            stamp(&mut block[..length], offset);
            file.write_all(&block[..length])?;
            offset += length as u64;
        }
        // Blocks that were never written back aren't on the drive yet, and read as nothing.
        file.sync_all()?;
        Ok(())
    }
}

/// Marks every page of bytes that lie at `offset` in the file with where it is.
pub(crate) fn stamp(bytes: &mut [u8], offset: u64) {
    for (index, page) in (0_u64..).zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
        page[..8].copy_from_slice(&mark(offset, index));
    }
}

/// Checks what [`stamp`] left.
pub(crate) fn check_stamps(bytes: &[u8], offset: u64) -> Result<()> {
    for (index, page) in (0_u64..).zip(bytes.chunks_exact(PAGE_BYTES)) {
        ensure!(page[..8] == mark(offset, index), "wrong bytes at page {index} from {offset}");
    }
    Ok(())
}

fn mark(offset: u64, page_index: u64) -> [u8; 8] {
    (MARK ^ (offset + page_index * PAGE_BYTES as u64)).to_le_bytes()
}

impl Drop for Payload {
    fn drop(&mut self) {
        // It may never have been made.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_go_with_their_owner() {
        let directory = std::env::temp_dir().join(format!("forebay-place-{}", std::process::id()));
        let place = Place::drive(&directory).unwrap();
        // Above the largest process id that Linux gives (2^22).
        let leftover = directory.join(format!("{PREFIX}99999999"));
        let strangers = directory.join("payload.bin");
        fs::write(&leftover, "x").unwrap();
        fs::write(&strangers, "x").unwrap();
        let payload = place.lay_out(4096).unwrap();
        assert!(!leftover.exists() && strangers.exists());
        check_stamps(&fs::read(payload.path()).unwrap(), 0).unwrap();
        let path = payload.path().to_path_buf();
        drop(payload);
        assert!(!path.exists());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_page_out_of_place_is_seen() {
        let mut bytes = vec![0; 3 * PAGE_BYTES];
        stamp(&mut bytes, 8192);
        check_stamps(&bytes, 8192).unwrap();
        assert!(check_stamps(&bytes, 4096).is_err());
        bytes[2 * PAGE_BYTES] ^= 1;
        assert!(check_stamps(&bytes, 8192).is_err());
    }
}
