//! Pieces of a file on their way to the drive: filled, checked, sent.
//!
//! Bytes of the host are copied into a piece at once, and were checked by whoever brought them. Those
//! of devices are copied when the piece is full, while the one before it is checked and sent.
//!
//! # Invariants
//!
//! - There are at most `PIECES_MAX` pieces, of `PIECE_BYTES` each.
//! - Pieces are whole pages, but for the last.

use std::collections::VecDeque;
use std::fs::File;

use forebay_io::{
    DeviceBytes, Direction, Error, ErrorKind, Gather, Handle, OwnedMemory, OwnedOperation, Result,
};

use super::Stop;

/// Bytes of a piece: long enough that a drive does its best with a few of them.
const PIECE_BYTES: usize = 8 << 20;
/// Pieces that are filled or on their way at once.
const PIECES_MAX: usize = 8;
/// Alignment of the pieces: a page, the most that direct I/O asks for.
const ALIGNMENT: usize = 4096;

/// Memory that becomes a part of the file.
#[derive(Debug)]
struct Piece<'a> {
    memory: OwnedMemory,
    /// Bytes that are there, or will be once they are copied.
    filled: usize,
    /// Where in the file it goes.
    offset: u64,
    /// What is to come from devices, and to where.
    copies: Vec<(usize, DeviceBytes<'a>)>,
}

/// Takes bytes that come from devices, by their file offset, to be checked.
pub(super) type Check<'c> = &'c mut dyn FnMut(u64, &[u8]);

/// See the [module documentation](self).
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    handle: &'a Handle,
    gather: Gather<'a>,
    file: File,
    stop: Stop,
    filling: Option<Piece<'a>>,
    /// Full of bytes that came from devices, and neither checked nor sent.
    copied: Option<Piece<'a>>,
    /// Where the next piece goes.
    offset: u64,
    on_their_way: VecDeque<OwnedOperation>,
}

impl<'a> Pieces<'a> {
    /// For bytes of a file from an offset on.
    pub(super) fn new(handle: &'a Handle, file: File, offset: u64, stop: Stop) -> Self {
        Self {
            handle,
            gather: Gather::new(handle),
            file,
            stop,
            filling: None,
            copied: None,
            offset,
            on_their_way: VecDeque::new(),
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Copies bytes of the host behind those that are there.
    pub(super) fn push(&mut self, mut bytes: &[u8], check: Check<'_>) -> Result<()> {
        while !bytes.is_empty() {
            let piece = self.filling(check)?;
            let room = &mut piece.memory.as_mut_slice()[piece.filled..];
            let (now, rest) = bytes.split_at(room.len().min(bytes.len()));
            room[..now.len()].copy_from_slice(now);
            piece.filled += now.len();
            bytes = rest;
            self.pass_on_if_full(check)?;
        }
        Ok(())
    }

    /// Takes bytes of a device behind those that are there.
    pub(super) fn lend(&mut self, bytes: DeviceBytes<'a>, check: Check<'_>) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let piece = self.filling(check)?;
            let now = (piece.memory.len() - piece.filled).min(rest.len());
            piece.copies.push((piece.filled, rest.part(0..now)));
            piece.filled += now;
            rest = rest.part(now..rest.len());
            self.pass_on_if_full(check)?;
        }
        Ok(())
    }

    /// The piece that has room.
    fn filling(&mut self, check: Check<'_>) -> Result<&mut Piece<'a>> {
        let piece = if let Some(piece) = self.filling.take() {
            piece
        } else {
            let memory = self.free(check)?;
            let offset = self.offset;
            self.offset += memory.len() as u64;
            Piece { memory, filled: 0, offset, copies: Vec::new() }
        };
        Ok(self.filling.insert(piece))
    }

    /// Memory for a piece: new, or of the one that is on its way the longest.
    fn free(&mut self, check: Check<'_>) -> Result<OwnedMemory> {
        self.stop.check()?;
        if self.on_their_way.len() + usize::from(self.copied.is_some()) < PIECES_MAX {
            let pool = self.handle.pool()?;
            match pool.allocate(PIECE_BYTES, ALIGNMENT) {
                Ok(buffer) => return Ok(buffer.into()),
                Err(error) if self.on_their_way.is_empty() && self.copied.is_none() => {
                    return Err(error);
                }
                // The pool's budget takes fewer.
                Err(_) => {}
            }
        }
        if self.on_their_way.is_empty() {
            self.send_copied(check)?;
        }
        match self.on_their_way.pop_front() {
            Some(operation) => self.stop.wait(operation),
            None => Err(Error::new(ErrorKind::OutOfMemory, "there is no memory to save with")),
        }
    }

    fn pass_on_if_full(&mut self, check: Check<'_>) -> Result<()> {
        let is_full = self.filling.as_ref().is_some_and(|piece| piece.filled == piece.memory.len());
        if is_full { self.pass_on(check) } else { Ok(()) }
    }

    /// Sends a piece that has all its bytes, or has those of devices come.
    fn pass_on(&mut self, check: Check<'_>) -> Result<()> {
        let Some(mut piece) = self.filling.take() else { return Ok(()) };
        let Self { handle, gather, file, on_their_way, .. } = self;
        if piece.copies.is_empty() {
            on_their_way.push_back(send(handle, file, piece)?);
            return Ok(());
        }
        let before = self.copied.take();
        let sent = gather.copy_while(piece.memory.as_mut_slice(), &piece.copies, || {
            before.map(|before| check_and_send(handle, file, before, check)).transpose()
        })?;
        on_their_way.extend(sent?);
        self.copied = Some(piece);
        Ok(())
    }

    fn send_copied(&mut self, check: Check<'_>) -> Result<()> {
        if let Some(piece) = self.copied.take() {
            let sent = check_and_send(self.handle, &self.file, piece, check)?;
            self.on_their_way.push_back(sent);
        }
        Ok(())
    }

    /// Sends what is left, and waits for everything.
    pub(super) fn flush(&mut self, check: Check<'_>) -> Result<()> {
        self.pass_on(check)?;
        self.send_copied(check)?;
        while let Some(operation) = self.on_their_way.pop_front() {
            self.stop.wait(operation)?;
        }
        self.stop.check()
    }
}

fn check_and_send(
    handle: &Handle,
    file: &File,
    piece: Piece<'_>,
    check: Check<'_>,
) -> Result<OwnedOperation> {
    for &(position, bytes) in &piece.copies {
        let copied = &piece.memory.as_slice()[position..position + bytes.len()];
        check(piece.offset + position as u64, copied);
    }
    send(handle, file, piece)
}

fn send(handle: &Handle, file: &File, piece: Piece<'_>) -> Result<OwnedOperation> {
    let Piece { memory, filled, offset, .. } = piece;
    handle.submit_owned(Direction::Store, file, offset, memory, filled)
}

impl Drop for Pieces<'_> {
    fn drop(&mut self) {
        for operation in &self.on_their_way {
            operation.cancel();
        }
        for operation in self.on_their_way.drain(..) {
            // The failure that ended the save is being returned; these follow from it.
            let _ = operation.wait();
        }
    }
}
