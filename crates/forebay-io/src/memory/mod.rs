//! Pinned memory: exact sizes, a hard budget, and pieces that engines can register.
//!
//! A [`Pool`] hands out [`PoolBuffer`]s. Large buffers have a mapping (a *region*) of their own,
//! their length rounded up to whole pages; small ones share regions of 2 MiB. A region is
//! unmapped, and its memory back with the kernel, when its last buffer goes, unless
//! [`PoolOptions::retain_bytes`] has it kept for the next request. The pages of long buffers are
//! touched in the background ([`PoolOptions::touch`]).
//!
//! # Invariants
//!
//! - A buffer's bytes are zero when it is handed out, or, where regions are kept, what an earlier
//!   buffer of the pool left; no two live buffers overlap.
//! - The bytes that a pool has mapped never exceed its budget.
//! - What a region lacks (a lock, huge pages) is a flag, never a failed allocation.
//! - Pinned regions aren't mapped in a forked child, others are, and nothing that a child does to
//!   objects it inherited changes the parent's memory or waits for a lock that the parent held.
//! - Listeners hear of a region's end once, before it is unmapped, with no pool lock held.
//!
//! # Examples
//!
//! ```
//! use forebay_io::memory::{ALIGNMENT_DEFAULT, Pool, PoolOptions};
//!
//! let pool = Pool::new(PoolOptions { budget_bytes: Some(16 << 20), ..PoolOptions::default() });
//! let mut buffer = pool.allocate(5 << 20, ALIGNMENT_DEFAULT)?;
//! buffer.as_mut_slice()[0] = 1;
//! assert_eq!(pool.stats().mapped_bytes, 5 << 20);
//! assert!(pool.allocate(12 << 20, ALIGNMENT_DEFAULT).is_err());
//! drop(buffer);
//! assert_eq!(pool.stats().mapped_bytes, 0);
//! # Ok::<(), forebay_io::error::Error>(())
//! ```
//!
//! The arithmetic of free extents (`extents`) makes no system calls, nor does the choice among
//! kept regions (`kept`); mapping and locking are in `region`, touching in `touch`, the lock-free list of all regions in `registry`, what the machine has left in
//! [`limits`], fork detection in `process`.

pub mod limits;

mod buffer;
mod extents;
mod kept;
mod options;
mod pool;
pub(crate) mod process;
mod region;
mod registry;
mod touch;

pub use buffer::PoolBuffer;
pub use options::{PoolOptions, PoolStats};
pub use pool::Pool;
pub use registry::{
    NewRegionListener, PIECE_BYTES, Piece, RegionListener, RegionSpan, listen, listen_to_new,
    piece_of, region_of, regions,
};
pub use touch::TOUCH_BYTES_MIN;

/// The smallest alignment of a buffer: a cache line.
pub const ALIGNMENT_MIN: usize = 64;

/// The alignment to ask for when nothing else is known: the page size of most machines and the
/// largest logical block size of the drives in use.
pub const ALIGNMENT_DEFAULT: usize = 4096;
