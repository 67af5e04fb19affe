//! Opening small files that say what others are: manifests, profiles, `latest`.
//!
//! # Invariants
//!
//! - Nothing but a regular file is opened: opening a pipe waits for its other end without end, and
//!   a device can go on for ever.
//!
//! Files of tensors are opened in [`safetensors`](crate::safetensors), after the same look.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

/// "Is a directory", from `errno(3)`.
const EISDIR: i32 = 21;

/// Opens a file to read, if it is one.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_file() {
        return File::open(path);
    }
    if kind.is_dir() {
        return Err(io::Error::from_raw_os_error(EISDIR));
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "it is a device, a pipe or a socket"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(open(&path).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(open(directory.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        fs::write(directory.path().join("file"), "").unwrap();
        assert!(open(&directory.path().join("file")).is_ok());
    }
}
