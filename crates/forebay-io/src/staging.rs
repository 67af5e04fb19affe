//! The staging blocks of one worker: aligned pool memory that bytes pass through.
//!
//! There are two kinds, each of a size and number of its own: for memory of the host, small enough
//! to stay in the processor's cache, and for memory of devices. Neither waits for the other, so an
//! operation over both gets on with as little as one block of each.

use std::sync::Arc;

use crate::error::Result;
use crate::memory::{Pool, PoolBuffer};
use crate::stats::{Counters, add};

/// Alignment of staging blocks: a page, enough for the direct I/O of any drive.
const STAGING_ALIGNMENT: usize = 4096;

/// A number of blocks for each kind of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockCounts {
    pub(crate) host: usize,
    pub(crate) device: usize,
}

impl BlockCounts {
    /// The number for memory of devices, or for that of the host.
    pub(crate) fn of(self, on_device: bool) -> usize {
        if on_device { self.device } else { self.host }
    }

    /// The same, to change.
    pub(crate) fn of_mut(&mut self, on_device: bool) -> &mut usize {
        if on_device { &mut self.device } else { &mut self.host }
    }
}

/// How large blocks are, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) block_bytes: usize,
    pub(crate) block_count: usize,
}

/// The shape of each kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shapes {
    pub(crate) host: Shape,
    pub(crate) device: Shape,
}

/// The blocks of both kinds. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct StagingBlocks {
    host: Staging,
    device: Staging,
}

impl StagingBlocks {
    pub(crate) fn new(pool: &Arc<Pool>, counters: &Arc<Counters>, shapes: Shapes) -> Self {
        let new = |shape| Staging::new(Arc::clone(pool), Arc::clone(counters), shape);
        Self { host: new(shapes.host), device: new(shapes.device) }
    }

    /// Those for memory of devices, or for that of the host.
    pub(crate) fn of(&mut self, on_device: bool) -> &mut Staging {
        if on_device { &mut self.device } else { &mut self.host }
    }

    /// Blocks that can be taken now.
    pub(crate) fn free(&self) -> BlockCounts {
        BlockCounts { host: self.host.free.len(), device: self.device.free.len() }
    }
}

/// A few blocks of equal size, taken from the pool when the first one is needed.
#[derive(Debug)]
pub(crate) struct Staging {
    pool: Arc<Pool>,
    counters: Arc<Counters>,
    shape: Shape,
    memory: Option<PoolBuffer>,
    /// Used as a stack: the block that was used last is the one still in the cache.
    free: Vec<usize>,
}

impl Staging {
    fn new(pool: Arc<Pool>, counters: Arc<Counters>, shape: Shape) -> Self {
        let free = (0..shape.block_count).rev().collect();
        Self { pool, counters, shape, memory: None, free }
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
        Ok(Some((index, memory.as_ptr().wrapping_add(index * self.shape.block_bytes))))
    }

    /// Gives a block back.
    pub(crate) fn give_back(&mut self, index: usize) {
        self.free.push(index);
    }

    /// Takes memory from the pool, fewer blocks if the budget is too small for all.
    fn reserve(&mut self) -> Result<()> {
        let Shape { block_bytes, block_count } = self.shape;
        let mut count = block_count;
        let memory = loop {
            match self.pool.allocate(count * block_bytes, STAGING_ALIGNMENT) {
                Ok(memory) => break memory,
                Err(_) if count > 1 => count /= 2,
                Err(error) => return Err(error),
            }
        };
        if count < block_count {
            self.counters.fallback("staging has fewer blocks than asked for: the pool is full");
        }
        self.free.retain(|index| *index < count);
        add(&self.counters.staging_bytes, memory.len() as u64);
        self.memory = Some(memory);
        Ok(())
    }
}
