//! Memory that goes with an operation and comes back with its result: requests without `unsafe`.
//!
//! A [`Payload`] is the caller's until it is submitted, the operation's until that is done,
//! and the caller's again by [`OwnedOperation::wait`]. So nobody can touch it in between.
#![expect(unsafe_code, reason = "requests name memory by address")]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::WakeEvent;
use crate::error::{Error, ErrorKind, Result};
use crate::handle::Handle;
use crate::memory::{ALIGNMENT_DEFAULT, PoolBuffer};
use crate::operation::Operation;
use crate::payload::Payload;
use crate::plan::Direction;
use crate::request::Request;
use crate::{Target, syscalls};

/// Memory that operations can take with them. See the [module documentation](self).
///
/// It can be [split](Self::split_to) into pieces that go with operations of their own at the same
/// time, and put together again.
#[derive(Debug)]
pub struct OwnedMemory {
    owner: Arc<Owner>,
    /// The first byte of this piece.
    address: NonNull<u8>,
    length: usize,
}

/// Holds the bytes of all pieces. Nobody reaches them through it while there are pieces.
#[derive(Debug)]
enum Owner {
    Pool(PoolBuffer),
    Heap { _bytes: Vec<u8> },
}

// SAFETY: the bytes of a piece are its alone, initialised, and belong to no thread; the owner is
// Send and Sync.
unsafe impl Send for OwnedMemory {}

// SAFETY: a shared reference only reads.
unsafe impl Sync for OwnedMemory {}

impl From<PoolBuffer> for OwnedMemory {
    fn from(buffer: PoolBuffer) -> Self {
        let (address, length) = (buffer.address(), buffer.len());
        Self { owner: Arc::new(Owner::Pool(buffer)), address, length }
    }
}

impl OwnedMemory {
    /// Ordinary zeroed memory, `shift` bytes behind the beginning of a page.
    pub fn ordinary(length: usize, shift: usize) -> Self {
        let page = usize::try_from(syscalls::page_bytes()).unwrap_or(ALIGNMENT_DEFAULT);
        let shift = shift % page;
        let mut heap = vec![0; length + 2 * page];
        let start = heap.as_ptr().align_offset(page) + shift;
        let address = NonNull::from(&mut heap[start..start + length]).cast();
        Self { owner: Arc::new(Owner::Heap { _bytes: heap }), address, length }
    }

    /// The number of its bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the owner holds the bytes in place; they are initialised, and this piece's alone.
        unsafe { slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }

    /// The bytes, to change.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`, and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }

    /// Takes the first `at` bytes off: they are returned, and this is what follows them.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut tail = forebay_io::OwnedMemory::ordinary(10, 0);
    /// let mut head = tail.split_to(4);
    /// head.as_mut_slice().fill(1);
    /// tail.as_mut_slice().fill(2);
    /// head.unsplit(tail).unwrap();
    /// assert_eq!(head.as_slice(), [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    /// ```
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        assert!(at <= self.length, "cannot take {at} bytes off {}", self.length);
        let head = Self { owner: Arc::clone(&self.owner), address: self.address, length: at };
        // SAFETY: both addresses are in the owner's bytes, or one behind them.
        self.address = unsafe { self.address.add(at) };
        self.length -= at;
        head
    }

    /// Puts a piece behind this one that follows it in the same memory.
    ///
    /// # Errors
    ///
    /// The piece, if it is of other memory or doesn't follow this one.
    pub fn unsplit(&mut self, tail: Self) -> std::result::Result<(), Self> {
        let end = self.address.as_ptr().wrapping_add(self.length);
        if !Arc::ptr_eq(&self.owner, &tail.owner) || tail.address.as_ptr() != end {
            return Err(tail);
        }
        self.length += tail.length;
        Ok(())
    }

    /// The buffer of the pool that it was made from, all of it, once no other piece is left.
    ///
    /// # Errors
    ///
    /// The memory as it was, if there is another piece, or if it isn't a pool's.
    pub fn into_pool_buffer(self) -> std::result::Result<PoolBuffer, Self> {
        let Self { owner, address, length } = self;
        match Arc::try_unwrap(owner) {
            Ok(Owner::Pool(buffer)) => Ok(buffer),
            Ok(heap) => Err(Self { owner: Arc::new(heap), address, length }),
            Err(owner) => Err(Self { owner, address, length }),
        }
    }
}

/// An operation that has its memory with it.
#[derive(Debug)]
pub struct OwnedOperation<M = OwnedMemory> {
    operation: Operation,
    memory: PhantomData<M>,
}

impl<M: Payload> OwnedOperation<M> {
    /// Whether it is finished, well or badly. Never blocks.
    pub fn is_done(&self) -> bool {
        self.operation.is_done()
    }

    /// Signals the event once it is done; at once if it is.
    pub fn notify(&self, wake: &Arc<WakeEvent>) {
        self.operation.notify(wake);
    }

    /// Starts no further block; see [`Operation::cancel`].
    pub fn cancel(&self) {
        self.operation.cancel();
    }

    /// Waits for at most `timeout`; `false` if it isn't done by then.
    pub fn is_done_within(&self, timeout: Duration) -> bool {
        self.operation.wait_timeout(timeout).unwrap_or(true)
    }

    /// Waits until it is done, and gives the memory back.
    ///
    /// # Errors
    ///
    /// As for [`Operation::wait`]; the memory goes with it.
    pub fn wait(self) -> Result<M> {
        self.operation.wait()?;
        let keep = self.operation.take_keep().and_then(|keep| keep.downcast::<M>().ok());
        keep.map(|memory| *memory).ok_or_else(|| {
            Error::new(ErrorKind::Closed, "the memory of the operation was taken before")
        })
    }
}

