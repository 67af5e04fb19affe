//! Whose memory an address is.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_void;

use super::DeviceAddress;
use super::cuda::Cuda;
use crate::error::Result;

/// `CU_POINTER_ATTRIBUTE_*` of `cuda.h`, in the order in which they are asked for.
const ATTRIBUTES: [u32; 5] = [MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START, RANGE_SIZE];
const MEMORY_TYPE: u32 = 2;
const IS_MANAGED: u32 = 8;
const DEVICE_ORDINAL: u32 = 9;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;
/// `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
const BUFFER_ID: u32 = 7;

/// `CU_MEMORYTYPE_HOST`.
const HOST: u64 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u64 = 2;

/// Whose memory an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The host's, unknown to the driver.
    Host,
    /// The host's, registered with the driver or made by it.
    RegisteredHost,
    /// A device's.
    Device {
        /// The device's number.
        ordinal: u32,
        /// Where the allocation starts that the address is in.
        start: DeviceAddress,
        /// Its length in bytes.
        length: usize,
    },
    /// Both can touch it, and the driver moves it between them.
    Managed {
        /// The number of the device for which it was made.
        ordinal: u32,
    },
}

/// Asks the driver whose memory is at an address.
///
/// # Errors
///
/// The driver refuses.
pub fn memory_at(cuda: &Cuda, address: usize) -> Result<Place> {
    cuda.refuse_forked()?;
    // Each attribute has at most 8 bytes; a shorter one leaves the rest zero, being little-endian.
    let mut values = [0u64; ATTRIBUTES.len()];
    let mut results: [*mut c_void; ATTRIBUTES.len()] =
        values.each_mut().map(|value| std::ptr::from_mut(value).cast());
    let count = u32::try_from(ATTRIBUTES.len()).unwrap_or(0);
    let ask = cuda.driver.pointer_attributes;
    // SAFETY: there are `count` attributes and as many results, each with room for its value.
    let code = unsafe { ask(count, ATTRIBUTES.as_ptr(), results.as_mut_ptr(), address) };
    cuda.check(code, &format!("cannot ask whose memory is at {address:#x}"))?;
    let [kind, managed, ordinal, start, length] = values;
    let ordinal = u32::try_from(ordinal).unwrap_or(0);
    Ok(match kind {
        _ if managed != 0 => Place::Managed { ordinal },
        DEVICE => Place::Device {
            ordinal,
            start: usize::try_from(start).unwrap_or(address),
            length: usize::try_from(length).unwrap_or(0),
        },
        HOST => Place::RegisteredHost,
        _ => Place::Host,
    })
}

/// The number of the allocation that holds an address: no other one of the process has it, those
/// that are freed included.
///
/// # Errors
///
/// The driver refuses, as for memory that isn't a device's.
pub(crate) fn allocation_at(cuda: &Cuda, address: DeviceAddress) -> Result<u64> {
    cuda.refuse_forked()?;
    let (wanted, mut number) = (BUFFER_ID, 0u64);
    let mut result: *mut c_void = std::ptr::from_mut(&mut number).cast();
    let ask = cuda.driver.pointer_attributes;
    // SAFETY: there is one attribute and a result for it, with room for its 8 bytes.
    let code = unsafe { ask(1, &raw const wanted, &raw mut result, address) };
    cuda.check(code, &format!("cannot ask which allocation is at {address:#x}"))?;
    Ok(number)
}

#[cfg(test)]
mod tests {
    use forebay_standin::Standin;

    use super::super::cuda::tests::stand_in;
    use super::*;

    #[test]
    fn the_places_are_told_apart() {
        let standin = Standin::new().unwrap();
        let cuda = Cuda::load(&stand_in(&standin)).unwrap();
        let device = standin.allocate(1, 1000);
        let managed = standin.allocate_managed(1, 1000);
        let host = [0u8; 10];
        let host = host.as_ptr().expose_provenance();
        let at = |address| memory_at(&cuda, address).unwrap();
        assert_eq!(at(device + 999), Place::Device { ordinal: 1, start: device, length: 1000 });
        assert_eq!(at(managed + 1), Place::Managed { ordinal: 1 });
        assert_eq!(at(host), Place::Host);
        standin.free(device);
        standin.free(managed);
        assert_eq!(at(device), Place::Host);
        standin.configure("fail=cuPointerGetAttributes:5:3");
        let error = memory_at(&cuda, host).unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_NOT_INITIALIZED"), "{error}");
    }
}
