//! Streams of Forebay's own: copies, and waiting for events.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::Arc;

use super::DeviceAddress;
use super::context::Context;
use super::event::Event;
use crate::error::Result;

/// `CU_STREAM_NON_BLOCKING`: the caller's default stream and this one don't wait for each other.
const NON_BLOCKING: u32 = 0x1;

/// A stream of the caller's, by the driver's handle: 0 and 1 are the default stream of a device, 2
/// that of a thread (`CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD` of `cuda.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CallerStream(pub usize);

/// A stream. What is still enqueued when it is dropped is waited for.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: usize,
}

impl Stream {
    /// A stream that no other one waits for.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: the result's pointer is valid.
        let code = unsafe { (context.cuda().driver.stream_create)(&raw mut handle, NON_BLOCKING) };
        context.cuda().check(code, "cannot make a CUDA stream")?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// Its device's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn handle(&self) -> usize {
        self.handle
    }

    /// Copies host memory to the device once all before it is done. Returns at once if the host
    /// memory is registered.
    ///
    /// # Errors
    ///
    /// The driver refuses, or the context is broken; nothing was enqueued then.
    ///
    /// # Safety
    ///
    /// Both ranges stay valid, the host memory unchanged and the device memory otherwise unused,
    /// until an event behind the copy is over.
    pub unsafe fn copy_in(&self, to: DeviceAddress, from: *const u8, length: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        // SAFETY: the caller's promise is passed on.
        let code = unsafe { (cuda.driver.copy_in)(to, from.cast(), length, self.handle) };
        cuda.check(code, &self.cannot_copy(length, "to"))
    }

    /// Copies device memory to the host, likewise.
    ///
    /// # Errors
    ///
    /// As for [`Self::copy_in`].
    ///
    /// # Safety
    ///
    /// Both ranges stay valid, the device memory unchanged and the host memory otherwise unused,
    /// until an event behind the copy is over.
    pub unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddress, length: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        // SAFETY: the caller's promise is passed on.
        let code = unsafe { (cuda.driver.copy_out)(to.cast(), from, length, self.handle) };
        cuda.check(code, &self.cannot_copy(length, "from"))
    }

    fn cannot_copy(&self, length: usize, way: &str) -> String {
        format!("cannot copy {length} bytes {way} CUDA device {}", self.context.ordinal())
    }

    /// What is enqueued from now on waits for what the event was recorded behind, on whatever
    /// device that is.
    ///
    /// # Errors
    ///
    /// The driver refuses, or the context is broken.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        // SAFETY: the stream is `self`'s, the event lives.
        let code = unsafe { (cuda.driver.stream_wait)(self.handle, event.handle(), 0) };
        cuda.check(code, "cannot wait for a CUDA event")
    }

    /// Sleeps until all that is enqueued is done.
    ///
    /// # Errors
    ///
    /// The context is broken.
    pub fn wait(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        // SAFETY: the stream is `self`'s.
        let code = unsafe { (cuda.driver.stream_synchronize)(self.handle) };
        cuda.check(code, "a CUDA stream failed")
    }
}

impl Stream {
    /// Sleeps until nothing that is enqueued moves any more, however that is.
    ///
    /// A call may fail for a reason of its own, or tell of the failure of something earlier; in a
    /// context that is broken or gone every call fails, and nothing moves.
    pub fn settle(&self) {
        let _ = self.wait().or_else(|_| self.wait());
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.settle();
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the stream is `self`'s, and isn't used after this.
            let _ = unsafe { (self.context.cuda().driver.stream_destroy)(self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_standin::Standin;

    use super::super::context::tests::context;
    use super::*;
    use crate::memory::{ALIGNMENT_DEFAULT, Pool, PoolBuffer, PoolOptions};

    const LENGTH: usize = 1 << 16;

    /// Memory that the driver knows, and all of it `value`.
    fn registered(context: &Context, value: u8) -> PoolBuffer {
        let pool = Pool::new(PoolOptions { touch: false, ..PoolOptions::default() });
        let mut buffer = pool.allocate(LENGTH, ALIGNMENT_DEFAULT).unwrap();
        buffer.as_mut_slice().fill(value);
        assert!(context.cuda().pin_region_of(context, buffer.as_ptr(), LENGTH).unwrap());
        buffer
    }

    #[test]
    fn copies_wait_for_kernels_of_the_callers_stream_and_end_with_their_event() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let theirs = standin.stream(1);
        let memory = standin.allocate(1, LENGTH + 1);
        {
            let context = context(&standin, 1);
            let ours = Stream::new(&context).unwrap();
            let (start, end) = (Event::new(&context).unwrap(), Event::new(&context).unwrap());
            let host = registered(&context, 0);
            let held = standin.hold(theirs);
            standin.kernel_write(theirs, memory + 1, &vec![9; LENGTH]);
            // SAFETY: the stream lives.
            unsafe { start.record_behind(CallerStream(theirs.handle)) }.unwrap();
            ours.wait_for(&start).unwrap();
            // SAFETY: both live until the event is over.
            unsafe { ours.copy_out(host.as_ptr(), memory + 1, LENGTH) }.unwrap();
            end.record(&ours).unwrap();
            assert!(!end.is_over().unwrap());
            drop(held);
            end.wait().unwrap();
            assert!(end.is_over().unwrap());
            assert_eq!(host.as_slice(), vec![9; LENGTH]);
        }
        standin.end(theirs);
        standin.free(memory);
        assert_eq!(standin.census(), before);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_stream_that_is_dropped_finishes_its_copies() {
        let standin = Standin::new().unwrap();
        let memory = standin.allocate(0, LENGTH);
        let context = context(&standin, 0);
        let host = registered(&context, 7);
        let ours = Stream::new(&context).unwrap();
        // SAFETY: both live until the stream is dropped, which waits.
        unsafe { ours.copy_in(memory, host.as_ptr(), LENGTH) }.unwrap();
        drop(ours);
        assert_eq!(standin.peek(memory, LENGTH), vec![7; LENGTH]);
        standin.free(memory);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_broken_context_is_an_error_with_its_code_everywhere() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let context = context(&standin, 0);
        let (ours, event) = (Stream::new(&context).unwrap(), Event::new(&context).unwrap());
        event.record(&ours).unwrap();
        standin.configure("broken=700");
        for error in [ours.wait(), event.wait(), event.record(&ours), ours.wait_for(&event)] {
            let error = error.unwrap_err();
            assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_ILLEGAL_ADDRESS");
            assert!(error.to_string().contains("CUDA_LAUNCH_BLOCKING"), "{error}");
        }
        drop((ours, event, context));
        assert_eq!(standin.census(), before);
    }
}
