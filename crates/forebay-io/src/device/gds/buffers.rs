//! Device memory that is registered with cuFile: what a program pins, and what operations use.
//!
//! What isn't registered goes through buffers that cuFile registered for itself, on the device; it
//! needs no registration to be right, nor to stay off the host.
//!
//! A program pins memory and unpins it; until then the entry keeps what owns the memory. Beyond
//! that, a long range is registered while operations use it, by all of them together, up to a
//! budget. Not for longer: the memory is its program's, which may free it and be given the same
//! addresses again, and cuFile says nothing of what a registration is then.
//!
//! # Invariants
//!
//! - Memory is registered at most once, and isn't freed before that has ended: its owner is kept by
//!   the entry (pinned) or by the operation.
//! - An entry is for the allocation that it begins in, which is looked at before each operation.
//! - What was pinned stays so until that is unpinned, whatever else is pinned in the same memory.
#![expect(unsafe_code, reason = "registers memory, which is a promise about its life")]

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::pointer::allocation_at;
use crate::device::{BufferRegistration, Context, CuFile, Cuda, DeviceAddress};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::process;

/// Most bytes that are registered without having been pinned. The window through which a device's
/// memory is reached by others is 256 MiB on the smallest.
const AUTOMATIC_BYTES_MAX: usize = 256 << 20;

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// The first byte.
    pub start: DeviceAddress,
    /// Bytes.
    pub length: usize,
}

impl DeviceRange {
    fn end(&self) -> usize {
        self.start.saturating_add(self.length)
    }

    /// Whether all of `other` is in it.
    pub fn holds(&self, other: &Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }
}

/// What owns pinned memory.
type Owner = Box<dyn Any + Send>;

/// The device memory that cuFile knows in this process.
#[derive(Debug)]
pub struct Buffers {
    process: u64,
    entries: Mutex<BTreeMap<DeviceAddress, Entry>>,
}

impl Default for Buffers {
    fn default() -> Self {
        Self { process: process::number(), entries: Mutex::default() }
    }
}

#[derive(Debug)]
struct Entry {
    // Ended before the owner goes.
    _registration: BufferRegistration,
    length: usize,
    /// The allocation's number.
    allocation: u64,
    uses: usize,
    /// What was pinned of it: none for what is registered for operations only.
    pins: Vec<Pin>,
}

impl Entry {
    fn is_needed(&self) -> bool {
        self.uses > 0 || !self.pins.is_empty()
    }
}

/// A range that the program pinned, and its owner.
struct Pin {
    range: DeviceRange,
    owner: Owner,
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pin").field("range", &self.range).finish_non_exhaustive()
    }
}

/// Registered memory that an operation uses.
#[derive(Debug)]
pub struct BufferUse {
    buffers: Arc<Buffers>,
    range: DeviceRange,
}

impl BufferUse {
    /// The range that is registered, whose start transfers have to name.
    pub fn range(&self) -> DeviceRange {
        self.range
    }
}

impl Drop for BufferUse {
    fn drop(&mut self) {
        // In a forked child nothing is registered, and the lock may be held for ever: registering
        // takes a while.
        if self.buffers.process != process::number() {
            return;
        }
        let mut entries = self.buffers.entries();
        if let Some(entry) = entries.get_mut(&self.range.start) {
            entry.uses -= 1;
            if !entry.is_needed() {
                entries.remove(&self.range.start);
            }
        }
    }
}

impl Buffers {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<DeviceAddress, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers memory until it is unpinned, and keeps its owner for as long. `false` if it is
    /// pinned already.
    ///
    /// # Errors
    ///
    /// cuFile refuses, or part of it is registered by itself.
    ///
    /// # Safety
    ///
    /// The memory stays allocated while `owner` lives.
    pub unsafe fn pin(
        &self,
        cufile: &Arc<CuFile>,
        context: &Arc<Context>,
        range: DeviceRange,
        owner: Owner,
    ) -> Result<bool> {
        let allocation = allocation_at(context.cuda(), range.start)?;
        // Goes after the lock: an owner's end may come back here.
        let _owners;
        let mut entries = self.entries();
        _owners = drop_stale(&mut entries, range, context.cuda());
        let pin = Pin { range, owner };
        if let Some((_, (entry, held))) = overlapping(&mut entries, range) {
            if !held.holds(&range) {
                return Err(overlap(range, entry));
            }
            let is_new = entry.pins.iter().all(|known| known.range != range);
            if is_new {
                entry.pins.push(pin);
            }
            return Ok(is_new);
        }
        // SAFETY: the entry is dropped before the owner that it holds.
        let registration = unsafe { cufile.register_buffer(context, range.start, range.length) }?;
        let DeviceRange { start, length } = range;
        let pins = vec![pin];
        entries.insert(
            start,
            Entry { _registration: registration, length, allocation, uses: 0, pins },
        );
        Ok(true)
    }

