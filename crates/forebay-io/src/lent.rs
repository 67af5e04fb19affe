//! Bytes that are lent for a while, in memory of the host or of a device, and gathering those of
//! devices in the host's memory.
//!
//! [`Gather`] is for what is put together before it is stored, such as files of many tensors and
//! states of a training run. Loads and stores of device memory don't need it: they are requests.
//!
//! # Invariants
//!
//! - A copy comes after what its lender's stream had to do when the bytes were lent, and is over when
//!   the call that made it returns, however it does.
#![expect(unsafe_code, reason = "enqueues copies, which are promises about memory")]

use std::ops::Range;
use std::sync::Arc;

use crate::device::{CallerStream, Context, DeviceAddress, Event, Stream};
use crate::error::Result;
use crate::handle::Handle;
use crate::request::DeviceAccess;

/// Where the stream of a lender of device memory was at some moment.
#[derive(Debug)]
pub struct Behind {
    context: Arc<Context>,
    event: Event,
}

impl Behind {
    /// Marks where a stream is now.
    ///
    /// # Errors
    ///
    /// The driver refuses, or the context is broken.
    ///
    /// # Safety
    ///
    /// The stream is live, and of the context's device.
    pub unsafe fn new(access: &DeviceAccess) -> Result<Arc<Self>> {
        let event = Event::new(&access.context)?;
        let behind = Self { context: Arc::clone(&access.context), event };
        // SAFETY: the caller's promise is passed on.
        unsafe { behind.mark(access.stream) }?;
        Ok(Arc::new(behind))
    }

    /// Marks where a stream is now instead, for copies that are yet to be asked for.
    ///
    /// # Errors
    ///
    /// As for [`Self::new`].
    ///
    /// # Safety
    ///
    /// As for [`Self::new`].
    pub unsafe fn mark(&self, stream: CallerStream) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.event.record_behind(stream) }
    }
}

/// Bytes in a device's memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBytes<'a> {
    behind: &'a Arc<Behind>,
    address: DeviceAddress,
    length: usize,
}

impl<'a> DeviceBytes<'a> {
    /// `length` bytes at an address, as they are behind a moment of their lender's stream.
    ///
    /// # Safety
    ///
    /// They are in memory of that stream's device, and neither freed nor changed in `'a`.
    pub unsafe fn new(behind: &'a Arc<Behind>, address: DeviceAddress, length: usize) -> Self {
        Self { behind, address, length }
    }

    /// The number of them.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Some of them.
    ///
    /// # Panics
    ///
    /// If there aren't that many.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.length,
            "{range:?} of {}",
            self.length
        );
        let (address, length) = (self.address + range.start, range.end - range.start);
        Self { address, length, ..*self }
    }
}

/// Bytes that nobody changes in `'a`.
#[derive(Clone, Copy, Debug)]
pub enum Lent<'a> {
    /// In the host's memory.
    Host(&'a [u8]),
    /// In a device's.
    Device(DeviceBytes<'a>),
}

impl<'a> From<&'a [u8]> for Lent<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Host(bytes)
    }
}

impl Lent<'_> {
    /// The number of its bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(bytes) => bytes.length,
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of its bytes.
    ///
    /// # Panics
    ///
    /// If it hasn't that many.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        match *self {
            Self::Host(bytes) => Self::Host(&bytes[range]),
            Self::Device(bytes) => Self::Device(bytes.part(range)),
        }
    }
}

/// Copies bytes of devices to the host's memory, on streams of its own: one for each device.
#[derive(Debug)]
pub struct Gather<'h> {
    handle: &'h Handle,
    lanes: Vec<Lane>,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    /// What was waited for last.
    behind: Option<Arc<Behind>>,
    /// Behind the copies of a call.
    end: Event,
    in_use: bool,
}

impl<'h> Gather<'h> {
    /// One whose bytes and fallbacks are counted in the statistics of a handle.
    pub fn new(handle: &'h Handle) -> Self {
        Self { handle, lanes: Vec::new() }
    }

