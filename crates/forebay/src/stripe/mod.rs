//! One logical file over several directories, RAID-0 style: many machines have several drives and
//! no RAID.
//!
//! A [`Stripe`] is the set of directories. [`Stripe::spread`] turns a request that names logical
//! files into one over their members, for any [`Handle`](crate::io::Handle): one operation, one
//! ticket. `docs/stripe.md` has the layout byte by byte and the manifest field by field.
//!
//! - `layout`: which byte is where; pure.
//! - `manifest`: what is written beside each member; pure.
//! - `name`: what striped files may be called, and what their parts are called then.
//! - `set`: the directories, and what can be asked of them.
//! - `state`: what the manifests of a name say together: absent, unfinished or whole.
//! - `publish`: writing manifests, each whole or not at all.
//! - `spread`: requests; `load`, `store`: what is done around their transfers.
//!
//! # Invariants
//!
//! - A logical file counts as whole only while every member has a complete manifest of one
//!   generation and at least the bytes that it says. A whole-file store takes that away before its
//!   first byte moves and gives it back after the last one, so one that failed or was killed never
//!   looks whole.
//! - A load that met another store's bytes fails: it looks at the manifests before and after.
//! - Nothing is ever written to a directory that isn't the one that the set was made with: an
//!   empty mount point isn't taken for the drive.

mod layout;
mod load;
mod manifest;
mod name;
mod publish;
mod set;
mod spread;
mod state;
mod store;

pub use layout::{Layout, MEMBERS_MAX, Piece, STRIPE_BYTES_MAX, STRIPE_GRANULE_BYTES};
pub use manifest::{Generation, MANIFEST_BYTES_MAX, Manifest};
pub use set::Stripe;

/// Values of `errno` that errors of this module carry, from `errno(3)`.
mod code {
    /// No such file or directory.
    pub(super) const ENOENT: i32 = 2;
    /// Device or resource busy.
    pub(super) const EBUSY: i32 = 16;
    /// Not a directory.
    pub(super) const ENOTDIR: i32 = 20;
    /// No such device.
    pub(super) const ENODEV: i32 = 19;
}
