//! Tuning: which options of a handle a drive does best with.
//!
//! - [`Space`] says what is searched, [`search`] how, and [`tune`] puts the searches for reading,
//!   writing and both together. None of them knows a drive: a [`Measure`] does.
//! - [`Drive`] measures on files in directories, [`Journal`] keeps what was measured, so that an
//!   interrupted run goes on where it was.
//!
//! What users see of it is in the command `forebay tune`; what handles use afterwards in
//! [`Profile`](crate::Profile).

mod drive;
mod journal;
mod rounds;
mod run;
mod search;
#[cfg(test)]
mod simulation;
mod space;

pub use drive::{Drive, DriveOptions, SampleMemory};
pub use journal::Journal;
pub use run::{Settings, Summary, Tuning, Way, tune};
pub use search::{
    Dropped, Limits, Measure, Measured, Outcome, Progress, Sample, TOLERANCE, search,
};
pub use space::{AioBlock, Candidate, Space};
