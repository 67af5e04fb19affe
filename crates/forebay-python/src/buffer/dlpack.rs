//! DLPack, with and without version (`dmlc.github.io/dlpack/latest/c_api.html`).
//!
//! The capsule is kept as it came, not consumed: its own destructor calls the producer's deleter,
//! once, when the last reference goes. Consuming it (renaming it and calling the deleter here)
//! would give the same with more `unsafe`.

#![expect(unsafe_code, reason = "reads the C structures that a capsule points to")]

use std::ffi::{CStr, c_void};

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

use super::cuda::{DEFAULT_STREAM, OnDevice};
use super::runs::Runs;
use super::{Memory, NOT_CONTIGUOUS, device_memory, invalid, invalid_because, runs_of};

const NAME_LEGACY: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";
/// The major version whose layout is declared here.
const VERSION_MAJOR: u32 = 1;
const FLAG_READ_ONLY: u64 = 1;
const FLAG_IS_COPIED: u64 = 1 << 1;
const FLAG_SUBBYTE_PADDED: u64 = 1 << 2;
/// Most dimensions that are believed; numpy and torch stop at 64.
const DIMENSIONS_MAX: usize = 256;

/// `DLDeviceType` values of memory that can be reached.
mod device {
    use std::borrow::Cow;

    pub(super) const CPU: i32 = 1;
    pub(super) const CUDA: i32 = 2;
    pub(super) const CUDA_HOST: i32 = 3;
    pub(super) const ROCM_HOST: i32 = 11;
    pub(super) const CUDA_MANAGED: i32 = 13;

    /// What users know a kind by that can't be reached; the header has the numbers.
    pub(super) fn name(kind: i32) -> Cow<'static, str> {
        Cow::Borrowed(match kind {
            4 => "OpenCL device",
            7 => "Vulkan device",
            8 => "Metal device",
            10 => "ROCm device",
            14 => "oneAPI device",
            _ => return Cow::Owned(format!("DLPack device of kind {kind}, number")),
        })
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    _code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Legacy {
    tensor: Tensor,
    _context: *mut c_void,
    _deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    _minor: u32,
    _context: *mut c_void,
    _deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

pub(super) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Option<Memory>> {
    let py = object.py();
    let Some(export) = object.getattr_opt(intern!(py, "__dlpack__"))? else { return Ok(None) };
    let mut stream = None;
    if let Some(method) = object.getattr_opt(intern!(py, "__dlpack_device__"))? {
        let (kind, id): (i32, i32) = method.call0()?.extract()?;
        stream = device_of(object, Device { kind, id })?.map(|device| device.stream);
    }
    let capsule = export_capsule(&export, stream)?;
    let Ok(capsule) = capsule.cast::<PyCapsule>() else {
        return Err(PyTypeError::new_err("__dlpack__ did not return a capsule"));
    };
    let (tensor, flags) = read(object, capsule)?;
    let device = device_of(object, tensor.device)?;
    let Extent { address, length, runs } = extent(object, &tensor, flags)?;
    let read_only = match flags {
        None => Some("a DLPack capsule without a version cannot say that it may be written to"),
        Some(flags) if flags & FLAG_READ_ONLY != 0 => Some("it is read-only"),
        Some(flags) if flags & FLAG_IS_COPIED != 0 => Some("its DLPack export is a copy"),
        Some(_) => None,
    };
    Ok(Some(Memory {
        address,
        length,
        runs,
        device,
        read_only,
        keep: capsule.clone().into_any().unbind(),
    }))
}

/// The device of a tensor; its producer makes the default stream wait for its own.
fn device_of(object: &Bound<'_, PyAny>, Device { kind, id }: Device) -> PyResult<Option<OnDevice>> {
    match (kind, u32::try_from(id)) {
        (device::CPU | device::CUDA_HOST | device::ROCM_HOST, _) => Ok(None),
        (device::CUDA | device::CUDA_MANAGED, Ok(ordinal)) => {
            Ok(Some(OnDevice { ordinal, stream: DEFAULT_STREAM }))
        }
        _ => Err(device_memory(object, &format!("{} {id}", device::name(kind)))),
    }
}

/// Asks for a capsule; for one on a device, whose memory is in order behind a stream.
fn export_capsule<'py>(
    export: &Bound<'py, PyAny>,
    stream: Option<usize>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = export.py();
    let named = PyDict::new(py);
    if let Some(stream) = stream {
        named.set_item(intern!(py, "stream"), stream)?;
    }
    named.set_item(intern!(py, "max_version"), (VERSION_MAJOR, 0))?;
    match export.call((), Some(&named)) {
        // Producers from before version 1.0 don't know the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            named.del_item(intern!(py, "max_version"))?;
            export.call((), Some(&named))
        }
        answer => answer,
    }
}

