//! A group of workers with the same options: started together, stopped together, fed by one
//! scheduler.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::config::Options;
use crate::engine::{Channels, EngineFactory, EngineKind, EngineOptions, WakeEvent};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Pool;
use crate::plan::STAGED_GRANULES_MIN;
use crate::scheduler::{Port, Scheduler};
use crate::staging::{Shape, Shapes, StagingBlocks};
use crate::stats::Counters;
use crate::worker::{Worker, abandon};

/// Largest staging block, in bytes: what was just copied, or is about to be, should still be in the
/// processor's cache. Blocks of 256 KiB stored a third faster here than blocks of 1 MiB.
const STAGED_BLOCK_BYTES_MAX: usize = 256 << 10;
/// Staging blocks per worker, of each kind, at the least, so that copies and transfers overlap.
const STAGING_BLOCKS_MIN: usize = 4;
/// Granule that staging blocks are made for at the least; files with larger ones than fit are
/// buffered.
const GRANULE_BYTES_MAX: usize = 16 << 10;

/// See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Workers {
    pub(crate) engine: EngineKind,
    pub(crate) scheduler: Arc<Scheduler>,
    pub(crate) block_bytes: usize,
    pub(crate) staged_block_bytes: usize,
    pub(crate) device_block_bytes: usize,
    breakage: Arc<Mutex<Option<Error>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What each worker's thread is started with.
struct Seat {
    options: EngineOptions,
    factory: Arc<dyn EngineFactory>,
    scheduler: Arc<Scheduler>,
    port: Arc<Port>,
    counters: Arc<Counters>,
    pool: Arc<Pool>,
    shapes: Shapes,
    uses_page_cache: bool,
    breakage: Arc<Mutex<Option<Error>>>,
}

impl Workers {
    /// Starts the workers; fewer than asked for if some find no engine.
    ///
    /// # Errors
    ///
    /// No worker found an engine; the first one's reason.
    pub(crate) fn start(
        options: &Options,
        factory: &Arc<dyn EngineFactory>,
        channels: Option<&Arc<Channels>>,
        (counters, pool): (&Arc<Counters>, &Arc<Pool>),
    ) -> Result<Self> {
        let ports: Vec<Arc<Port>> = (0..options.parallelism)
            .map(|_| Ok(Arc::new(Port::new(Arc::new(WakeEvent::new()?)))))
            .collect::<Result<_>>()?;
        let scheduler = Arc::new(Scheduler::new(ports));
        let shapes = staging_shapes(options);
        let breakage = Arc::default();
        let (report, reports) = channel();
        let mut threads = Vec::new();
        for (index, port) in scheduler.ports().iter().enumerate() {
            let seat = Seat {
                options: EngineOptions {
                    queue_depth: options.queue_depth,
                    wake: Arc::clone(&port.wake),
                    single_submit: options.single_submit,
                    sqpoll: options.sqpoll,
                    iopoll: options.iopoll,
                    channels: channels.cloned(),
                },
                factory: Arc::clone(factory),
                scheduler: Arc::clone(&scheduler),
                port: Arc::clone(port),
                counters: Arc::clone(counters),
                pool: Arc::clone(pool),
                shapes,
                uses_page_cache: options.page_cache,
                breakage: Arc::clone(&breakage),
            };
            let report = report.clone();
            let thread = std::thread::Builder::new()
                .name(format!("forebay-{index}"))
                .spawn(move || serve(seat, &report))
                .map_err(|error| Error::from_io(error, "cannot start a worker thread"));
            match thread {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    scheduler.stop();
                    return Err(error);
                }
            }
        }
        drop(report);
        let engine = hear(&reports, options.parallelism, counters)?;
        for fallback in factory.fallbacks() {
            counters.fallback(&fallback.to_string());
        }
        Ok(Self {
            engine,
            scheduler,
            block_bytes: options.block_size,
            staged_block_bytes: shapes.host.block_bytes,
            device_block_bytes: shapes.device.block_bytes,
            breakage,
            threads: Mutex::new(threads),
        })
    }

    /// Why no worker is left, if none is.
    pub(crate) fn breakage(&self) -> Option<Error> {
        let none_left =
            self.scheduler.ports().iter().all(|port| !port.alive.load(Ordering::SeqCst));
        none_left.then(|| {
            let reason = self.breakage.lock().unwrap_or_else(PoisonError::into_inner).clone();
            reason.unwrap_or_else(closed)
        })
    }

    /// Has the workers finish what is queued and leave, and waits for that.
    pub(crate) fn stop(&self) {
        self.scheduler.stop();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A worker that drops the last reference to its own handle can't wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                // A panic was reported by the operations that it failed.
                let _ = thread.join();
            }
        }
    }

    /// Whether the caller is one of the workers.
    pub(crate) fn is_worker_thread(&self) -> bool {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().any(|thread| thread.thread().id() == std::thread::current().id())
    }

    /// Leaves the threads of a forked child's parent alone. They don't exist here, and the C library
    /// has given their stacks, and with them their identities, to new threads: to drop their
    /// handles would detach those.
    pub(crate) fn forget(&self) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        Vec::leak(std::mem::take(&mut *threads));
    }
}