    /// Ends what [`Self::pin`] began for the memory that starts there, once no operation uses it.
    /// `false` if it isn't pinned.
    pub fn unpin(&self, start: DeviceAddress) -> bool {
        // Go after the lock: an owner's end may come back here.
        let ended: Vec<Pin>;
        let mut entries = self.entries();
        let first = DeviceRange { start, length: 1 };
        let Some((key, (entry, _))) = overlapping(&mut entries, first) else { return false };
        let pins = std::mem::take(&mut entry.pins);
        (ended, entry.pins) = pins.into_iter().partition(|pin| pin.range.start == start);
        if !entry.is_needed() {
            entries.remove(&key);
        }
        !ended.is_empty()
    }

    /// Whether all of a range is pinned.
    pub fn is_pinned(&self, range: DeviceRange) -> bool {
        let mut entries = self.entries();
        overlapping(&mut entries, range)
            .is_some_and(|(_, (entry, _))| entry.pins.iter().any(|pin| pin.range.holds(&range)))
    }

    /// Registered memory that holds all of a range, for an operation that keeps it allocated;
    /// `None` if it isn't registered, and not worth it or beyond the budget.
    ///
    /// # Errors
    ///
    /// cuFile refuses, which keeps nobody from using the memory unregistered.
    ///
    /// # Safety
    ///
    /// The memory stays allocated until what comes back is dropped.
    pub unsafe fn enter(
        self: &Arc<Self>,
        cufile: &Arc<CuFile>,
        context: &Arc<Context>,
        range: DeviceRange,
        is_long: bool,
    ) -> Result<Option<BufferUse>> {
        if !is_long && self.entries().is_empty() {
            return Ok(None);
        }
        let allocation = allocation_at(context.cuda(), range.start)?;
        // Goes after the lock: an owner's end may come back here.
        let _owners;
        let mut entries = self.entries();
        _owners = drop_stale(&mut entries, range, context.cuda());
        let buffers = Arc::clone(self);
        if let Some((start, (entry, held))) = overlapping(&mut entries, range) {
            if !held.holds(&range) {
                return Ok(None);
            }
            entry.uses += 1;
            let range = DeviceRange { start, length: entry.length };
            return Ok(Some(BufferUse { buffers, range }));
        }
        let automatic = entries.values().filter(|entry| entry.pins.is_empty());
        let automatic: usize = automatic.map(|entry| entry.length).sum();
        if !is_long || automatic + range.length > AUTOMATIC_BYTES_MAX {
            return Ok(None);
        }
        // SAFETY: the registration ends with the last use, before which nobody frees the memory.
        let registration = unsafe { cufile.register_buffer(context, range.start, range.length) }?;
        let DeviceRange { start, length } = range;
        entries.insert(
            start,
            Entry { _registration: registration, length, allocation, uses: 1, pins: Vec::new() },
        );
        Ok(Some(BufferUse { buffers, range }))
    }
}

/// Drops entries that reach into a range and are for memory that was freed since; their owners.
fn drop_stale(
    entries: &mut BTreeMap<DeviceAddress, Entry>,
    range: DeviceRange,
    cuda: &Cuda,
) -> Vec<Owner> {
    let mut owners = Vec::new();
    entries.retain(|start, entry| {
        let held = DeviceRange { start: *start, length: entry.length };
        let apart = held.end() <= range.start || range.end() <= held.start;
        // Asked of where the entry begins: memory that is mapped piece by piece has several
        // numbers. Where the driver doesn't answer, nothing is known against it.
        let is_current = || allocation_at(cuda, *start).map_or(true, |it| it == entry.allocation);
        let stays = apart || entry.uses > 0 || is_current();
        if !stays {
            owners.extend(entry.pins.drain(..).map(|pin| pin.owner));
        }
        stays
    });
    owners
}

/// The entry that a range reaches into, its start, and its range.
fn overlapping(
    entries: &mut BTreeMap<DeviceAddress, Entry>,
    range: DeviceRange,
) -> Option<(DeviceAddress, (&mut Entry, DeviceRange))> {
    let (start, entry) = entries.range_mut(..range.end().max(range.start + 1)).next_back()?;
    let held = DeviceRange { start: *start, length: entry.length };
    (held.end() > range.start).then_some((*start, (entry, held)))
}

