//! Device memory, and host memory that is registered.
//!
//! An allocation is a range of addresses without access, which stays reserved for good, and a file
//! in memory that has its bytes. Copies move them with `pread(2)` and `pwrite(2)`, which fail on
//! host memory that isn't there instead of ending the process.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::{Outcome, code};

const PAGE_BYTES: usize = 4096;

/// Device memory of one `cuMemAlloc`.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) device: i32,
    pub(crate) start: usize,
    pub(crate) length: usize,
    /// The host may touch it too.
    pub(crate) managed: bool,
    /// Unlike any other's of the process, those that were freed included.
    pub(crate) number: u64,
    file: OwnedFd,
}

/// Why an address can't be used, as a code and in words.
pub(crate) type Misuse = (i32, String);

/// See the [module documentation](self).
#[derive(Default)]
pub(crate) struct Memory {
    /// Allocations so far.
    allocated: u64,
    live: BTreeMap<usize, Arc<Allocation>>,
    /// Those that were freed: start and length.
    freed: BTreeMap<usize, usize>,
    /// Registered host memory: start and length.
    registered: BTreeMap<usize, usize>,
}

impl Allocation {
    fn new(device: i32, length: usize, managed: bool, number: u64) -> Option<Self> {
        // SAFETY: the name is a C string.
        let descriptor =
            unsafe { libc::memfd_create(c"device memory".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return None;
        }
        // SAFETY: the descriptor was just made and is nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let size = libc::off_t::try_from(length).ok()?;
        // SAFETY: a call on a descriptor, with no memory.
        if unsafe { libc::ftruncate(file.as_raw_fd(), size) } != 0 {
            return None;
        }
        let (access, sharing) = if managed {
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)
        } else {
            (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_NORESERVE)
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, access, sharing, file.as_raw_fd(), 0)
        };
        (start != libc::MAP_FAILED).then(|| Self {
            device,
            start: start.expose_provenance(),
            length,
            managed,
            number,
            file,
        })
    }

    /// Copies host memory to `offset`.
    pub(crate) fn copy_in(&self, offset: usize, from: usize, length: usize) -> bool {
        each(offset, length, |at, done, left| {
            let from = std::ptr::with_exposed_provenance::<libc::c_void>(from + done);
            // SAFETY: the kernel checks the memory; that nobody changes it is for whoever
            // enqueued the copy, as on a device.
            unsafe { libc::pwrite(self.file.as_raw_fd(), from, left, at) }
        })
    }

    /// Copies from `offset` to host memory.
    pub(crate) fn copy_out(&self, offset: usize, to: usize, length: usize) -> bool {
        each(offset, length, |at, done, left| {
            let to = std::ptr::with_exposed_provenance_mut::<libc::c_void>(to + done);
            // SAFETY: the kernel checks the memory; that nobody else uses it is for whoever
            // enqueued the copy, as on a device.
            unsafe { libc::pread(self.file.as_raw_fd(), to, left, at) }
        })
    }
}

impl Memory {
    pub(crate) fn allocate(&mut self, device: i32, length: usize, managed: bool) -> Outcome<usize> {
        if length == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.allocated += 1;
        let allocation =
            Allocation::new(device, length, managed, self.allocated).ok_or(code::OUT_OF_MEMORY)?;
        let start = allocation.start;
        self.live.insert(start, Arc::new(allocation));
        Ok(start)
    }

    pub(crate) fn free(&mut self, start: usize) -> Outcome {
        let allocation = self.live.remove(&start).ok_or(code::INVALID_VALUE)?;
        if allocation.managed {
            let address = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: the mapping is this allocation's; its owner gave it up.
            unsafe { libc::mprotect(address, allocation.length, libc::PROT_NONE) };
        }
        self.freed.insert(start, allocation.length);
        Ok(())
    }

    /// Frees the memory of a device.
    pub(crate) fn free_all_of(&mut self, device: i32) -> Outcome {
        let all = self.live.values().filter(|allocation| allocation.device == device);
        let starts: Vec<usize> = all.map(|allocation| allocation.start).collect();
        starts.into_iter().try_for_each(|start| self.free(start))
    }

    /// No host memory is registered any more.
    pub(crate) fn forget_registrations(&mut self) {
        self.registered.clear();
    }

    /// The allocation that holds an address, and how far from its start.
    pub(crate) fn at(&self, address: usize) -> Option<(&Arc<Allocation>, usize)> {
        let (start, allocation) = self.live.range(..=address).next_back()?;
        let offset = address - start;
        (offset < allocation.length).then_some((allocation, offset))
    }

