//! Putting what was made under its final name, in one step.
//!
//! # Invariants
//!
//! - Under the final name there is what was there before or all of what was made.
//! - Only what a conversion could have written is replaced, and only if that was asked for.

use std::fs;
use std::io::ErrorKind as IoErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_io::directory::exchange;
use forebay_io::{Error, ErrorKind, Result};

use super::output::sync;
use crate::safetensors::{followed, take_after};

/// Names of files in a directory that a conversion may replace.
const REPLACED: [&str; 3] = [".npy", ".safetensors", ".safetensors.index.json"];

/// Where a directory is for a moment that changes places with the new one.
const REPLACED_NAME: &str = ".forebay-replaced";

/// Where to write what is to be found at `path`: links are followed, the last of which may lead to
/// nothing yet. A link stays, what it leads to is replaced.
///
/// # Errors
///
/// [`ErrorKind::Os`] for links that lead around in a circle.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    match path.canonicalize() {
        Ok(found) => Ok(found),
        Err(_) => followed(path).map_err(|error| error.path(path)),
    }
}

/// Refuses what may not be replaced by a file, or by a directory: with `replace`, a directory in
/// which there is anything but tensors, a device, a pipe, a socket; without it, everything. A file
/// isn't named as a directory is, with a slash at the end.
///
/// # Errors
///
/// [`ErrorKind::InvalidInput`], with the path and what is in the way.
pub fn refuse_replacing(path: &Path, directory: bool, replace: bool) -> Result<()> {
    let refused = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text).path(path));
    if !directory && path.as_os_str().as_bytes().ends_with(b"/") {
        return refused("a file was to be written, and this names a directory:");
    }
    let facts = match fs::symlink_metadata(path) {
        Ok(facts) => facts,
        Err(error) if error.kind() == IoErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::from_io(error, "cannot look at").path(path)),
    };
    if !replace {
        return refused("there is something already:");
    }
    if !facts.is_dir() && !facts.is_file() {
        return refused("only plain files can be replaced, and there is a device, pipe or socket:");
    }
    match (facts.is_dir(), directory) {
        (true, false) => refused("a file can't replace the directory"),
        (false, true) => refused("a directory can't replace the file"),
        (false, false) => Ok(()),
        (true, true) => refuse_other_files(path),
    }
}

fn refuse_other_files(directory: &Path) -> Result<()> {
    let failed = |error| Error::from_io(error, "cannot list").path(directory);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_file || !REPLACED.iter().any(|suffix| name.ends_with(suffix)) {
            let text = format!("{name} would be lost: only files of tensors are replaced in");
            return Err(Error::new(ErrorKind::InvalidInput, text).path(directory));
        }
    }
    Ok(())
}

/// Puts what is at `made` under its final name, in the same file system, and has the name on the
/// drive. What was there takes its place, if it was a directory; a file's mode and owner are kept.
///
/// # Errors
///
/// What the system refused; as for [`refuse_replacing`], which is asked once more.
pub fn publish(made: &Path, path: &Path, replace: bool) -> Result<()> {
    let failed = |error| Error::from_io(error, "cannot rename to").path(path);
    let is_directory = made.is_dir();
    refuse_replacing(path, is_directory, replace)?;
    match (is_directory, fs::symlink_metadata(path)) {
        (true, Ok(_)) => swap(made, path)?,
        (true, Err(_)) => fs::rename(made, path).map_err(failed)?,
        (false, Ok(before)) => {
            fs::File::open(made).and_then(|made| take_after(&made, &before)).map_err(failed)?;
            fs::rename(made, path).map_err(failed)?;
        }
        (false, Err(_)) => name_file(made, path)?,
    }
    path.parent().map_or(Ok(()), |parent| {
        sync(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
    })
}

/// Gives a file its name unless somebody else has taken it by now.
fn name_file(made: &Path, path: &Path) -> Result<()> {
    match fs::hard_link(made, path) {
        Ok(()) => fs::remove_file(made),
        Err(error) if error.kind() == IoErrorKind::AlreadyExists => Err(error),
        // Some file systems have no links.
        Err(_) => fs::rename(made, path),
    }
    .map_err(|error| Error::from_io(error, "cannot rename to").path(path))
}

/// Changes the places of two directories, or of none; in one moment wherever the file system can.
fn swap(made: &Path, path: &Path) -> Result<()> {
    let failed = |error| Error::from_io(error, "cannot replace").path(path);
    match exchange(made, path) {
        Err(error)
            if matches!(error.kind(), IoErrorKind::InvalidInput | IoErrorKind::Unsupported) => {}
        exchanged => return exchanged.map_err(failed),
    }
    let before = made.with_file_name(REPLACED_NAME);
    fs::rename(path, &before).map_err(failed)?;
    if let Err(error) = fs::rename(made, path) {
        // If that can't be undone, it is told where the old one is.
        return Err(match fs::rename(&before, path) {
            Ok(()) => failed(error),
            Err(_) => failed(error).hint(format!("what was there is in {}", before.display())),
        });
    }
    fs::rename(&before, made).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_file_is_replaced_only_if_asked_and_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        let [made, path] = ["made", "path"].map(|name| directory.path().join(name));
        fs::write(&made, "new").unwrap();
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(publish(&made, &path, false).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        publish(&made, &path, true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(!made.exists());
    }

    #[test]
    fn a_directory_of_tensors_changes_places_with_the_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let [made, path] = ["made", "path"].map(|name| directory.path().join(name));
        for (folder, text) in [(&made, "new"), (&path, "old")] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("a.npy"), text).unwrap();
        }
        publish(&made, &path, true).unwrap();
        assert_eq!(fs::read(path.join("a.npy")).unwrap(), b"new");
        assert_eq!(fs::read(made.join("a.npy")).unwrap(), b"old");
    }

    #[test]
    fn what_is_no_plain_file_is_never_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let [made, path] = ["made", "path"].map(|name| directory.path().join(name));
        fs::write(&made, "new").unwrap();
        let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let error = publish(&made, &path, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(socket.local_addr().is_ok() && fs::read(&path).is_err());
        assert_eq!(fs::read(&made).unwrap(), b"new");
        assert!(refuse_replacing(Path::new("/dev/full"), false, true).is_err());
    }

    #[test]
    fn a_name_of_a_directory_is_none_of_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors/");
        let error = refuse_replacing(&path, false, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        refuse_replacing(&path, true, true).unwrap();
    }

    #[test]
    fn a_link_leads_to_what_is_not_there_yet() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        symlink("two", at("one")).unwrap();
        symlink(at("three"), at("two")).unwrap();
        assert_eq!(resolve(&at("one")).unwrap(), at("three"));
        assert_eq!(resolve(&at("none")).unwrap(), at("none"));
        symlink("around", at("around")).unwrap();
        assert_eq!(resolve(&at("around")).unwrap_err().kind(), ErrorKind::Os);
    }

    #[test]
    fn nothing_but_tensors_is_ever_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let [made, path] = ["made", "path"].map(|name| directory.path().join(name));
        fs::create_dir(&made).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("thesis.txt"), "mine").unwrap();
        let error = publish(&made, &path, true).unwrap_err().to_string();
        assert!(error.contains("thesis.txt"), "{error}");
        assert_eq!(fs::read(path.join("thesis.txt")).unwrap(), b"mine");
        let file = directory.path().join("file");
        fs::write(&file, "x").unwrap();
        assert!(publish(&made, &file, true).is_err());
        assert!(publish(&file, &path, true).is_err());
    }
}
