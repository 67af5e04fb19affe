//! What an operation can take with it: memory of the host, or of a device.
//!
//! How it goes and comes back is in [`crate::owned`].

use std::sync::Arc;

use crate::device::{CallerStream, DeviceMemory};
use crate::error::Result;
use crate::owned::OwnedMemory;
use crate::request::DeviceAccess;

/// Bytes of a device that are in the host's memory at once, while they are made or looked at.
const RUN_BYTES: usize = 4 << 20;

/// Memory that operations can take with them: [`OwnedMemory`], [`DeviceMemory`], or
/// [`TensorMemory`], which is one of the two.
pub trait Payload: sealed::Bytes + Send + 'static {}

pub(crate) mod sealed {
    use crate::request::DeviceAccess;

    /// Where bytes are that stay there, and belong to nobody else, while their owner is kept.
    pub trait Bytes {
        /// Their address and how many there are; the device that has them, and where they are
        /// worked on.
        fn bytes(&mut self) -> (*mut u8, usize, Option<DeviceAccess>);
    }
}

impl Payload for OwnedMemory {}

impl sealed::Bytes for OwnedMemory {
    fn bytes(&mut self) -> (*mut u8, usize, Option<DeviceAccess>) {
        let bytes = self.as_mut_slice();
        (bytes.as_mut_ptr(), bytes.len(), None)
    }
}

impl Payload for DeviceMemory {}

impl sealed::Bytes for DeviceMemory {
    fn bytes(&mut self) -> (*mut u8, usize, Option<DeviceAccess>) {
        // Whatever its owner does with it goes through the default stream.
        let access =
            DeviceAccess { context: Arc::clone(self.context()), stream: CallerStream::default() };
        (std::ptr::without_provenance_mut(self.address()), self.len(), Some(access))
    }
}

/// Memory of the host or of a device.
#[derive(Debug)]
pub enum TensorMemory {
    /// The host's.
    Host(OwnedMemory),
    /// A device's.
    Device(DeviceMemory),
}

impl Payload for TensorMemory {}

impl sealed::Bytes for TensorMemory {
    fn bytes(&mut self) -> (*mut u8, usize, Option<DeviceAccess>) {
        match self {
            Self::Host(memory) => memory.bytes(),
            Self::Device(memory) => memory.bytes(),
        }
    }
}

impl TensorMemory {
    /// The number of its bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(memory) => memory.len(),
            Self::Device(memory) => memory.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes its bytes anew, run by run: `make` gets where a run begins and the run, and writes all
    /// of it.
    ///
    /// # Errors
    ///
    /// The device refuses.
    pub fn write_with(&mut self, mut make: impl FnMut(usize, &mut [u8])) -> Result<()> {
        match self {
            Self::Host(memory) => make(0, memory.as_mut_slice()),
            Self::Device(memory) => {
                let mut run = vec![0; RUN_BYTES.min(memory.len())];
                for offset in (0..memory.len()).step_by(RUN_BYTES) {
                    let length = run.len().min(memory.len() - offset);
                    make(offset, &mut run[..length]);
                    memory.copy_in(offset, &run[..length])?;
                }
            }
        }
        Ok(())
    }

    /// Shows its bytes, run by run: `look` gets where a run begins and the run.
    ///
    /// # Errors
    ///
    /// The device refuses.
    pub fn read_with(&self, mut look: impl FnMut(usize, &[u8])) -> Result<()> {
        match self {
            Self::Host(memory) => look(0, memory.as_slice()),
            Self::Device(memory) => {
                let mut run = vec![0; RUN_BYTES.min(memory.len())];
                for offset in (0..memory.len()).step_by(RUN_BYTES) {
                    let length = run.len().min(memory.len() - offset);
                    memory.copy_out(offset, &mut run[..length])?;
                    look(offset, &run[..length]);
                }
            }
        }
        Ok(())
    }
}
