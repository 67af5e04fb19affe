//! Compares an array with a file by a second, plain way of reading it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use forebay_io::Error;
use pyo3::prelude::*;

use crate::buffer::Memory;
use crate::buffer::submit::Bytes;
use crate::error::OrRaise;

/// Bytes read at a time: fits in a core's second-level cache.
const CHUNK_BYTES: usize = 1 << 20;

/// The first file offset at or after `offset` where the file differs from the array, the file's
/// end included; `None` if there is no difference.
#[pyfunction]
pub(crate) fn compare(
    py: Python<'_>,
    array: &Bound<'_, PyAny>,
    path: PathBuf,
    offset: u64,
) -> PyResult<Option<u64>> {
    let bytes = Bytes::of(Memory::in_runs(array, false)?.on_host(array)?);
    py.detach(move || {
        first_difference(&bytes, &path, offset).map_err(|error| {
            Error::from_io(error, "cannot read back").operation("validate").path(&path)
        })
    })
    .or_raise(py)
}

fn first_difference(bytes: &Bytes, path: &Path, offset: u64) -> io::Result<Option<u64>> {
    let file = File::open(path)?;
    let mut chunk = Vec::new();
    for (run, position) in bytes.runs() {
        let found = difference_of(run, &file, offset + position as u64, &mut chunk)?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn difference_of(
    bytes: &[u8],
    file: &File,
    offset: u64,
    chunk: &mut Vec<u8>,
) -> io::Result<Option<u64>> {
    chunk.resize(CHUNK_BYTES.min(bytes.len()).max(chunk.len()), 0);
    let mut position = offset;
    for expected in bytes.chunks(CHUNK_BYTES) {
        let found = &mut chunk[..expected.len()];
        let count = read_at_most(file, found, position)?;
        if *expected != found[..count] {
            let same = expected.iter().zip(&found[..count]).take_while(|(a, b)| a == b).count();
            return Ok(Some(position + same as u64));
        }
        position += expected.len() as u64;
    }
    Ok(None)
}

fn read_at_most(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
