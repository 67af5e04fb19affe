//! Lends the bytes of arrays to the core, of the host and of devices, for as long as a call takes.

#![expect(unsafe_code, reason = "promises the core that the memory stays valid")]

use std::sync::Arc;

use forebay_io::device::CallerStream;
use forebay_io::{Behind, DeviceBytes, Lent};
use pyo3::prelude::*;

use super::Memory;
use super::cuda::OnDevice;
use super::submit::Bytes;
use crate::error::OrRaise;

/// The streams on which lent arrays are made, as far as they were when the last array of each came.
#[derive(Default)]
pub(crate) struct Lenders {
    known: Vec<(OnDevice, Arc<Behind>)>,
}

impl Lenders {
    /// Takes an array, for reading.
    ///
    /// # Errors
    ///
    /// As for [`Memory::anywhere`]; what the driver says.
    pub(crate) fn take(&mut self, object: &Bound<'_, PyAny>) -> PyResult<LentArray> {
        let memory = Memory::anywhere(object, false)?;
        let behind = memory.device.map(|device| self.behind(object, device)).transpose()?;
        Ok(LentArray { bytes: Bytes::of(memory), behind })
    }

    fn behind(&mut self, object: &Bound<'_, PyAny>, device: OnDevice) -> PyResult<Arc<Behind>> {
        let py = object.py();
        if let Some((_, behind)) = self.known.iter().find(|(known, _)| *known == device) {
            // A producer may have had the stream wait for its own only when it was asked for this.
            // SAFETY: the stream is the array's producer's, which is live while the array is.
            py.detach(|| unsafe { behind.mark(CallerStream(device.stream)) }).or_raise(py)?;
            return Ok(Arc::clone(behind));
        }
        let access = device.access(object)?;
        // SAFETY: the stream is the array's producer's, which is live while the array is.
        let behind = py.detach(|| unsafe { Behind::new(&access) }).or_raise(py)?;
        self.known.push((device, Arc::clone(&behind)));
        Ok(behind)
    }
}

/// An array whose bytes can be lent.
pub(crate) struct LentArray {
    bytes: Bytes,
    /// Where its producer's stream was, if it is on a device.
    behind: Option<Arc<Behind>>,
}

impl LentArray {
    pub(crate) fn as_lent(&self) -> Lent<'_> {
        match &self.behind {
            None => Lent::Host(self.bytes.as_slice()),
            Some(behind) => {
                let (address, length) = self.bytes.place();
                // SAFETY: the memory is that device's and valid while `self` lives. That nothing
                // writes to it meanwhile is up to the user, as for memory of the host.
                Lent::Device(unsafe { DeviceBytes::new(behind, address, length) })
            }
        }
    }
}
