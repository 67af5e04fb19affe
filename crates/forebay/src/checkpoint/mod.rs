//! Checkpoints: states of a training run, each whole or not there at all.
//!
//! A [`Checkpointer`] saves states into a directory, in the background, and keeps the newest few;
//! a [`Reader`] opens one. `docs/format.md` has the files byte by byte.
//!
//! - `name`: what is called what; `manifest`: the description of a checkpoint; `checksum`: CRC32C of
//!   pieces; `layout`: which tensor goes where. Pure.
//! - `storage`: what is done to directories and small files, a seam for tests.
//! - `capture`: copies a state into pool memory while its owner waits; `write`: stores what was
//!   captured; `publish`: gives it its name; `leftovers`: who is writing what, and what dead
//!   writers have left.
//! - `queue`, `job`: saves under way. `read`: loading and checking.
//!
//! # Invariants
//!
//! - The order of a save is: data, its sync, the manifest, its sync, the rename that publishes both,
//!   the sync of the directory, `latest`, the removal of old ones. So whatever ends the process, and
//!   with durability `full` the machine, what has the name of a step is whole, and the newest step
//!   whose save has returned is there.
//! - A state that was captured may change at once. Writers touch neither it nor what owns it.
//! - What a live writer has is never removed by others; what a dead one left is, at the next start.
//! - Nothing is loaded that has no checksum, or another than was written, unless that is asked for.

mod capture;
mod checksum;
mod job;
mod layout;
mod leftovers;
mod manifest;
mod name;
mod options;
mod publish;
mod queue;
mod read;
mod save;
pub mod storage;
mod write;

pub use checksum::PIECE_BYTES;
pub use job::Ticket;
pub use layout::TensorSpec;
pub use manifest::{MANIFEST_BYTES_MAX, Manifest, STATE_BYTES_MAX, Shard, TensorEntry};
pub(crate) use name::parse_step;
pub use name::{LATEST_FILE, MANIFEST_FILE, STATE_FILE, STEP_MAX, shard_file, step_directory};
pub use options::{BUDGET_BYTES_MIN, CheckpointOptions, OnBusy};
pub use read::Reader;
pub use save::{Checkpointer, Meanwhile, State};

/// Values of `errno` that errors of this module carry, from `errno(3)`.
mod code {
    /// No such file or directory.
    pub(super) const ENOENT: i32 = 2;
    /// Device or resource busy.
    pub(super) const EBUSY: i32 = 16;
}
