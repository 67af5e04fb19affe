//! numpy's array interface, version 3 (`numpy.org/doc/stable/reference/arrays.interface.html`).

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use super::{Memory, byte_length, invalid, invalid_because, runs_of};

pub(super) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Option<Memory>> {
    let py = object.py();
    let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? else {
        return Ok(None);
    };
    let Ok(interface) = interface.cast_into::<PyDict>() else { return Ok(None) };
    let (Some(shape), Some(kind)) =
        (field(&interface, intern!(py, "shape"))?, field(&interface, intern!(py, "typestr"))?)
    else {
        return Err(invalid(object, "its array interface lacks shape or typestr"));
    };
    let item_bytes = item_bytes(object, &kind.extract::<String>()?)?;
    // `numpy.ma` tells only by its attributes.
    let masked = object.hasattr(intern!(py, "mask"))? && object.hasattr(intern!(py, "filled"))?;
    if masked || field(&interface, intern!(py, "mask"))?.is_some() {
        return Err(invalid(object, "it has a mask, which would be lost; pass .data and .mask"));
    }
    let shape: Vec<usize> =
        shape.extract().map_err(|cause| invalid_because(object, "its shape is invalid", cause))?;
    let length = byte_length(&shape, item_bytes)
        .ok_or_else(|| invalid(object, "its size in bytes doesn't fit in memory"))?;
    let runs = match field(&interface, intern!(py, "strides"))? {
        Some(strides) => {
            let strides: Vec<i64> = strides
                .extract()
                .map_err(|cause| invalid_because(object, "its strides are invalid", cause))?;
            runs_of(object, &shape, &strides, item_bytes, "call numpy.ascontiguousarray")?
        }
        None => None,
    };
    let data = field(&interface, intern!(py, "data"))?;
    let Some(data) = data.as_ref().and_then(|data| data.cast::<PyTuple>().ok()) else {
        return Err(invalid(object, "its array interface gives no address; call numpy.asarray"));
    };
    let (address, read_only): (usize, bool) = data.extract().map_err(|cause| {
        invalid_because(object, "its array interface gives no valid address", cause)
    })?;
    if length > 0 && address == 0 {
        return Err(invalid(object, "its array interface gives a null address"));
    }
    Ok(Some(Memory {
        address: std::ptr::with_exposed_provenance_mut(address),
        length,
        runs,
        device: None,
        read_only: read_only.then_some("it is read-only"),
        keep: object.clone().unbind(),
    }))
}

/// A field, if it is there and not `None`.
fn field<'py>(
    interface: &Bound<'py, PyDict>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(interface.get_item(name)?.filter(|value| !value.is_none()))
}

/// The size of one item, once it is clear that items are plain bytes.
pub(super) fn item_bytes(object: &Bound<'_, PyAny>, typestr: &str) -> PyResult<usize> {
    let py = object.py();
    let kind = typestr.chars().nth(1).unwrap_or(' ');
    let dtype = object.getattr_opt(intern!(py, "dtype"))?;
    let has_objects = match dtype.as_ref().map(|dtype| dtype.getattr_opt(intern!(py, "hasobject")))
    {
        Some(Ok(Some(answer))) => answer.is_truthy()?,
        _ => false,
    };
    if has_objects || !"bBiufcmMSUV?".contains(kind) {
        return Err(invalid(
            object,
            &format!(
                "its items ({typestr}) are references or of variable length, not plain bytes; \
                 convert it to a numeric dtype"
            ),
        ));
    }
    // "<f4", "<M8[ns]", "<U10" (ten characters of four bytes each).
    let digits: String = typestr.chars().skip(2).take_while(char::is_ascii_digit).collect();
    let count: usize = digits
        .parse()
        .map_err(|_| invalid(object, &format!("its typestr {typestr:?} gives no item size")))?;
    let unit = if kind == 'U' { 4 } else { 1 };
    count
        .checked_mul(unit)
        .ok_or_else(|| invalid(object, &format!("its typestr {typestr:?} is out of range")))
}
