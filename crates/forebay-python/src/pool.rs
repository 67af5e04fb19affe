//! The pinned pool and its buffers.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use forebay_io::{ErrorKind, PoolBuffer, PoolOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::OrRaise;

/// Longest time in which memory that a finished operation holds isn't noticed by who waits for it:
/// what the drive takes for a few blocks.
const LOOK: Duration = Duration::from_millis(10);

/// Pinned memory with a budget.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct Pool(Arc<forebay_io::Pool>);

impl Pool {
    pub(crate) fn over(pool: Arc<forebay_io::Pool>) -> Self {
        Self(pool)
    }

    pub(crate) fn core(&self) -> Arc<forebay_io::Pool> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (
        budget_bytes=None, retain_bytes=0, lock=true, huge_pages=true, touch=true, pinned=true
    ))]
    #[expect(clippy::fn_params_excessive_bools, reason = "Python gives them by name")]
    fn new(
        budget_bytes: Option<usize>,
        retain_bytes: usize,
        lock: bool,
        huge_pages: bool,
        touch: bool,
        pinned: bool,
    ) -> Self {
        let options = PoolOptions { budget_bytes, pinned, lock, huge_pages, touch, retain_bytes };
        Self(forebay_io::Pool::new(options))
    }

    /// The pool of the process.
    #[staticmethod]
    fn shared(py: Python<'_>) -> Self {
        Self(py.detach(forebay_io::Pool::global))
    }

    /// Memory; waits for room in the budget for `timeout` seconds (`None`: for ever).
    ///
    /// `make_room` lets go of what nobody needs any more: it is called where there is no room, and
    /// now and then while waiting for some.
    #[pyo3(signature = (length, alignment, timeout, make_room))]
    fn allocate(
        &self,
        py: Python<'_>,
        length: usize,
        alignment: usize,
        timeout: Option<f64>,
        make_room: &Bound<'_, PyAny>,
    ) -> PyResult<PinnedBuffer> {
        let at_once = py.detach(|| self.0.allocate(length, alignment));
        let full = at_once.as_ref().is_err_and(|error| error.kind() == ErrorKind::OutOfMemory);
        if !full {
            return at_once.or_raise(py).map(|buffer| PinnedBuffer::over(Arc::new(buffer)));
        }
        make_room.call0()?;
        if timeout.is_some_and(|seconds| seconds <= 0.0) {
            let answer = py.detach(|| self.0.allocate(length, alignment)).or_raise(py);
            return answer.map(|buffer| PinnedBuffer::over(Arc::new(buffer)));
        }
        let timeout = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let make_room = make_room.as_unbound();
        let mut raised = None;
        let answer = py.detach(|| {
            self.0.allocate_watched(length, alignment, timeout, LOOK, &mut || {
                let look = |py: Python<'_>| {
                    py.check_signals()?;
                    make_room.call0(py).map(drop)
                };
                match Python::attach(look) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(error) => {
                        raised = Some(error);
                        ControlFlow::Break(())
                    }
                }
            })
        });
        match raised {
            Some(error) => Err(error),
            None => answer.or_raise(py).map(|buffer| PinnedBuffer::over(Arc::new(buffer))),
        }
    }

    /// Lets go of what it keeps without a buffer; how many bytes those were.
    fn trim(&self, py: Python<'_>) -> usize {
        py.detach(|| self.0.trim())
    }

    /// What it holds now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.0.stats());
        let answer = PyDict::new(py);
        answer.set_item("budget_bytes", stats.budget_bytes)?;
        answer.set_item("used_bytes", stats.used_bytes)?;
        answer.set_item("mapped_bytes", stats.mapped_bytes)?;
        answer.set_item("kept_bytes", stats.kept_bytes)?;
        answer.set_item("locked_bytes", stats.locked_bytes)?;
        answer.set_item("peak_bytes", stats.peak_bytes)?;
        answer.set_item("buffers", stats.buffers)?;
        answer.set_item("regions", stats.regions)?;
        answer.set_item("lock_refused", stats.lock_refused)?;
        Ok(answer)
    }
}

/// Memory of a pool, given back with its last reference.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct PinnedBuffer(Option<Arc<PoolBuffer>>);

impl PinnedBuffer {
    pub(crate) fn over(buffer: Arc<PoolBuffer>) -> Self {
        Self(Some(buffer))
    }
}

#[pymethods]
impl PinnedBuffer {
    /// numpy's view of it: bytes.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("shape", (self.__len__(),))?;
        interface.set_item("data", (self.address(), false))?;
        Ok(interface)
    }

    fn __len__(&self) -> usize {
        self.0.as_ref().map_or(0, |buffer| buffer.len())
    }

    #[getter]
    fn address(&self) -> usize {
        self.0.as_ref().map_or(0, |buffer| buffer.as_ptr().expose_provenance())
    }

    /// Whether the system agreed to keep it in memory.
    #[getter]
    fn is_locked(&self) -> bool {
        self.0.as_ref().is_some_and(|buffer| buffer.is_locked())
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // Unmapping gigabytes takes a while: not with the GIL held.
        let buffer = self.0.take();
        Python::attach(|py| py.detach(|| drop(buffer)));
    }
}
