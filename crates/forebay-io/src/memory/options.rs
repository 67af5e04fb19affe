//! What a pool is asked to do, and what it says it holds.

/// How a [`Pool`](super::Pool) behaves.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct PoolOptions {
    /// The most bytes to have mapped at any moment; `None`: as much as the machine has left.
    pub budget_bytes: Option<usize>,
    /// Memory for transfers: registered with engines, and kept out of forked children, since a fork
    /// would copy registered pages. Without it, memory is like any other: neither registered nor
    /// locked, and there in forked children. That is for what is loaded once and then belongs to a
    /// program, which may fork whenever it likes.
    pub pinned: bool,
    /// Keep pages in memory (`mlock2`), where the host allows it; pinned memory only.
    pub lock: bool,
    /// Ask for transparent huge pages.
    pub huge_pages: bool,
    /// Touch the pages of long buffers (from [`TOUCH_BYTES_MIN`](super::TOUCH_BYTES_MIN) up) on a
    /// thread of the pool's, ahead of the transfers into them: `MADV_POPULATE_WRITE`, Linux 5.14;
    /// does nothing on older kernels. Loads into fresh memory end about a sixth earlier for a
    /// tenth more processor time; memory that is allocated and never used is resident with it.
    pub touch: bool,
    /// How many bytes of regions to keep when their last buffer goes, for requests that they fit;
    /// 0: none. They count as mapped, stay registered with engines, and are let go, the one kept
    /// first at first, when the budget or the machine lacks room for a request.
    ///
    /// A buffer in a kept region holds what was left in it, as from `malloc`, not zeros: zeroing
    /// costs about what keeping saves. Small buffers (up to 1 MiB), which share regions, are zero
    /// all the same.
    pub retain_bytes: usize,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            budget_bytes: None,
            pinned: true,
            lock: true,
            huge_pages: true,
            touch: true,
            retain_bytes: 0,
        }
    }
}

/// What a [`Pool`](super::Pool) holds at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// The most bytes it may map.
    pub budget_bytes: Option<usize>,
    /// The lengths of its live buffers, summed.
    pub used_bytes: usize,
    /// The bytes of its regions, those kept, being mapped or being unmapped included.
    pub mapped_bytes: usize,
    /// The bytes of its regions that are kept without a buffer.
    pub kept_bytes: usize,
    /// The bytes of its regions that are locked.
    pub locked_bytes: usize,
    /// The most that `mapped_bytes` has been.
    pub peak_bytes: usize,
    /// Its live buffers.
    pub buffers: usize,
    /// Its regions, the kept ones included.
    pub regions: usize,
    /// Why some memory isn't locked and what to do about it, if locking was ever refused.
    pub lock_refused: Option<String>,
}
