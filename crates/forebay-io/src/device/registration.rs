//! Host memory that is registered with the driver, so that copies from and to it are asynchronous.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::Arc;

use super::context::Context;
use crate::error::Result;

/// `CU_MEMHOSTREGISTER_PORTABLE`: for the contexts of all devices.
const PORTABLE: u32 = 0x1;

/// Host memory that the driver knows, until it is dropped.
#[derive(Debug)]
pub struct HostRegistration {
    context: Arc<Context>,
    start: *mut u8,
}

// SAFETY: the address is only handed to the driver, which any thread may call.
unsafe impl Send for HostRegistration {}
// SAFETY: nothing is done through a shared reference.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// Registers memory for the contexts of all devices. Its pages are brought in and stay.
    ///
    /// # Errors
    ///
    /// The driver refuses: too much is pinned, or part of it is registered already.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until what comes back is dropped, and no copy from or to it is under
    /// way then.
    pub unsafe fn new(context: &Arc<Context>, start: *mut u8, length: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let cuda = context.cuda();
        // SAFETY: the caller's promise is passed on.
        let code = unsafe { (cuda.driver.host_register)(start.cast(), length, PORTABLE) };
        cuda.check(code, &format!("cannot register {length} bytes of host memory with CUDA"))?;
        Ok(Self { context: Arc::clone(context), start })
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it was registered, and is mapped still by the promise made then.
            let _ = unsafe { (self.context.cuda().driver.host_unregister)(self.start.cast()) };
        }
    }
}