impl Handle {
    /// Starts an operation on `length` bytes at `offset` of a file, with memory of its own. A store
    /// leaves the rest of the file as it is.
    ///
    /// # Errors
    ///
    /// As for [`Handle::submit`]; [`ErrorKind::InvalidInput`] where the memory is shorter than
    /// `length`.
    ///
    /// # Examples
    ///
    /// ```
    /// use forebay_io::{Direction, Handle, Options, OwnedMemory};
    ///
    /// let directory = tempfile::tempdir()?;
    /// let path = directory.path().join("w.bin");
    /// let handle = Handle::new(Options::default())?;
    /// let mut memory = OwnedMemory::ordinary(5, 1);
    /// memory.as_mut_slice().copy_from_slice(b"bytes");
    /// let memory = handle.submit_owned(Direction::Store, &path, 2, memory, 5)?.wait()?;
    /// assert_eq!(std::fs::read(&path)?, b"\0\0bytes");
    /// # drop(memory);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn submit_owned<M: Payload>(
        &self,
        direction: Direction,
        target: impl Into<Target>,
        offset: u64,
        memory: M,
        length: usize,
    ) -> Result<OwnedOperation<M>> {
        let mut memory = Box::new(memory);
        let (address, available, device) = memory.bytes();
        if available < length {
            let text = format!("{length} bytes to move, {available} of memory");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let mut request = Request::new(direction, target.into(), offset, address, length);
        if let Some(access) = device {
            request.parts[0].device = Some(0);
            request.devices = vec![access];
        }
        request.keep = Some(memory);
        // SAFETY: the memory, whose bytes don't move with its owner, is kept by the operation until
        // it is done, and nobody else has a reference to it.
        let operation = unsafe { self.submit(request) }?;
        Ok(OwnedOperation { operation, memory: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{Options, Pool};

    #[test]
    fn memory_comes_back_with_the_bytes_at_any_shift() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.bin");
        let handle = Handle::new(Options::default()).unwrap();
        let wanted: Vec<u8> = (0..100_003_u32).map(|index| (index % 251) as u8).collect();
        for shift in [0, 1, 64, 511] {
            let mut memory = OwnedMemory::ordinary(wanted.len(), shift);
            assert_eq!(memory.as_slice().as_ptr().addr() % 4096, shift);
            memory.as_mut_slice().copy_from_slice(&wanted);
            let stored = handle.submit_owned(Direction::Store, &path, 7, memory, wanted.len());
            let mut memory = stored.unwrap().wait().unwrap();
            memory.as_mut_slice().fill(0);
            let loaded = handle.submit_owned(Direction::Load, &path, 7, memory, wanted.len());
            assert_eq!(loaded.unwrap().wait().unwrap().as_slice(), wanted);
        }
    }

    #[test]
    fn more_bytes_than_memory_are_refused() {
        let handle = Handle::new(Options::default()).unwrap();
        let memory = OwnedMemory::ordinary(10, 0);
        let error = handle.submit_owned(Direction::Store, Path::new("x"), 0, memory, 11);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn pieces_of_one_buffer_go_with_operations_at_the_same_time_and_come_together_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.bin");
        let handle = Handle::new(Options::default()).unwrap();
        let wanted: Vec<u8> = (0..300_007_u32).map(|index| (index % 251) as u8).collect();
        handle.store(&path, &wanted).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let buffer = Pool::global().allocate(wanted.len(), 4096).unwrap();
        let place = buffer.as_ptr();
        let mut rest = OwnedMemory::from(buffer);
        let mut position = 0;
        let mut operations = Vec::new();
        for length in [1, 4095, 100_000, 0, 7, 195_904] {
            let piece = rest.split_to(length);
            let started = handle.submit_owned(Direction::Load, &file, position, piece, length);
            operations.push(started.unwrap());
            position += length as u64;
        }
        assert!(rest.is_empty());
        drop(file);
        let mut pieces = operations.into_iter().map(|operation| operation.wait().unwrap());
        let mut whole = pieces.next().unwrap();
        for piece in pieces {
            whole.unsplit(piece).unwrap();
        }
        assert!(whole.as_slice() == wanted);
        let whole = whole.into_pool_buffer().unwrap_err();
        drop(rest);
        let buffer = whole.into_pool_buffer().unwrap();
        assert_eq!((buffer.as_ptr(), buffer.len()), (place, wanted.len()));
        assert!(buffer.as_slice() == wanted);
    }

    #[test]
    fn pieces_that_do_not_follow_each_other_stay_apart() {
        let mut tail = OwnedMemory::ordinary(10, 0);
        let mut head = tail.split_to(3);
        let middle = tail.split_to(3);
        let tail = head.unsplit(tail).unwrap_err();
        assert_eq!((head.len(), tail.len()), (3, 4));
        let other = head.unsplit(OwnedMemory::ordinary(3, 3)).unwrap_err();
        assert_eq!(other.len(), 3);
        head.unsplit(middle).unwrap();
        head.unsplit(tail).unwrap();
        assert_eq!(head.len(), 10);
        assert!(head.into_pool_buffer().is_err());
    }

    #[test]
    #[should_panic(expected = "cannot take 11 bytes off 10")]
    fn more_than_there_is_cannot_be_split_off() {
        let _ = OwnedMemory::ordinary(10, 0).split_to(11);
    }
}
