//! Which of a process's interpreters this is.
//!
//! Since 3.12, Python itself refuses to load the module in a subinterpreter. Before, it would load,
//! and the process would hang at its end: `PyO3` attaches threads to the main interpreter.
#![expect(unsafe_code, reason = "asks Python's C interface for the interpreter")]

use pyo3::exceptions::PyImportError;
use pyo3::{PyResult, Python, ffi};

/// The identifier of the main interpreter.
const MAIN: i64 = 0;

/// Refuses all interpreters but the main one.
pub(crate) fn refuse_subinterpreters(_: Python<'_>) -> PyResult<()> {
    // SAFETY: this thread is attached, as the token says, so it has an interpreter.
    let interpreter = unsafe { ffi::PyInterpreterState_Get() };
    // SAFETY: the interpreter goes on as long as this thread is attached to it.
    if unsafe { ffi::PyInterpreterState_GetID(interpreter) } == MAIN {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "module forebay._forebay does not support loading in subinterpreters",
    ))
}