/// Size and number of a worker's staging blocks, within its shares of the staging memory. What is
/// copied to and from a device doesn't pass through the processor's cache, and each copy has a price
/// of its own, so those blocks are as large as others.
fn staging_shapes(options: &Options) -> Shapes {
    let shape = |bytes: usize, block_bytes_max: usize| {
        let share = bytes / options.parallelism;
        let most = share / STAGING_BLOCKS_MIN;
        let least = STAGED_GRANULES_MIN * GRANULE_BYTES_MAX;
        let block = options.block_size.min(most).min(block_bytes_max).max(least);
        let block_bytes = block - block % GRANULE_BYTES_MAX;
        let block_count = (share / block_bytes).min(options.queue_depth).max(1);
        Shape { block_bytes, block_count }
    };
    Shapes {
        host: shape(options.staging_bytes, STAGED_BLOCK_BYTES_MAX),
        device: shape(options.device_staging_bytes, usize::MAX),
    }
}

/// Waits for each worker to say whether it has an engine.
fn hear(
    reports: &Receiver<Result<EngineKind>>,
    count: usize,
    counters: &Counters,
) -> Result<EngineKind> {
    let (mut engine, mut refusal) = (None, None);
    for report in reports.iter().take(count) {
        match report {
            Ok(kind) => engine = engine.or(Some(kind)),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    match (engine, refusal) {
        (Some(engine), None) => Ok(engine),
        (Some(engine), Some(error)) => {
            counters.fallback(&format!("fewer workers than asked for: {error}"));
            Ok(engine)
        }
        (None, refusal) => Err(refusal
            .unwrap_or_else(|| Error::new(ErrorKind::Unsupported, "no worker could be started"))),
    }
}

/// The life of a worker's thread.
fn serve(seat: Seat, report: &Sender<Result<EngineKind>>) {
    let port = Arc::clone(&seat.port);
    let scheduler = Arc::clone(&seat.scheduler);
    let breakage = Arc::clone(&seat.breakage);
    let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(seat, report)));
    let error = match served {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error),
        Err(_) => Some(Error::new(ErrorKind::Closed, "a worker panicked; this is a bug")),
    };
    let error = {
        let mut breakage = breakage.lock().unwrap_or_else(PoisonError::into_inner);
        if breakage.is_none() {
            *breakage = error;
        }
        breakage.clone().unwrap_or_else(closed)
    };
    port.alive.store(false, Ordering::SeqCst);
    // The last one out looks once more: a request may have come after its last look, and whoever
    // made it may have looked before `alive` was cleared.
    if scheduler.ports().iter().all(|port| !port.alive.load(Ordering::SeqCst)) {
        abandon(&scheduler, &error);
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the handle is closed")
}

fn work(seat: Seat, report: &Sender<Result<EngineKind>>) -> Result<()> {
    let engine = match seat.factory.build(&seat.options) {
        Ok(engine) => engine,
        Err(error) => {
            // The receiver is gone only if the handle gave up, which is the same news.
            let _ = report.send(Err(error.clone()));
            return Err(error);
        }
    };
    let kind = engine.kind();
    let Seat { scheduler, port, counters, pool, shapes, .. } = seat;
    let staging = StagingBlocks::new(&pool, &counters, shapes);
    let worker = Worker::new(engine, scheduler, port, counters, staging, seat.uses_page_cache);
    let _ = report.send(Ok(kind));
    worker.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_blocks_for_devices_are_whole_blocks_and_all_are_within_their_budget() {
        let defaults = staging_shapes(&Options::default());
        assert_eq!(defaults.host, Shape { block_bytes: 256 << 10, block_count: 16 });
        assert_eq!(defaults.device, Shape { block_bytes: 2 << 20, block_count: 16 });
        for parallelism in [1, 2, 3, 7] {
            for (block_size, queue_depth) in [(4096, 1), (100_000, 3), (1 << 20, 32), (1 << 30, 8)]
            {
                for bytes in [128 << 10, 1 << 20, (8 << 20) + 77, 64 << 20] {
                    let bytes = bytes * parallelism;
                    let options = Options {
                        parallelism,
                        block_size,
                        queue_depth,
                        staging_bytes: bytes,
                        device_staging_bytes: bytes,
                        ..Options::default()
                    };
                    options.validate().unwrap();
                    let Shapes { host, device } = staging_shapes(&options);
                    for Shape { block_bytes, block_count } in [host, device] {
                        assert!((1..=queue_depth).contains(&block_count));
                        assert!(block_bytes * block_count * parallelism <= bytes, "{options:?}");
                    }
                    assert!(device.block_bytes >= host.block_bytes);
                }
            }
        }
    }
}
