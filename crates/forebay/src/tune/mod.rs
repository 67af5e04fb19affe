//! Tuning.

mod rounds;
mod search;
#[cfg(test)]
mod simulation;
mod space;

pub use search::{
    Dropped, Limits, Measure, Measured, Outcome, Progress, Sample, TOLERANCE, search,
};
pub use space::{AioBlock, Candidate, Space};
