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

/// How many GPUs there are: one at least.
pub(crate) fn count(option: &str) -> Result<u32, Failure> {
    Ok(devices(option)?.cuda().device_count())
}

fn devices(option: &str) -> Result<Arc<Devices>, Failure> {
    Devices::global().map_err(|error| refused(option, &error))
}

fn refused(option: &str, error: &forebay::io::Error) -> Failure {
    Failure::environment(format!("{option} takes a GPU: {error}"))
}
