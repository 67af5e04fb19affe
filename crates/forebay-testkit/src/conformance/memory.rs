//! The memory of transfers: the host's, or a device's for engines that move that.

#![expect(unsafe_code, reason = "memory that the kernel writes to")]
#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::alloc::Layout;
use std::cell::RefCell;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

use forebay_io::engine::Channels;
use forebay_io::engine::gds::OpenChannel;

use super::rig::ALIGNMENT;

/// A device whose memory the suite is to move.
pub trait Device: std::fmt::Debug {
    /// That many bytes.
    fn allocate(&self, length: usize) -> usize;
    /// Gives them back.
    fn free(&self, address: usize);
    /// What is there now.
    fn read(&self, address: usize, length: usize) -> Vec<u8>;
    /// Changes what is there.
    fn write(&self, address: usize, bytes: &[u8]);
    /// The channels of the engines under test.
    fn channels(&self) -> Arc<Channels>;
    /// One of them, between the device and a file that is open for direct I/O.
    fn open(&self, file: &File) -> OpenChannel;
}

thread_local! {
    /// The device whose memory the checks on this thread use.
    static DEVICE: RefCell<Option<Rc<dyn Device>>> = const { RefCell::new(None) };
}

/// The device whose memory is to be used now.
pub(super) fn device() -> Option<Rc<dyn Device>> {
    DEVICE.with_borrow(Clone::clone)
}

/// Has the memory of a device used, or again that of the host.
pub(super) fn set_device(device: Option<Rc<dyn Device>>) {
    DEVICE.with_borrow_mut(|current| *current = device);
}

/// Page-aligned memory that the kernel writes to, so it is never a slice while a transfer runs.
#[derive(Debug)]
pub(super) struct Memory {
    address: *mut u8,
    layout: Layout,
    device: Option<Rc<dyn Device>>,
}

impl Memory {
    /// `length` bytes, all of them `fill`.
    pub(super) fn filled(length: usize, fill: u8) -> Rc<Self> {
        let layout = Layout::from_size_align(length.max(1), ALIGNMENT).unwrap();
        if let Some(device) = device() {
            let start = device.allocate(layout.size());
            device.write(start, &vec![fill; layout.size()]);
            let address = std::ptr::without_provenance_mut(start);
            return Rc::new(Self { address, layout, device: Some(device) });
        }
        // SAFETY: the layout's size isn't zero.
        let address = unsafe { std::alloc::alloc(layout) };
        assert!(!address.is_null(), "no memory for the test");
        // SAFETY: `address` was just allocated with this size.
        unsafe { address.write_bytes(fill, layout.size()) };
        Rc::new(Self { address, layout, device: None })
    }

    /// Memory with these bytes.
    pub(super) fn holding(bytes: &[u8]) -> Rc<Self> {
        let memory = Self::filled(bytes.len(), 0);
        memory.put(0, bytes);
        memory
    }

    /// A copy of what it holds. No transfer may be writing to it.
    pub(super) fn bytes(&self) -> Vec<u8> {
        if let Some(device) = &self.device {
            return device.read(self.address.addr(), self.layout.size());
        }
        // SAFETY: all bytes were initialised, and the caller sees to it that none is written to.
        unsafe { std::slice::from_raw_parts(self.address, self.layout.size()) }.to_vec()
    }

    /// Puts bytes in at `index`. No transfer may be using them.
    pub(super) fn put(&self, index: usize, bytes: &[u8]) {
        assert!(index + bytes.len() <= self.layout.size());
        let target = self.address(index);
        if let Some(device) = &self.device {
            return device.write(target.addr(), bytes);
        }
        // SAFETY: in bounds, and the caller sees to it that nobody else uses it.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// The address of the byte at `index`.
    pub(super) fn address(&self, index: usize) -> *mut u8 {
        assert!(index <= self.layout.size());
        self.address.wrapping_add(index)
    }

    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.device {
            Some(device) => device.free(self.address.addr()),
            // SAFETY: allocated in `filled` with this layout.
            None => unsafe { std::alloc::dealloc(self.address, self.layout) },
        }
    }
}
