//! What this host and its files can do.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::OrRaise;

/// `(engine, available, features or reason)` for each engine, the preferred first.
#[pyfunction]
pub(crate) fn probe_engines(py: Python<'_>) -> Vec<(&'static str, bool, String)> {
    let probes = py.detach(forebay_io::probe_engines);
    probes.into_iter().map(|probe| (probe.engine.name(), probe.available, probe.detail)).collect()
}

/// How a file, or a new one in a directory, can be read and written.
#[pyfunction]
pub(crate) fn file_facts(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let facts = py.detach(move || forebay_io::facts(&path)).or_raise(py)?;
    let answer = PyDict::new(py);
    answer.set_item("direct", facts.direct)?;
    answer.set_item("reason", facts.reason)?;
    answer.set_item("memory_alignment", facts.memory_alignment)?;
    answer.set_item("offset_alignment", facts.offset_alignment)?;
    answer.set_item("size", facts.size)?;
    Ok(answer)
}

/// Bytes of a file that are in the page cache; `None` where the kernel can't tell.
#[pyfunction]
pub(crate) fn cached_bytes(py: Python<'_>, path: PathBuf) -> PyResult<Option<u64>> {
    py.detach(move || forebay_io::usage::cached_bytes(&path)).or_raise(py)
}

/// Has a file on the drive, and asks the kernel to drop it from the page cache.
#[pyfunction]
pub(crate) fn drop_cached(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    py.detach(move || forebay_io::usage::drop_cached(&path)).or_raise(py)
}
