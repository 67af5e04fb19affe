//! Options of handles for one kind of memory.

use forebay_io::{DeviceRoute, MemoryKind, Options};

/// The options of a handle that moves this kind of memory by its own route, and no other.
pub(crate) fn routed(options: Options, memory: MemoryKind) -> Options {
    let device_route = match memory {
        MemoryKind::Host => DeviceRoute::Auto,
        MemoryKind::Gpu => DeviceRoute::Host,
        MemoryKind::Gds => DeviceRoute::Gds,
    };
    Options { device_route, ..options }
}
