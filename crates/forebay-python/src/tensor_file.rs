//! Files of tensors: headers, saving, checksums.

use std::collections::BTreeMap;
use std::path::PathBuf;

use forebay::safetensors::{self as core, ChecksumState, SaveOptions, Stop, TensorData};
use forebay_io::Durability;
use pyo3::prelude::*;

use crate::buffer::Memory;
use crate::buffer::submit::Bytes;
use crate::error::OrRaise;
use crate::handle::Handle;
use crate::interrupt::interruptible;

/// A tensor's dtype, shape, and first and last byte in the data section.
type Info<'a> = (&'static str, &'a [u64], u64, u64);

/// A tensor to be saved: name, dtype, shape, array.
type Given<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);

/// What a file says of its tensors.
#[pyclass(frozen, module = "forebay._forebay")]
#[derive(Debug)]
pub(crate) struct TensorHeader(core::Header);

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
    for (name, dtype, shape, array) in tensors {
        let dtype = dtype.parse::<core::Dtype>().or_raise(py)?;
        let bytes = Bytes::of(Memory::of(&array, false)?);
        held.push((name, dtype, shape, bytes));
    }
    let plain = handle.plain(py)?;
    interruptible(py, |stop: &Stop| {
        let tensors: Vec<TensorData<'_>> = held
            .iter()
            .map(|(name, dtype, shape, bytes)| TensorData {
                name,
                dtype: *dtype,
                shape,
                bytes: bytes.as_slice(),
            })
            .collect();
        let options = SaveOptions { durability, checksums, stop: stop.clone() };
        core::save(plain, &path, &tensors, metadata.as_ref(), &options)
    })
}