fn overlap(range: DeviceRange, entry: &Entry) -> Error {
    let DeviceRange { start, length } = range;
    let text = format!("part of the {length} bytes of device memory at {start:#x} is registered");
    Error::new(ErrorKind::InvalidInput, text).hint(if entry.pins.is_empty() {
        "an operation uses it: wait for that first"
    } else {
        "unpin that first, or pin what holds both"
    })
}

#[cfg(test)]
mod tests {
    use forebay_standin::Standin;

    use super::*;
    use crate::device::cuda::tests::stand_in;

    const LENGTH: usize = 1 << 20;

    struct Rig {
        buffers: Arc<Buffers>,
        context: Arc<Context>,
        cufile: Arc<CuFile>,
        // The last to go.
        standin: Standin,
    }

    impl Rig {
        fn new() -> Self {
            let standin = Standin::new().unwrap();
            let search = stand_in(&standin);
            let cuda = Cuda::load(&search).unwrap();
            let cufile = CuFile::load(&cuda, &search).unwrap();
            let context = Context::retain(&cuda, 0).unwrap();
            Self { buffers: Arc::default(), context, cufile, standin }
        }

        fn pin(&self, start: usize, length: usize) -> Result<bool> {
            let range = DeviceRange { start, length };
            // SAFETY: the tests free memory once it is unpinned, but for the one that says so.
            unsafe { self.buffers.pin(&self.cufile, &self.context, range, Box::new(())) }
        }

        fn enter(&self, start: usize, length: usize, is_long: bool) -> Option<BufferUse> {
            let range = DeviceRange { start, length };
            // SAFETY: the tests free memory once the use is dropped.
            unsafe { self.buffers.enter(&self.cufile, &self.context, range, is_long) }.unwrap()
        }

        fn counts(&self) -> (u64, u64) {
            let count = |symbol| self.standin.count(symbol);
            (count("cuFileBufRegister"), count("cuFileBufDeregister"))
        }
    }

