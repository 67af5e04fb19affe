//! Handles: options in, items in, tickets and numbers out.

use std::ffi::CString;
use std::sync::Arc;

use forebay::{Profiles, stripe};
use forebay_io::stats::DeviceRouteTaken;
use forebay_io::{Direction, Durability, Options, Priority, Tunings};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::submit::{Item, Job, Terms};
use crate::error::{OrRaise, argument, exception, refusal};
use crate::operation::Operation;
use crate::pool::Pool;
use crate::stripe::Stripe;

/// A handle of the core.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct Handle {
    core: forebay_io::Handle,
    /// What the names of its files are striped over, if they are.
    stripe: Option<stripe::Stripe>,
}

impl Handle {
    /// The core's handle, for files that are whole in one place.
    pub(crate) fn plain(&self, py: Python<'_>) -> PyResult<&forebay_io::Handle> {
        match &self.stripe {
            None => Ok(&self.core),
            Some(_) => Err(refusal(
                py,
                "UnsupportedError",
                "files of tensors can't be striped: use a handle without `stripe`",
            )),
        }
    }

    fn start(&self, job: Job) -> forebay_io::Result<forebay_io::Operation> {
        match &self.stripe {
            Some(stripe) => job.spread(stripe, self.core.options().durability)?.submit(&self.core),
            None => job.submit(&self.core),
        }
    }
}

#[pymethods]
impl Handle {
    /// Options by name; those left out have the core's defaults.
    #[new]
    #[pyo3(signature = (**options))]
    fn new(py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let (options, stripe) = read_options(py, options)?;
        let core = py.detach(|| forebay_io::Handle::new(options)).or_raise(py)?;
        Ok(Self { core, stripe })
    }

    /// Starts an operation over `(array, path or descriptor, offset)` items.
    #[expect(clippy::too_many_arguments, reason = "what holds of a request")]
    #[pyo3(signature = (store, items, whole_file, priority, durability, checksums=false))]
    fn submit(
        &self,
        py: Python<'_>,
        store: bool,
        items: Vec<Item<'_>>,
        whole_file: bool,
        priority: &str,
        durability: Option<&str>,
        checksums: bool,
    ) -> PyResult<Operation> {
        let terms = terms(py, store, whole_file, priority, durability)?;
        let mut job = Job::new(items, Terms { checksums, ..terms })?;
        let run_lengths = job.take_run_lengths();
        let operation = py.detach(|| self.start(job)).or_raise(py)?;
        Ok(Operation::with_sums(operation, run_lengths))
    }

    /// As `submit`, and waits for it. An interrupt cancels it.
    #[pyo3(signature = (store, items, whole_file, priority, durability))]
    fn run(
        &self,
        py: Python<'_>,
        store: bool,
        items: Vec<Item<'_>>,
        whole_file: bool,
        priority: &str,
        durability: Option<&str>,
    ) -> PyResult<()> {
        let job = Job::new(items, terms(py, store, whole_file, priority, durability)?)?;
        if self.stripe.is_none() && py.detach(|| job.run_quickly(&self.core)).or_raise(py)? {
            return Ok(());
        }
        let operation = py.detach(|| self.start(job)).or_raise(py)?;
        Operation::new(operation).finish(py)
    }

    /// Waits for everything under way and stops the workers.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.core.close()).or_raise(py)
    }

    /// Operations under way.
    fn pending(&self, py: Python<'_>) -> usize {
        py.detach(|| self.core.pending())
    }

    /// The failures of finished operations that nobody has heard of, as exceptions.
    fn take_unseen_failures<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let failures = py.detach(|| self.core.take_unseen_failures());
        failures
            .iter()
            .map(|error| exception(py, error).into_value(py).into_bound(py).into_any())
            .collect()
    }

    /// Fallbacks that were not reported yet.
    fn notices(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.core.notices())
    }

    /// The name of the engine in use.
    #[getter]
    fn engine(&self) -> &'static str {
        self.core.engine().name()
    }

    /// The pool that memory comes from.
    fn pool(&self, py: Python<'_>) -> PyResult<Pool> {
        py.detach(|| self.core.pool()).or_raise(py).map(Pool::over)
    }

    /// The pool that memory for results comes from: that it was given, else of ordinary memory.
    fn result_pool(&self, py: Python<'_>) -> PyResult<Pool> {
        py.detach(|| self.core.result_pool()).or_raise(py).map(Pool::over)
    }

    /// What it did so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.core.stats());
        let answer = PyDict::new(py);
        answer.set_item("engine", stats.engine)?;
        for (name, value) in [
            ("operations", stats.operations),
            ("failures", stats.failures),
            ("cancelled", stats.cancelled),
            ("bytes_read", stats.bytes_read),
            ("bytes_written", stats.bytes_written),
            ("bytes_direct", stats.bytes_direct),
            ("bytes_staged", stats.bytes_staged),
            ("bytes_buffered", stats.bytes_buffered),
            ("bytes_cached", stats.bytes_cached),
            ("bytes_registered", stats.bytes_registered),
            ("bytes_gds", stats.bytes_gds),
            ("bytes_device", stats.bytes_device),
            ("transfers", stats.transfers),
            ("retries", stats.retries),
            ("short_transfers", stats.short_transfers),
            ("queue_depth_max", stats.queue_depth_max),
            ("latency_us_p50", stats.latency_us_p50),
            ("latency_us_p99", stats.latency_us_p99),
            ("latency_us_max", stats.latency_us_max),
            ("staging_bytes", stats.staging_bytes),
        ] {
            answer.set_item(name, value)?;
        }
        let fallbacks = PyDict::new(py);
        for (text, count) in stats.fallbacks {
            fallbacks.set_item(text, count)?;
        }
        answer.set_item("fallbacks", fallbacks)?;
        let routes = PyDict::new(py);
        for DeviceRouteTaken { file, route, reason } in stats.device_routes {
            let taken = PyDict::new(py);
            taken.set_item("route", route)?;
            taken.set_item("reason", reason)?;
            routes.set_item(file, taken)?;
        }
        answer.set_item("device_routes", routes)?;
        Ok(answer)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Dropping the core's handle waits for its workers: not with the GIL held, which a signal
        // handler or another thread may need meanwhile. Its failures were taken by the Python half.
        Python::attach(|py| py.detach(|| drop(self.core.close())));
    }
}

