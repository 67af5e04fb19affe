//! torch tensors and storages, and what looks like them: asked by their own methods.
//!
//! What is kept alive is the storage, not the tensor: `tensor.data = other` lets go of the old
//! storage at once, while the kernel could still be writing to it.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::cuda::{OnDevice, unreachable_memory};
use super::runs::Runs;
use super::{Memory, device_memory, invalid, invalid_because, runs_of};

pub(super) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Option<Memory>> {
    let py = object.py();
    let Some(data_ptr) = object.getattr_opt(intern!(py, "data_ptr"))? else { return Ok(None) };
    if !data_ptr.is_callable() {
        return Ok(None);
    }
    let device = device_of(object)?;
    check_layout(object)?;
    let address: usize = data_ptr
        .call0()
        .and_then(|address| address.extract())
        .map_err(|cause| invalid_because(object, "it has no memory of its own", cause))?;
    let length = byte_count(object)?;
    if length > 0 && address == 0 {
        return Err(invalid(
            object,
            "it has no memory of its own (a fake, functional or distributed tensor, or one whose \
             storage was freed); pass the tensor that has",
        ));
    }
    let runs = runs(object)?;
    let (first, end) = match &runs {
        Some((runs, _)) => {
            let (first, end) = runs.reach();
            (address.checked_add_signed(first), address.checked_add_signed(end))
        }
        None => (Some(address), address.checked_add(length)),
    };
    let reach = if length > 0 { first.zip(end) } else { None };
    let keep = storage(object, reach)?.unwrap_or_else(|| object.clone());
    let address = std::ptr::with_exposed_provenance_mut(address);
    Ok(Some(Memory { address, length, runs, device, read_only: None, keep: keep.unbind() }))
}

fn device_of(object: &Bound<'_, PyAny>) -> PyResult<Option<OnDevice>> {
    let py = object.py();
    let Some(device) = object.getattr_opt(intern!(py, "device"))? else { return Ok(None) };
    let kind = match device.getattr_opt(intern!(py, "type"))? {
        Some(kind) => kind,
        None => device.str()?.into_any(),
    };
    if kind.eq(intern!(py, "cpu"))? {
        Ok(None)
    } else if kind.eq(intern!(py, "cuda"))? && !is_rocm(py)? {
        cuda_device(object, &device).map(Some)
    } else if kind.eq(intern!(py, "meta"))? {
        Err(invalid(object, "a meta tensor has no bytes; make it with device=\"cpu\""))
    } else {
        Err(device_memory(object, &device.str()?.to_string_lossy()))
    }
}

/// Whether `"cuda"` is torch's name for devices of AMD here.
fn is_rocm(py: Python<'_>) -> PyResult<bool> {
    let version = py.import(intern!(py, "torch.version"))?;
    let hip = version.getattr_opt(intern!(py, "hip"))?;
    Ok(hip.is_some_and(|hip| !hip.is_none()))
}

/// The device of a CUDA tensor, and the stream on which torch works there now.
fn cuda_device(object: &Bound<'_, PyAny>, device: &Bound<'_, PyAny>) -> PyResult<OnDevice> {
    let py = object.py();
    let ask = || -> PyResult<OnDevice> {
        let ordinal = device.getattr(intern!(py, "index"))?.extract()?;
        let module = py.import(intern!(py, "torch.cuda"))?;
        let stream = module.call_method1(intern!(py, "current_stream"), (device,))?;
        let stream = stream.getattr(intern!(py, "cuda_stream"))?.extract()?;
        Ok(OnDevice { ordinal, stream })
    };
    ask().map_err(|cause| unreachable_memory(object, &device.to_string(), cause))
}

fn check_layout(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    if let Some(layout) = object.getattr_opt(intern!(py, "layout"))? {
        let layout = layout.str()?;
        if !layout.to_string_lossy().ends_with("strided") {
            let layout = layout.to_string_lossy();
            return Err(invalid(
                object,
                &format!("its layout is {layout}; call .to_dense(), or pass its parts"),
            ));
        }
    }
    if let Some(dtype) = object.getattr_opt(intern!(py, "dtype"))? {
        let dtype = dtype.str()?.to_string_lossy().into_owned();
        if matches!(dtype.as_str(), "torch.quint4x2" | "torch.quint2x4") {
            return Err(invalid(
                object,
                &format!("several of its items ({dtype}) share a byte; pass .int_repr()"),
            ));
        }
    }
    if let Some(nested) = object.getattr_opt(intern!(py, "is_nested"))?
        && nested.is_truthy()?
    {
        return Err(invalid(object, "it is a nested tensor; pass its parts (.unbind())"));
    }
    if answers(object, intern!(py, "is_conj"))? == Some(true) {
        return Err(invalid(object, "it is a lazy conjugate; call .resolve_conj()"));
    }
    if answers(object, intern!(py, "is_neg"))? == Some(true) {
        return Err(invalid(object, "it is a lazy negative; call .resolve_neg()"));
    }
    Ok(())
}

/// The runs of a tensor that says that it isn't contiguous.
fn runs(object: &Bound<'_, PyAny>) -> PyResult<Option<(Runs, &'static str)>> {
    let py = object.py();
    if answers(object, intern!(py, "is_contiguous"))? != Some(false) {
        return Ok(None);
    }
    let ask = || -> PyResult<(Vec<usize>, Vec<i64>, usize)> {
        Ok((
            object.getattr(intern!(py, "shape"))?.extract()?,
            object.call_method0(intern!(py, "stride"))?.extract()?,
            object.call_method0(intern!(py, "element_size"))?.extract()?,
        ))
    };
    let (shape, mut strides, item_bytes) =
        ask().map_err(|cause| invalid_because(object, "its strides are unknown", cause))?;
    // torch's strides count items.
    let factor = i64::try_from(item_bytes).unwrap_or(i64::MAX);
    for stride in &mut strides {
        *stride = stride.saturating_mul(factor);
    }
    runs_of(object, &shape, &strides, item_bytes, "call .contiguous()")
}

/// Calls a method without arguments, if there is one.
fn answers(object: &Bound<'_, PyAny>, method: &Bound<'_, PyString>) -> PyResult<Option<bool>> {
    let Some(method) = object.getattr_opt(method)? else { return Ok(None) };
    method.call0()?.is_truthy().map(Some)
}

fn byte_count(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = object.py();
    if let Some(bytes) = object.getattr_opt(intern!(py, "nbytes"))? {
        // A property of tensors, a method of storages.
        let bytes = if bytes.is_callable() { bytes.call0()? } else { bytes };
        return bytes.extract();
    }
    let item_bytes: usize = object.call_method0(intern!(py, "element_size"))?.extract()?;
    let items: usize = object.call_method0(intern!(py, "numel"))?.extract()?;
    item_bytes
        .checked_mul(items)
        .ok_or_else(|| invalid(object, "its size in bytes doesn't fit in memory"))
}

/// The storage that the tensor is a view of, once it is clear that its bytes, from the first one to
/// the end, lie within it.
fn storage<'py>(
    object: &Bound<'py, PyAny>,
    reach: Option<(usize, usize)>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = object.py();
    let Some(method) = object.getattr_opt(intern!(py, "untyped_storage"))? else {
        return Ok(None);
    };
    let storage = method.call0()?;
    if let Some((first, end)) = reach {
        let start: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
        if first < start || end - start > bytes {
            return Err(invalid(
                object,
                &format!("its storage was resized to {bytes} bytes and no longer holds it"),
            ));
        }
    }
    Ok(Some(storage))
}
