//! Memory of a device that Forebay has for itself, such as for measuring.
//!
//! What it does itself goes through the default stream of its device and is waited for, so whoever
//! uses it next needs no other order than that it was their turn.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::Arc;

use super::DeviceAddress;
use super::context::Context;
use super::stream::CallerStream;
use crate::error::{Error, ErrorKind, Result};

/// Bytes that a fill copies at once.
const FILL_BYTES: usize = 1 << 20;

/// An allocation in the memory of a device, freed when it is dropped. Nothing else uses it, and the
/// host reaches it by copies only.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    /// Where it starts; nothing is allocated for no bytes.
    start: DeviceAddress,
    length: usize,
}

impl DeviceMemory {
    /// Allocates memory, with whatever is in it.
    ///
    /// # Errors
    ///
    /// The device has too little, or the driver refuses.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use forebay_io::device::{DeviceMemory, Devices};
    ///
    /// let context = Devices::global()?.context(0)?;
    /// let mut memory = DeviceMemory::allocate(&context, 1 << 30)?;
    /// memory.copy_in(100, b"bytes")?;
    /// let mut back = [0; 5];
    /// memory.copy_out(100, &mut back)?;
    /// assert_eq!(&back, b"bytes");
    /// # Ok::<(), forebay_io::Error>(())
    /// ```
    pub fn allocate(context: &Arc<Context>, length: usize) -> Result<Self> {
        let mut start = 0;
        if length > 0 {
            let _entered = context.enter()?;
            let cuda = context.cuda();
            // SAFETY: the result's pointer is valid.
            let code = unsafe { (cuda.driver.allocate)(&raw mut start, length) };
            let ordinal = context.ordinal();
            let what = format!("cannot allocate {length} bytes on CUDA device {ordinal}");
            cuda.check(code, &what).map_err(|error| error.bytes(length as u64, 0))?;
        }
        Ok(Self { context: Arc::clone(context), start, length })
    }

    /// The number of its bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where it starts, for the driver.
    pub fn address(&self) -> DeviceAddress {
        self.start
    }