/// The tensor of a capsule; its flags if it has a version.
fn read(
    object: &Bound<'_, PyAny>,
    capsule: &Bound<'_, PyCapsule>,
) -> PyResult<(Tensor, Option<u64>)> {
    if capsule.is_valid_checked(Some(NAME_VERSIONED)) {
        let managed = capsule.pointer_checked(Some(NAME_VERSIONED))?.cast::<Versioned>();
        // SAFETY: a capsule of this name points to a DLManagedTensorVersioned, which it owns; the
        // place of `major` is the same in every version.
        let major = unsafe { (*managed.as_ptr()).major };
        if major != VERSION_MAJOR {
            return Err(invalid(object, &format!("its DLPack version is {major}, not 1")));
        }
        // SAFETY: as above, and the layout is that of version 1.
        let managed = unsafe { managed.as_ref() };
        return Ok((managed.tensor, Some(managed.flags)));
    }
    let managed = capsule
        .pointer_checked(Some(NAME_LEGACY))
        .map_err(|cause| {
            let message = "its DLPack capsule was used already, or is none";
            invalid_because(object, message, cause)
        })?
        .cast::<Legacy>();
    // SAFETY: a capsule of this name points to a DLManagedTensor, which it owns.
    let managed = unsafe { managed.as_ref() };
    Ok((managed.tensor, None))
}

/// Where a tensor's bytes are.
struct Extent {
    address: *mut u8,
    length: usize,
    runs: Option<(Runs, &'static str)>,
}

fn extent(object: &Bound<'_, PyAny>, tensor: &Tensor, flags: Option<u64>) -> PyResult<Extent> {
    let dimensions = usize::try_from(tensor.dimensions)
        .ok()
        .filter(|&dimensions| {
            dimensions <= DIMENSIONS_MAX && (dimensions == 0 || !tensor.shape.is_null())
        })
        .ok_or_else(|| invalid(object, "its DLPack tensor has no valid shape"))?;
    let list = |list: *const i64| -> &[i64] {
        if dimensions == 0 {
            return &[];
        }
        // SAFETY: the producer promises `dimensions` values at `shape`, and at `strides` unless
        // that is null, for as long as the capsule lives, which the caller holds.
        unsafe { std::slice::from_raw_parts(list, dimensions) }
    };
    let shape: Vec<usize> = list(tensor.shape)
        .iter()
        .map(|&extent| usize::try_from(extent).map_err(|_| invalid(object, "a negative extent")))
        .collect::<PyResult<_>>()?;
    let bits = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes);
    let padded = flags.is_some_and(|flags| flags & FLAG_SUBBYTE_PADDED != 0);
    let item_bits = if padded { bits.next_multiple_of(8) } else { bits };
    let length = super::byte_length(&shape, item_bits)
        .map(|bits| bits.div_ceil(8))
        .ok_or_else(|| invalid(object, "its size in bytes doesn't fit in memory"))?;
    let runs = if tensor.strides.is_null() {
        None
    } else {
        runs_in_items(object, &shape, list(tensor.strides), item_bits)?
    };
    if length > 0 && tensor.data.is_null() {
        return Err(invalid(object, "its DLPack tensor has a null address"));
    }
    let offset = usize::try_from(tensor.byte_offset)
        .map_err(|_| invalid(object, "its DLPack offset doesn't fit in memory"))?;
    Ok(Extent { address: tensor.data.cast::<u8>().wrapping_add(offset), length, runs })
}

/// As [`runs_of`], for strides that count items; those that share bytes have no runs.
fn runs_in_items(
    object: &Bound<'_, PyAny>,
    shape: &[usize],
    strides: &[i64],
    item_bits: usize,
) -> PyResult<Option<(Runs, &'static str)>> {
    let unit = if item_bits.is_multiple_of(8) { item_bits / 8 } else { 1 };
    let factor = i64::try_from(unit).unwrap_or(i64::MAX);
    let strides: Vec<i64> = strides.iter().map(|stride| stride.saturating_mul(factor)).collect();
    let advice = "make it contiguous first";
    match runs_of(object, shape, &strides, unit, advice)? {
        Some(_) if !item_bits.is_multiple_of(8) => {
            Err(invalid(object, &format!("{NOT_CONTIGUOUS}; {advice}")))
        }
        runs => Ok(runs),
    }
}
