//! The live regions of all pools of this process, found by address without a lock.
//!
//! Engines ask [`piece_of`] for every buffer they see, so the list is a sorted array behind an
//! atomic pointer, copied on the rare change. Entries inherited through a fork aren't seen.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use arc_swap::ArcSwapOption;

use super::process::ProcessLocal;

/// The most bytes of a [`Piece`]. The kernel refuses to register more than 1 GiB in one
/// buffer (`io_uring_register(2)`); 64 MiB keeps a first use short, since registering pins every page.
pub const PIECE_BYTES: usize = 64 << 20;

static REGIONS: ArcSwapOption<Vec<Arc<Entry>>> = ArcSwapOption::const_empty();
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A part of a region that can be registered with an engine as one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The region, by a number that is never used again in this process.
    pub region: u64,
    /// Which piece of the region, counted from its start.
    pub index: u32,
    /// Where the piece starts.
    pub address: *mut u8,
    /// Its length in bytes, at most [`PIECE_BYTES`].
    pub length: usize,
}

/// A region as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpan {
    /// The region, by a number that is never used again in this process.
    pub id: u64,
    /// The address of its first byte.
    pub start: usize,
    /// Its length in bytes.
    pub length: usize,
}

/// Hears of regions that come.
pub trait NewRegionListener: Send + Sync + fmt::Debug {
    /// The region was mapped. A lock of its pool may be held: it must not panic, nor use the pool.
    /// `false` if it wants to hear of no more.
    fn region_mapped(&self, region: RegionSpan) -> bool;
}

/// Hears of the end of regions.
pub trait RegionListener: Send + Sync + fmt::Debug {
    /// The region is about to be unmapped and no buffer of it is left. Called once for each
    /// region listened to, on the thread that dropped the last buffer; it must not panic.
    fn region_gone(&self, region: u64);
}

type NewListeners = Vec<Arc<dyn NewRegionListener>>;
static NEW_LISTENERS: ArcSwapOption<NewListeners> = ArcSwapOption::const_empty();

type Listeners = Vec<Weak<dyn RegionListener>>;

/// A region as others see it.
#[derive(Debug)]
pub(super) struct Entry {
    id: u64,
    start: usize,
    length: usize,
    is_pinned: bool,
    /// `None` once the region has gone.
    listeners: ProcessLocal<Mutex<Option<Listeners>>>,
}

impl Entry {
    /// Lists the mapping at `start`, whose length isn't zero. Unless it is pinned, it counts as
    /// mapped and has no pieces.
    pub(super) fn publish(start: usize, length: usize, is_pinned: bool) -> Arc<Self> {
        let entry = Arc::new(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            start,
            length,
            is_pinned,
            listeners: ProcessLocal::new(Mutex::new(Some(Vec::new()))),
        });
        replace(|entries| {
            let at = entries.partition_point(|other| other.start < start);
            entries.insert(at, Arc::clone(&entry));
        });
        entry
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Tells those who want to hear of new regions, unless this one isn't pinned.
    pub(super) fn announce(&self) {
        if !self.is_pinned {
            return;
        }
        let listeners = NEW_LISTENERS.load_full();
        let leaving: Vec<_> = listeners
            .iter()
            .flat_map(|all| all.iter())
            .filter(|listener| !listener.region_mapped(self.span()))
            .collect();
        if !leaving.is_empty() {
            change_new_listeners(|all| {
                all.retain(|one| !leaving.iter().any(|other| Arc::ptr_eq(one, other)));
            });
        }
    }

    fn span(&self) -> RegionSpan {
        RegionSpan { id: self.id, start: self.start, length: self.length }
    }

    /// Takes the region off the list, then tells its listeners. Does nothing in a forked child.
    pub(super) fn retire(&self) {
        let Some(listeners) = self.listeners.get() else {
            return;
        };
        replace(|entries| entries.retain(|other| other.id != self.id));
        let told = listeners.lock().unwrap_or_else(PoisonError::into_inner).take();
        for listener in told.iter().flatten().filter_map(Weak::upgrade) {
            listener.region_gone(self.id);
        }
    }

    fn piece(&self, address: *const u8, length: usize) -> Option<Piece> {
        if !self.is_pinned {
            return None;
        }
        let offset = address.addr().checked_sub(self.start)?;
        let end = offset.checked_add(length)?;
        let index = offset / PIECE_BYTES;
        let piece_start = index * PIECE_BYTES;
        let piece_length = self.length.checked_sub(piece_start)?.min(PIECE_BYTES);
        if offset >= self.length || end > piece_start + piece_length {
            return None;
        }
        Some(Piece {
            region: self.id,
            index: u32::try_from(index).ok()?,
            address: address.wrapping_sub(offset - piece_start).cast_mut(),
            length: piece_length,
        })
    }
}

/// Swaps the list for a changed copy. Entries of another process are left behind.
fn replace(change: impl Fn(&mut Vec<Arc<Entry>>)) {
    REGIONS.rcu(|current| {
        let mut entries: Vec<Arc<Entry>> = current
            .iter()
            .flat_map(|entries| entries.iter())
            .filter(|entry| entry.listeners.is_here())
            .cloned()
            .collect();
        change(&mut entries);
        Some(Arc::new(entries))
    });
}

/// The piece of pool memory in which all of `length` bytes at `address` lie; `None` when they
/// cross into another piece or aren't all pinned memory of a pool. Any pool of this process; lock-free.
///
/// The caller keeps the buffer that the address came from alive for as long as it uses the piece.
pub fn piece_of(address: *const u8, length: usize) -> Option<Piece> {
    entry_before(address)?.piece(address, length)
}

