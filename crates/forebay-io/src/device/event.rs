//! Events: points in streams that other streams and threads can wait for.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::Arc;

use super::context::Context;
use super::cuda::{IN_CAPTURE, NOT_READY};
use super::stream::{CallerStream, Stream};
use crate::error::{Error, ErrorKind, Result};

/// `CU_EVENT_BLOCKING_SYNC`: who waits for it sleeps. `CU_EVENT_DISABLE_TIMING`: it is cheaper.
const FLAGS: u32 = 0x1 | 0x2;

/// A point in a stream, once it is recorded.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: usize,
}

impl Event {
    /// An event that nobody has recorded: it counts as over.
    ///
    /// # Errors
    ///
    /// The driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: the result's pointer is valid.
        let code = unsafe { (context.cuda().driver.event_create)(&raw mut handle, FLAGS) };
        context.cuda().check(code, "cannot make a CUDA event")?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// Records it behind all that a stream of Forebay's has to do.
    ///
    /// # Errors
    ///
    /// The driver refuses, or the context is broken.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.record_on(stream.handle())
    }

    /// Records it behind all that a stream of the caller's has to do, of the same device.
    ///
    /// # Errors
    ///
    /// As for [`Self::record`]. [`ErrorKind::InvalidInput`] while a graph is captured there: what is
    /// to be waited for would be part of the graph, and happen whenever that is launched.
    ///
    /// # Safety
    ///
    /// The handle is that of a live stream, or of a default stream.
    pub unsafe fn record_behind(&self, stream: CallerStream) -> Result<()> {
        self.refuse_capture(stream.0)?;
        self.record_on(stream.0)
    }

    fn refuse_capture(&self, stream: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        let mut status = 0;
        // SAFETY: the stream is the caller's, the result's pointer valid.
        let code = unsafe { (cuda.driver.is_capturing)(stream, &raw mut status) };
        cuda.check(code, "cannot ask whether a CUDA graph is being captured")?;
        if status == 0 {
            return Ok(());
        }
        let text = "a CUDA graph is being captured on the caller's stream";
        Err(Error::new(ErrorKind::InvalidInput, text).hint(IN_CAPTURE))
    }

    fn record_on(&self, stream: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        // SAFETY: the event is `self`'s, the stream the caller's.
        let code = unsafe { (cuda.driver.event_record)(self.handle, stream) };
        cuda.check(code, "cannot record a CUDA event")
    }

    /// Whether what it was recorded behind is over.
    ///
    /// # Errors
    ///
    /// The context is broken: what it was recorded behind may have failed.
    pub fn is_over(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        // SAFETY: the event is `self`'s.
        match unsafe { (cuda.driver.event_query)(self.handle) } {
            NOT_READY => Ok(false),
            code => cuda.check(code, "cannot ask for a CUDA event").map(|()| true),
        }
    }

    /// Sleeps until what it was recorded behind is over.
    ///
    /// # Errors
    ///
    /// As for [`Self::is_over`].
    pub fn wait(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        let cuda = self.context.cuda();
        // SAFETY: the event is `self`'s.
        let code = unsafe { (cuda.driver.event_synchronize)(self.handle) };
        cuda.check(code, "a CUDA stream failed")
    }

    /// Sleeps until what it was recorded behind doesn't move any more, and says how that ended. See
    /// [`Stream::settle`] for what errors mean.
    ///
    /// # Errors
    ///
    /// As for [`Self::is_over`].
    pub fn settle(&self) -> Result<()> {
        let result = self.wait();
        if result.is_err() {
            let _ = self.wait();
        }
        result
    }

    pub(super) fn handle(&self) -> usize {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the event is `self`'s, and isn't used after this.
            let _ = unsafe { (self.context.cuda().driver.event_destroy)(self.handle) };
        }
    }
}
