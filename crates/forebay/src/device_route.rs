//! Options of handles for one kind of memory.

use forebay_io::{Error, ErrorKind, MemoryKind, Options, Result};

/// The options of a handle that moves this kind of memory by its own route.
///
/// # Errors
///
/// [`ErrorKind::Unsupported`]: handles don't have the route.
pub(crate) fn routed(options: Options, memory: MemoryKind) -> Result<Options> {
    match memory {
        MemoryKind::Host | MemoryKind::Gpu => Ok(options),
        MemoryKind::Gds => {
            let text = "handles of this version move GPU memory through the host's only";
            Err(Error::new(ErrorKind::Unsupported, text).hint("leave GPUDirect Storage out"))
        }
    }
}