fn terms(
    py: Python<'_>,
    store: bool,
    whole_file: bool,
    priority: &str,
    durability: Option<&str>,
) -> PyResult<Terms> {
    Ok(Terms {
        direction: if store { Direction::Store } else { Direction::Load },
        whole_file,
        priority: priority.parse::<Priority>().or_raise(py)?,
        durability: durability.map(str::parse::<Durability>).transpose().or_raise(py)?,
        checksums: false,
    })
}

fn read_options(
    py: Python<'_>,
    given: Option<&Bound<'_, PyDict>>,
) -> PyResult<(Options, Option<stripe::Stripe>)> {
    let mut options = Options::default();
    let mut stripe = None;
    for (name, value) in given.into_iter().flatten() {
        let name = name.extract::<String>()?;
        let name = name.as_str();
        match name {
            "engine" => options.engine = argument::<String>(name, &value)?.parse().or_raise(py)?,
            "block_size" => options.block_size = argument(name, &value)?,
            "queue_depth" => options.queue_depth = argument(name, &value)?,
            "parallelism" => options.parallelism = argument(name, &value)?,
            "single_submit" => options.single_submit = argument(name, &value)?,
            "sqpoll" => options.sqpoll = argument(name, &value)?,
            "iopoll" => options.iopoll = argument(name, &value)?,
            "direct" => options.direct = argument::<String>(name, &value)?.parse().or_raise(py)?,
            "durability" => {
                options.durability = argument::<String>(name, &value)?.parse().or_raise(py)?;
            }
            "device_route" => {
                options.device_route = argument::<String>(name, &value)?.parse().or_raise(py)?;
            }
            "drop_behind" => options.drop_behind = argument(name, &value)?,
            "page_cache" => options.page_cache = argument(name, &value)?,
            "staging_bytes" => options.staging_bytes = argument(name, &value)?,
            "device_staging_bytes" => options.device_staging_bytes = argument(name, &value)?,
            "throttle_bytes_per_second" => {
                options.throttle_bytes_per_second = argument(name, &value)?;
            }
            "stripe" => stripe = Some(value.cast::<Stripe>()?.get().core()),
            "tuned" if argument(name, &value)? => options.tunings = stored_tunings(py)?,
            "tuned" => {}
            "pool" => options.pool = Some(value.cast::<Pool>()?.get().core()),
            other => {
                let message = format!("a handle has no option {other:?}");
                return Err(pyo3::exceptions::PyTypeError::new_err(message));
            }
        }
    }
    Ok((options, stripe))
}

/// What drives were found to do best with, if that is stored for any.
pub(crate) fn stored_tunings(py: Python<'_>) -> PyResult<Option<Arc<dyn Tunings>>> {
    match py.detach(Profiles::load) {
        Ok(profiles) if profiles.is_empty() => Ok(None),
        Ok(profiles) => Ok(Some(Arc::new(profiles))),
        Err(error) => {
            let text = CString::new(format!("default options are used: {error}"))?;
            let category = py.import("forebay.errors")?.getattr("ForebayWarning")?;
            PyErr::warn(py, &category, &text, 3)?;
            Ok(None)
        }
    }
}

/// Waits for every operation of this process.
#[pyfunction]
pub(crate) fn drain_all(py: Python<'_>) {
    py.detach(forebay_io::drain_all);
}
