//! The staging blocks of one worker: aligned pool memory that bytes pass through.

use std::sync::Arc;

use crate::error::Result;
use crate::memory::{Pool, PoolBuffer};
use crate::stats::{Counters, add};

/// Alignment of staging blocks: a page, enough for the direct I/O of any drive.
const STAGING_ALIGNMENT: usize = 4096;

/// A few blocks of equal size, taken from the pool when the first one is needed.
#[derive(Debug)]
pub(crate) struct Staging {
    pool: Arc<Pool>,
    counters: Arc<Counters>,
    block_bytes: usize,
    block_count: usize,
    memory: Option<PoolBuffer>,
    /// Used as a stack: the block that was used last is the one still in the cache.
    free: Vec<usize>,
}

impl Staging {
    pub(crate) fn new(
        pool: Arc<Pool>,
        counters: Arc<Counters>,
        block_bytes: usize,
        block_count: usize,
    ) -> Self {
        let free = (0..block_count).rev().collect();
        Self { pool, counters, block_bytes, block_count, memory: None, free }
    }

    /// Blocks that can be taken now.
    pub(crate) fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Takes a block: its index and address. `None` if all are in use.
    ///
    /// # Errors
    ///
    /// The pool has no room for even one block.
    pub(crate) fn take(&mut self) -> Result<Option<(usize, *mut u8)>> {
        if self.memory.is_none() {
            self.reserve()?;
        }
        let Some(memory) = &self.memory else {
            return Ok(None);
        };
        let Some(index) = self.free.pop() else {
            return Ok(None);
        };
        Ok(Some((index, memory.as_ptr().wrapping_add(index * self.block_bytes))))
    }

    /// Gives a block back.
    pub(crate) fn give_back(&mut self, index: usize) {
        self.free.push(index);
    }

    /// Takes memory from the pool, fewer blocks if the budget is too small for all.
    fn reserve(&mut self) -> Result<()> {
        let mut count = self.block_count;
        let memory = loop {
            match self.pool.allocate(count * self.block_bytes, STAGING_ALIGNMENT) {
                Ok(memory) => break memory,
                Err(_) if count > 1 => count /= 2,
                Err(error) => return Err(error),
            }
        };
        if count < self.block_count {
            self.counters.fallback("staging has fewer blocks than asked for: the pool is full");
        }
        self.free.retain(|index| *index < count);
        add(&self.counters.staging_bytes, memory.len() as u64);
        self.memory = Some(memory);
        Ok(())
    }
}
