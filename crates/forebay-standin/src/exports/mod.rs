//! The symbols: C functions that turn their arguments into calls of the model.
//!
//! Their callers promise what `cuda.h` and `cufile.h` ask: pointers to results are valid, and so
//! are the things that handles name. Handles are numbers here, never followed.

mod control;
mod device;
mod file;
mod memory;
mod stream;

use crate::model::{Outcome, code};

/// Leaves a result where the caller wants it.
fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: by the rules of the C interface, a result's pointer is valid for writing.
    unsafe { to.write(value) };
    Ok(())
}
