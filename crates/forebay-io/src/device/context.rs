//! Primary contexts: held while something of Forebay's lives in them, current only while needed.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::marker::PhantomData;
use std::sync::Arc;

use super::cuda::Cuda;
use crate::error::Result;

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
        // SAFETY: the context is held by `self`.
        let code = unsafe { (self.cuda.driver.push)(self.handle) };
        self.cuda
            .check(code, &format!("cannot use the context of CUDA device {}", self.ordinal))?;
        Ok(Entered { context: self, on_this_thread: PhantomData })
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

/// A context is current on this thread.
#[derive(Debug)]
pub struct Entered<'a> {
    context: &'a Context,
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut handle = 0;
        // SAFETY: the result's pointer is valid; what was pushed on this thread is popped on it.
        let _ = unsafe { (self.context.cuda.driver.pop)(&raw mut handle) };
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