    /// The context of the device that has it.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Copies bytes to `offset`, and waits for that.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if they don't fit; the driver refuses, or the context is broken.
    pub fn copy_in(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check_range(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        let to = self.start + offset;
        // SAFETY: the range is in this allocation, which is used by nobody else, and `bytes` stay as
        // they are until the call is back.
        let code = unsafe { (cuda.driver.copy_in_now)(to, bytes.as_ptr().cast(), bytes.len()) };
        cuda.check(code, &self.cannot_copy(bytes.len(), "to"))?;
        // The driver may be back before the last bytes are there.
        // SAFETY: the default stream of the context that was entered.
        let code = unsafe { (cuda.driver.stream_synchronize)(CallerStream::default().0) };
        cuda.check(code, &self.cannot_copy(bytes.len(), "to"))
    }

    /// Copies bytes from `offset`.
    ///
    /// # Errors
    ///
    /// As for [`Self::copy_in`].
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.check_range(offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        let from = self.start + offset;
        let (to, length) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the range is in this allocation, which nobody changes meanwhile, and `bytes` are
        // borrowed until the call is back, which is when the copy is over.
        let code = unsafe { (cuda.driver.copy_out_now)(to.cast(), from, length) };
        cuda.check(code, &self.cannot_copy(length, "from"))
    }

    /// Makes every byte the same.
    ///
    /// # Errors
    ///
    /// The driver refuses, or the context is broken.
    pub fn fill(&mut self, value: u8) -> Result<()> {
        let block = vec![value; FILL_BYTES.min(self.length)];
        let mut offset = 0;
        while offset < self.length {
            let length = block.len().min(self.length - offset);
            self.copy_in(offset, &block[..length])?;
            offset += length;
        }
        Ok(())
    }

    fn check_range(&self, offset: usize, length: usize) -> Result<()> {
        if offset.checked_add(length).is_some_and(|end| end <= self.length) {
            return Ok(());
        }
        let text = format!("{length} bytes at {offset} of device memory of {}", self.length);
        Err(Error::new(ErrorKind::InvalidInput, text))
    }

    fn cannot_copy(&self, length: usize, way: &str) -> String {
        format!("cannot copy {length} bytes {way} CUDA device {}", self.context.ordinal())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.length > 0
            && let Ok(_entered) = self.context.enter()
        {
            // SAFETY: the allocation is `self`'s; whatever took it along is over.
            let _ = unsafe { (self.context.cuda().driver.free)(self.start) };
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_standin::Standin;

    use super::super::context::tests::context;
    use super::*;
    use crate::{Direction, Handle, Options, OwnedMemory, TensorMemory};

    /// Longer than a block of a fill, and no whole number of anything.
    const LENGTH: usize = (2 << 20) + 1234;

    fn pattern() -> Vec<u8> {
        (0..=250).cycle().take(LENGTH).collect()
    }

    #[test]
    fn bytes_are_copied_anywhere_within_it_and_nowhere_else() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        {
            let mut memory = DeviceMemory::allocate(&context(&standin, 1), LENGTH).unwrap();
            memory.fill(7).unwrap();
            assert!(standin.peek(memory.address(), LENGTH) == vec![7; LENGTH]);
            memory.copy_in(LENGTH - 5, b"bytes").unwrap();
            memory.copy_in(LENGTH, b"").unwrap();
            let mut back = [0; 6];
            memory.copy_out(LENGTH - 6, &mut back).unwrap();
            assert_eq!(&back, b"\x07bytes");
            for (offset, length) in [(LENGTH - 5, 6), (LENGTH + 1, 0), (usize::MAX, 2)] {
                let error = memory.copy_out(offset, &mut vec![0; length]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                assert!(error.to_string().contains(&LENGTH.to_string()), "{error}");
                assert!(memory.copy_in(offset, &vec![0; length]).is_err());
            }
        }
        assert_eq!(standin.census(), before);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn what_cannot_be_had_is_an_error_with_the_bytes_and_nothing_takes_nothing() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        {
            let context = context(&standin, 0);
            standin.configure("fail=cuMemAlloc_v2:1:2");
            let error = DeviceMemory::allocate(&context, 12_345).unwrap_err();
            assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_OUT_OF_MEMORY");
            assert!(error.to_string().contains("12345 bytes on CUDA device 0"), "{error}");
            let mut empty = DeviceMemory::allocate(&context, 0).unwrap();
            empty.fill(1).unwrap();
            assert!(empty.is_empty());
            drop(empty);
            assert_eq!(standin.count("cuMemFree_v2"), 0);
            let mut memory = DeviceMemory::allocate(&context, 10).unwrap();
            standin.configure("fail=cuMemcpyHtoD_v2:1:700");
            let error = memory.copy_in(0, b"bytes").unwrap_err().to_string();
            assert!(error.contains("cannot copy 5 bytes to CUDA device 0"), "{error}");
        }
        assert_eq!(standin.census(), before);
    }

    #[test]
    fn it_goes_with_an_operation_and_comes_back_with_the_bytes() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.bin");
        {
            let context = context(&standin, 0);
            let handle = Handle::new(Options::default()).unwrap();
            let mut memory = DeviceMemory::allocate(&context, LENGTH).unwrap();
            memory.copy_in(0, &pattern()).unwrap();
            let stored = handle.submit_owned(Direction::Store, &path, 3, memory, LENGTH).unwrap();
            let mut memory = stored.wait().unwrap();
            assert!(std::fs::read(&path).unwrap()[3..] == pattern());
            memory.fill(0).unwrap();
            let loaded = handle.submit_owned(Direction::Load, &path, 3, memory, LENGTH - 1);
            let memory = loaded.unwrap().wait().unwrap();
            let mut back = vec![9; LENGTH];
            memory.copy_out(0, &mut back).unwrap();
            assert!(back[..LENGTH - 1] == pattern()[..LENGTH - 1]);
            assert_eq!(back[LENGTH - 1], 0);
            let more = handle.submit_owned(Direction::Load, &path, 0, memory, LENGTH + 1);
            assert_eq!(more.unwrap_err().kind(), ErrorKind::InvalidInput);
            // Nobody waits for it, or has it afterwards: it is freed once it isn't used any more.
            let memory = DeviceMemory::allocate(&context, LENGTH).unwrap();
            drop(handle.submit_owned(Direction::Load, &path, 0, memory, LENGTH).unwrap());
            handle.close().unwrap();
        }
        assert_eq!(standin.census().split(' ').nth(3), before.split(' ').nth(3), "allocations");
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn bytes_of_both_kinds_of_memory_are_made_and_looked_at_alike() {
        let standin = Standin::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.bin");
        let handle = Handle::new(Options::default()).unwrap();
        // More than one run, and a ragged last one.
        let length = 2 * (4 << 20) + 3;
        let byte_at = |place: usize| u8::try_from(place % 251).unwrap();
        let device = DeviceMemory::allocate(&context(&standin, 0), length).unwrap();
        let kinds =
            [TensorMemory::Host(OwnedMemory::ordinary(length, 1)), TensorMemory::Device(device)];
        for mut memory in kinds {
            assert_eq!(memory.len(), length);
            let mut places = 0..length;
            let make = |_: usize, run: &mut [u8]| {
                for byte in run {
                    *byte = byte_at(places.next().unwrap());
                }
            };
            memory.write_with(make).unwrap();
            let stored = handle.submit_owned(Direction::Store, &path, 0, memory, length).unwrap();
            let memory = stored.wait().unwrap();
            let mut seen = Vec::new();
            let look = |offset: usize, run: &[u8]| {
                assert_eq!(offset, seen.len());
                seen.extend_from_slice(run);
            };
            memory.read_with(look).unwrap();
            assert!(seen == std::fs::read(&path).unwrap());
            assert!(seen.iter().enumerate().all(|(place, byte)| *byte == byte_at(place)));
            assert_eq!(seen.len(), length);
        }
        drop(handle);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }
}
