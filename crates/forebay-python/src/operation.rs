//! Tickets, and the event that asyncio sleeps on.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_io::{crc32c, crc32c_combine, engine};
use pyo3::prelude::*;

use crate::error::OrRaise;

/// Longest time without a look at Python's signals.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Ticket of one operation.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct Operation {
    core: forebay_io::Operation,
    /// The bytes of each run of each array, if their checksums are wanted.
    run_lengths: Vec<Vec<u64>>,
}

impl Operation {
    pub(crate) fn new(core: forebay_io::Operation) -> Self {
        Self::with_sums(core, Vec::new())
    }

    /// One that has checksums of arrays, whose runs are parts of the request.
    pub(crate) fn with_sums(core: forebay_io::Operation, run_lengths: Vec<Vec<u64>>) -> Self {
        Self { core, run_lengths }
    }

    /// Waits, with a look at Python's signals after each slice; `false` if time ran out.
    fn wait_until(&self, py: Python<'_>, deadline: Option<Instant>) -> PyResult<bool> {
        loop {
            let time = slice(deadline);
            let answer = py.detach(|| self.core.wait_timeout(time));
            if !matches!(answer, Ok(false)) {
                self.let_go(py);
                return answer.or_raise(py);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Waits for as long as it takes; an interrupt cancels it.
    pub(crate) fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let answer = self.wait_until(py, None);
        if answer.is_err() {
            py.detach(|| self.core.cancel());
        }
        answer.map(|_| ())
    }

    fn let_go(&self, py: Python<'_>) {
        let kept = py.detach(|| self.core.take_keep());
        drop(kept);
    }
}

#[pymethods]
impl Operation {
    /// Waits; `False` if it isn't done after `timeout` seconds. Raises its error.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.wait_until(py, deadline(timeout))
    }

    /// Waits until it is done, and leaves its failure for others to hear of; `False` if it isn't
    /// done after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait_finished(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = deadline(timeout);
        loop {
            let time = slice(deadline);
            if py.detach(|| self.core.wait_finished(time)).or_raise(py)? {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// As `wait`, but raises only an error that nobody has heard of.
    #[pyo3(signature = (timeout=None))]
    fn wait_unheard(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        if !self.wait_finished(py, timeout)? {
            return Ok(false);
        }
        if py.detach(|| self.core.acknowledge()) {
            return self.wait_until(py, None);
        }
        self.let_go(py);
        Ok(true)
    }

    /// Whether it is finished, well or badly.
    fn done(&self) -> bool {
        self.core.is_done()
    }

    /// Starts no further block.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.core.cancel());
    }

    /// Signals `event` once it is done.
    fn notify(&self, py: Python<'_>, event: &WakeEvent) {
        py.detach(|| self.core.notify(&event.0));
    }

    /// Lets go of the arrays that it kept, if it is done.
    fn release(&self, py: Python<'_>) {
        self.let_go(py);
    }

    /// The CRC32C of each array, if they were asked for and all has moved.
    #[getter]
    fn checksums(&self, py: Python<'_>) -> Option<Vec<u32>> {
        py.detach(|| {
            let mut sums = self.core.checksums()?.into_iter();
            let whole = |lengths: &Vec<u64>| {
                lengths
                    .iter()
                    .zip(&mut sums)
                    .fold(crc32c(&[]), |head, (&length, tail)| crc32c_combine(head, tail, length))
            };
            Some(self.run_lengths.iter().map(whole).collect())
        })
    }

    #[getter]
    fn bytes_done(&self) -> u64 {
        self.core.bytes_done()
    }

    #[getter]
    fn bytes_total(&self) -> u64 {
        self.core.bytes_total()
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // Python drops this with the GIL held: the place to let go of Python objects.
        drop(self.core.take_keep());
    }
}

/// The moment `timeout` seconds from now; `None` is never, as is what the clock can't express.
pub(crate) fn deadline(timeout: Option<f64>) -> Option<Instant> {
    let timeout = Duration::try_from_secs_f64(timeout?.max(0.0)).ok()?;
    Instant::now().checked_add(timeout)
}

/// How long to sleep next: until the deadline, at most a slice.
pub(crate) fn slice(deadline: Option<Instant>) -> Duration {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    left.map_or(SLICE, |left| left.min(SLICE))
}

/// An eventfd that operations signal.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct WakeEvent(Arc<engine::WakeEvent>);

impl WakeEvent {
    pub(crate) fn core(&self) -> &Arc<engine::WakeEvent> {
        &self.0
    }
}

#[pymethods]
impl WakeEvent {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        engine::WakeEvent::new().or_raise(py).map(|event| Self(Arc::new(event)))
    }

    /// The descriptor, for a selector.
    fn fileno(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Takes the signal; `False` if there was none.
    fn consume(&self) -> bool {
        self.0.consume()
    }
}
