//! Checkpoints: states out as tensors and text, tickets, and shards back as memory.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use forebay::checkpoint::{self as core, CheckpointOptions, Meanwhile, State, TensorSpec};
use forebay::safetensors::{Dtype, Stop};
use forebay_io::{Error, ErrorKind, Lent};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::lent::{Lenders, LentArray};
use crate::error::{OrRaise, argument, exception};
use crate::handle::stored_tunings;
use crate::interrupt::interruptible;
use crate::operation::{SLICE, WakeEvent, deadline, slice};
use crate::pool::PinnedBuffer;

/// A tensor of a state: name, dtype, shape, array.
type Given<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);

/// A tensor of a checkpoint: name, shard, dtype, shape, first byte and the one behind the last.
type Found<'a> = (&'a str, usize, &'static str, &'a [u64], u64, u64);

/// Saves into a directory, and opens what is there.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct Checkpointer(Option<Arc<core::Checkpointer>>);

impl Checkpointer {
    fn core(&self) -> &Arc<core::Checkpointer> {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

#[pymethods]
impl Checkpointer {
    /// Options by name; those left out have the core's defaults.
    #[new]
    #[pyo3(signature = (directory, **options))]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = read_options(py, options)?;
        let tunings = stored_tunings(py)?;
        let opened = py.detach(|| core::Checkpointer::open_tuned(directory, options, tunings));
        opened.or_raise(py).map(|core| Self(Some(Arc::new(core))))
    }

    /// Saves `(name, dtype, shape, array)` tensors and the text of the rest, for a caller who waits for
    /// it or goes on meanwhile. Returns when they have been captured; `None` where the policy is to skip. An interrupt ends it.
    fn save(
        &self,
        py: Python<'_>,
        step: u64,
        tensors: Vec<Given<'_>>,
        rest: &[u8],
        waits: bool,
    ) -> PyResult<Option<SaveTicket>> {
        let mut specs = Vec::with_capacity(tensors.len());
        let mut held = Vec::with_capacity(tensors.len());
        let mut lenders = Lenders::default();
        for (name, dtype, shape, array) in tensors {
            let dtype = dtype.parse::<Dtype>().or_raise(py)?;
            specs.push(TensorSpec { name, dtype, shape });
            held.push(lenders.take(&array)?);
        }
        let core = self.core();
        let meanwhile = if waits { Meanwhile::Waits } else { Meanwhile::GoesOn };
        let mut raised = None;
        let saved = py.detach(|| {
            let bytes: Vec<Lent<'_>> = held.iter().map(LentArray::as_lent).collect();
            let state = State { tensors: &specs, bytes: &bytes, rest };
            core.save(step, state, meanwhile, &mut || {
                raised = Python::attach(|py| py.check_signals().err());
                match raised {
                    None => Ok(()),
                    Some(_) => Err(Error::new(ErrorKind::Cancelled, "interrupted")),
                }
            })
        });
        match raised {
            Some(raised) => Err(raised),
            None => saved.or_raise(py).map(|ticket| ticket.map(SaveTicket)),
        }
    }

    /// Waits until no save is under way; `False` if that isn't so after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait_idle(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = deadline(timeout);
        while !py.detach(|| self.core().wait_idle(slice(deadline))) {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            py.check_signals()?;
        }
        Ok(true)
    }

    /// The oldest failure that nobody has heard of, as an exception.
    fn take_failure<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let failure = py.detach(|| self.core().take_failure())?;
        Some(exception(py, &failure).into_value(py).into_bound(py).into_any())
    }

    /// Opens the checkpoint of a step, or the newest.
    #[pyo3(signature = (step, verify))]
    fn open(&self, py: Python<'_>, step: Option<u64>, verify: bool) -> PyResult<CheckpointReader> {
        let opened = py.detach(|| self.core().reader(step, verify)).or_raise(py)?;
        Ok(CheckpointReader { core: opened, of: Arc::clone(self.core()) })
    }

    /// The steps that are there, in the order of their numbers.
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        py.detach(|| self.core().steps()).or_raise(py)
    }

    /// The newest step.
    fn latest(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        py.detach(|| self.core().latest()).or_raise(py)
    }

    /// Where they are.
    #[getter]
    fn directory(&self) -> PathBuf {
        self.core().directory().to_path_buf()
    }

    /// Lets go of the memory that is kept for the next save.
    fn trim(&self, py: Python<'_>) -> usize {
        py.detach(|| self.core().trim())
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        // Dropping the core's waits for saves under way: not with the GIL held.
        let core = self.0.take();
        Python::attach(|py| py.detach(|| drop(core)));
    }
}

