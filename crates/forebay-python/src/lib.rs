//! The Python module `forebay._forebay`: conversions between Python objects and `forebay-io`.
//!
//! No policy lives here. What users see (`forebay.Handle` and its kin) is written in Python over
//! the classes of this module, which take plain numbers, strings and arrays.
//!
//! # Invariants
//!
//! - The GIL is released around every lock, copy and transfer of the core.
//! - Worker threads never take the GIL. Python objects that an operation keeps alive are let go
//!   by whoever waits for it, under the GIL.
//! - Waits last at most `operation::SLICE` before Python's signal handlers get their turn.
//! - `unsafe` is in `buffer`, but for one question in `interpreter`.

use pyo3::prelude::*;

mod buffer;
mod checkpoint;
mod command;
mod compare;
mod error;
mod handle;
mod interpreter;
mod interrupt;
mod operation;
mod pool;
mod probe;
mod stripe;
mod tensor_file;
mod tensor_stream;

/// The compiled half of the package. Private: import `forebay`.
#[pymodule]
mod _forebay {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::buffer::cuda::{notice_cuda, search_cuda};
    #[pymodule_export]
    use super::buffer::gds::{
        cufile_is_in, device_of, gds_missing, is_device_memory_pinned, pin_device_memory,
        unpin_device_memory,
    };
    #[pymodule_export]
    use super::checkpoint::{CheckpointReader, Checkpointer, SaveTicket};
    #[pymodule_export]
    use super::command::run_command;
    #[pymodule_export]
    use super::compare::compare;
    #[pymodule_export]
    use super::error::write_unraisable;
    #[pymodule_export]
    use super::handle::{Handle, drain_all};
    #[pymodule_export]
    use super::operation::{Operation, WakeEvent};
    #[pymodule_export]
    use super::pool::{PinnedBuffer, Pool};
    #[pymodule_export]
    use super::probe::{cached_bytes, drop_cached, file_facts, probe_engines};
    #[pymodule_export]
    use super::stripe::Stripe;
    #[pymodule_export]
    use super::tensor_file::{
        TensorHeader, TensorSource, crc32c, load_tensors, parse_header, plan_load, read_header,
        save_tensors, verify_tensors,
    };
    #[pymodule_export]
    use super::tensor_stream::TensorStream;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::interpreter::refuse_subinterpreters(module.py())
    }
}