/// The region in which all of `length` bytes at `address` lie, like [`piece_of`].
pub fn region_of(address: *const u8, length: usize) -> Option<RegionSpan> {
    let entry = entry_before(address).filter(|entry| entry.is_pinned)?;
    let span = entry.span();
    let offset = address.addr() - span.start;
    (offset < span.length && length <= span.length - offset).then_some(span)
}

/// The last region that doesn't start behind an address.
fn entry_before(address: *const u8) -> Option<Arc<Entry>> {
    let regions = REGIONS.load();
    let entries = regions.as_ref()?;
    let after = entries.partition_point(|entry| entry.start <= address.addr());
    let entry = entries.get(after.checked_sub(1)?)?;
    entry.listeners.is_here().then(|| Arc::clone(entry))
}

/// The pinned regions of this process. Any of them may go at any time: [`listen`] says whether it has.
pub fn regions() -> Vec<RegionSpan> {
    let regions = REGIONS.load();
    let all = regions.iter().flat_map(|all| all.iter());
    let pinned = all.filter(|entry| entry.is_pinned && entry.listeners.is_here());
    pinned.map(|entry| entry.span()).collect()
}

/// Has `listener` called for each pinned region that is mapped from now on, until it wants no more.
pub fn listen_to_new(listener: &Arc<dyn NewRegionListener>) {
    change_new_listeners(|all| all.push(Arc::clone(listener)));
}

fn change_new_listeners(change: impl Fn(&mut NewListeners)) {
    NEW_LISTENERS.rcu(|current| {
        let mut all = current.as_ref().map_or_else(Vec::new, |all| all.to_vec());
        change(&mut all);
        Some(Arc::new(all))
    });
}

/// Has `listener` called once when `region` goes. Registering the same listener again changes
/// nothing; a listener that was dropped is passed over; a region that isn't known (any more) is
/// left alone, and then `false` comes back and nothing will be called.
pub fn listen(region: u64, listener: Weak<dyn RegionListener>) -> bool {
    let regions = REGIONS.load();
    let Some(entry) = regions.iter().flat_map(|all| all.iter()).find(|entry| entry.id == region)
    else {
        return false;
    };
    let Some(listeners) = entry.listeners.get() else {
        return false;
    };
    let mut listeners = listeners.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(listeners) = listeners.as_mut() else {
        return false;
    };
    let same = |other: &Weak<dyn RegionListener>| {
        other.as_ptr().cast::<()>() == listener.as_ptr().cast::<()>()
    };
    if !listeners.iter().any(same) {
        listeners.retain(|other| other.strong_count() > 0);
        listeners.push(listener);
    }
    true
}

/// The bytes of all regions of this process.
pub(super) fn mapped_bytes() -> usize {
    let regions = REGIONS.load();
    let entries = regions.iter().flat_map(|entries| entries.iter());
    entries.filter(|entry| entry.listeners.is_here()).map(|entry| entry.length).sum()
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Debug, Default)]
    struct Counter(AtomicUsize);

    impl RegionListener for Counter {
        fn region_gone(&self, _: u64) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    // Addresses that no mapping of a user process has.
    const BASE: usize = usize::MAX - (1 << 40) + 1;

    fn at(offset: usize) -> *const u8 {
        ptr::without_provenance(BASE + offset)
    }

    #[test]
    fn a_range_is_found_only_within_one_piece_of_its_region() {
        let length = 2 * PIECE_BYTES + 8192;
        let entry = Entry::publish(BASE, length, true);
        let piece = piece_of(at(PIECE_BYTES + 5), 100).unwrap();
        assert_eq!((piece.region, piece.index), (entry.id(), 1));
        assert_eq!((piece.address.cast_const(), piece.length), (at(PIECE_BYTES), PIECE_BYTES));
        assert_eq!(piece_of(at(0), PIECE_BYTES).unwrap().index, 0);
        assert_eq!(piece_of(at(2 * PIECE_BYTES), 8192).unwrap().length, 8192);
        assert_eq!(piece_of(at(PIECE_BYTES - 1), 2), None);
        assert_eq!(piece_of(at(2 * PIECE_BYTES), 8193), None);
        assert_eq!(piece_of(at(length), 0), None);
        assert_eq!(piece_of(at(0), usize::MAX), None);
        assert_eq!(piece_of(at(0).wrapping_sub(1), 1), None);
        entry.retire();
        assert_eq!(piece_of(at(0), 1), None);
    }

    #[test]
    fn a_listener_is_told_once_and_a_dead_one_is_passed_over() {
        let entry = Entry::publish(BASE + (1 << 39), 4096, true);
        let listener = Arc::new(Counter::default());
        let weak: Weak<dyn RegionListener> = Arc::<Counter>::downgrade(&listener);
        assert!(listen(entry.id(), Weak::clone(&weak)));
        assert!(listen(entry.id(), Weak::clone(&weak)));
        let dead = Arc::<Counter>::downgrade(&Arc::new(Counter::default()));
        assert!(listen(entry.id(), dead));
        assert!(!listen(u64::MAX, Weak::clone(&weak)));
        entry.retire();
        entry.retire();
        assert_eq!(listener.0.load(Ordering::Relaxed), 1);
        assert!(!listen(entry.id(), weak));
    }
}
