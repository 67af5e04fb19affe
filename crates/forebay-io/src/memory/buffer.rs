//! A buffer of a pool: its bytes, and giving them back.
#![expect(unsafe_code, reason = "the bytes of a mapping are reached by address")]

use std::fs::File;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::extents::Extent;
use super::pool::Pool;
use super::region::Region;
use crate::error::Result;

/// Where a buffer's bytes come from.
#[derive(Debug)]
pub(super) enum Place {
    /// No bytes: nothing to give back.
    Nowhere,
    /// Part of a shared region.
    Shared(Extent),
    /// All of a region; `None` once given back.
    Own(Option<Region>),
}

/// Memory of a [`Pool`]; dropping it gives it back at once. It is initialised when handed out:
/// zero, but for what [`retain_bytes`](super::PoolOptions::retain_bytes) says.
///
/// In a forked child [pinned](super::PoolOptions::pinned) memory isn't mapped: reading it there is a
/// fault, dropping it is fine.
#[derive(Debug)]
pub struct PoolBuffer {
    pub(super) address: NonNull<u8>,
    pub(super) length: usize,
    pub(super) locked: bool,
    pub(super) place: Place,
    pub(super) pool: Arc<Pool>,
}

// SAFETY: the bytes are this buffer's alone and belong to no thread; the pool is Send and Sync.
unsafe impl Send for PoolBuffer {}
// SAFETY: a shared reference only reads; who writes through `as_ptr` keeps the rules of raw
// pointers itself.
unsafe impl Sync for PoolBuffer {}

impl PoolBuffer {
    /// The first byte, aligned as asked; valid for reads and writes of [`len`](Self::len) bytes
    /// while the buffer lives. A buffer of no bytes has an aligned address that isn't mapped.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// As [`as_ptr`](Self::as_ptr), never null.
    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// The length in bytes, as asked for.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether its pages stay in memory once touched; if not, [`super::PoolStats::lock_refused`]
    /// says why. True of a buffer of no bytes.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// The pool that it came from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Its bytes. They are initialised: as handed out, or what was written since.
    ///
    /// Whoever has a transfer write to [`as_ptr`](Self::as_ptr) makes sure that no such slice is
    /// in use before its completion.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped bytes are initialised by the kernel, and these are this buffer's alone until it is dropped.
        unsafe { slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }

    /// Its bytes, to change. See [`as_slice`](Self::as_slice).
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`, and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }

    /// Has bytes of a file in place of its own, from `position` on, without copying them: a private
    /// mapping. What is written to them later stays here, as with all of the buffer's bytes.
    ///
    /// `false`, with nothing changed, where that can't be: in pinned memory, in a pool that keeps
    /// regions, in buffers of up to 1 MiB, which share one, at places and offsets that aren't whole
    /// pages, or for files that can't be mapped.
    ///
    /// What another process does to the file in place is seen in bytes that weren't written here,
    /// and where the file gets shorter, touching them ends the process (`SIGBUS`), as with every
    /// mapping of a file. Files that are replaced by a rename are safe.
    ///
    /// # Errors
    ///
    /// What the kernel says when it is too late to go on without: drop the buffer.
    pub fn map_file(
        &mut self,
        position: usize,
        file: &File,
        offset: u64,
        length: usize,
    ) -> Result<bool> {
        let options = self.pool.options();
        match &mut self.place {
            Place::Own(Some(region)) if !options.pinned && options.retain_bytes == 0 => {
                region.map_file(position, file.as_fd(), offset, length)
            }
            _ => Ok(false),
        }
    }

    /// Zeroes the first `length` bytes, which an earlier buffer may have written.
    pub(super) fn clear(&mut self, length: usize) {
        let length = length.min(self.length);
        // SAFETY: the bytes are mapped, this buffer's alone, and `u8` takes any value.
        unsafe { self.address.as_ptr().write_bytes(0, length) };
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        let place = std::mem::replace(&mut self.place, Place::Nowhere);
        self.pool.take_back(self.length, place);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::super::{ALIGNMENT_DEFAULT, PoolOptions};
    use super::*;

    const LENGTH: usize = 3 << 20;

    fn pool(pinned: bool, retain_bytes: usize) -> Arc<Pool> {
        Pool::new(PoolOptions { pinned, retain_bytes, ..PoolOptions::default() })
    }

    fn file(length: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
        let content: Vec<u8> =
            (0..length).map(|index| u8::try_from(index % 251).unwrap()).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&content).unwrap();
        (file, content)
    }

    #[test]
    fn a_mapped_file_is_in_place_of_the_bytes_and_stays_as_it_was() {
        let (file, content) = file((2 << 20) + 4096 + 13);
        let mut buffer = pool(false, 0).allocate(LENGTH, ALIGNMENT_DEFAULT).unwrap();
        buffer.as_mut_slice().fill(0xAA);
        let wanted = &content[4096..];
        assert!(buffer.map_file(8192, file.as_file(), 4096, wanted.len()).unwrap());
        assert!(buffer.as_slice()[..8192].iter().all(|&byte| byte == 0xAA));
        assert_eq!(&buffer.as_slice()[8192..][..wanted.len()], wanted);
        let behind = 8192 + wanted.len().next_multiple_of(4096);
        assert!(buffer.as_slice()[behind..].iter().all(|&byte| byte == 0xAA));
        buffer.as_mut_slice().fill(7);
        assert_eq!(fs::read(file.path()).unwrap(), content);
        drop(buffer);
        assert_eq!(fs::read(file.path()).unwrap(), content);
    }

    #[test]
    fn a_file_is_not_mapped_where_that_would_surprise() {
        let (file, _) = file(1 << 20);
        let refused = |pool: Arc<Pool>, length, position, offset| {
            let mut buffer = pool.allocate(length, ALIGNMENT_DEFAULT).unwrap();
            buffer.as_mut_slice().fill(0xAA);
            let mapped = buffer.map_file(position, file.as_file(), offset, 8192).unwrap();
            !mapped && buffer.as_slice().iter().all(|&byte| byte == 0xAA)
        };
        assert!(refused(pool(true, 0), LENGTH, 0, 0), "pinned memory is registered");
        assert!(refused(pool(false, LENGTH), LENGTH, 0, 0), "a kept region would keep the file");
        assert!(refused(pool(false, 0), 64 << 10, 0, 0), "small buffers share a region");
        assert!(refused(pool(false, 0), LENGTH, 1, 0), "within a page");
        assert!(refused(pool(false, 0), LENGTH, 0, 1), "within a page of the file");
        assert!(refused(pool(false, 0), LENGTH, LENGTH - 4096, 0), "more than there is room for");
        let directory = fs::File::open(std::env::temp_dir()).unwrap();
        let mut buffer = pool(false, 0).allocate(LENGTH, ALIGNMENT_DEFAULT).unwrap();
        assert!(!buffer.map_file(0, &directory, 0, 8192).unwrap(), "what can't be mapped");
    }
}
