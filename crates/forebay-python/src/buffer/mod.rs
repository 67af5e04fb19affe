//! Any array → address, length, whether it may be written to, and what keeps it alive.
//!
//! Five routes, in this order, so that the one that knows most about an object is asked first:
//! torch's own methods ([`torch`]), numpy's array interface ([`interface`]), that of CUDA arrays
//! ([`cuda`]), DLPack ([`dlpack`]), Python's buffer protocol ([`protocol`]). An array whose bytes in memory aren't its values in C
//! order is refused, with what to do about it; it is never copied silently.
//!
//! # Invariants
//!
//! - The memory of a [`Memory`] stays where it is while its `keep` object lives: that is the
//!   promise on which [`submit`] hands the address to the core.
//! - This module and its children are the only ones of the crate with `unsafe`.

pub(crate) mod cuda;
mod dlpack;
mod interface;
mod protocol;
pub(crate) mod submit;
mod torch;

use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::error::refusal;
use cuda::OnDevice;

/// Where an array's bytes are.
#[derive(Debug)]
pub(crate) struct Memory {
    /// First byte; may be null if there are none.
    pub(crate) address: *mut u8,
    /// Bytes.
    pub(crate) length: usize,
    /// The device whose memory it is, if it isn't the host's.
    pub(crate) device: Option<OnDevice>,
    /// Why nothing may be loaded into it, if nothing may.
    read_only: Option<&'static str>,
    /// Holds the memory in place.
    pub(crate) keep: Py<PyAny>,
}

impl Memory {
    /// The memory of an array that the host can touch, for a destination (`writable`) or a source.
    ///
    /// # Errors
    ///
    /// `InvalidBufferError` (a `ValueError`) or `TypeError`, with what to do.
    pub(crate) fn of(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let memory = Self::anywhere(object, writable)?;
        match memory.device {
            Some(device) => Err(device_memory(object, &format!("CUDA device {}", device.ordinal))),
            None => Ok(memory),
        }
    }

    /// The memory of an array, which may be a device's.
    ///
    /// # Errors
    ///
    /// As for [`Self::of`].
    pub(crate) fn anywhere(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let memory = Self::find(object)?;
        match memory.read_only {
            Some(reason) if writable => Err(invalid(
                object,
                &format!("cannot load into it: {reason}; pass a writable array"),
            )),
            _ => Ok(memory),
        }
    }

    fn find(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(class) = object.cast::<PyType>() {
            let name = class.fully_qualified_name()?;
            return Err(pyo3::exceptions::PyTypeError::new_err(format!(
                "{name} is a class: pass an array"
            )));
        }
        let routes =
            [torch::memory, interface::memory, cuda::memory, dlpack::memory, protocol::memory];
        for route in routes {
            if let Some(memory) = route(object)? {
                return Ok(memory);
            }
        }
        Err(pyo3::exceptions::PyTypeError::new_err(format!(
            "{} has no memory that can be moved: pass a torch tensor, a numpy array, or an object \
             with DLPack, the array interface or the buffer protocol",
            type_name(object)
        )))
    }
}

/// What a message calls the object.
fn type_name(object: &Bound<'_, PyAny>) -> String {
    let name = |class: Bound<'_, PyType>| class.fully_qualified_name().map(|name| name.to_string());
    name(object.get_type()).unwrap_or_else(|_| "the object".to_owned())
}

fn invalid(object: &Bound<'_, PyAny>, message: &str) -> PyErr {
    let message = format!("{}: {message}", type_name(object));
    refusal(object.py(), "InvalidBufferError", &message)
}

/// As [`invalid`], with the exception that led to it as its cause.
fn invalid_because(object: &Bound<'_, PyAny>, message: &str, cause: PyErr) -> PyErr {
    let error = invalid(object, &format!("{message}: {cause}"));
    error.set_cause(object.py(), Some(cause));
    error
}

fn device_memory(object: &Bound<'_, PyAny>, device: &str) -> PyErr {
    let message = format!(
        "{}: its memory is on {device}, which is not supported here; copy it to the CPU",
        type_name(object)
    );
    refusal(object.py(), "UnsupportedBufferError", &message)
}

/// Bytes of `shape` items of `item_bytes` each; `None` when it doesn't fit in memory.
fn byte_length(shape: &[usize], item_bytes: usize) -> Option<usize> {
    let length = if shape.contains(&0) {
        0
    } else {
        shape.iter().try_fold(item_bytes, |bytes, &extent| bytes.checked_mul(extent))?
    };
    isize::try_from(length).is_ok().then_some(length)
}

/// Whether items `strides` apart (in units of `unit`) lie one behind the other in C order.
fn is_c_order(shape: &[usize], strides: &[i64], unit: usize) -> bool {
    if shape.len() != strides.len() {
        return false;
    }
    if shape.contains(&0) {
        return true;
    }
    let mut expected = unit as u64;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        // The stride of a dimension of one item is never used, whatever it says.
        if extent != 1 && u64::try_from(stride) != Ok(expected) {
            return false;
        }
        expected = expected.saturating_mul(extent as u64);
    }
    true
}

const NOT_CONTIGUOUS: &str = "its items aren't next to each other in C order, so its bytes aren't \
                              its values";
