//! Moves tensors between drives and memory: engines, planner, pinned memory, handles.
//!
//! - A [`Handle`] is what a user holds. It takes [`Request`]s, and returns an [`Operation`], a
//!   ticket, for each.
//! - The [`plan`]ner cuts a request into blocks that go straight between the drive and the
//!   caller's memory wherever the rules of direct I/O allow it, through aligned staging blocks
//!   where they don't, and through the page cache at ragged ends.
//! - An [`engine`] hands blocks to the kernel: io_uring, Linux AIO or threads, the first of them
//!   that works. Every fallback is counted in [`Stats`] and reported once.
//! - [`device`] finds CUDA and cuFile at run time, and has what is needed of them.
//! - [`memory`] has the pinned pool, whose memory is registered with the engine once.
//!
//! ```
//! use forebay_io::{Handle, Options};
//!
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("layer.bin");
//! let handle = Handle::new(Options::default())?;
//!
//! handle.store(&path, b"weights of odd length")?;
//! handle.store_at(&path, 11, b"any")?;
//! let mut back = [0; 21];
//! handle.load(&path, 0, &mut back)?;
//! assert_eq!(&back, b"weights of any length");
//! assert_eq!(handle.stats().bytes_read, 21);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod borrowed;
pub mod checksum;
pub mod commit;
pub mod config;
pub mod device;
pub mod directory;
pub mod engine;
pub mod error;
pub mod files;
pub mod handle;
pub mod lent;
pub mod memory;
pub mod operation;
pub mod owned;
pub mod payload;
pub mod plan;
pub mod probe;
pub mod request;
pub mod stats;
pub mod usage;

mod order;
mod routes;
mod runtime;
mod scheduler;
mod staging;
mod syscalls;
mod tracker;
mod worker;
mod workers;

pub use checksum::{crc32c, crc32c_combine};
pub use commit::Commit;
pub use config::{
    DeviceRoute, DirectMode, Durability, EngineChoice, MemoryKind, Options, Priority, Tuning,
    Tunings,
};
pub use engine::EngineKind;
pub use error::{DeviceCode, Error, ErrorKind, Result};
pub use files::{FileFacts, Target, facts, reserve};
pub use handle::{Handle, drain_all};
pub use lent::{Behind, DeviceBytes, Gather, Lent};
pub use memory::{Pool, PoolBuffer, PoolOptions, PoolStats};
pub use operation::Operation;
pub use owned::{OwnedMemory, OwnedOperation};
pub use payload::{Payload, TensorMemory};
pub use plan::Direction;
pub use probe::{EngineProbe, probe_engines};
pub use request::{DeviceAccess, Part, Request};
pub use stats::Stats;
