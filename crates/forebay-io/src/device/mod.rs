//! Devices: CUDA and cuFile, found at run time and never needed.
//!
//! [`Cuda`] is the driver, loaded by [`Cuda::load`] from where a [`Search`] says; a missing library
//! or symbol is an error that names it, and changes nothing. A [`Context`] holds the primary
//! context of one device, [`Stream`] and [`Event`] are Forebay's own on it, and [`memory_at`] says
//! whose memory an address is. [`DeviceMemory`] is memory of Forebay's own there. [`Devices`] has
//! one of each for the process; [`notice`] sees that somebody else has brought CUDA up. [`CuFile`]
//! is the same for GPUDirect Storage, and [`gds`] says when that is worth asking for.
//!
//! # Invariants
//!
//! - Nothing here is linked at build time or writes a file.
//! - Status codes stay integers; an error has the code, its name and what to try.
//! - A thread's stack of contexts is left as it was found: what needs a context pushes it, and pops
//!   it again.
//! - What was made is given back on drop, in the process that made it; nothing panics there, and a
//!   refusal there is passed over: the driver may be gone before its user is.
//! - In a forked child every call is refused before it reaches the driver.
//!
//! Unsafe code is in this folder only; which copies an operation needs is decided elsewhere.

mod codes;
mod context;
mod cuda;
mod cufile;
mod devices;
mod event;
pub mod gds;
mod library;
mod memory;
mod pinned;
mod pointer;
mod presence;
mod stream;
mod symbols;

pub(crate) use codes::CODE_BASE;
pub use context::{Context, Entered};
pub use cuda::Cuda;
pub(crate) use cufile::device_error;
pub use cufile::{BufferRegistration, CuFile, DriverFacts, FileRange, FileRegistration};
pub use devices::Devices;
pub use event::Event;
pub use library::Search;
pub use memory::DeviceMemory;
pub(crate) use pointer::allocation_at;
pub use pointer::{Place, memory_at};
pub use presence::{notice, notice_at_once};
pub use stream::{CallerStream, Stream};

/// An address in a device's memory.
pub type DeviceAddress = usize;