    /// The allocation that holds all of a range.
    pub(crate) fn device(&self, bytes: &Range<usize>) -> Result<(Arc<Allocation>, usize), Misuse> {
        let length = bytes.len();
        if let Some((allocation, offset)) = self.at(bytes.start) {
            if length <= allocation.length - offset {
                return Ok((Arc::clone(allocation), offset));
            }
            let there = allocation.length;
            let text = format!("{length} bytes from {offset} on, of device memory of {there}");
            return Err((code::INVALID_VALUE, text));
        }
        let freed = self.freed.range(..=bytes.start).next_back();
        let what = match freed {
            Some((start, freed)) if bytes.start - start < *freed => "freed device memory",
            _ => "what isn't device memory",
        };
        Err((code::INVALID_VALUE, format!("{length} bytes at {:#x}, {what}", bytes.start)))
    }

    pub(crate) fn register(&mut self, start: usize, length: usize) -> Outcome {
        if start == 0 || length == 0 || !is_mapped(start, length) || self.at(start).is_some() {
            return Err(code::INVALID_VALUE);
        }
        let end = start + length;
        let before = self.registered.range(..end).next_back();
        if before.is_some_and(|(other, length)| other + length > start) {
            return Err(code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.registered.insert(start, length);
        Ok(())
    }

    /// The bytes that were registered at `start`, and whether they are still mapped.
    pub(crate) fn unregister(&mut self, start: usize) -> Outcome<(Range<usize>, bool)> {
        let length = self.registered.remove(&start).ok_or(code::HOST_MEMORY_NOT_REGISTERED)?;
        Ok((start..start + length, is_mapped(start, length)))
    }

    /// Whether all of a range is within one registration.
    pub(crate) fn is_registered(&self, bytes: &Range<usize>) -> bool {
        self.registered
            .range(..=bytes.start)
            .next_back()
            .is_some_and(|(start, length)| bytes.end <= start + length)
    }

    pub(crate) fn allocation_count(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn registration_count(&self) -> usize {
        self.registered.len()
    }
}

/// Moves `length` bytes by steps that say how many they moved.
fn each(offset: usize, length: usize, step: impl Fn(libc::off_t, usize, usize) -> isize) -> bool {
    let mut done = 0;
    while done < length {
        let Ok(at) = libc::off_t::try_from(offset + done) else { return false };
        match usize::try_from(step(at, done, length - done)) {
            Ok(moved) if moved > 0 => done += moved,
            _ => return false,
        }
    }
    true
}

/// Whether every page of a range is mapped (`mincore(2)`).
fn is_mapped(start: usize, length: usize) -> bool {
    let first = start - start % PAGE_BYTES;
    let span = (start + length).next_multiple_of(PAGE_BYTES) - first;
    let mut residency = vec![0u8; span / PAGE_BYTES];
    let address = std::ptr::with_exposed_provenance_mut(first);
    // SAFETY: the call only looks at the range, and `residency` has a byte for each of its pages.
    unsafe { libc::mincore(address, span, residency.as_mut_ptr().cast()) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_the_host_has_no_access() {
        let mut memory = Memory::default();
        let start = memory.allocate(0, 10_001, false).unwrap();
        let bytes: Vec<u8> = (0..100u8).collect();
        let (allocation, offset) = memory.device(&(start + 9_901..start + 10_001)).unwrap();
        assert!(allocation.copy_in(offset, bytes.as_ptr().expose_provenance(), 100));
        let mut back = vec![0u8; 100];
        assert!(allocation.copy_out(offset, back.as_mut_ptr().expose_provenance(), 100));
        assert_eq!(back, bytes);
        assert!(!allocation.copy_in(0, start, 100), "the host can't reach device memory");
        assert!(memory.device(&(start + 9_902..start + 10_002)).is_err());
        memory.free(start).unwrap();
        let (_, text) = memory.device(&(start + 5..start + 6)).unwrap_err();
        assert!(text.contains("freed"), "{text}");
    }

    #[test]
    fn registrations_do_not_overlap_and_hold_whole_ranges() {
        let host = vec![0u8; 4 * PAGE_BYTES];
        let start = host.as_ptr().expose_provenance();
        let mut memory = Memory::default();
        memory.register(start, 2 * PAGE_BYTES).unwrap();
        assert_eq!(
            memory.register(start + PAGE_BYTES, 2 * PAGE_BYTES),
            Err(code::HOST_MEMORY_ALREADY_REGISTERED)
        );
        memory.register(start + 2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert!(memory.is_registered(&(start + 5..start + 2 * PAGE_BYTES)));
        assert!(!memory.is_registered(&(start + 5..start + 2 * PAGE_BYTES + 1)));
        assert!(memory.unregister(start).unwrap().1);
        assert_eq!(memory.unregister(start), Err(code::HOST_MEMORY_NOT_REGISTERED));
        assert!(!memory.is_registered(&(start..start + 1)));
    }
}
