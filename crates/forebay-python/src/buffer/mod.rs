//! Any array → address, length, whether it may be written to, and what keeps it alive.
//!
//! Five routes, in this order, so that the one that knows most about an object is asked first:
//! torch's own methods ([`torch`]), numpy's array interface ([`interface`]), that of CUDA arrays
//! ([`cuda`]), DLPack ([`dlpack`]), Python's buffer protocol ([`protocol`]). An array whose bytes in
//! memory aren't its values in C order is taken as the [`runs`] that are, where whoever asks can do
//! with that, or refused, with what to do about it; it is never copied silently.
//!
//! # Invariants
//!
//! - The memory of a [`Memory`] stays where it is while its `keep` object lives: that is the
//!   promise on which [`submit`] hands the address to the core.
//! - This module and its children are the only ones of the crate with `unsafe`.

pub(crate) mod cuda;
mod dlpack;
pub(crate) mod gds;
mod interface;
pub(crate) mod lent;
mod protocol;
mod runs;
pub(crate) mod submit;
mod torch;

use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::error::refusal;
use cuda::OnDevice;
use runs::{Layout, Runs, layout_of};

/// Where an array's bytes are.
#[derive(Debug)]
pub(crate) struct Memory {
    /// First byte of the first item; may be null if there are none.
    pub(crate) address: *mut u8,
    /// Bytes, of all runs.
    pub(crate) length: usize,
    /// Where they are if not all behind the address, and what to do about that.
    runs: Option<(Runs, &'static str)>,
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
        Self::anywhere(object, writable)?.on_host(object)
    }

    /// It, if the host can touch it.
    ///
    /// # Errors
    ///
    /// `UnsupportedBufferError` for memory of a device.
    pub(crate) fn on_host(self, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match self.device {
            Some(device) => Err(device_memory(object, &format!("CUDA device {}", device.ordinal))),
            None => Ok(self),
        }
    }

    /// The memory of an array, which may be a device's.
    ///
    /// # Errors
    ///
    /// As for [`Self::of`].
    pub(crate) fn anywhere(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let memory = Self::in_runs(object, writable)?;
        match memory.runs {
            Some((_, advice)) => Err(invalid(object, &format!("{NOT_CONTIGUOUS}; {advice}"))),
            None => Ok(memory),
        }
    }

    /// The memory of an array, which may be a device's and need not be contiguous.
    ///
    /// # Errors
    ///
    /// As for [`Self::of`]; runs of a destination overlap.
    pub(crate) fn in_runs(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let memory = Self::find(object)?;
        if let Some((runs, _)) = &memory.runs
            && writable
            && runs.overlap()
        {
            let message = "cannot load into it: its items share memory; pass an array of its own";
            return Err(invalid(object, message));
        }
        match memory.read_only {
            Some(reason) if writable => Err(invalid(
                object,
                &format!("cannot load into it: {reason}; pass a writable array"),
            )),
            _ => Ok(memory),
        }
    }

    /// Address, bytes, and offset from the array's first byte of each run.
    pub(crate) fn pieces(&self) -> Vec<(*mut u8, usize, usize)> {
        let Some((Runs { length, starts }, _)) = &self.runs else {
            return vec![(self.address, self.length, 0)];
        };
        let piece = |(index, start): (usize, &isize)| {
            (self.address.wrapping_offset(*start), *length, index * length)
        };
        starts.iter().enumerate().map(piece).collect()
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

/// The runs of an array, or `None` if it is contiguous; `advice` is for where they aren't taken.
fn runs_of(
    object: &Bound<'_, PyAny>,
    shape: &[usize],
    strides: &[i64],
    item_bytes: usize,
    advice: &'static str,
) -> PyResult<Option<(Runs, &'static str)>> {
    match layout_of(shape, strides, item_bytes) {
        Some(Layout::Contiguous) => Ok(None),
        Some(Layout::InRuns(runs)) => Ok(Some((runs, advice))),
        Some(Layout::Scattered { count, length }) => Err(invalid(
            object,
            &format!("{NOT_CONTIGUOUS} ({count} runs of {length} bytes); {advice}"),
        )),
        None => Err(invalid(object, "its strides don't fit its shape")),
    }
}

const NOT_CONTIGUOUS: &str = "its items aren't next to each other in C order, so its bytes aren't \
                              its values";
