//! Files of tensors: headers, sources, loading, saving, checksums.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use forebay::safetensors::{
    self as core, ChecksumState, LoadOptions, LoadPlan, PlanOptions, SaveOptions, Source, Stop,
    TensorData, Verdict,
};
use forebay_io::Durability;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::Memory;
use crate::buffer::lent::Lenders;
use crate::buffer::submit::Bytes;
use crate::error::OrRaise;
use crate::handle::Handle;
use crate::interrupt::interruptible;
use crate::pool::PinnedBuffer;

/// A tensor's dtype, shape, and first and last byte in the data section.
type Info<'a> = (&'static str, &'a [u64], u64, u64);

/// A tensor to be saved: name, dtype, shape, array.
type Given<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);

/// What a file says of its tensors.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct TensorHeader(core::Header);

/// A tensor in memory: name, dtype, shape, index of its buffer, first byte there.
pub(crate) type Loaded = (String, &'static str, Vec<u64>, usize, u64);

/// What was found of a tensor: file, name, bytes, verdict, wanted and found checksum.
type Found = (PathBuf, String, u64, &'static str, Option<u32>, Option<u32>);

#[pymethods]
impl TensorHeader {
    /// The names, in the order of the tensors' bytes.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.0.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
    }

    /// `(dtype, shape, start, end)` of a tensor, if it is there; the last two are bytes of the data
    /// section.
    fn get(&self, name: &str) -> Option<Info<'_>> {
        let tensor = self.0.get(name)?;
        Some((tensor.dtype.name(), &tensor.shape, tensor.start, tensor.end))
    }

    /// The user's metadata.
    #[getter]
    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        self.0.metadata().cloned()
    }

    /// The file offset of the data section.
    #[getter]
    fn data_start(&self) -> u64 {
        self.0.data_start()
    }

    /// `"ours"`, `"absent"` or `"stale"`.
    #[getter]
    fn checksums(&self) -> &'static str {
        match self.0.checksums() {
            ChecksumState::Ours => "ours",
            ChecksumState::Absent => "absent",
            ChecksumState::Stale => "stale",
        }
    }

    /// The CRC32C of a tensor, if the file has one that counts.
    fn checksum(&self, name: &str) -> Option<u32> {
        self.0.checksum(name)
    }

    fn __len__(&self) -> usize {
        self.0.tensors().len()
    }
}

/// Reads a file's header.
#[pyfunction]
pub(crate) fn read_header(py: Python<'_>, path: PathBuf) -> PyResult<TensorHeader> {
    py.detach(|| core::Header::read(path)).or_raise(py).map(TensorHeader)
}

/// Parses the header in the bytes of a whole file.
#[pyfunction]
pub(crate) fn parse_header(py: Python<'_>, data: &[u8]) -> PyResult<TensorHeader> {
    core::Header::parse(data, data.len() as u64).or_raise(py).map(TensorHeader)
}

/// Files of tensors that are open: what is loaded later is what was looked at.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct TensorSource(pub(crate) Arc<core::Opened>);

#[pymethods]
impl TensorSource {
    /// Opens a file, an index, a directory, or a list of files.
    #[new]
    fn new(py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<Self> {
        let source = match source.extract::<PathBuf>() {
            Ok(path) => py.detach(|| Source::of(path)),
            Err(_) => Source::Files(source.extract()?),
        };
        py.detach(|| source.open()).or_raise(py).map(|opened| Self(Arc::new(opened)))
    }

    /// The files.
    #[getter]
    fn paths(&self) -> Vec<PathBuf> {
        self.0.files().iter().map(|file| file.path.clone()).collect()
    }

    /// Their descriptors, open as long as this is.
    #[getter]
    fn descriptors(&self) -> Vec<i32> {
        self.0.files().iter().map(|file| file.file().as_raw_fd()).collect()
    }

    /// The header of a file.
    fn header(&self, file: usize) -> Option<TensorHeader> {
        self.0.files().get(file).map(|file| TensorHeader(file.header.clone()))
    }

    /// The names, file by file in the order of the tensors' bytes.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.0.places().iter().map(|&place| self.0.tensor(place).name.as_str()).collect()
    }

    /// Fails if one of the files was written to since they were opened.
    fn check_unchanged(&self, py: Python<'_>) -> PyResult<()> {
        let check = || self.0.files().iter().try_for_each(core::OpenedFile::check_unchanged);
        py.detach(check).or_raise(py)
    }

    /// Takes note of a file that was read, if its checksums say nothing.
    fn note_unverified(&self, py: Python<'_>, handle: &Handle, file: usize) -> PyResult<()> {
        if let Some(file) = self.0.files().get(file) {
            core::note_unverified(handle.plain(py)?, file);
        }
        Ok(())
    }

    /// The index of a tensor's file, if it is there.
    fn file_of(&self, name: &str) -> Option<usize> {
        self.0.find(name).map(|place| place.file)
    }
}

