//! The devices of this process: one driver, and one context for each device that was used.
//!
//! A forked child doesn't see what its parent had, and waits for no lock of it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;

use super::context::Context;
use super::cuda::Cuda;
use super::gds::Gds;
use super::library::Search;
use super::presence;
use crate::error::Result;
use crate::memory::process;
use crate::syscalls::is_shortage;

static GLOBAL: ArcSwapOption<Devices> = ArcSwapOption::const_empty();
static SEARCH: ArcSwapOption<Search> = ArcSwapOption::const_empty();
static CUFILE_FOLDERS: ArcSwapOption<Vec<PathBuf>> = ArcSwapOption::const_empty();
static ROOT: ArcSwapOption<PathBuf> = ArcSwapOption::const_empty();

/// The driver of a process and a context for each device. See the [module documentation](super).
#[derive(Debug)]
pub struct Devices {
    process: u64,
    cuda: Arc<Cuda>,
    contexts: Mutex<HashMap<u32, Arc<Context>>>,
    search: Search,
    root: PathBuf,
    gds: OnceLock<Result<Arc<Gds>>>,
    /// Held while cuFile is looked for.
    looking: Mutex<()>,
}

impl Devices {
    /// The devices of a driver that is loaded for them.
    ///
    /// # Errors
    ///
    /// As for [`Cuda::load`].
    pub fn load(search: &Search) -> Result<Arc<Self>> {
        Self::load_under(search, Path::new("/"))
    }

    /// The same on a machine whose `/proc`, `/sys` and `/etc` are under a root, as far as GPUDirect
    /// Storage is concerned.
    ///
    /// # Errors
    ///
    /// As for [`Cuda::load`].
    pub fn load_under(search: &Search, root: &Path) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            process: process::number(),
            cuda: Cuda::load(search)?,
            contexts: Mutex::default(),
            search: search.clone(),
            root: root.to_path_buf(),
            gds: OnceLock::new(),
            looking: Mutex::default(),
        }))
    }

    /// Those of this process, loaded if they aren't, from where [`Self::search_in`] said. They stay
    /// until the process ends. A failure isn't remembered.
    ///
    /// # Errors
    ///
    /// As for [`Cuda::load`].
    pub fn global() -> Result<Arc<Self>> {
        let here = |devices: &Option<Arc<Self>>| {
            devices.as_ref().filter(|it| it.process == process::number()).map(Arc::clone)
        };
        if let Some(devices) = here(&GLOBAL.load()) {
            return Ok(devices);
        }
        let fresh = Self::load_under(&Self::search(), &Self::root())?;
        GLOBAL.rcu(|current| here(current).or_else(|| Some(Arc::clone(&fresh))));
        Ok(here(&GLOBAL.load()).unwrap_or(fresh))
    }

    /// Where [`Self::global`] looks for the driver from now on, if it isn't loaded.
    pub fn search_in(search: Search) {
        SEARCH.store(Some(Arc::new(search)));
        presence::look_again();
    }

    pub(super) fn search() -> Search {
        SEARCH.load().as_deref().cloned().unwrap_or_default()
    }

    /// Folders in which [`Self::gds`] looks for cuFile, those of NVIDIA's packages, unless it is to
    /// look in given folders only.
    pub fn cufile_is_in(folders: Vec<PathBuf>) {
        CUFILE_FOLDERS.store(Some(Arc::new(folders)));
    }

    /// The root under which [`Self::global`] finds the facts about this machine, `/` if nothing else
    /// is said.
    pub fn root() -> PathBuf {
        ROOT.load().as_deref().cloned().unwrap_or_else(|| PathBuf::from("/"))
    }

    /// Has the facts about this machine looked for under a root, for tests. Changes nothing once
    /// [`Self::global`] is loaded.
    pub fn look_under(root: PathBuf) {
        ROOT.store(Some(Arc::new(root)));
    }

    /// cuFile, loaded with its driver open. A failure is remembered: what is missing doesn't come
    /// while a process runs, and looking for it isn't cheap.
    ///
    /// # Errors
    ///
    /// As for [`Gds::load`].
    pub fn gds(&self) -> Result<Arc<Gds>> {
        let load = || {
            let mut search = self.search.clone();
            if search.system {
                let packages = CUFILE_FOLDERS.load();
                search.folders.extend(packages.iter().flat_map(|folders| folders.iter().cloned()));
            }
            Gds::load(&self.cuda, &search)
        };
        if let Some(found) = self.gds.get() {
            return found.clone();
        }
        let _looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.gds.get() {
            return found.clone();
        }
        match load() {
            // It may be there at another moment.
            Err(error) if error.os_code().is_some_and(is_shortage) => Err(error),
            found => self.gds.get_or_init(|| found).clone(),
        }
    }

    /// Where its `/proc`, `/sys` and `/etc` are.
    pub fn facts_root(&self) -> &Path {
        &self.root
    }

    /// The driver.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// The context of a device. With the first one, the memory of all pools is registered with the
    /// driver, and whatever pools map later is too.
    ///
    /// # Errors
    ///
    /// As for [`Context::retain`].
    pub fn context(&self, ordinal: u32) -> Result<Arc<Context>> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&ordinal) {
            return Ok(Arc::clone(context));
        }
        let context = Context::retain(&self.cuda, ordinal)?;
        let is_first = contexts.is_empty();
        contexts.insert(ordinal, Arc::clone(&context));
        // Registering takes as long as there is memory: others may have contexts meanwhile.
        drop(contexts);
        if is_first && let Err(error) = self.cuda.pin_pools(&context) {
            tracing::warn!(target: "forebay", "the memory of pools isn't pinned: {error}");
        }
        Ok(context)
    }
}

#[cfg(test)]
mod tests {
    use forebay_standin::Standin;

    use super::super::cuda::tests::stand_in;
    use super::super::pointer::{Place, memory_at};
    use super::*;
    use crate::memory::{ALIGNMENT_DEFAULT, Pool, PoolOptions};

    #[test]
    fn a_device_has_one_context_and_pools_are_registered_with_the_first() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let pool = Pool::new(PoolOptions { touch: false, ..PoolOptions::default() });
        let buffer = pool.allocate(3 << 20, ALIGNMENT_DEFAULT).unwrap();
        {
            let devices = Devices::load(&stand_in(&standin)).unwrap();
            let place = || memory_at(devices.cuda(), buffer.as_ptr().expose_provenance()).unwrap();
            assert!(devices.context(5).is_err());
            assert_eq!(place(), Place::Host);
            let context = devices.context(1).unwrap();
            assert!(Arc::ptr_eq(&context, &devices.context(1).unwrap()));
            assert!(!context.is_same(&devices.context(0).unwrap()));
            assert_eq!(place(), Place::RegisteredHost);
        }
        assert_eq!(standin.census(), before);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }
}
