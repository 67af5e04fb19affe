//! Streams of tensors.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay::safetensors::{self as core, Stop, StreamOptions};
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::handle::Handle;
use crate::interrupt::interruptible;
use crate::pool::PinnedBuffer;
use crate::tensor_file::TensorSource;

/// Longest timeout: more than a year, and less than what clocks can't express.
const SECONDS_MAX: f64 = 1e8;

/// A tensor of a stream: name, dtype, shape, buffer, first byte there.
type Item = (String, &'static str, Vec<u64>, PinnedBuffer, usize);

/// Tensors one after the other, within a budget.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct TensorStream {
    handle: Py<Handle>,
    /// `None` once closed. In a forked child, a thread that isn't there may hold its lock.
    stream: Mutex<Option<core::Stream>>,
    process: u32,
}

#[pymethods]
impl TensorStream {
    /// Plans it; `timeout` is in seconds.
    #[new]
    #[pyo3(signature = (handle, source, names, budget, verify, timeout))]
    fn new(
        py: Python<'_>,
        handle: Py<Handle>,
        source: &TensorSource,
        names: Option<Vec<String>>,
        budget: u64,
        verify: bool,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let timeout = timeout.unwrap_or(SECONDS_MAX).clamp(0.0, SECONDS_MAX);
        let timeout = Duration::from_secs_f64(timeout);
        let options = StreamOptions { names, budget_bytes: budget, verify, timeout };
        let plain = handle.get().plain(py)?;
        let opened = Arc::clone(&source.0);
        let stream = py.detach(|| core::Stream::new(plain, opened, options)).or_raise(py)?;
        Ok(Self { handle, stream: Mutex::new(Some(stream)), process: std::process::id() })
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Item>> {
        let next = loop {
            let ready = py.detach(|| self.with(|stream| Ok(stream.next_ready()))).or_raise(py)?;
            if ready.is_some() {
                break ready;
            }
            // What was got ready stays with the stream if an interrupt ends the call; another thread
            // may take it first.
            let plain = self.handle.get().plain(py)?;
            let get = |stop: &Stop| self.with(|stream| stream.make_ready(plain, stop));
            if !interruptible(py, get)? {
                break None;
            }
        };
        Ok(next.map(|tensor| {
            let core::TensorInfo { name, dtype, shape, .. } = tensor.info();
            let buffer = PinnedBuffer::over(Arc::clone(tensor.buffer()));
            (name.clone(), dtype.name(), shape.clone(), buffer, tensor.position())
        }))
    }

    /// Loads nothing more; what it returned stays.
    fn close(&self, py: Python<'_>) {
        if !self.is_here() {
            return;
        }
        let take = || self.stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(take()));
    }

    /// Bytes that its live tensors, and what is loaded ahead, hold.
    #[getter]
    fn held_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        let held = |stream: &mut core::Stream| Ok(stream.pool().stats().used_bytes);
        py.detach(|| self.with(held)).or_raise(py)
    }
}

impl TensorStream {
    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    fn with<T>(
        &self,
        work: impl FnOnce(&mut core::Stream) -> forebay_io::Result<T>,
    ) -> forebay_io::Result<T> {
        if !self.is_here() {
            return Err(forebay_io::Error::new(
                forebay_io::ErrorKind::Closed,
                "the stream belongs to the process that this one was forked from",
            )
            .hint("make a stream in this process"));
        }
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        match stream.as_mut() {
            Some(stream) => work(stream),
            None => {
                Err(forebay_io::Error::new(forebay_io::ErrorKind::Closed, "the stream is closed"))
            }
        }
    }
}

impl Drop for TensorStream {
    fn drop(&mut self) {
        // What is on its way is waited for: not with the GIL held.
        let stream = self.stream.get_mut().map(Option::take);
        Python::attach(|py| py.detach(|| drop(stream)));
    }
}
