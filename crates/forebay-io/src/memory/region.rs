//! One mapping: reserved, aligned; pinned memory is kept out of forked children, and locked where
//! that is allowed.
#![expect(unsafe_code, reason = "mappings are made, advised, locked and unmapped by address")]

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, MremapFlags, ProtFlags};

use super::PoolOptions;
use super::limits;
use super::process::ProcessLocal;
use super::registry::Entry;
use super::touch::{Toucher, Touching};
use crate::error::{Error, ErrorKind, Result};

/// The size of a huge page on x86-64 and on arm64 with 4 KiB pages.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Whether a region's pages stay in memory.
#[derive(Clone, Debug)]
pub(super) enum Locking {
    Locked,
    NotAsked,
    /// With cause and cure.
    Refused(String),
}

/// Memory, zeroed when it is mapped, that is unmapped on drop, after its listeners have heard of
/// it. In a forked child it isn't mapped if it is pinned, and dropping it there does nothing.
#[derive(Debug)]
pub(super) struct Region {
    /// Before the mapping, since fields are dropped in order: nothing unmapped is touched.
    touching: ProcessLocal<Option<Touching>>,
    mapping: ProcessLocal<Mapping>,
    entry: Arc<Entry>,
    locking: Locking,
}

/// The bytes of a region that holds `length`: whole pages, 4 KiB at least.
pub(super) fn region_bytes(length: usize) -> Option<usize> {
    length.max(1).checked_next_multiple_of(rustix::param::page_size().max(4096))
}