    /// Copies bytes to their positions in `memory`, and does something else while they are on their
    /// way. Memory of a pool is registered with the driver first.
    ///
    /// # Errors
    ///
    /// The driver refuses, or a context is broken.
    ///
    /// # Panics
    ///
    /// If the memory hasn't that many bytes.
    pub fn copy_while<T>(
        &mut self,
        memory: &mut [u8],
        copies: &[(usize, DeviceBytes<'_>)],
        meanwhile: impl FnOnce() -> T,
    ) -> Result<T> {
        let under_way = UnderWay(&mut self.lanes);
        for &(position, bytes) in copies.iter().filter(|(_, bytes)| bytes.length > 0) {
            let to = &mut memory[position..position + bytes.length];
            let index = lane_of(under_way.0, &bytes.behind.context)?;
            let lane = &mut under_way.0[index];
            if !lane.in_use {
                register(self.handle, &bytes.behind.context, to);
            }
            lane.in_use = true;
            lane.wait_for(bytes.behind)?;
            // SAFETY: whoever lent the bytes keeps them as they are, and the memory is borrowed;
            // `under_way` waits for the copy before both ends.
            unsafe { lane.stream.copy_out(to.as_mut_ptr(), bytes.address, bytes.length) }?;
            self.handle.note_device_bytes(bytes.length as u64);
        }
        for lane in under_way.0.iter().filter(|lane| lane.in_use) {
            lane.end.record(&lane.stream)?;
        }
        let answer = meanwhile();
        under_way.land()?;
        Ok(answer)
    }
}

/// Registers the region of a pool that memory is in. Without, copies work and take longer.
fn register(handle: &Handle, context: &Context, memory: &[u8]) {
    match context.cuda().pin_region_of(context, memory.as_ptr(), memory.len()) {
        Ok(true) => {}
        Ok(false) => handle.note_fallback("memory for what is saved isn't registered with CUDA"),
        Err(error) => {
            handle.note_fallback(&format!("memory for what is saved isn't pinned: {error}"));
        }
    }
}

fn lane_of(lanes: &mut Vec<Lane>, context: &Arc<Context>) -> Result<usize> {
    if let Some(index) = lanes.iter().position(|lane| lane.stream.context().is_same(context)) {
        return Ok(index);
    }
    let (stream, end) = (Stream::new(context)?, Event::new(context)?);
    lanes.push(Lane { stream, behind: None, end, in_use: false });
    Ok(lanes.len() - 1)
}

impl Lane {
    fn wait_for(&mut self, behind: &Arc<Behind>) -> Result<()> {
        let is_last = self.behind.as_ref().is_some_and(|last| Arc::ptr_eq(last, behind));
        if !is_last {
            self.stream.wait_for(&behind.event)?;
            self.behind = Some(Arc::clone(behind));
        }
        Ok(())
    }
}

/// Copies that were enqueued: none is under way any more when it is dropped.
struct UnderWay<'a>(&'a mut Vec<Lane>);

impl UnderWay<'_> {
    /// Sleeps until all of them are over, and says how that ended.
    fn land(self) -> Result<()> {
        let mut result = Ok(());
        for lane in self.0.iter_mut().filter(|lane| lane.in_use) {
            result = result.and(lane.end.settle());
            lane.in_use = false;
        }
        result
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        for lane in self.0.iter_mut().filter(|lane| lane.in_use) {
            lane.stream.settle();
            lane.in_use = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_standin::{Standin, Stream as Theirs};

    use super::*;
    use crate::device::{Cuda, Search};
    use crate::memory::{ALIGNMENT_DEFAULT, PoolBuffer};
    use crate::{Options, Pool};

    const LENGTH: usize = (1 << 20) + 77;

    struct Rig {
        contexts: Vec<Arc<Context>>,
        streams: Vec<Theirs>,
        memory: Vec<DeviceAddress>,
        standin: Standin,
    }

    impl Rig {
        fn new(settings: &str) -> Self {
            let standin = Standin::new().unwrap();
            standin.configure(settings);
            let folders = vec![standin.folder().to_path_buf()];
            let cuda = Cuda::load(&Search { folders, system: false }).unwrap();
            let contexts = (0..2).map(|device| Context::retain(&cuda, device).unwrap()).collect();
            let streams: Vec<Theirs> = (0..2).map(|device| standin.stream(device)).collect();
            let memory = (0..2).map(|device| standin.allocate(device, LENGTH + 1)).collect();
            Self { contexts, streams, memory, standin }
        }

        /// What both devices' streams have to do so far.
        fn behind(&self) -> Vec<Arc<Behind>> {
            let behind = |(context, stream): (&Arc<Context>, &Theirs)| {
                let stream = CallerStream(stream.handle);
                let access = DeviceAccess { context: Arc::clone(context), stream };
                // SAFETY: the streams live as long as the rig.
                unsafe { Behind::new(&access) }.unwrap()
            };
            self.contexts.iter().zip(&self.streams).map(behind).collect()
        }

        fn bytes<'a>(&self, behind: &'a [Arc<Behind>], device: usize) -> DeviceBytes<'a> {
            // SAFETY: the tests change and free it when copies are over.
            unsafe { DeviceBytes::new(&behind[device], self.memory[device] + 1, LENGTH) }
        }

        fn end(self) {
            let Self { contexts, streams, memory, standin } = self;
            drop(contexts);
            for memory in memory {
                standin.free(memory);
            }
            for stream in streams {
                standin.end(stream);
            }
            assert_eq!(standin.violations(), Vec::<String>::new());
        }
    }

