//! testkit
pub mod memory;
pub mod usage;
