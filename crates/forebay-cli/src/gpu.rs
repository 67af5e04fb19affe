//! GPUs whose memory a command moves: finding them, or saying why there are none.

use std::sync::Arc;

use forebay::io::device::{Context, Devices};
use serde::Serialize;

use crate::exit::Failure;

/// A GPU, as results name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Gpu {
    /// Its number in this process.
    pub(crate) ordinal: u32,
    /// Its model.
    pub(crate) name: String,
}

/// The GPU of a number, with its context; `option` is what asks for one.
pub(crate) fn take(option: &str, ordinal: u32) -> Result<(Gpu, Arc<Context>), Failure> {
    let devices = devices(option)?;
    let refused = |error: forebay::io::Error| refused(option, &error);
    let name = devices.cuda().device_name(ordinal).map_err(refused)?;
    let context = devices.context(ordinal).map_err(refused)?;
    Ok((Gpu { ordinal, name }, context))
}

/// All GPUs: one at least.
pub(crate) fn all(option: &str) -> Result<Vec<Gpu>, Failure> {
    let devices = devices(option)?;
    let cuda = devices.cuda();
    let named = |ordinal| {
        let name = cuda.device_name(ordinal).map_err(|error| refused(option, &error))?;
        Ok(Gpu { ordinal, name })
    };
    (0..cuda.device_count()).map(named).collect()
}

/// Whether a GPU has too little memory for what was asked (`CUDA_ERROR_OUT_OF_MEMORY`).
pub(crate) fn is_out_of_memory(error: &forebay::io::Error) -> bool {
    error.device_code().is_some_and(|device| device.library == "cuda" && device.code == 2)
}

fn devices(option: &str) -> Result<Arc<Devices>, Failure> {
    Devices::global().map_err(|error| refused(option, &error))
}

fn refused(option: &str, error: &forebay::io::Error) -> Failure {
    Failure::environment(format!("{option} takes a GPU: {error}"))
}
