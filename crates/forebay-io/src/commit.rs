//! What an operation does besides moving bytes, to make several files one.
//!
//! A [`Commit`] given with a [`Request`](crate::Request) is called by a worker at two moments of
//! the operation: before its first byte moves, and when its last byte is there and as durable as
//! was asked. What is between the two belongs to the operation alone as far as the order of stores
//! goes: whole-file stores of the same files begin only when it is over.
//!
//! # Invariants
//!
//! - [`Commit::begin`] is called at most once, before [`Commit::finish`], which is called at most
//!   once, and only when everything before it went well.
//! - An operation that fails or is cancelled ends with one call of [`Commit::abandon`], whether or
//!   not it began: when its files have been put right, and before another store of them begins.

use std::fmt;

use crate::error::Result;

/// See the [module documentation](self). The calls run on a worker's thread, which moves nothing
/// meanwhile: what they do is to be short.
pub trait Commit: fmt::Debug + Send + Sync {
    /// Called before room is reserved and the first byte moves; every earlier store of the same
    /// files is over.
    ///
    /// # Errors
    ///
    /// Whatever forbids the operation, which then changes nothing and fails with it.
    fn begin(&self) -> Result<()>;

    /// Called when all bytes are there.
    ///
    /// # Errors
    ///
    /// Whatever keeps the bytes from counting; the operation fails with it, and its files are
    /// treated as those of a store that failed halfway.
    fn finish(&self) -> Result<()>;

    /// Called when the operation failed, be it in [`Self::begin`] or [`Self::finish`].
    /// `is_spoiled`: old content of a file may have been overwritten. The failure is being
    /// reported already, so there is nothing to return.
    fn abandon(&self, is_spoiled: bool);
}
