//! Pool memory that is registered with the driver, so that copies from and to it are asynchronous.
//!
//! # Invariants
//!
//! - A region is registered at most once, whole, for the contexts of all devices, and unregistered
//!   before it is unmapped, or when the [`Cuda`] goes.
//! - Registering pins every page of a region, which takes a while: no lock is held meanwhile, and
//!   only those who want that region wait for it.
//! - A primary context is held for as long as a region is registered. Regions are registered in the
//!   first held one that takes them: that of one device may break while others work.
//! - A refusal never fails what wanted the memory: copies from and to memory that isn't registered
//!   are right, and slower.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use super::context::{self, Context};
use super::cuda::Cuda;
use super::symbols::Driver;
use crate::error::Result;
use crate::memory::{self, NewRegionListener, RegionListener, RegionSpan, process};

/// `CU_MEMHOSTREGISTER_PORTABLE`: for the contexts of all devices.
const PORTABLE: u32 = 0x1;
/// `CUDA_ERROR_INVALID_CONTEXT`.
const NO_CONTEXT: c_int = 201;

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
    /// The contexts in which regions can be registered.
    contexts: Vec<Held>,
    known: HashMap<u64, State>,
}

/// How far a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A thread is registering it.
    Registering,
    /// It is registered in this context, and starts here.
    Registered(Held, usize),
    /// This many contexts have refused it.
    Refused(usize),
}

/// A context that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    device: c_int,
    handle: usize,
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
        match state {
            Some(State::Registered(..)) => return Ok(true),
            Some(State::Refused(count)) if count == regions.contexts.len() => return Ok(false),
            _ => {}
        }
        regions.known.insert(id, State::Registering);
        let contexts = regions.contexts.clone();
        drop(regions);
        let listener: Arc<dyn RegionListener> = Arc::clone(self) as Arc<dyn RegionListener>;
        // From here on the region's end waits for what comes of this, or it is over already.
        let is_there = memory::listen(id, Arc::downgrade(&listener));
        let outcome = is_there.then(|| self.register(&contexts, start, length));
        let mut regions = self.lock();
        match outcome {
            None => regions.known.remove(&id),
            Some(Ok(held)) => regions.known.insert(id, State::Registered(held, start)),
            Some(Err(_)) => regions.known.insert(id, State::Refused(contexts.len())),
        };
        drop(regions);
        self.settled.notify_all();
        outcome.map_or(Ok(false), |outcome| outcome.map(|_| true))
    }

    /// Registers memory that stays mapped meanwhile, in the first context that takes it; the last
    /// one's refusal if none does.
    fn register(&self, contexts: &[Held], start: usize, length: usize) -> Result<Held, c_int> {
        let address = std::ptr::with_exposed_provenance_mut(start);
        let mut refusal = NO_CONTEXT;
        for held in contexts {
            let code = in_context(self.driver, *held, || {
                // SAFETY: the region is mapped until its listeners have heard of its end.
                unsafe { (self.driver.host_register)(address, length, PORTABLE) }
            });
            if code == 0 {
                return Ok(*held);
            }
            refusal = code;
        }
        Err(refusal)
    }

    /// A refusal means that the driver or the context is gone, and its registrations with it.
    fn unregister(&self, held: Held, start: usize) {
        let address = std::ptr::with_exposed_provenance_mut(start);
        in_context(self.driver, held, || {
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
        for (_, state) in regions.known.drain() {
            if let State::Registered(held, start) = state {
                self.unregister(held, start);
            }
        }
        for held in regions.contexts.drain(..) {
            // SAFETY: it gives back what was held for registrations, once.
            let _ = unsafe { (self.driver.release)(held.device) };
        }
    }
}

/// Runs a call of the driver in a context that is held; its code, or that of entering.
fn in_context(driver: Driver, held: Held, run: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the context is held.
    match unsafe { context::enter(&driver, held.handle) } {
        Err(code) => code,
        Ok(mode) => {
            let code = run();
            // SAFETY: it was entered above.
            unsafe { context::leave(&driver, mode) };
            code
        }
    }
}

impl RegionListener for Pinned {
    fn region_gone(&self, region: u64) {
        let (mut regions, state) = self.state_of(region);
        regions.known.remove(&region);
        drop(regions);
        if let Some(State::Registered(held, start)) = state {
            self.unregister(held, start);
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

    /// Holds a context to register regions in, the first time that it is seen.
    fn hold(&self, context: &Context) -> Result<()> {
        let mut regions = self.pinned.lock();
        if !regions.contexts.iter().any(|held| held.handle == context.handle()) {
            let (device, handle) = context.hold_once_more()?;
            regions.contexts.push(Held { device, handle });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay_standin::Standin;

    use super::super::context::Context;
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
    fn threads_that_register_and_free_meet_without_harm() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let pool = pool();
        let context = context(&standin, 0);
        context.cuda().pin_pools(&context).unwrap();
        let shared = pool.allocate(6 << 20, ALIGNMENT_DEFAULT).unwrap();
        let registered = standin.count("cuMemHostRegister_v2");
        std::thread::scope(|scope| {
            for worker in 0..4usize {
                let (pool, context, shared) = (&pool, &context, &shared);
                scope.spawn(move || {
                    for round in 0..50 {
                        let length = (2 << 20) + ((worker * 7 + round) << 12);
                        let buffer = pool.allocate(length, ALIGNMENT_DEFAULT).unwrap();
                        for buffer in [&buffer, shared] {
                            let (address, cuda) = (buffer.as_ptr(), context.cuda());
                            assert!(cuda.pin_region_of(context, address, 10).unwrap());
                            let place = memory_at(cuda, address.expose_provenance()).unwrap();
                            assert_eq!(place, Place::RegisteredHost);
                        }
                    }
                });
            }
        });
        assert_eq!(standin.count("cuMemHostRegister_v2"), registered + 4 * 50);
        drop((shared, pool, context));
        assert_eq!(standin.count("cuMemHostUnregister"), standin.count("cuMemHostRegister_v2"));
        assert_eq!(standin.census(), before);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_context_that_refuses_leaves_it_to_the_next_one() {
        let standin = Standin::new().unwrap();
        let pool = pool();
        let first = context(&standin, 0);
        let cuda = first.cuda();
        let second = Context::retain(cuda, 1).unwrap();
        let early = pool.allocate(2 << 20, ALIGNMENT_DEFAULT).unwrap();
        cuda.pin_pools(&first).unwrap();
        let late = pool.allocate(2 << 20, ALIGNMENT_DEFAULT).unwrap();
        standin.configure("broken=700@0");
        let newest = pool.allocate(2 << 20, ALIGNMENT_DEFAULT).unwrap();
        assert!(!cuda.pin_region_of(&first, newest.as_ptr(), 10).unwrap());
        for buffer in [&early, &late, &newest] {
            assert!(cuda.pin_region_of(&second, buffer.as_ptr(), 10).unwrap());
        }
        let refused = standin.count("cuMemHostRegister_v2");
        drop(newest);
        standin.configure("broken=0");
        drop((early, late));
        // Two, two refusals of the newest by the first context, and its registration in the second.
        assert_eq!((refused, standin.count("cuMemHostUnregister")), (5, 3));
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
