//! Files and policy over [`forebay_io`]: what to do with drives, not how to talk to the kernel.
//!
//! - [`checkpoint`]: states of a training run, each whole or not there at all.
//! - [`safetensors`]: files of tensors, read, verified and written.
//! - [`stripe`]: one logical file over several directories.
//!
//! No system calls beyond those of [`std::fs`] and no `unsafe` are here: what moves bytes or asks
//! the kernel is in [`forebay_io`]; what talks to users is in the command and in the Python package.

#![forbid(unsafe_code)]

pub mod catalog;
pub mod checkpoint;
pub mod config;
pub mod convert;
mod device_route;
mod kernel_files;
mod lossy;
pub mod npy;
mod profile;
mod regular;
pub mod report;
pub mod safetensors;
mod size;
mod stamp;
pub mod stripe;
pub mod topology;
pub mod tune;
pub mod workload;

pub use forebay_io as io;
pub use profile::{Best, Profile, Profiles};
pub use size::ByteSize;
pub use stamp::Stamp;
