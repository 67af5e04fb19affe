//! Slices that are lent to an operation for as long as a call lasts: requests without `unsafe`, and
//! without giving memory away. [`crate::owned`] has those that go on after the call.
#![expect(unsafe_code, reason = "requests name memory by address")]

use crate::config::Durability;
use crate::error::Result;
use crate::files::Target;
use crate::handle::Handle;
use crate::plan::Direction;
use crate::request::{Part, Request};

impl Handle {
    /// Loads `buffer.len()` bytes at `offset` of a file.
    ///
    /// # Errors
    ///
    /// As for [`Self::run`].
    pub fn load(&self, target: impl Into<Target>, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let address = buffer.as_mut_ptr();
        let request = Request::new(Direction::Load, target.into(), offset, address, buffer.len());
        // SAFETY: the slice is borrowed for this call alone until `run` returns, when the operation
        // is done.
        unsafe { self.run(request) }
    }

    /// Stores a buffer as a whole file of exactly its size.
    ///
    /// # Errors
    ///
    /// As for [`Self::run`].
    pub fn store(&self, target: impl Into<Target>, buffer: &[u8]) -> Result<()> {
        self.store_parts(target, &[(0, buffer)], true, None)
    }

    /// Stores a buffer at `offset` of a file, and leaves the rest of the file as it is.
    ///
    /// # Errors
    ///
    /// As for [`Self::run`].
    pub fn store_at(&self, target: impl Into<Target>, offset: u64, buffer: &[u8]) -> Result<()> {
        self.store_parts(target, &[(offset, buffer)], false, None)
    }

    /// Stores buffers at their offsets of one file, as one operation. With `whole_file`, the file
    /// ends where the furthest of them does; without it, what else is in the file stays. Without a
    /// durability, the handle's option holds.
    ///
    /// # Errors
    ///
    /// As for [`Self::run`]; [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) where
    /// buffers overlap in the file.
    ///
    /// # Examples
    ///
    /// ```
    /// use forebay_io::{Durability, Handle, Options};
    ///
    /// let directory = tempfile::tempdir()?;
    /// let path = directory.path().join("w.bin");
    /// let handle = Handle::new(Options::default())?;
    /// let parts: &[(u64, &[u8])] = &[(6, b"weights"), (0, b"header")];
    /// handle.store_parts(&path, parts, true, Some(Durability::Data))?;
    /// assert_eq!(std::fs::read(&path)?, b"headerweights");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn store_parts(
        &self,
        target: impl Into<Target>,
        parts: &[(u64, &[u8])],
        whole_file: bool,
        durability: Option<Durability>,
    ) -> Result<()> {
        let part = |&(offset, bytes): &(u64, &[u8])| Part {
            file: 0,
            offset,
            address: bytes.as_ptr().cast_mut(),
            length: bytes.len(),
            device: None,
        };
        let target = target.into();
        let nothing = Request::new(Direction::Store, target, 0, std::ptr::null_mut(), 0);
        let parts = parts.iter().map(part).collect();
        let request = Request { parts, whole_file, durability, ..nothing };
        // SAFETY: the slices are borrowed until `run` returns, when the operation is done; a store
        // only reads from them.
        unsafe { self.run(request) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ErrorKind, Options};

    #[test]
    fn parts_go_to_their_offsets_and_the_rest_stays_or_goes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.bin");
        let handle = Handle::new(Options::default()).unwrap();
        let first: Vec<u8> = (0..70_001_u32).map(|index| (index % 251) as u8).collect();
        let second: Vec<u8> = (0..4097_u32).map(|index| (index % 13) as u8).collect();
        std::fs::write(&path, vec![0xAA; 200_000]).unwrap();
        let parts: &[(u64, &[u8])] = &[(100_003, &second), (1, &first), (90_000, &[])];

        handle.store_parts(&path, parts, false, Some(Durability::Full)).unwrap();
        let mut wanted = vec![0xAA; 200_000];
        wanted[1..70_002].copy_from_slice(&first);
        wanted[100_003..104_100].copy_from_slice(&second);
        assert!(std::fs::read(&path).unwrap() == wanted);

        handle.store_parts(&path, parts, true, None).unwrap();
        wanted.truncate(104_100);
        assert!(std::fs::read(&path).unwrap() == wanted);
    }

    #[test]
    fn parts_that_overlap_in_the_file_are_refused_and_it_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.bin");
        std::fs::write(&path, b"before").unwrap();
        let handle = Handle::new(Options::default()).unwrap();
        let error = handle.store_parts(&path, &[(0, b"abc"), (2, b"x")], true, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert_eq!(std::fs::read(&path).unwrap(), b"before");
    }
}
