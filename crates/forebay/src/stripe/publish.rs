//! Writing manifests: each is the old one or the new one, whatever happens in between.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use forebay_io::{Error, Result};

use super::name::Name;

/// Puts the bytes of a manifest in place.
pub(super) fn write_manifest(
    name: &Name,
    directory: &Path,
    bytes: &[u8],
    is_durable: bool,
) -> Result<()> {
    let (path, next) = (name.manifest(directory), name.next_manifest(directory));
    let written = write_next(&path, &next, bytes, is_durable)
        .map_err(|error| Error::from_io(error, "cannot write the manifest").path(&path));
    if let Err(error) = written {
        // What is left of it is overwritten the next time, if it can't be removed.
        let _ = fs::remove_file(&next);
        return Err(error);
    }
    if is_durable { sync_folder(&path) } else { Ok(()) }
}

fn write_next(path: &Path, next: &Path, bytes: &[u8], is_durable: bool) -> io::Result<()> {
    let mut file = File::create(next)?;
    if let Ok(before) = fs::metadata(path) {
        file.set_permissions(before.permissions())?;
    }
    file.write_all(bytes)?;
    if is_durable {
        file.sync_all()?;
    }
    fs::rename(next, path)
}

/// Removes a manifest, if it is there.
pub(super) fn remove_manifest(name: &Name, directory: &Path, is_durable: bool) -> Result<()> {
    let path = name.manifest(directory);
    // What a killed store left of the next one; a store overwrites what can't be removed.
    let _ = fs::remove_file(name.next_manifest(directory));
    match fs::remove_file(&path) {
        Ok(()) if is_durable => sync_folder(&path),
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::from_io(error, "cannot remove the manifest").path(path)),
    }
}

/// Makes a name durable: syncs the directory that it is in.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|error| Error::from_io(error, "cannot make the directory durable:").path(folder))
}
