//! Memory that goes with an operation and comes back with its result: requests without `unsafe`.
//!
//! An [`OwnedMemory`] is the caller's until it is submitted, the operation's until that is done,
//! and the caller's again by [`OwnedOperation::wait`]. So nobody can touch it in between.
#![expect(unsafe_code, reason = "requests name memory by address")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::WakeEvent;
use crate::error::{Error, ErrorKind, Result};
use crate::handle::Handle;
use crate::memory::{ALIGNMENT_DEFAULT, PoolBuffer};
use crate::operation::Operation;
use crate::plan::Direction;
use crate::request::Request;
use crate::{Target, syscalls};

/// Memory that operations can take with them. See the [module documentation](self).
#[derive(Debug)]
pub struct OwnedMemory {
    bytes: Bytes,
    /// Where the caller's bytes begin.
    start: usize,
    length: usize,
}

#[derive(Debug)]
enum Bytes {
    Pool(PoolBuffer),
    Heap(Vec<u8>),
}

impl From<PoolBuffer> for OwnedMemory {
    fn from(buffer: PoolBuffer) -> Self {
        Self { start: 0, length: buffer.len(), bytes: Bytes::Pool(buffer) }
    }
}

impl OwnedMemory {
    /// Ordinary zeroed memory, `shift` bytes behind the beginning of a page.
    pub fn ordinary(length: usize, shift: usize) -> Self {
        let page = usize::try_from(syscalls::page_bytes()).unwrap_or(ALIGNMENT_DEFAULT);
        let shift = shift % page;
        let heap = vec![0; length + 2 * page];
        let start = heap.as_ptr().align_offset(page) + shift;
        Self { bytes: Bytes::Heap(heap), start, length }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        let all = match &self.bytes {
            Bytes::Pool(buffer) => buffer.as_slice(),
            Bytes::Heap(heap) => heap,
        };
        &all[self.start..self.start + self.length]
    }

    /// The bytes, to change.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let all = match &mut self.bytes {
            Bytes::Pool(buffer) => buffer.as_mut_slice(),
            Bytes::Heap(heap) => heap,
        };
        &mut all[self.start..self.start + self.length]
    }
}

/// An operation that has its memory with it.
#[derive(Debug)]
pub struct OwnedOperation(Operation);

impl OwnedOperation {
    /// Whether it is finished, well or badly. Never blocks.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Signals the event once it is done; at once if it is.
    pub fn notify(&self, wake: &Arc<WakeEvent>) {
        self.0.notify(wake);
    }

    /// Starts no further block; see [`Operation::cancel`].
    pub fn cancel(&self) {
        self.0.cancel();
    }

    /// Waits for at most `timeout`; `false` if it isn't done by then.
    pub fn is_done_within(&self, timeout: Duration) -> bool {
        self.0.wait_timeout(timeout).unwrap_or(true)
    }

    /// Waits until it is done, and gives the memory back.
    ///
    /// # Errors
    ///
    /// As for [`Operation::wait`]; the memory goes with it.
    pub fn wait(self) -> Result<OwnedMemory> {
        self.0.wait()?;
        let keep = self.0.take_keep().and_then(|keep| keep.downcast::<OwnedMemory>().ok());
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
    pub fn submit_owned(
        &self,
        direction: Direction,
        path: &Path,
        offset: u64,
        memory: OwnedMemory,
        length: usize,
    ) -> Result<OwnedOperation> {
        let mut memory = Box::new(memory);
        let bytes = memory.as_mut_slice();
        if bytes.len() < length {
            let text = format!("{length} bytes to move, {} of memory", bytes.len());
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let address = bytes.as_mut_ptr();
        let target = Target::Path(path.to_path_buf());
        let mut request = Request::new(direction, target, offset, address, length);
        request.keep = Some(memory);
        // SAFETY: the memory, whose bytes don't move with its owner, is kept by the operation until
        // it is done, and nobody else has a reference to it.
        unsafe { self.submit(request) }.map(OwnedOperation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;

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
}