impl Region {
    /// Maps `length` bytes, a multiple of the page size, at a multiple of `alignment` (and of
    /// 2 MiB when huge pages could serve it).
    pub(super) fn map(length: usize, alignment: usize, options: &PoolOptions) -> Result<Self> {
        let least = if length >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 1 };
        let mapping = Mapping::reserve(length, alignment.max(least)).map_err(|errno| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!("cannot map {length} bytes: {}", std::io::Error::from(errno)),
            )
            .hint("see `ulimit -v`, vm.overcommit_memory and vm.max_map_count")
        })?;
        if options.pinned {
            mapping.advise(Advice::LinuxDontFork).map_err(|errno| {
                Error::from_os(errno.raw_os_error(), "cannot keep memory out of forked children")
            })?;
        }
        if options.huge_pages {
            // A kernel built without transparent huge pages refuses; small pages do as well.
            let _ = mapping.advise(Advice::LinuxHugepage);
        }
        let is_locked = options.pinned && options.lock;
        let locking = if is_locked { mapping.lock() } else { Locking::NotAsked };
        let start = mapping.start.expose_provenance().get();
        let entry = Entry::publish(start, length, options.pinned);
        entry.announce();
        let touching = ProcessLocal::new(None);
        Ok(Self { touching, mapping: ProcessLocal::new(mapping), entry, locking })
    }

    /// Has all of it touched in the background, for as long as it lives.
    pub(super) fn touch(&mut self, toucher: &Arc<Toucher>) {
        let Some(mapping) = self.mapping.get() else { return };
        let start = mapping.start.as_ptr().expose_provenance();
        // SAFETY: the mapping is dropped after what comes back.
        let touching = unsafe { toucher.touch(self.id(), start, mapping.length) };
        self.touching = ProcessLocal::new(touching);
    }

    /// Puts a private mapping of `length` bytes of a file, from `offset` on, in place of its own
    /// bytes from `position` on; all three are whole pages, but for the length at the file's end.
    /// `false`, and nothing is changed, where the file can't be mapped.
    pub(super) fn map_file(
        &mut self,
        position: usize,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> Result<bool> {
        let page = rustix::param::page_size();
        let Some(mapping) = self.mapping.get() else { return Ok(false) };
        let whole = length.next_multiple_of(page);
        let fits = position.checked_add(whole).is_some_and(|end| end <= mapping.length);
        if length == 0 || !fits || !position.is_multiple_of(page) {
            return Ok(false);
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let new = unsafe { rustix::mm::mmap(ptr::null_mut(), length, access, flags, file, offset) };
        let Ok(new) = new else { return Ok(false) };
        let place = mapping.address().wrapping_byte_add(position);
        // SAFETY: the new mapping is nobody else's; the place is part of this region, whose only
        // buffer is borrowed by the caller for this call, and stays mapped.
        let moved =
            unsafe { rustix::mm::mremap_fixed(new, whole, whole, MremapFlags::MAYMOVE, place) };
        moved.map(|_| true).map_err(|errno| {
            // SAFETY: the new mapping is nobody else's, and was not moved.
            let _ = unsafe { rustix::mm::munmap(new, whole) };
            Error::from_os(errno.raw_os_error(), "cannot move a mapping of a file")
        })
    }

    /// A number that no other region of this process has or had.
    pub(super) fn id(&self) -> u64 {
        self.entry.id()
    }

    /// The first byte, or `None` in a forked child.
    pub(super) fn start(&self) -> Option<NonNull<u8>> {
        self.mapping.get().map(|mapping| mapping.start)
    }

    /// Its length in bytes; 0 in a forked child.
    pub(super) fn length(&self) -> usize {
        self.mapping.get().map_or(0, |mapping| mapping.length)
    }

    pub(super) fn locking(&self) -> &Locking {
        &self.locking
    }

    pub(super) fn is_locked(&self) -> bool {
        matches!(self.locking, Locking::Locked)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Before the mapping's own drop: a device must let go of pages while they are mapped.
        self.entry.retire();
    }
}

/// An anonymous mapping, unmapped on drop.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping belongs to the process, not to the thread that made it.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference the mapping is only advised and locked, which the kernel
// serialises; its bytes are reached through buffers alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves more than it needs without access (which no overcommit rule counts), cuts both
    /// ends off, and makes the rest accessible.
    fn reserve(length: usize, alignment: usize) -> Result<Self, Errno> {
        let page = rustix::param::page_size();
        let spare = alignment.max(page) - page;
        let reserved = length.checked_add(spare).ok_or(Errno::NOMEM)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                reserved,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )
        }?
        .cast::<u8>();
        let whole = Self { start: NonNull::new(base).ok_or(Errno::NOMEM)?, length: reserved };
        let mapping = whole.cut(length, alignment.max(page))?;
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range is this mapping, which nothing refers to yet.
        unsafe { rustix::mm::mprotect(mapping.address(), length, access) }?;
        Ok(mapping)
    }

    /// The `length` bytes at the first multiple of `alignment`; the rest is unmapped. There must
    /// be that many.
    fn cut(mut self, length: usize, alignment: usize) -> Result<Self, Errno> {
        let head = self.start.addr().get().wrapping_neg() & (alignment - 1);
        let tail = self.length - head - length;
        if tail > 0 {
            let rest = self.address().wrapping_byte_add(head + length);
            // SAFETY: the range is the end of this mapping, which nothing refers to yet.
            unsafe { rustix::mm::munmap(rest, tail) }?;
            self.length -= tail;
        }
        if head > 0 {
            // SAFETY: the range is the beginning of this mapping, which nothing refers to yet.
            unsafe { rustix::mm::munmap(self.address(), head) }?;
            self.start = self.start.map_addr(|address| address.saturating_add(head));
            self.length -= head;
        }
        Ok(self)
    }

    fn address(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this mapping; the kinds of advice used here change no contents.
        unsafe { rustix::mm::madvise(self.address(), self.length, advice) }
    }

    /// Locks pages as they are first touched (`mlock2(2)`, Linux 4.4), or all of them at once on
    /// a kernel that can't.
    fn lock(&self) -> Locking {
        // SAFETY: the range is this mapping; locking changes no contents.
        let on_fault =
            unsafe { rustix::mm::mlock_with(self.address(), self.length, MlockFlags::ONFAULT) };
        let locked = match on_fault {
            Err(Errno::NOSYS | Errno::INVAL) => self.lock_all_pages(),
            other => other,
        };
        match locked {
            Ok(()) => Locking::Locked,
            Err(errno) => Locking::Refused(limits::lock_refusal(self.length, errno)),
        }
    }

    fn lock_all_pages(&self) -> Result<(), Errno> {
        // SAFETY: the range is this mapping; locking changes no contents.
        let locked = unsafe { rustix::mm::mlock(self.address(), self.length) };
        if locked.is_err() {
            // The kernel marks the range before it fails to fill it: take the mark back.
            // SAFETY: the range is this mapping; unlocking changes no contents.
            let _ = unsafe { rustix::mm::munlock(self.address(), self.length) };
        }
        locked
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the owner drops the mapping only when no buffer over it is left, and only in
        // the process that made it.
        let _ = unsafe { rustix::mm::munmap(self.address(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_and_exactly_as_long_as_asked() {
        for (length, alignment) in
            [(4096, 4096), (3 << 20, 4096), (8192, 1 << 22), (5 << 20, 1 << 24), (4096, 64)]
        {
            let region = Region::map(length, alignment, &PoolOptions::default()).unwrap();
            let start = region.start().unwrap().addr().get();
            assert_eq!(start % alignment, 0);
            assert!(length < HUGE_PAGE_BYTES || start.is_multiple_of(HUGE_PAGE_BYTES));
            assert_eq!(region.length(), length);
        }
    }

    #[test]
    fn lengths_are_rounded_to_pages_and_no_further() {
        let page = rustix::param::page_size().max(4096);
        assert_eq!(region_bytes(0), Some(page));
        assert_eq!(region_bytes(page + 1), Some(2 * page));
        assert_eq!(region_bytes(5 << 30), Some(5 << 30));
        assert_eq!(region_bytes(usize::MAX), None);
    }

    #[test]
    fn more_than_the_address_space_is_an_error() {
        let length = usize::MAX & !4095;
        let error = Region::map(length, 1 << 40, &PoolOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.to_string().contains(&length.to_string()));
    }
}
