//! Sets of directories to stripe over.

use std::path::PathBuf;

use forebay::stripe;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// A set of directories.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct Stripe(stripe::Stripe);

impl Stripe {
    pub(crate) fn core(&self) -> stripe::Stripe {
        self.0.clone()
    }
}

#[pymethods]
impl Stripe {
    #[new]
    fn new(py: Python<'_>, directories: Vec<PathBuf>, stripe_bytes: u64) -> PyResult<Self> {
        py.detach(move || stripe::Stripe::new(&directories, stripe_bytes)).or_raise(py).map(Self)
    }

    /// The directories, as absolute paths.
    #[getter]
    fn directories(&self) -> Vec<PathBuf> {
        self.0.directories().map(PathBuf::from).collect()
    }

    /// Bytes of a stripe of a new file.
    #[getter]
    fn stripe_bytes(&self) -> u64 {
        self.0.layout().stripe_bytes()
    }

    /// What is allowed and yet pointless.
    fn notices(&self) -> Vec<String> {
        self.0.notices()
    }

    /// Whether anything of that name is there.
    fn exists(&self, py: Python<'_>, name: PathBuf) -> PyResult<bool> {
        py.detach(|| self.0.exists(name)).or_raise(py)
    }

    /// Bytes of the logical file.
    fn size(&self, py: Python<'_>, name: PathBuf) -> PyResult<u64> {
        py.detach(|| self.0.size(name)).or_raise(py)
    }

    /// Raises unless the file is whole.
    fn verify(&self, py: Python<'_>, name: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.verify(name)).or_raise(py)
    }

    /// Removes all parts of a file.
    fn remove(&self, py: Python<'_>, name: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.remove(name)).or_raise(py)
    }
}
