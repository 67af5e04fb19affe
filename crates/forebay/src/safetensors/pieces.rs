//! Pieces of regions on their way from files.
//!
//! A region is cut into pieces, each with an operation of its own, so that the first can be checked
//! while the last are loaded. Cuts are at multiples of [`PIECE_BYTES`] in the file.

use std::collections::VecDeque;

use forebay_io::{Direction, Handle, OwnedMemory, OwnedOperation, PoolBuffer, Result};

use super::Stop;
use super::header::corrupt;
use super::plan::Read;
use super::source::OpenedFile;

/// Bytes of a piece: many blocks of any engine, and a few milliseconds of any drive.
pub(super) const PIECE_BYTES: u64 = 32 << 20;

/// Memory that bytes of a file are to go to.
#[derive(Debug)]
pub(super) struct Piece {
    /// Index of the file.
    pub(super) file: usize,
    /// File offset of its first byte.
    pub(super) offset: u64,
    pub(super) memory: OwnedMemory,
    /// The bytes at the beginning of the memory that are the piece's.
    pub(super) length: usize,
}

impl Piece {
    /// A piece that fills its memory.
    fn new(file: usize, offset: u64, memory: OwnedMemory) -> Self {
        Self { file, offset, length: memory.len(), memory }
    }

    /// What has been loaded.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory.as_slice()[..self.length]
    }
}

/// Cuts a file's region into the pieces that its reads fill; the second is what is left of it, which
/// becomes the buffer again when the pieces are gone.
pub(super) fn cut(
    buffer: PoolBuffer,
    file: usize,
    reads: &[Read],
) -> Result<(VecDeque<Piece>, OwnedMemory)> {
    let too_small = || corrupt("a plan that doesn't fit its region");
    let mut rest = OwnedMemory::from(buffer);
    let mut pieces = VecDeque::new();
    let mut position = 0;
    for read in reads {
        let gap = read.position.checked_sub(position).and_then(|gap| usize::try_from(gap).ok());
        let gap = gap.filter(|&gap| gap <= rest.len()).ok_or_else(too_small)?;
        drop(rest.split_to(gap));
        let (mut offset, end) = (read.offset, read.offset + read.length);
        while offset < end {
            let stop = end.min((offset / PIECE_BYTES + 1) * PIECE_BYTES);
            let length = usize::try_from(stop - offset).ok();
            let length = length.filter(|&length| length <= rest.len()).ok_or_else(too_small)?;
            pieces.push_back(Piece::new(file, offset, rest.split_to(length)));
            offset = stop;
        }
        position = read.position + read.length;
    }
    Ok((pieces, rest))
}

/// A piece on its way.
#[derive(Debug)]
pub(super) struct Flight {
    file: usize,
    offset: u64,
    length: usize,
    operation: OwnedOperation,
}

impl Flight {
    /// Sends a piece on its way.
    pub(super) fn start(handle: &Handle, file: &OpenedFile, piece: Piece) -> Result<Self> {
        let Piece { file: number, offset, memory, length } = piece;
        let operation = handle
            .submit_owned(Direction::Load, file.file(), offset, memory, length)
            .map_err(|error| error.path_instead(&file.path))?;
        Ok(Self { file: number, offset, length, operation })
    }

    /// Waits for it.
    fn land(self, files: &[OpenedFile], stop: &Stop) -> Result<Piece> {
        let Self { file, offset, length, operation } = self;
        let memory = stop.wait(operation);
        let memory = memory.map_err(|error| error.path_instead(&files[file].path))?;
        Ok(Piece { file, offset, memory, length })
    }
}

/// Pieces on their way, in the order of their start. Dropping it cancels them and waits.
#[derive(Debug, Default)]
pub(super) struct Flights {
    queue: VecDeque<Flight>,
    bytes: u64,
}

impl Flights {
    /// Bytes under way.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pieces under way.
    pub(super) fn count(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn push(&mut self, flight: Flight) {
        self.bytes += flight.length as u64;
        self.queue.push_back(flight);
    }

    /// Waits for the one that started first; `None` if there is none.
    pub(super) fn land(&mut self, files: &[OpenedFile], stop: &Stop) -> Result<Option<Piece>> {
        let Some(flight) = self.queue.pop_front() else { return Ok(None) };
        self.bytes -= flight.length as u64;
        flight.land(files, stop).map(Some)
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        for flight in &self.queue {
            flight.operation.cancel();
        }
        for flight in self.queue.drain(..) {
            // What ended it all is being returned; these follow from it.
            let _ = flight.operation.wait();
        }
    }
}
