//! GPUDirect Storage as Python sees it: what is missing for it, and device memory that is pinned.

#![expect(unsafe_code, reason = "promises that pinned memory stays")]

use std::path::PathBuf;
use std::sync::Arc;

use forebay_io::device::gds::{DeviceRange, missing};
use forebay_io::device::{Context, Devices};
use pyo3::prelude::*;

use super::{Memory, invalid};
use crate::error::OrRaise;

/// Says in which folders cuFile may be, beside where the system's loader looks.
#[pyfunction]
pub(crate) fn cufile_is_in(folders: Vec<PathBuf>) {
    Devices::cufile_is_in(folders);
}

/// All that stands in the way of GPUDirect Storage here.
#[pyfunction]
pub(crate) fn gds_missing(py: Python<'_>) -> Vec<String> {
    py.detach(missing)
}

/// The number of the device that an array's memory is on; `None`: the host's.
#[pyfunction]
pub(crate) fn device_of(array: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    Ok(Memory::in_runs(array, false)?.device.map(|device| device.ordinal))
}

/// Registers the device memory of an array with cuFile, and keeps the array until it is unpinned;
/// `false` if it is pinned already.
#[pyfunction]
pub(crate) fn pin_device_memory(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = array.py();
    let (range, context, owner) = on_device(array)?;
    let pinned = py.detach(|| {
        let gds = Devices::global()?.gds()?;
        // SAFETY: the memory stays while its owner lives (the promise of `Memory`).
        unsafe { gds.buffers().pin(gds.cufile(), &context, range, Box::new(owner)) }
    });
    pinned.or_raise(py)
}

/// Ends that for the memory that begins where an array's does; `false` if it isn't pinned.
#[pyfunction]
pub(crate) fn unpin_device_memory(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = array.py();
    let (range, ..) = on_device(array)?;
    py.detach(|| Ok(Devices::global()?.gds()?.buffers().unpin(range.start))).or_raise(py)
}

/// Whether all of an array's memory is pinned.
#[pyfunction]
pub(crate) fn is_device_memory_pinned(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = array.py();
    if Memory::in_runs(array, false)?.device.is_none() {
        return Ok(false);
    }
    let (range, ..) = on_device(array)?;
    py.detach(|| Ok(Devices::global()?.gds()?.buffers().is_pinned(range))).or_raise(py)
}

fn on_device(array: &Bound<'_, PyAny>) -> PyResult<(DeviceRange, Arc<Context>, Py<PyAny>)> {
    let memory = Memory::anywhere(array, false)?;
    let Some(device) = memory.device else {
        return Err(invalid(array, "its memory isn't a device's; pass a tensor that is on one"));
    };
    let context = device.access(array)?.context;
    let range = DeviceRange { start: memory.address.expose_provenance(), length: memory.length };
    Ok((range, context, memory.keep))
}
