//! Pool memory that is registered with the driver, so that copies from and to it are asynchronous.
//!
//! # Invariants
//!
//! - A region is registered at most once, whole, for the contexts of all devices, and unregistered
//!   before it is unmapped, or when the [`Cuda`] goes.
//! - Registering pins every page of a region, which takes a while: no lock is held meanwhile, and
//!   only those who want that region wait for it.
//! - A primary context is held for as long as a region is registered.
//! - A refusal never fails what wanted the memory: copies from and to memory that isn't registered
//!   are right, and slower.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use super::context::Context;
use super::cuda::Cuda;
use super::symbols::Driver;
use crate::error::Result;
use crate::memory::{self, NewRegionListener, RegionListener, RegionSpan, process};

/// `CU_MEMHOSTREGISTER_PORTABLE`: for the contexts of all devices.
const PORTABLE: u32 = 0x1;

/// The regions that a [`Cuda`] has registered.
#[derive(Debug)]
pub(super) struct Pinned {
    driver: Driver,
    process: u64,
    regions: Mutex<Regions>,
    settled: Condvar,
}

#[derive(Debug, Default)]
struct Regions {
    /// The context in which regions are registered: its device and handle.
    context: Option<(c_int, usize)>,
    known: HashMap<u64, State>,
}

/// How far a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A thread is registering it.
    Registering,
    /// It is registered, and starts here.
    Registered(usize),
    Refused,
}

