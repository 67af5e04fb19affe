//! One workload on one drive: what `forebay io` measures.
//!
//! A [`Job`] says what one process does. A [`Runner`] carries it out loop by loop, so that several
//! processes can be started together for each; a [`LoopReport`] is what a loop came to, and
//! [`Summary`] joins the reports of all loops and processes. Jobs and reports are plain data that
//! goes through pipes.
//!
//! # Invariants
//!
//! - What is written is [`Contents`]: each byte follows from seed, generation and position. Nothing
//!   is filled or compared while the clock runs.
//! - A request moves its own bytes and no others; together the requests of a loop move each byte of
//!   the job once.

mod contents;
mod job;
mod latency;
mod places;
mod rates;
mod report;
mod runner;
mod summary;

pub use contents::{Contents, Difference};
pub use job::{HandleOptions, Job, Memory, REQUESTS_MAX};
pub use latency::{Latencies, Percentiles};
pub use places::Places;
pub use rates::{INTERVAL, Rates, sparkline};
pub use report::{LoopReport, Moved, ProcessReport, Way};
pub use runner::Runner;
pub use summary::{Spread, Summary};
