//! The command `forebay`, carried by the wheel.
//!
//! Its definitions and most of its work are in `forebay-cli`. What that needs of Python comes back
//! here as calls to an object that `forebay._cli` hands over.

use std::ffi::OsString;

use forebay_cli::{Exit, Host};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use serde_json::Value;

/// Runs the command; `host` has `facts() -> str`, `call(subcommand, options) -> int`, in which facts
/// and options are JSON, `ask(question, options) -> str`, all of which are JSON but the question, and
/// `command() -> list[str]`.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, arguments: Vec<OsString>, host: Py<PyAny>) -> u8 {
    py.detach(move || forebay_cli::run(arguments, &PythonHost(host)))
}

struct PythonHost(Py<PyAny>);

impl Host for PythonHost {
    fn facts(&self) -> anyhow::Result<Option<Value>> {
        let text: String = Python::attach(|py| self.0.call_method0(py, "facts")?.extract(py))?;
        Ok(Some(serde_json::from_str(&text)?))
    }

    fn call(&self, subcommand: &str, options: &Value) -> anyhow::Result<u8> {
        let arguments = (subcommand, options.to_string());
        Python::attach(|py| match self.0.call_method1(py, "call", arguments) {
            Ok(code) => Ok(code.extract(py)?),
            Err(error) if error.is_instance_of::<PyKeyboardInterrupt>(py) => {
                Ok(Exit::Interrupted as u8)
            }
            Err(error) => Err(error.into()),
        })
    }

    fn ask(&self, question: &str, options: &Value) -> anyhow::Result<Value> {
        let arguments = (question, options.to_string());
        let text: String =
            Python::attach(|py| self.0.call_method1(py, "ask", arguments)?.extract(py))?;
        Ok(serde_json::from_str(&text)?)
    }

    fn command(&self) -> anyhow::Result<Vec<OsString>> {
        Python::attach(|py| Ok(self.0.call_method0(py, "command")?.extract(py)?))
    }
}
