//! What a handle has in one process: its workers, and the books that they share.
//!
//! There is one group of workers with the handle's options and, where those leave it to the drives
//! ([`Options::tunings`]), another for each set of options that a drive was found to do best with,
//! started when the first file on such a drive comes. All share one tracker, so that stores of a
//! file keep their order whoever moves them.
//!
//! A forked child gets a runtime of its own ([`Handle`](crate::Handle) sees to that), since
//! threads don't survive a fork and the parent's locks may have been held at that moment.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::{MemoryKind, Options, Tuning};
use crate::engine::EngineFactory;
use crate::error::{Error, Result};
use crate::files::{Mounts, TensorFile};
use crate::handle::factory_of;
use crate::memory::{Pool, process};
use crate::plan::Direction;
use crate::routes::Routes;
use crate::stats::Counters;
use crate::tracker::Tracker;
use crate::workers::Workers;

/// See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Runtime {
    process: u64,
    options: Options,
    pub(crate) workers: Arc<Workers>,
    tuned: Mutex<Tuned>,
    pub(crate) tracker: Arc<Tracker>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) mounts: Mounts,
    pub(crate) routes: Routes,
    pub(crate) pool: Arc<Pool>,
}

/// Workers beside those with the handle's own options.
#[derive(Debug, Default)]
struct Tuned {
    groups: Vec<(Tuning, Arc<Workers>)>,
    /// Who moves the files of a device; `None`: those with the handle's own options.
    devices: HashMap<(u32, u32, Direction, MemoryKind), Option<Arc<Workers>>>,
    stopped: bool,
}

impl Runtime {
    /// Starts the workers; fewer than asked for if some find no engine.
    ///
    /// # Errors
    ///
    /// No worker found an engine; the first one's reason.
    pub(crate) fn start(options: &Options, factory: &Arc<dyn EngineFactory>) -> Result<Self> {
        let counters = Arc::new(Counters::default());
        let pool = options.pool.clone().unwrap_or_else(Pool::global);
        let routes = Routes::new(options);
        let workers =
            Arc::new(Workers::start(options, factory, routes.channels(), (&counters, &pool))?);
        Ok(Self {
            process: process::number(),
            options: options.clone(),
            workers,
            tuned: Mutex::default(),
            tracker: Arc::new(Tracker::new(Arc::clone(&counters))),
            counters,
            mounts: Mounts::default(),
            routes,
            pool,
        })
    }

    fn tuned(&self) -> MutexGuard<'_, Tuned> {
        self.tuned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who moves a request whose first file this is, to or from one kind of memory.
    pub(crate) fn workers_for(
        &self,
        file: &TensorFile,
        direction: Direction,
        memory: MemoryKind,
    ) -> Arc<Workers> {
        let Some(tunings) = &self.options.tunings else { return Arc::clone(&self.workers) };
        let (major, minor, _) = file.key;
        let key = (major, minor, direction, memory);
        let mut tuned = self.tuned();
        if let Some(workers) = tuned.devices.get(&key) {
            return Arc::clone(workers.as_ref().unwrap_or(&self.workers));
        }
        let tuning = tunings.tuning(&file.whereabouts(), direction, memory);
        let workers = tuning.and_then(|tuning| self.start_tuned(&mut tuned, tuning));
        tuned.devices.insert(key, workers.clone());
        workers.unwrap_or_else(|| Arc::clone(&self.workers))
    }

    fn start_tuned(&self, tuned: &mut Tuned, tuning: Tuning) -> Option<Arc<Workers>> {
        if tuned.stopped {
            return None;
        }
        if let Some((_, workers)) = tuned.groups.iter().find(|(other, _)| *other == tuning) {
            return Some(Arc::clone(workers));
        }
        let options = self.options.clone().tuned_to(tuning);
        let started = options.validate().and_then(|()| {
            let factory = factory_of(&options)?;
            let channels = self.routes.channels();
            Workers::start(&options, &factory, channels, (&self.counters, &self.pool))
        });
        match started {
            Ok(workers) => {
                let workers = Arc::new(workers);
                tuned.groups.push((tuning, Arc::clone(&workers)));
                Some(workers)
            }
            Err(error) => {
                self.counters
                    .fallback(&format!("the options stored for a drive don't work: {error}"));
                None
            }
        }
    }

    fn groups(&self) -> Vec<Arc<Workers>> {
        let tuned = self.tuned();
        let groups = tuned.groups.iter().map(|(_, workers)| Arc::clone(workers));
        std::iter::once(Arc::clone(&self.workers)).chain(groups).collect()
    }

    /// Why no worker of the handle's own options is left, if none is.
    pub(crate) fn breakage(&self) -> Option<Error> {
        self.workers.breakage()
    }

    /// Has the workers finish what is queued and leave, and waits for that.
    pub(crate) fn stop(&self) {
        self.tuned().stopped = true;
        for workers in self.groups() {
            workers.stop();
        }
    }

    /// Whether the caller is one of the workers.
    pub(crate) fn is_worker_thread(&self) -> bool {
        self.groups().iter().any(|workers| workers.is_worker_thread())
    }

    pub(crate) fn belongs_here(&self) -> bool {
        self.process == process::number()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if self.belongs_here() {
            self.stop();
        } else {
            self.workers.forget();
            let tuned = self.tuned.get_mut().unwrap_or_else(PoisonError::into_inner);
            for (_, workers) in &tuned.groups {
                workers.forget();
            }
        }
    }
}
