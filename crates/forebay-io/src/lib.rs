//! Engines, planner, pinned memory and handles that move tensors between NVMe drives and memory.

pub mod engine;
pub mod error;
