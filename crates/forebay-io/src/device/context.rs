//! Primary contexts: held while something of Forebay's lives in them, current only while needed.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::Arc;

use super::cuda::Cuda;
use super::symbols::Driver;
use crate::error::Result;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: what this thread does is no part of a graph that somebody is
/// capturing, and breaks none.
const RELAXED: c_int = 2;

/// Makes a context current on this thread; how the thread took captures of graphs before, for
/// [`leave`]. A code if it can't be.
///
/// # Safety
///
/// The handle is that of a context that is held until the thread has left it.
pub(super) unsafe fn enter(driver: &Driver, handle: usize) -> Result<c_int, c_int> {
    // SAFETY: the caller's promise is passed on.
    let code = unsafe { (driver.push)(handle) };
    if code != 0 {
        return Err(code);
    }
    let mut mode = RELAXED;
    // SAFETY: the pointer is valid.
    let refused = unsafe { (driver.exchange_capture_mode)(&raw mut mode) };
    Ok(if refused == 0 { mode } else { RELAXED })
}

/// Leaves what [`enter`] entered on this thread.
///
/// # Safety
///
/// It is the last one that this thread entered and hasn't left.
pub(super) unsafe fn leave(driver: &Driver, mut mode: c_int) {
    // SAFETY: the pointer is valid.
    let _ = unsafe { (driver.exchange_capture_mode)(&raw mut mode) };
    let mut handle = 0;
    // SAFETY: the result's pointer is valid, the context was pushed by `enter`.
    let _ = unsafe { (driver.pop)(&raw mut handle) };
}

/// The primary context of a device, which PyTorch and others use too.
#[derive(Debug)]
pub struct Context {
    cuda: Arc<Cuda>,
    ordinal: u32,
    device: i32,
    handle: usize,
}

impl Context {
    /// Holds the primary context of a device. It is made if nobody has it yet, which takes device
    /// memory.
    ///
    /// # Errors
    ///
    /// There is no such device, or the driver refuses.
    pub fn retain(cuda: &Arc<Cuda>, ordinal: u32) -> Result<Arc<Self>> {
        let device = cuda.device(ordinal)?;
        let mut handle = 0;
        // SAFETY: the result's pointer is valid.
        let code = unsafe { (cuda.driver.retain)(&raw mut handle, device) };
        cuda.check(code, &format!("cannot make a context on CUDA device {ordinal}"))?;
        Ok(Arc::new(Self { cuda: Arc::clone(cuda), ordinal, device, handle }))
    }

    /// The device's number in this process.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The driver's handle.
    pub(super) fn handle(&self) -> usize {
        self.handle
    }

    /// Whether `other` is the context of the same device.
    pub fn is_same(&self, other: &Self) -> bool {
        self.ordinal == other.ordinal && Arc::ptr_eq(&self.cuda, &other.cuda)
    }

    /// The driver.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Holds the context for somebody else as well: its device and handle, for the driver. Whoever
    /// asks gives it back.
    pub(super) fn hold_once_more(&self) -> Result<(i32, usize)> {
        self.cuda.refuse_forked()?;
        let mut handle = 0;
        // SAFETY: the result's pointer is valid.
        let code = unsafe { (self.cuda.driver.retain)(&raw mut handle, self.device) };
        self.cuda.check(code, "cannot hold a CUDA context")?;
        Ok((self.device, handle))
    }

    /// Makes it current on this thread until what comes back is dropped.
    ///
    /// # Errors
    ///
    /// The context is broken or gone, or the process was forked.
    pub fn enter(&self) -> Result<Entered<'_>> {
        self.cuda.refuse_forked()?;
        // SAFETY: the context is held by `self`, which what comes back borrows.
        match unsafe { enter(&self.cuda.driver, self.handle) } {
            Ok(mode) => Ok(Entered { context: self, mode, on_this_thread: PhantomData }),
            Err(code) => {
                let what = format!("cannot use the context of CUDA device {}", self.ordinal);
                Err(self.cuda.refusal(code, &what))
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.cuda.is_here() {
            // SAFETY: it gives back what `retain` took, once.
            let _ = unsafe { (self.cuda.driver.release)(self.device) };
        }
    }
}

/// A context is current on this thread, and graphs that are being captured don't mind it.
#[derive(Debug)]
pub struct Entered<'a> {
    context: &'a Context,
    /// How the thread took captures before.
    mode: c_int,
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // SAFETY: it was entered on this thread, which what is dropped later has left before.
        unsafe { leave(&self.context.cuda.driver, self.mode) };
    }
}

#[cfg(test)]
pub(super) mod tests {
    use forebay_standin::Standin;

    use super::super::cuda::tests::stand_in;
    use super::*;

    /// A context of a stand-in's device.
    pub(in crate::device) fn context(standin: &Standin, ordinal: u32) -> Arc<Context> {
        Context::retain(&Cuda::load(&stand_in(standin)).unwrap(), ordinal).unwrap()
    }

    #[test]
    fn contexts_are_given_back_and_the_thread_is_left_as_it_was() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let (first, second) = (context(&standin, 0), context(&standin, 1));
        {
            let _first = first.enter().unwrap();
            let _second = second.enter().unwrap();
        }
        let count = |symbol| standin.count(symbol);
        assert_eq!((count("cuCtxPushCurrent_v2"), count("cuCtxPopCurrent_v2")), (2, 2));
        assert_ne!(standin.census(), before);
        drop((first, second));
        assert_eq!(standin.census(), before);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_refusal_leaves_nothing_behind() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let cuda = Cuda::load(&stand_in(&standin)).unwrap();
        assert!(Context::retain(&cuda, 7).is_err());
        standin.configure("fail=cuDevicePrimaryCtxRetain:1:2 fail=cuCtxPushCurrent_v2:1:201");
        let error = Context::retain(&cuda, 0).unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        let context = Context::retain(&cuda, 0).unwrap();
        assert!(context.enter().is_err());
        assert!(context.enter().is_ok());
        drop(context);
        assert_eq!(standin.census(), before);
        assert_eq!(standin.count("cuCtxPopCurrent_v2"), 1);
    }
}
