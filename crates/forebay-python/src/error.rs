//! Turns errors of the core into exceptions of `forebay.errors`.
//!
//! The classes, and which of them an error becomes, are in Python: this hands over the fields.

use std::path::Path;

use forebay_io::{Error, ErrorKind};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn errors(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    let module = ERRORS.get_or_try_init(py, || py.import("forebay.errors").map(Bound::unbind))?;
    Ok(module.bind(py))
}

/// The name by which `forebay.errors` knows a kind.
fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Os => "os",
        ErrorKind::ShortFile => "short_file",
        ErrorKind::InvalidInput => "invalid_input",
        ErrorKind::OutOfMemory => "out_of_memory",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Cancelled => "cancelled",
        ErrorKind::TimedOut => "timed_out",
        ErrorKind::Closed => "closed",
        ErrorKind::Mismatch => "mismatch",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Device => "device",
        _ => "other",
    }
}

/// The exception for an error of the core.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let built = errors(py).and_then(|module| {
        let class = module.getattr(intern!(py, "class_for"))?;
        let class = class.call1((kind_name(error.kind()), error.os_code()))?;
        class.call1((
            error.to_string(),
            error.os_code(),
            error.path_ref().map(Path::as_os_str),
            error.offset_bytes(),
            error.wanted_bytes(),
            error.done_bytes(),
            error.engine_name(),
            error.operation_name(),
        ))
    });
    match built {
        Ok(exception) => PyErr::from_value(exception),
        Err(failure) => failure,
    }
}

/// The exception for an argument that can't be used: `class` is a name in `forebay.errors`.
pub(crate) fn refusal(py: Python<'_>, class: &str, message: &str) -> PyErr {
    let built = errors(py).and_then(|module| module.getattr(class)?.call1((message,)));
    match built {
        Ok(exception) => PyErr::from_value(exception),
        Err(failure) => failure,
    }
}

/// Maps the error of a core call made with the GIL released.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for forebay_io::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}

/// Hands an error to `sys.unraisablehook`, whose argument Python code can't make.
#[pyfunction]
pub(crate) fn write_unraisable(error: Bound<'_, PyAny>, about: &Bound<'_, PyAny>) {
    let py = error.py();
    PyErr::from_value(error).write_unraisable(py, Some(about));
}

/// Converts an argument; an error names it.
pub(crate) fn argument<'py, T>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: FromPyObjectOwned<'py>,
{
    let py = value.py();
    value.extract::<T>().map_err(|error| {
        let error: PyErr = error.into();
        if error.is_instance_of::<PyOverflowError>(py) {
            refusal(py, "InvalidInputError", &format!("{name} is out of range"))
        } else if error.is_instance_of::<PyTypeError>(py) {
            PyTypeError::new_err(format!("{name}: {}", error.value(py)))
        } else {
            error
        }
    })
}
