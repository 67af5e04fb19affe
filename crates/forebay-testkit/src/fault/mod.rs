//! An engine that fails as planned, over any other engine.
//!
//! [`FaultFactory`] wraps a factory; its engines do what the wrapped ones do, except where the
//! [`FaultPlan`] says otherwise. Transfers are counted over all engines of a factory, from 1, in
//! the order in which they are accepted, so that a test can run once without faults, see how many
//! there are, and then fail each in turn:
//!
//! ```
//! use std::sync::Arc;
//! use forebay_io::engine::EngineKind;
//! use forebay_testkit::fault::{FaultFactory, FaultPlan, Scope, When};
//!
//! let plan = FaultPlan::new(7).fail(When::Nth(3), Scope::Writes, libc::ENOSPC);
//! let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
//! assert_eq!(factory.counts().transfers, 0);
//! ```
//!
//! A short transfer is real: the part that it reports has been moved, and nothing else.

mod engine;
mod plan;

pub use engine::{Counts, FaultEngine, FaultFactory};
pub use plan::{Cut, Fault, FaultPlan, Scope, When};
