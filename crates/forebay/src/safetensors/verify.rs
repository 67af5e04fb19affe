//! Verifying files: every tensor's bytes are read and compared with their checksums, in a few pieces
//! of memory whatever the size.

use std::sync::Arc;

use forebay_io::{Handle, OwnedMemory, Pool, Result};

use super::Stop;
use super::load::{ALIGNMENT, memory_bytes, note_unverified};
use super::pieces::{Flight, Flights, Piece};
use super::plan::PAGE_BYTES;
use super::source::Opened;
use super::sums::{Checked, sums_of};

/// Bytes of a piece.
const PIECE_BYTES: usize = 16 << 20;
/// Pieces on their way at once.
const PIECES_MAX: u64 = 8;

/// What became of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its bytes match their checksum.
    Matches,
    /// They don't.
    Differs {
        /// The checksum in the file.
        wanted: u32,
        /// That of the bytes.
        found: u32,
    },
    /// There is no checksum to compare with.
    Unknown,
}

/// What was found of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Index of its file.
    pub file: usize,
    /// Its name.
    pub name: String,
    /// Bytes of it.
    pub bytes: u64,
    /// What became of it.
    pub verdict: Verdict,
}

/// Reads all tensors of a source and compares them with their checksums; file by file.
///
/// # Errors
///
/// What the system says of reading; a tensor that differs is no error but a finding.
pub fn verify(handle: &Handle, opened: &Opened, stop: &Stop) -> Result<Vec<Finding>> {
    let verified = || {
        let pool = handle.pool()?;
        let mut findings = Vec::new();
        for (number, file) in opened.files().iter().enumerate() {
            let mut checked = read_all(handle, &pool, opened, number, stop)?;
            file.check_unchanged()?;
            note_unverified(handle, file);
            for (index, info) in file.header.tensors().iter().enumerate() {
                let wanted = file.header.checksum(&info.name);
                let verdict = match (wanted, checked.checksum(index, info)) {
                    (Some(wanted), Some(found)) if wanted != found => {
                        Verdict::Differs { wanted, found }
                    }
                    (Some(_), Some(_)) => Verdict::Matches,
                    _ => Verdict::Unknown,
                };
                findings.push(Finding {
                    file: number,
                    name: info.name.clone(),
                    bytes: info.bytes(),
                    verdict,
                });
            }
        }
        Ok(findings)
    };
    verified().map_err(|error: forebay_io::Error| error.operation("verify"))
}

/// Reads a file's data section, from the page that it begins in on.
fn read_all(
    handle: &Handle,
    pool: &Arc<Pool>,
    opened: &Opened,
    number: usize,
    stop: &Stop,
) -> Result<Checked> {
    let files = opened.files();
    let header = &files[number].header;
    let end = header.file_bytes();
    let mut offset = header.data_start() - header.data_start() % PAGE_BYTES;
    let mut free = Vec::new();
    for _ in 0..(end - offset).div_ceil(PIECE_BYTES as u64).min(PIECES_MAX) {
        let bytes = memory_bytes((end - offset).min(PIECE_BYTES as u64))?;
        free.push(OwnedMemory::from(pool.allocate(bytes, ALIGNMENT)?));
    }
    let mut checked = Checked::default();
    let mut flights = Flights::default();
    loop {
        stop.check()?;
        let next = if offset < end { free.pop() } else { None };
        if let Some(memory) = next {
            let length = memory_bytes((end - offset).min(memory.len() as u64))?;
            let piece = Piece { file: number, offset, memory, length };
            flights.push(Flight::start(handle, &files[number], piece)?);
            offset += length as u64;
        } else if let Some(piece) = flights.land(files, stop)? {
            checked.add(sums_of(header, piece.offset, piece.bytes()));
            free.push(piece.memory);
        } else {
            return Ok(checked);
        }
    }
}
