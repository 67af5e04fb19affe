//! Moves tensors between drives and memory.

pub mod error;
pub mod memory;
