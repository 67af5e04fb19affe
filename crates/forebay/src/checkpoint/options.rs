//! What a user can choose about checkpoints, with defaults and bounds.

use std::str::FromStr;

use forebay_io::memory::limits;
use forebay_io::{Durability, Error, ErrorKind, Result};

/// The least budget: a few chunks.
pub const BUDGET_BYTES_MIN: usize = 16 << 20;
/// What the machine is taken to have free where it doesn't say.
const AVAILABLE_BYTES_FALLBACK: u64 = 4 << 30;
/// Most bytes of tensors in a shard, if nothing else is asked for: what is loaded at a time.
const SHARD_BYTES_DEFAULT: u64 = 2 << 30;
/// Most bytes that are captured and written at a time: many transfers, so that their ends, which go
/// through the page cache, and the copy's start are a small part.
const CHUNK_BYTES_MAX: usize = 64 << 20;
/// Chunks that the budget has at the least, so that copying one goes on while others are written.
const CHUNKS_MIN: usize = 4;
/// What chunks are a multiple of, so that all but the ends of a file are written directly.
const CHUNK_GRANULE_BYTES: usize = 4096;

/// What a save does while as many as allowed are under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBusy {
    /// Waits.
    #[default]
    Wait,
    /// Saves nothing.
    Skip,
    /// Is an error.
    Error,
}

impl FromStr for OnBusy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "wait" => Ok(Self::Wait),
            "skip" => Ok(Self::Skip),
            "error" => Ok(Self::Error),
            other => {
                let text = format!("on_busy {other:?} is not known");
                Err(Error::new(ErrorKind::InvalidInput, text).hint("one of: wait skip error"))
            }
        }
    }
}

/// How a [`Checkpointer`](super::Checkpointer) saves.
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// How many checkpoints to keep; `None`: all.
    pub keep: Option<usize>,
    /// How far a save goes before it is done.
    pub durability: Durability,
    /// Most bytes of captured states to hold; `None`: half of what is free when it starts.
    pub budget_bytes: Option<usize>,
    /// Saves under way at the most.
    pub in_flight: usize,
    /// What a save does while that many are.
    pub on_busy: OnBusy,
    /// Most bytes of tensors in a shard; a larger tensor has one of its own.
    pub shard_bytes: u64,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self {
            keep: Some(3),
            durability: Durability::Full,
            budget_bytes: None,
            in_flight: 1,
            on_busy: OnBusy::Wait,
            shard_bytes: SHARD_BYTES_DEFAULT,
        }
    }
}

impl CheckpointOptions {
    /// Refuses what can't be.
    pub(super) fn validate(&self) -> Result<()> {
        let invalid = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        if self.keep == Some(0) {
            return invalid("keep is 0: at least the newest checkpoint has to be kept".to_owned());
        }
        if self.in_flight == 0 {
            return invalid("in_flight is 0: at least one save has to be under way".to_owned());
        }
        if self.shard_bytes == 0 {
            return invalid("shard_size is 0: a shard has to hold something".to_owned());
        }
        match self.budget_bytes {
            Some(bytes) if bytes < BUDGET_BYTES_MIN => {
                invalid(format!("budget is {bytes} bytes, it takes at least {BUDGET_BYTES_MIN}"))
            }
            _ => Ok(()),
        }
    }

    /// The budget that holds.
    pub(super) fn budget(&self) -> usize {
        self.budget_bytes.unwrap_or_else(|| {
            let available = limits::available_bytes().map(|available| available.bytes);
            let half = available.unwrap_or(AVAILABLE_BYTES_FALLBACK) / 2;
            usize::try_from(half).unwrap_or(usize::MAX).max(BUDGET_BYTES_MIN)
        })
    }
}

/// Bytes of a chunk.
pub(super) fn chunk_bytes(budget: usize) -> u64 {
    let bytes = (budget / CHUNKS_MIN).min(CHUNK_BYTES_MAX);
    (bytes / CHUNK_GRANULE_BYTES * CHUNK_GRANULE_BYTES) as u64
}
