//! What a file or a directory is, by its content.

use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};

use super::checkpoint::{is_checkpoint, step_in};
use crate::safetensors::open_file;

/// The first bytes of a zip archive, which files of torch and `.npz` files are.
const ZIP: &[u8] = b"PK\x03\x04";
/// The first bytes of a pickle of protocol 2 to 5, which old files of torch are.
const PICKLE: u8 = 0x80;
/// Bytes of an archive's first entry before its name, and where its name's length is.
const ZIP_NAME_AT: usize = 30;
const ZIP_NAME_LENGTH_AT: usize = 26;
/// Bytes by which a file is told: the first entry of an archive and its name.
const START_BYTES: u64 = 512;

/// What tensors are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A `.safetensors` file, or a directory of them.
    Safetensors,
    /// A `.npy` file, or a directory of them.
    Npy,
    /// What `torch.save` writes.
    Torch,
}

impl Kind {
    /// Tells what is at a path.
    ///
    /// # Errors
    ///
    /// What opening or reading met; [`ErrorKind::Unsupported`] for an `.npz` file, for a directory
    /// without tensors, and for one with several formats.
    pub fn of(path: &Path) -> Result<Self> {
        let facts =
            fs::metadata(path).map_err(|error| Error::from_io(error, "cannot open").path(path))?;
        if facts.is_dir() { Self::of_directory(path) } else { Self::of_file(path) }
    }

    fn of_file(path: &Path) -> Result<Self> {
        let mut start = Vec::new();
        open_file(path)
            .map_err(|error| error.path(path))?
            .take(START_BYTES)
            .read_to_end(&mut start)
            .map_err(|error| Error::from_io(error, "cannot read").path(path))?;
        if start.starts_with(ZIP) {
            if !first_name(&start).ends_with(b".npy") {
                return Ok(Self::Torch);
            }
            let error = Error::new(ErrorKind::Unsupported, "this is a .npz archive:").path(path);
            return Err(error.hint("unzip it into a directory of .npy files"));
        }
        Ok(match start.first() {
            // A header of safetensors begins with its length, and 128 is one that it can have: then
            // the header itself follows, which begins with a brace.
            Some(&PICKLE) if start.get(8) != Some(&b'{') => Self::Torch,
            _ if start.starts_with(b"\x93NUMPY") => Self::Npy,
            _ => Self::Safetensors,
        })
    }

    fn of_directory(path: &Path) -> Result<Self> {
        let names = names_in(path)?;
        if is_checkpoint(path) {
            return Ok(Self::Safetensors);
        }
        let with = |suffix: &str| names.iter().any(|name| name.ends_with(suffix));
        match (with(".safetensors") || with(".safetensors.index.json"), with(".npy")) {
            (true, false) => Ok(Self::Safetensors),
            (false, true) => Ok(Self::Npy),
            (true, true) => {
                let text = "both .safetensors and .npy files are in";
                let error = Error::new(ErrorKind::Unsupported, text).path(path);
                Err(error.hint("name one of the files"))
            }
            (false, false) => {
                let text = "neither .safetensors nor .npy files are in";
                let error = Error::new(ErrorKind::Unsupported, text).path(path);
                let torch = names.iter().find(|name| is_torch(name));
                Err(match (step_in(&names), torch) {
                    (Some(name), _) => error.hint(format!("name a checkpoint, such as {name}")),
                    (_, Some(name)) => error.hint(format!("name a file of torch, such as {name}")),
                    _ => error,
                })
            }
        }
    }
}

/// The files of a directory whose names end so, by name.
pub(super) fn files_of(directory: &Path, suffix: &str) -> Result<Vec<PathBuf>> {
    let failed = |error| Error::from_io(error, "cannot list").path(directory);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_bytes().ends_with(suffix.as_bytes()) {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    Ok(files)
}

/// The names in a directory, as far as they are text.
fn names_in(directory: &Path) -> Result<Vec<String>> {
    let failed = |error| Error::from_io(error, "cannot list").path(directory);
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

fn is_torch(name: &str) -> bool {
    [".pt", ".pth", ".bin"].iter().any(|suffix| name.ends_with(suffix))
}

/// The name of an archive's first entry, as far as it is among the bytes.
fn first_name(start: &[u8]) -> &[u8] {
    let length = match start.get(ZIP_NAME_LENGTH_AT..ZIP_NAME_LENGTH_AT + 2) {
        Some([low, high]) => usize::from(u16::from_le_bytes([*low, *high])),
        _ => 0,
    };
    start.get(ZIP_NAME_AT..ZIP_NAME_AT + length).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_told_by_its_first_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let zip = |name: &str| {
            let mut bytes = [ZIP, &[0; 26]].concat();
            bytes[ZIP_NAME_LENGTH_AT] = u8::try_from(name.len()).unwrap();
            [&bytes, name.as_bytes(), b"rest"].concat()
        };
        for (bytes, kind) in [
            (zip("model/data.pkl"), Some(Kind::Torch)),
            (zip("weights.npy"), None),
            (b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9".to_vec(), Some(Kind::Torch)),
            (b"\x93NUMPY\x01\x00".to_vec(), Some(Kind::Npy)),
            (b"\x80\0\0\0\0\0\0\0{\"a\":".to_vec(), Some(Kind::Safetensors)),
            (b"\x02\0\0\0\0\0\0\0{}".to_vec(), Some(Kind::Safetensors)),
        ] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(Kind::of(&path).ok(), kind);
        }
    }

    #[test]
    fn a_directory_is_told_by_what_is_in_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(Kind::of(path).unwrap_err().kind(), ErrorKind::Unsupported);
        fs::write(path.join("pytorch_model.bin"), "").unwrap();
        assert!(Kind::of(path).unwrap_err().to_string().contains("pytorch_model.bin"));
        fs::write(path.join("a.npy"), "").unwrap();
        assert_eq!(Kind::of(path).unwrap(), Kind::Npy);
        fs::write(path.join("model.safetensors"), "").unwrap();
        assert!(Kind::of(path).unwrap_err().to_string().contains("both"));
        fs::remove_file(path.join("a.npy")).unwrap();
        assert_eq!(Kind::of(path).unwrap(), Kind::Safetensors);
    }
}