impl Pinned {
    pub(super) fn new(driver: Driver) -> Arc<Self> {
        let process = process::number();
        Arc::new(Self { driver, process, regions: Mutex::default(), settled: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Regions> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far a region is, once no thread is registering it.
    fn state_of(&self, region: u64) -> (MutexGuard<'_, Regions>, Option<State>) {
        let mut regions = self.lock();
        loop {
            match regions.known.get(&region).copied() {
                Some(State::Registering) => {
                    regions = self.settled.wait(regions).unwrap_or_else(PoisonError::into_inner);
                }
                state => return (regions, state),
            }
        }
    }

    /// Registers a region unless it is, or was refused. The code of a refusal, or whether it is
    /// registered.
    fn pin(self: &Arc<Self>, region: RegionSpan) -> Result<bool, c_int> {
        let RegionSpan { id, start, length } = region;
        let (mut regions, state) = self.state_of(id);
        if let Some(state) = state {
            return Ok(state != State::Refused);
        }
        regions.known.insert(id, State::Registering);
        let context = regions.context;
        drop(regions);
        let listener: Arc<dyn RegionListener> = Arc::clone(self) as Arc<dyn RegionListener>;
        // From here on the region's end waits for what comes of this, or it is over already.
        let registered = memory::listen(id, Arc::downgrade(&listener)).then(|| {
            let address = std::ptr::with_exposed_provenance_mut(start);
            in_context(self.driver, context, || {
                // SAFETY: the region is mapped until its listeners have heard of its end.
                unsafe { (self.driver.host_register)(address, length, PORTABLE) }
            })
        });
        let mut regions = self.lock();
        match registered {
            None => regions.known.remove(&id),
            Some(0) => regions.known.insert(id, State::Registered(start)),
            Some(_) => regions.known.insert(id, State::Refused),
        };
        drop(regions);
        self.settled.notify_all();
        match registered {
            None => Ok(false),
            Some(0) => Ok(true),
            Some(code) => Err(code),
        }
    }

    /// A refusal means that the driver or the context is gone, and its registrations with it.
    fn unregister(&self, context: Option<(c_int, usize)>, start: usize) {
        let address = std::ptr::with_exposed_provenance_mut(start);
        in_context(self.driver, context, || {
            // SAFETY: the region is registered, and mapped until its listeners have heard of its
            // end.
            unsafe { (self.driver.host_unregister)(address) }
        });
    }

    /// Lets go of every region, at the end of the driver's use.
    pub(super) fn unpin_all(&self) {
        let mut regions = self.lock();
        while regions.known.values().any(|state| *state == State::Registering) {
            regions = self.settled.wait(regions).unwrap_or_else(PoisonError::into_inner);
        }
        let context = regions.context.take();
        for (_, state) in regions.known.drain() {
            if let State::Registered(start) = state {
                self.unregister(context, start);
            }
        }
        if let Some((device, _)) = context {
            // SAFETY: it gives back what was held for the first registration, once.
            let _ = unsafe { (self.driver.release)(device) };
        }
    }
}

/// Runs a call of the driver in a context that is held; its code, or that of entering.
fn in_context(
    driver: Driver,
    context: Option<(c_int, usize)>,
    run: impl FnOnce() -> c_int,
) -> c_int {
    let (_, handle) = context.unwrap_or_default();
    // SAFETY: the context is held; none at all is refused by the driver.
    let entered = unsafe { (driver.push)(handle) };
    if entered != 0 {
        return entered;
    }
    let code = run();
    let mut popped = 0;
    // SAFETY: the result's pointer is valid; the context was pushed above.
    let _ = unsafe { (driver.pop)(&raw mut popped) };
    code
}

impl RegionListener for Pinned {
    fn region_gone(&self, region: u64) {
        let (mut regions, state) = self.state_of(region);
        regions.known.remove(&region);
        let context = regions.context;
        drop(regions);
        if let Some(State::Registered(start)) = state {
            self.unregister(context, start);
        }
    }
}

fn warn_of(code: c_int, length: usize) {
    tracing::warn!(
        target: "forebay",
        "cannot register {length} bytes of the pool with CUDA: error {code}"
    );
}

/// Registers regions as they come.
#[derive(Debug)]
struct NewRegions(Weak<Pinned>);

impl NewRegionListener for NewRegions {
    fn region_mapped(&self, region: RegionSpan) -> bool {
        let Some(pinned) = self.0.upgrade() else { return false };
        if pinned.process != process::number() {
            return false;
        }
        if let Err(code) = pinned.pin(region) {
            warn_of(code, region.length);
        }
        true
    }
}

impl Cuda {
    /// Registers the pool region that holds `length` bytes at `address`, unless it is. `false` if
    /// they aren't all in one region, or were refused before.
    ///
    /// The caller keeps the buffer at that address meanwhile.
    ///
    /// # Errors
    ///
    /// The driver's refusal, the first time.
    pub fn pin_region_of(
        &self,
        context: &Context,
        address: *const u8,
        length: usize,
    ) -> Result<bool> {
        self.refuse_forked()?;
        let Some(region) = memory::region_of(address, length) else { return Ok(false) };
        self.hold(context)?;
        self.pinned.pin(region).or_else(|code| {
            let what = format!("cannot register {} bytes of the pool with CUDA", region.length);
            self.check(code, &what).map(|()| false)
        })
    }

    /// Registers the regions of all pools, those that are there and those to come, for as long as
    /// this [`Cuda`] lives. How many of those that are there are registered; refusals are logged.
    ///
    /// # Errors
    ///
    /// The context can't be held.
    pub fn pin_pools(&self, context: &Context) -> Result<usize> {
        self.hold(context)?;
        let listener: Arc<dyn NewRegionListener> =
            Arc::new(NewRegions(Arc::downgrade(&self.pinned)));
        memory::listen_to_new(&listener);
        let mut count = 0;
        for region in memory::regions() {
            match self.pinned.pin(region) {
                Ok(pinned) => count += usize::from(pinned),
                Err(code) => warn_of(code, region.length),
            }
        }
        Ok(count)
    }

    /// Holds a context to register regions in, the first time.
    fn hold(&self, context: &Context) -> Result<()> {
        let mut regions = self.pinned.lock();
        if regions.context.is_none() {
            regions.context = Some(context.hold_once_more()?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay_standin::Standin;

    use super::super::context::tests::context;
    use super::super::pointer::{Place, memory_at};
    use crate::memory::{ALIGNMENT_DEFAULT, Pool, PoolOptions};

    fn pool() -> std::sync::Arc<Pool> {
        Pool::new(PoolOptions { touch: false, ..PoolOptions::default() })
    }

    #[test]
    fn a_region_is_registered_once_and_let_go_before_it_is_unmapped() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let pool = pool();
        let context = context(&standin, 1);
        let cuda = context.cuda();
        let buffer = pool.allocate(5 << 20, ALIGNMENT_DEFAULT).unwrap();
        for start in [0, 1, 4 << 20] {
            let address = buffer.as_ptr().wrapping_add(start);
            assert!(cuda.pin_region_of(&context, address, 1 << 20).unwrap());
            assert_eq!(
                memory_at(cuda, address.expose_provenance()).unwrap(),
                Place::RegisteredHost
            );
        }
        assert!(!cuda.pin_region_of(&context, buffer.as_ptr(), 6 << 20).unwrap());
        assert_eq!(standin.count("cuMemHostRegister_v2"), 1);
        drop(buffer);
        assert_eq!(standin.count("cuMemHostUnregister"), 1);
        drop(context);
        assert_eq!(standin.census(), before);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn pools_are_registered_whether_their_memory_came_before_cuda_or_after() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let pool = pool();
        let early = pool.allocate(3 << 20, ALIGNMENT_DEFAULT).unwrap();
        let context = context(&standin, 0);
        let cuda = context.cuda();
        assert!(cuda.pin_pools(&context).unwrap() >= 1);
        let late = pool.allocate(2 << 20, ALIGNMENT_DEFAULT).unwrap();
        for buffer in [&early, &late] {
            let address = buffer.as_ptr().expose_provenance();
            assert_eq!(memory_at(cuda, address).unwrap(), Place::RegisteredHost);
        }
        drop(early);
        // The driver goes first, then the memory.
        drop(context);
        assert_eq!(standin.census(), before);
        drop(late);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_refusal_is_told_once_and_leaves_the_memory_usable() {
        let standin = Standin::new().unwrap();
        let pool = pool();
        let context = context(&standin, 0);
        let buffer = pool.allocate(2 << 20, ALIGNMENT_DEFAULT).unwrap();
        standin.configure("fail=cuMemHostRegister_v2:1+:2");
        let pin = || context.cuda().pin_region_of(&context, buffer.as_ptr(), 10);
        let error = pin().unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        assert!(!pin().unwrap());
        assert_eq!(standin.count("cuMemHostRegister_v2"), 1);
        drop(buffer);
        assert_eq!(standin.count("cuMemHostUnregister"), 0);
    }
}
