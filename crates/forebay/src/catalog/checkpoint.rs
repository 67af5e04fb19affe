//! The directory of a checkpoint's step: which shards belong to it, and what they are to hold.
//!
//! Names and checksums of the manifest are held against those of the shards.

use std::io::Read;
use std::path::{Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};

use super::{Catalog, Entry};
use crate::checkpoint::{
    MANIFEST_BYTES_MAX, MANIFEST_FILE, Manifest, STATE_FILE, TensorEntry, parse_step, shard_file,
};
use crate::safetensors::{crc32c, open_file};

/// The manifest in a directory; `None` if that is no checkpoint's.
pub(super) fn read_manifest(directory: &Path) -> Result<Option<Manifest>> {
    if !is_checkpoint(directory) {
        return Ok(None);
    }
    let path = directory.join(MANIFEST_FILE);
    let mut bytes = Vec::new();
    open_file(&path)
        .map_err(|error| error.path(&path))?
        .take(MANIFEST_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Error::from_io(error, "cannot read").path(&path))?;
    Manifest::parse(&bytes).map(Some).map_err(|error| error.path(&path))
}

/// Where the shards of a manifest are.
pub(super) fn shards(manifest: &Manifest, directory: &Path) -> Vec<PathBuf> {
    (0..manifest.shards.len()).map(|index| directory.join(shard_file(index))).collect()
}

/// Holds the catalog of the shards against the manifest, whose checksums are to be those that
/// tensors are verified by.
pub(super) fn hold_against(
    manifest: &Manifest,
    directory: &Path,
    catalog: &mut Catalog,
) -> Result<()> {
    let path = directory.join(MANIFEST_FILE);
    let refuse = |text: String| Err(corrupt(text).path(&path));
    if manifest.tensors.len() != catalog.tensors.len() {
        let (wanted, found) = (manifest.tensors.len(), catalog.tensors.len());
        return refuse(format!("{found} tensors are in the shards, and {wanted} by"));
    }
    for (entry, TensorEntry { name, shard, checksum: wanted, .. }) in
        catalog.tensors.iter_mut().zip(&manifest.tensors)
    {
        if entry.name != *name || entry.file != *shard {
            return refuse(format!("the tensor {:?} isn't where it is by", entry.name));
        }
        if let Entry { checksum: Some(found), .. } = entry
            && found != wanted
        {
            let file = shard_file(*shard);
            return refuse(format!("the tensor {name:?} of {file} is another than by"));
        }
        entry.checksum = Some(*wanted);
    }
    catalog.state = Some((directory.join(STATE_FILE), manifest.state_checksum));
    Ok(())
}

/// Whether a directory is that of a checkpoint's step, which may lack a file. A `manifest.json` alone
/// can be anybody's.
pub(super) fn is_checkpoint(directory: &Path) -> bool {
    let name = directory.file_name().map(|name| name.to_string_lossy());
    let is_named = name.is_some_and(|name| parse_step(&name).is_some());
    directory.join(MANIFEST_FILE).is_file() && (is_named || directory.join(STATE_FILE).is_file())
}

/// The newest step among the names in a directory.
pub(super) fn step_in(names: &[String]) -> Option<&String> {
    names.iter().max_by_key(|name| parse_step(name)).filter(|name| parse_step(name).is_some())
}

/// Reads what isn't tensors, and compares.
pub(crate) fn verify_state(path: &Path, wanted: u32) -> Result<()> {
    let mut bytes = Vec::new();
    open_file(path)
        .map_err(|error| error.path(path))?
        .read_to_end(&mut bytes)
        .map_err(|error| Error::from_io(error, "cannot read").path(path))?;
    let found = crc32c(&bytes);
    if found == wanted {
        return Ok(());
    }
    let text = format!("the CRC32C is {found:08x}, and by the manifest {wanted:08x}, of");
    Err(corrupt(text).path(path))
}

fn corrupt(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_step_is_that_of_the_highest_number() {
        let named = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            step_in(&names).cloned()
        };
        let found = named(&["step-100000000", "step-99999999", "step-x", "steps"]);
        assert_eq!(found.as_deref(), Some("step-100000000"));
        assert_eq!(named(&["step-1", "latest"]), None);
    }
}
