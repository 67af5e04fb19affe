//! CUDA arrays: the driver of this process, and `__cuda_array_interface__`, version 3
//! (`numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html`).
//!
//! The driver is loaded when the first array on a device comes.

use std::path::PathBuf;

use forebay_io::DeviceAccess;
use forebay_io::device::{CallerStream, Devices, Place, Search, memory_at, notice_at_once};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::{Memory, byte_length, invalid, invalid_because, runs_of};
use crate::error::{OrRaise, refusal};

/// `CU_STREAM_LEGACY`: the default stream of a device, which waits for those of the caller that
/// aren't made otherwise.
pub(super) const DEFAULT_STREAM: usize = 1;

/// On which device an array is, and where its producer works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OnDevice {
    pub(crate) ordinal: u32,
    pub(crate) stream: usize,
}

/// Says where the driver's library is to be looked for: in these folders, then, if `system`, where
/// the system's loader looks. The facts about this machine that GPUDirect Storage depends on are
/// looked up under `root`, if that is given. Changes nothing once the driver is loaded.
#[pyfunction]
#[pyo3(signature = (folders, system, root=None))]
pub(crate) fn search_cuda(folders: Vec<PathBuf>, system: bool, root: Option<PathBuf>) {
    Devices::search_in(Search { folders, system });
    if let Some(root) = root {
        Devices::look_under(root);
    }
}

/// Registers the memory of pools with CUDA if somebody has brought that up: see
/// [`forebay_io::device::notice_at_once`].
#[pyfunction]
pub(crate) fn notice_cuda(py: Python<'_>) -> bool {
    py.detach(notice_at_once)
}

impl OnDevice {
    /// What the core needs to reach the device of an array.
    pub(super) fn access(self, object: &Bound<'_, PyAny>) -> PyResult<DeviceAccess> {
        let py = object.py();
        let context = py.detach(|| Devices::global()?.context(self.ordinal)).or_raise(py);
        let context = context.map_err(|cause| {
            unreachable_memory(object, &format!("CUDA device {}", self.ordinal), cause)
        })?;
        Ok(DeviceAccess { context, stream: CallerStream(self.stream) })
    }

    /// The device that has an address; `None` if the host has it.
    fn of(py: Python<'_>, address: usize, stream: usize) -> PyResult<Option<Self>> {
        let place = py.detach(|| memory_at(Devices::global()?.cuda(), address)).or_raise(py)?;
        Ok(match place {
            Place::Device { ordinal, .. } | Place::Managed { ordinal } => {
                Some(Self { ordinal, stream })
            }
            Place::Host | Place::RegisteredHost => None,
        })
    }
}

/// The memory of an object with `__cuda_array_interface__`.
pub(super) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Option<Memory>> {
    let py = object.py();
    let Some(interface) = object.getattr_opt(intern!(py, "__cuda_array_interface__"))? else {
        return Ok(None);
    };
    let Ok(interface) = interface.cast_into::<PyDict>() else { return Ok(None) };
    let field = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        Ok(interface.get_item(name)?.filter(|value| !value.is_none()))
    };
    let (Some(shape), Some(kind), Some(data)) =
        (field("shape")?, field("typestr")?, field("data")?)
    else {
        return Err(invalid(object, "its CUDA array interface lacks shape, typestr or data"));
    };
    if field("mask")?.is_some() {
        return Err(invalid(object, "it has a mask, which would be lost; pass both as arrays"));
    }
    let item_bytes = super::interface::item_bytes(object, &kind.extract::<String>()?)?;
    let shape: Vec<usize> =
        shape.extract().map_err(|cause| invalid_because(object, "its shape is invalid", cause))?;
    let length = byte_length(&shape, item_bytes)
        .ok_or_else(|| invalid(object, "its size in bytes doesn't fit in memory"))?;
    let runs = match field("strides")? {
        Some(strides) => {
            let strides: Vec<i64> = strides
                .extract()
                .map_err(|cause| invalid_because(object, "its strides are invalid", cause))?;
            runs_of(object, &shape, &strides, item_bytes, "make it contiguous first")?
        }
        None => None,
    };
    let (address, read_only): (usize, bool) = data
        .cast::<PyTuple>()
        .map_err(PyErr::from)
        .and_then(|data| data.extract())
        .map_err(|cause| invalid_because(object, "its address is invalid", cause))?;
    let stream = match field("stream")? {
        // The producer has nothing to wait for, or is of a version that didn't say.
        None => DEFAULT_STREAM,
        Some(stream) => stream.extract()?,
    };
    if stream == 0 {
        return Err(invalid(object, "its stream is 0, which the CUDA array interface rules out"));
    }
    let device = if length == 0 { None } else { on_device(object, address, stream)? };
    Ok(Some(Memory {
        address: std::ptr::with_exposed_provenance_mut(address),
        length,
        runs,
        device,
        read_only: read_only_reason(object, read_only)?,
        keep: object.clone().unbind(),
    }))
}

fn on_device(
    object: &Bound<'_, PyAny>,
    address: usize,
    stream: usize,
) -> PyResult<Option<OnDevice>> {
    let py = object.py();
    OnDevice::of(py, address, stream).map_err(|cause| unreachable_memory(object, "CUDA", cause))
}

/// The error for memory on a device that can't be reached, and why.
pub(super) fn unreachable_memory(object: &Bound<'_, PyAny>, device: &str, cause: PyErr) -> PyErr {
    let py = object.py();
    let message = format!(
        "{}: its memory is on {device}, which can't be reached: {}",
        super::type_name(object),
        cause.value(py)
    );
    let error = refusal(py, "UnsupportedBufferError", &message);
    error.set_cause(py, Some(cause));
    error
}

/// jax doesn't say in this interface that its arrays can't be changed.
fn read_only_reason(object: &Bound<'_, PyAny>, read_only: bool) -> PyResult<Option<&'static str>> {
    let module = object.get_type().module()?;
    let is_jax = module.to_string_lossy().starts_with("jax");
    Ok(match (read_only, is_jax) {
        (true, _) => Some("it is read-only"),
        (_, true) => Some("jax arrays can't be changed"),
        _ => None,
    })
}
