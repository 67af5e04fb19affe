//! Power cuts, played back: what is left of a directory if everything is lost that wasn't synced.
//!
//! A [`Journal`] writes down in one order what a checkpointer has a [`Storage`] do and what its
//! engines write. [`image()`] lays out what a power cut after any number of those events leaves: of
//! what a sync of its file or directory had followed everything, of the rest nothing, or any part
//! of it. Bytes are lost by the block, names one by one; a rename is never half done.
//!
//! [`FaultStorage`] fails one call instead. [`Sample`] is a state whose content follows from its
//! step.

mod image;
mod journal;
mod sample;

pub use image::{Kept, image};
pub use journal::{Event, FaultStorage, Journal, JournalEngines};
pub use sample::{Sample, leftovers};

#[cfg(doc)]
use forebay::checkpoint::storage::Storage;