    fn pattern(seed: u8) -> Vec<u8> {
        (0..=250).cycle().take(LENGTH).map(|byte: u8| byte ^ seed).collect()
    }

    fn room() -> PoolBuffer {
        Pool::global().allocate(2 * LENGTH + 5, ALIGNMENT_DEFAULT).unwrap()
    }

    #[test]
    fn bytes_of_several_devices_come_behind_the_kernels_that_make_them() {
        let rig = Rig::new("delay_us=100");
        let handle = Handle::new(Options::default()).unwrap();
        let mut gather = Gather::new(&handle);
        let mut memory = room();
        for round in 0..3 {
            for (device, seed) in [(0, round), (1, round + 10)] {
                let address = rig.memory[device] + 1;
                rig.standin.kernel_write(rig.streams[device], address, &pattern(seed));
            }
            let behind = rig.behind();
            let (first, second) = (rig.bytes(&behind, 0), rig.bytes(&behind, 1));
            let (head, tail) = (first.part(0..1000), first.part(1000..LENGTH));
            let copies = [(0, tail), (LENGTH + 5, second), (LENGTH - 1000, head)];
            let mut ran = 0;
            gather.copy_while(memory.as_mut_slice(), &copies, || ran += 1).unwrap();
            assert_eq!(ran, 1);
            let (content, other) = (pattern(round), pattern(round + 10));
            assert!(memory.as_slice()[..LENGTH - 1000] == content[1000..]);
            assert!(memory.as_slice()[LENGTH - 1000..LENGTH] == content[..1000]);
            assert!(memory.as_slice()[LENGTH + 5..] == other);
        }
        assert_eq!(handle.stats().bytes_device, 6 * LENGTH as u64);
        assert_eq!(handle.stats().fallbacks, []);
        drop((gather, memory));
        rig.end();
    }

    #[test]
    fn whatever_call_fails_no_copy_is_under_way_afterwards() {
        for symbol in ["cuMemcpyDtoHAsync_v2", "cuStreamWaitEvent", "cuEventSynchronize"] {
            for number in 1..4 {
                let rig = Rig::new(&format!("delay_us=300 fail={symbol}:{number}:719"));
                let handle = Handle::new(Options::default()).unwrap();
                let mut gather = Gather::new(&handle);
                let mut failures = 0;
                for _ in 0..3 {
                    let behind = rig.behind();
                    // Freed in each round: the stand-in says so if a copy may still use it.
                    let mut memory = room();
                    let copies = [(0, rig.bytes(&behind, 0)), (LENGTH, rig.bytes(&behind, 1))];
                    let copied = gather.copy_while(memory.as_mut_slice(), &copies, || ());
                    failures += usize::from(copied.is_err());
                }
                assert_eq!(failures, 1, "{symbol} {number}");
                drop(gather);
                rig.end();
            }
        }
    }

    #[test]
    #[should_panic(expected = "meanwhile")]
    fn a_panic_meanwhile_waits_for_the_copies() {
        let rig = Rig::new("delay_us=2000");
        let handle = Handle::new(Options::default()).unwrap();
        let mut memory = room();
        let behind = rig.behind();
        let copies = [(0, rig.bytes(&behind, 0))];
        let mut gather = Gather::new(&handle);
        let copying = std::panic::AssertUnwindSafe(|| {
            gather.copy_while(memory.as_mut_slice(), &copies, || panic!("meanwhile"))
        });
        let panicked = std::panic::catch_unwind(copying).map(|_| ());
        drop((gather, memory));
        rig.end();
        std::panic::resume_unwind(panicked.unwrap_err());
    }
}
