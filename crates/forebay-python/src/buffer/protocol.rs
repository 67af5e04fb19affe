//! Python's buffer protocol: `bytes`, `bytearray`, `memoryview`, `array.array`, `mmap`.
//!
//! The C API has it in the stable ABI from 3.11 on only, so `pyo3` leaves it out of a wheel for
//! 3.10. The functions have been exported by every `CPython` since 2.6, and the structure that 3.11
//! froze is the one that 3.0 to 3.10 have (PEP 3118, `Include/pybuffer.h`): they are declared
//! here.

#![expect(unsafe_code, reason = "declares and calls two functions of the C API")]

use std::ffi::{CStr, c_char, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use super::{Memory, NOT_CONTIGUOUS, invalid, invalid_because};

/// `PyBUF_C_CONTIGUOUS | PyBUF_FORMAT`.
const FLAGS: c_int = 0x0020 | 0x0010 | 0x0008 | 0x0004;

/// `Py_buffer`.
#[repr(C)]
#[derive(Debug)]
struct View {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut View);
}

/// Holds a buffer: its object can't be resized or closed meanwhile. Released by the collector.
#[pyclass(frozen, module = "forebay._forebay")]
struct BufferView {
    /// Boxed: exporters let `shape` point into the structure, so it must not move.
    view: Box<View>,
}

// SAFETY: the pointers are only used to release the view, which happens in `drop`, under the GIL;
// nothing is read or changed through a shared reference.
unsafe impl Send for BufferView {}

// SAFETY: as above.
unsafe impl Sync for BufferView {}

impl Drop for BufferView {
    fn drop(&mut self) {
        // SAFETY: the view was filled by PyObject_GetBuffer, and is released once, here. Python
        // deallocates objects with the GIL held, and nobody else drops this: it is made in
        // `memory` only, straight into a Python object.
        unsafe { PyBuffer_Release(&raw mut *self.view) };
    }
}

pub(super) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Option<Memory>> {
    let py = object.py();
    // SAFETY: the object is alive and the GIL is held.
    if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
        return Ok(None);
    }
    let mut view = Box::new(View {
        buf: std::ptr::null_mut(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 0,
        ndim: 0,
        format: std::ptr::null_mut(),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        suboffsets: std::ptr::null_mut(),
        internal: std::ptr::null_mut(),
    });
    // SAFETY: the object is alive, the GIL is held, and `view` is a valid place for the answer.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, FLAGS) } != 0 {
        let cause = PyErr::fetch(py);
        let message = format!("{NOT_CONTIGUOUS}, or it is in use; copy it first");
        return Err(invalid_because(object, &message, cause));
    }
    let (address, length, read_only) = (view.buf.cast::<u8>(), view.len, view.readonly != 0);
    let format = view.format;
    let keep = Bound::new(py, BufferView { view })?;
    // SAFETY: a format that isn't null is a C string that lives as long as the view, held by
    // `keep`.
    if !format.is_null() && has_pointers(unsafe { CStr::from_ptr(format) }.to_bytes()) {
        return Err(invalid(object, "its items are pointers or references, not plain bytes"));
    }
    Ok(Some(Memory {
        address,
        length: usize::try_from(length).unwrap_or(0),
        runs: None,
        device: None,
        read_only: read_only.then_some("it is read-only"),
        keep: keep.into_any().unbind(),
    }))
}

/// Whether a format (PEP 3118, and ctypes' `z`, `Z` and `P`) has items that are addresses.
fn has_pointers(format: &[u8]) -> bool {
    let mut in_name = false;
    format.iter().enumerate().any(|(index, code)| {
        // Names of fields are between colons.
        in_name ^= *code == b':';
        let next = format.get(index + 1);
        !in_name
            && match code {
                b'O' | b'P' | b'z' | b'&' | b'X' => true,
                // Before one of these it is a complex number.
                b'Z' => !next.is_some_and(|next| b"efdgFDG".contains(next)),
                _ => false,
            }
    })
}

#[cfg(test)]
mod tests {
    use super::has_pointers;

    #[test]
    fn pointers_are_told_from_names_and_complex_numbers() {
        for format in ["O", "<P", "<z", "<Z", "&<i", "X{}", "T{<i:x:<P:y:}", "(2)&<i"] {
            assert!(has_pointers(format.as_bytes()), "{format}");
        }
        for format in ["B", "<f", "Zd", "T{<i:OPzZ:Zf:X:}", "10s", "e", ""] {
            assert!(!has_pointers(format.as_bytes()), "{format}");
        }
    }
}