/// A save under way, or done.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct SaveTicket(core::Ticket);

#[pymethods]
impl SaveTicket {
    /// Waits; `False` if it isn't done after `timeout` seconds. Raises its error.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = deadline(timeout);
        loop {
            let time = deadline.map_or(SLICE, |_| slice(deadline));
            if py.detach(|| self.0.wait_timeout(time)).or_raise(py)? {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Whether it is finished, well or badly.
    fn done(&self) -> bool {
        self.0.is_done()
    }

    /// Signals `event` once it is done.
    fn notify(&self, py: Python<'_>, event: &WakeEvent) {
        py.detach(|| self.0.notify(event.core()));
    }

    #[getter]
    fn step(&self) -> u64 {
        self.0.step()
    }

    /// Seconds until the state was captured.
    #[getter]
    fn blocked_seconds(&self) -> f64 {
        self.0.blocked().as_secs_f64()
    }

    /// Seconds until it was done, or so far.
    #[getter]
    fn total_seconds(&self) -> f64 {
        self.0.total().as_secs_f64()
    }
}

/// An open checkpoint.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct CheckpointReader {
    core: core::Reader,
    of: Arc<core::Checkpointer>,
}

#[pymethods]
impl CheckpointReader {
    #[getter]
    fn step(&self) -> u64 {
        self.core.manifest().step
    }

    /// What isn't tensors, as it was saved.
    #[getter]
    fn rest(&self) -> &[u8] {
        self.core.state()
    }

    /// `(name, shard, dtype, shape, start, end)` of every tensor, by shard.
    #[getter]
    fn tensors(&self) -> Vec<Found<'_>> {
        let tensors = self.core.manifest().tensors.iter();
        let found = tensors.map(|tensor| {
            let (name, dtype) = (tensor.name.as_str(), tensor.dtype.name());
            (name, tensor.shard, dtype, tensor.shape.as_slice(), tensor.start, tensor.end)
        });
        found.collect()
    }

    /// The CRC32C of every tensor, in the same order.
    #[getter]
    fn checksums(&self) -> Vec<u32> {
        self.core.manifest().tensors.iter().map(|tensor| tensor.checksum).collect()
    }

    /// The files of the shards.
    #[getter]
    fn shard_paths(&self) -> Vec<PathBuf> {
        (0..self.core.manifest().shards.len()).map(|index| self.core.shard_path(index)).collect()
    }

    #[getter]
    fn shard_count(&self) -> usize {
        self.core.manifest().shards.len()
    }

    /// Bytes of all shards.
    #[getter]
    fn shard_bytes(&self) -> u64 {
        self.core.manifest().shard_bytes()
    }

    /// Whether nobody has removed or replaced it since it was opened.
    fn is_current(&self, py: Python<'_>) -> bool {
        py.detach(|| self.core.is_current())
    }

    /// A shard's file in memory. An interrupt ends it.
    fn load_shard(&self, py: Python<'_>, index: usize) -> PyResult<PinnedBuffer> {
        let load = |stop: &Stop| self.core.load_shard(self.of.handle(), index, stop);
        interruptible(py, load).map(|shard| PinnedBuffer::over(Arc::new(shard)))
    }

    /// Reads a shard, and compares it with its checksums. An interrupt ends it.
    fn verify_shard(&self, py: Python<'_>, index: usize) -> PyResult<()> {
        interruptible(py, |stop: &Stop| self.core.verify_shard(self.of.handle(), index, stop))
    }
}

fn read_options(py: Python<'_>, given: Option<&Bound<'_, PyDict>>) -> PyResult<CheckpointOptions> {
    let mut options = CheckpointOptions::default();
    for (name, value) in given.into_iter().flatten() {
        let name = name.extract::<String>()?;
        let name = name.as_str();
        match name {
            "keep" => options.keep = argument(name, &value)?,
            "durability" => {
                options.durability = argument::<String>(name, &value)?.parse().or_raise(py)?;
            }
            "budget_bytes" => options.budget_bytes = argument(name, &value)?,
            "in_flight" => options.in_flight = argument(name, &value)?,
            "on_busy" => {
                options.on_busy = argument::<String>(name, &value)?.parse().or_raise(py)?;
            }
            "shard_bytes" => options.shard_bytes = argument(name, &value)?,
            other => {
                let message = format!("a checkpointer has no option {other:?}");
                return Err(pyo3::exceptions::PyTypeError::new_err(message));
            }
        }
    }
    Ok(options)
}