/// What a load would take, as numbers of bytes; refuses what the budget doesn't.
#[pyfunction]
#[pyo3(signature = (handle, source, names, budget))]
pub(crate) fn plan_load<'py>(
    py: Python<'py>,
    handle: &Handle,
    source: &TensorSource,
    names: Option<Vec<String>>,
    budget: Option<u64>,
) -> PyResult<Bound<'py, PyDict>> {
    let plan = plan(py, handle, source, names, budget)?;
    let answer = PyDict::new(py);
    answer.set_item("tensors", plan.tensors().len())?;
    answer.set_item("files", plan.files().len())?;
    answer.set_item("reads", plan.files().iter().map(|file| file.reads.len()).sum::<usize>())?;
    answer.set_item("tensor_bytes", plan.tensor_bytes())?;
    answer.set_item("read_bytes", plan.read_bytes())?;
    answer.set_item("region_bytes", plan.region_bytes())?;
    answer.set_item("copied_bytes", plan.copied_bytes())?;
    answer.set_item("peak_bytes", plan.peak_bytes())?;
    let device_staging_bytes = handle.plain(py)?.options().device_staging_bytes;
    answer.set_item("device_staging_bytes", device_staging_bytes)?;
    Ok(answer)
}

fn plan(
    py: Python<'_>,
    handle: &Handle,
    source: &TensorSource,
    names: Option<Vec<String>>,
    budget: Option<u64>,
) -> PyResult<LoadPlan> {
    let staging_bytes = handle.plain(py)?.options().staging_bytes as u64;
    let options = PlanOptions { names, budget_bytes: budget, staging_bytes };
    let opened = Arc::clone(&source.0);
    py.detach(|| LoadPlan::new(opened, &options)).or_raise(py)
}

/// Loads tensors into buffers; see `forebay::safetensors::load` for whose.
#[pyfunction]
#[pyo3(signature = (handle, source, names, verify, budget, map))]
pub(crate) fn load_tensors(
    py: Python<'_>,
    handle: &Handle,
    source: &TensorSource,
    names: Option<Vec<String>>,
    verify: bool,
    budget: Option<u64>,
    map: bool,
) -> PyResult<(Vec<PinnedBuffer>, Vec<Loaded>)> {
    let plan = plan(py, handle, source, names, budget)?;
    let plain = handle.plain(py)?;
    let regions = interruptible(py, |stop: &Stop| {
        core::load(plain, &plan, &LoadOptions { verify, map, stop: stop.clone() })
    })?;
    let loaded = |placed: &core::Placed| {
        let info = plan.opened().tensor(placed.place);
        let core::TensorInfo { name, dtype, shape, .. } = info;
        (name.clone(), dtype.name(), shape.clone(), placed.region, placed.position)
    };
    let tensors = plan.tensors().iter().map(loaded).collect();
    let buffers = regions.into_iter().map(|region| PinnedBuffer::over(Arc::new(region)));
    Ok((buffers.collect(), tensors))
}

/// Reads every tensor and compares it with its checksum.
#[pyfunction]
pub(crate) fn verify_tensors(
    py: Python<'_>,
    handle: &Handle,
    source: &TensorSource,
) -> PyResult<Vec<Found>> {
    let plain = handle.plain(py)?;
    let findings = interruptible(py, |stop: &Stop| core::verify(plain, &source.0, stop))?;
    let found = |finding: core::Finding| {
        let path = source.0.files()[finding.file].path.clone();
        let (verdict, wanted, found) = match finding.verdict {
            Verdict::Matches => ("matches", None, None),
            Verdict::Differs { wanted, found } => ("differs", Some(wanted), Some(found)),
            Verdict::Unknown => ("unknown", None, None),
        };
        (path, finding.name, finding.bytes, verdict, wanted, found)
    };
    Ok(findings.into_iter().map(found).collect())
}

/// The CRC32C of an array's bytes.
#[pyfunction]
pub(crate) fn crc32c(py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<u32> {
    let bytes = Bytes::of(Memory::of(array, false)?);
    Ok(py.detach(|| core::crc32c(bytes.as_slice())))
}

/// Saves `(name, dtype, shape, array)` tensors as one file.
#[pyfunction]
#[pyo3(signature = (handle, path, tensors, metadata, durability, checksums))]
pub(crate) fn save_tensors(
    py: Python<'_>,
    handle: &Handle,
    path: PathBuf,
    tensors: Vec<Given<'_>>,
    metadata: Option<BTreeMap<String, String>>,
    durability: &str,
    checksums: bool,
) -> PyResult<()> {
    let durability = durability.parse::<Durability>().or_raise(py)?;
    let mut held = Vec::with_capacity(tensors.len());
    let mut lenders = Lenders::default();
    for (name, dtype, shape, array) in tensors {
        let dtype = dtype.parse::<core::Dtype>().or_raise(py)?;
        held.push((name, dtype, shape, lenders.take(&array)?));
    }
    let plain = handle.plain(py)?;
    let held = &held;
    interruptible(py, move |stop: &Stop| {
        let tensors: Vec<TensorData<'_>> = held
            .iter()
            .map(|(name, dtype, shape, array)| TensorData {
                name,
                dtype: *dtype,
                shape,
                bytes: array.as_lent(),
            })
            .collect();
        let options = SaveOptions { durability, checksums, stop: stop.clone() };
        core::save(plain, &path, &tensors, metadata.as_ref(), &options)
    })
}