    #[test]
    fn pinned_memory_is_registered_once_and_used_by_its_start() {
        let rig = Rig::new();
        let memory = rig.standin.allocate(0, LENGTH);
        assert!(rig.pin(memory, LENGTH).unwrap());
        assert!(!rig.pin(memory, LENGTH).unwrap());
        let whole = DeviceRange { start: memory, length: LENGTH };
        let used = rig.enter(memory + 5, 100, false).unwrap();
        assert_eq!(used.range(), whole);
        assert!(rig.buffers.is_pinned(DeviceRange { start: memory + 9, length: 9 }));
        assert!(rig.buffers.unpin(memory));
        assert!(!rig.buffers.unpin(memory));
        assert!(!rig.buffers.is_pinned(whole));
        assert_eq!(rig.counts(), (1, 0), "an operation uses it");
        // Pinned again while it is still registered.
        assert!(rig.pin(memory, LENGTH).unwrap());
        drop(used);
        assert_eq!(rig.counts(), (1, 0));
        assert!(rig.buffers.unpin(memory));
        assert_eq!(rig.counts(), (1, 1));
        rig.standin.free(memory);
        assert_eq!(rig.standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn long_ranges_are_registered_while_operations_use_them_within_a_budget() {
        let rig = Rig::new();
        let memory = rig.standin.allocate(0, 2 * LENGTH);
        let large = rig.standin.allocate(0, AUTOMATIC_BYTES_MAX);
        assert!(rig.enter(memory, LENGTH, false).is_none());
        let first = rig.enter(memory, LENGTH, true).unwrap();
        let second = rig.enter(memory, LENGTH, true).unwrap();
        assert!(rig.enter(memory + 7, LENGTH, true).is_none(), "registered in part");
        assert!(rig.enter(large, AUTOMATIC_BYTES_MAX, true).is_none(), "beyond the budget");
        drop(first);
        assert_eq!(rig.counts(), (1, 0));
        drop(second);
        assert_eq!(rig.counts(), (1, 1));
        drop(rig.enter(large, AUTOMATIC_BYTES_MAX, true).unwrap());
        rig.standin.free(memory);
        rig.standin.free(large);
        assert_eq!(rig.standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn ranges_that_overlap_by_half_are_refused() {
        let rig = Rig::new();
        let memory = rig.standin.allocate(0, LENGTH);
        assert!(rig.pin(memory + 100, 1000).unwrap());
        let error = rig.pin(memory, 200).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("unpin"), "{error}");
        assert!(rig.pin(memory + 1100, 10).unwrap(), "it begins where the other ends");
        assert!(rig.buffers.unpin(memory + 100) && rig.buffers.unpin(memory + 1100));
        rig.standin.configure("fail=cuFileBufRegister:3:5036");
        let error = rig.pin(memory, 200).unwrap_err();
        assert_eq!(error.device_code().unwrap().name, "CU_FILE_GPU_MEMORY_PINNING_FAILED");
        rig.standin.free(memory);
        assert_eq!(rig.standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_forked_child_lets_go_of_a_use_without_waiting_for_its_parents_locks() {
        let rig = Rig::new();
        let memory = rig.standin.allocate(0, LENGTH);
        let used = rig.enter(memory, LENGTH, true).unwrap();
        let registering = rig.buffers.entries();
        // SAFETY: the child lets go of what is being tested, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(used);
            // SAFETY: the child has nothing to tidy up.
            unsafe { libc::_exit(0) };
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let mut status = -1;
        // SAFETY: the child is this test's; the result's pointer is valid.
        while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
            if std::time::Instant::now() > deadline {
                // SAFETY: as above.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(status, 0, "the child hung");
        drop(registering);
        drop(used);
        assert_eq!(rig.counts(), (1, 1));
        rig.standin.free(memory);
    }

    #[test]
    fn a_view_is_pinned_and_unpinned_by_itself() {
        let rig = Rig::new();
        let memory = rig.standin.allocate(0, LENGTH);
        let view = DeviceRange { start: memory + 4096, length: 100 };
        // While an operation has all of it registered.
        let used = rig.enter(memory, LENGTH, true).unwrap();
        assert!(rig.pin(view.start, view.length).unwrap());
        let error = rig.pin(memory + 1, LENGTH).unwrap_err().to_string();
        assert!(error.contains("unpin"), "{error}");
        drop(used);
        assert!(rig.buffers.is_pinned(view));
        assert!(!rig.buffers.is_pinned(DeviceRange { start: memory, length: 100 }));
        // Two tensors over the same memory: what one pinned the other doesn't unpin.
        assert!(rig.pin(memory, LENGTH).unwrap());
        assert!(rig.buffers.unpin(memory));
        assert!(rig.buffers.is_pinned(view));
        assert!(rig.buffers.unpin(view.start));
        assert!(!rig.buffers.unpin(view.start));
        assert_eq!(rig.counts(), (1, 1));
        let used = rig.enter(memory + 1, LENGTH - 1, true).unwrap();
        let error = rig.pin(memory, LENGTH).unwrap_err().to_string();
        assert!(error.contains("an operation uses it"), "{error}");
        drop(used);
        rig.standin.free(memory);
        assert_eq!(rig.standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn memory_of_several_allocations_stays_pinned_whichever_is_used() {
        let rig = Rig::new();
        let mut memory = [(); 2].map(|()| rig.standin.allocate(0, LENGTH));
        memory.sort_unstable();
        let [memory, next] = memory;
        assert!(rig.pin(memory, LENGTH).unwrap());
        let mut entries = rig.buffers.entries();
        // As if both were pieces of one range, as with torch's expandable segments.
        let length = next + LENGTH - memory;
        let entry = entries.get_mut(&memory).unwrap();
        entry.length = length;
        entry.pins[0].range.length = length;
        drop(entries);
        let used = rig.enter(next + 100, 100, false).unwrap();
        assert_eq!(used.range(), DeviceRange { start: memory, length });
        drop(used);
        assert_eq!(rig.counts(), (1, 0));
        assert!(rig.buffers.unpin(memory));
        rig.standin.free(memory);
        rig.standin.free(next);
    }

    #[test]
    fn an_entry_for_memory_that_was_freed_is_not_taken_for_what_is_there_now() {
        let rig = Rig::new();
        let memory = rig.standin.allocate(0, LENGTH);
        assert!(rig.pin(memory, LENGTH).unwrap());
        let mut entries = rig.buffers.entries();
        // As if the allocation had been another one, at the same addresses.
        entries.get_mut(&memory).unwrap().allocation += 1;
        drop(entries);
        assert!(rig.enter(memory, 100, false).is_none());
        assert_eq!(rig.counts(), (1, 1));
        rig.standin.free(memory);
    }
}
