//! Handles: what a user holds to move tensors.
//!
//! A [`Handle`] takes [`Request`]s and returns an [`Operation`] for each. It can be used from any
//! number of threads at once, and in a process forked from the one that made it, where it starts
//! fresh workers.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use rustix::io::Errno;

use crate::config::{DeviceRoute, DirectMode, Durability, EngineChoice, MemoryKind, Options};
use crate::device::{self, Event};
use crate::engine::throttle::ThrottleFactory;
use crate::engine::{AutoFactory, EngineFactory, EngineKind};
use crate::error::{Error, ErrorKind, Result};
use crate::files::{OPEN_ATTEMPTS_MAX, OpenOptions, Target, TensorFile, read_if_cached};
use crate::memory::Pool;
use crate::operation::{DeviceUse, OpenedFile, Operation, Plan, Shared, Sums, join};
use crate::order::Entry;
use crate::plan::{Direction, STAGED_GRANULES_MIN};
use crate::request::{
    DeviceAccess, Request, check_end, check_files, check_memory, check_parts, reach_of, runs_of,
};
use crate::routes::Routes;
use crate::runtime::Runtime;
use crate::stats::{Stats, add};
use crate::syscalls::cached_bytes;
use crate::worker::abandon;
use crate::workers::Workers;

/// Attempts at opening files whose names are taken from them before they are stored to. Another
/// thread that fails in a loop to store the same name takes about every second one.
const STALE_ATTEMPTS_MAX: usize = 64;

/// Longest load, in bytes, that is tried in the caller's thread first: above it, waking a worker
/// costs less than the copy.
const QUICK_LOAD_BYTES_MAX: usize = 128 << 10;

/// Moves tensors between files and memory. See the [module documentation](self).
///
/// Dropping it waits for everything under way; [`Self::close`] does so too and says what failed.
#[derive(Debug)]
pub struct Handle {
    options: Options,
    factory: Arc<dyn EngineFactory>,
    runtime: ArcSwap<Runtime>,
    closed: AtomicBool,
}

/// The runtimes of this process and, in a forked child, its parent's. Not behind a lock, which
/// could have been held when the process was forked.
static RUNTIMES: LazyLock<ArcSwap<Vec<Weak<Runtime>>>> = LazyLock::new(ArcSwap::default);

impl Handle {
    /// Starts a handle with the engine that the options name.
    ///
    /// # Errors
    ///
    /// An option out of bounds, or an engine that can't be had here.
    ///
    /// # Examples
    ///
    /// ```
    /// use forebay_io::{Handle, Options};
    ///
    /// let directory = tempfile::tempdir()?;
    /// let handle = Handle::new(Options::default())?;
    /// let path = directory.path().join("w.bin");
    /// handle.store(&path, &[7; 10_001])?;
    /// let mut weights = vec![0; 10_001];
    /// handle.load(&path, 0, &mut weights)?;
    /// assert_eq!(weights, [7; 10_001]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(options: Options) -> Result<Self> {
        let factory = engines_of(options.engine);
        Self::with_factory(options, factory)
    }

    /// Starts a handle whose engines come from `factory`.
    ///
    /// # Errors
    ///
    /// As for [`Self::new`].
    pub fn with_factory(options: Options, factory: Arc<dyn EngineFactory>) -> Result<Self> {
        options.validate()?;
        Routes::new(&options).check()?;
        let factory = throttled(factory, &options)?;
        let runtime = Arc::new(Runtime::start(&options, &factory)?);
        enlist(&runtime);
        Ok(Self {
            options,
            factory,
            runtime: ArcSwap::new(runtime),
            closed: AtomicBool::new(false),
        })
    }

    /// The runtime of this process: the parent's is left alone in a forked child.
    fn runtime(&self) -> Result<Arc<Runtime>> {
        let runtime = self.runtime.load_full();
        if runtime.belongs_here() {
            return Ok(runtime);
        }
        let mut options = self.options.clone();
        // The parent's pool isn't mapped here.
        options.pool = None;
        let fresh = Arc::new(Runtime::start(&options, &self.factory)?);
        let before = self.runtime.compare_and_swap(&runtime, Arc::clone(&fresh));
        if !Arc::ptr_eq(&before, &runtime) {
            return Ok(Arc::clone(&before));
        }
        enlist(&fresh);
        Ok(fresh)
    }

    fn open_runtime(&self) -> Result<Arc<Runtime>> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        let runtime = self.runtime()?;
        match runtime.breakage() {
            Some(error) => Err(error.hint("make a new handle")),
            None => Ok(runtime),
        }
    }

    /// Starts an operation. Files are opened before it returns, bytes move afterwards.
    ///
    /// # Errors
    ///
    /// What opening a file met; [`ErrorKind::ShortFile`] with both sizes when a load reaches
    /// behind a file's end; [`ErrorKind::Closed`] after [`Self::close`].
    ///
    /// # Safety
    ///
    /// Each part's memory must stay valid, and for a load untouched by others, until the operation
    /// is done; [`Request::keep`] can hold what keeps it so. The streams of [`Request::devices`]
    /// must be those of their devices, and live until this returns.
    #[expect(unsafe_code, reason = "the request names memory by address")]
    pub unsafe fn submit(&self, request: Request) -> Result<Operation> {
        let name = name_of(request.direction);
        let runtime = self.open_runtime().map_err(|error| error.operation(name))?;
        let begun = self.begin(&runtime, request);
        let (operation, workers) = begun.map_err(|error| error.operation(name))?;
        if let Some(error) = workers.breakage() {
            abandon(&workers.scheduler, &error);
        }
        Ok(Operation(operation))
    }

    /// Opens the files, gets in line for them, and starts unless there is somebody to wait for.
    fn begin(
        &self,
        runtime: &Runtime,
        mut request: Request,
    ) -> Result<(Arc<Shared>, Arc<Workers>)> {
        check_parts(&request)?;
        check_memory(&request)?;
        device::notice();
        let devices = start_behind_callers(&request)?;
        for attempt in 0..STALE_ATTEMPTS_MAX {
            let (operation, workers) = self.prepare(runtime, &request, &devices)?;
            operation.keep(request.keep.take());
            let entry = runtime.tracker.begin(&operation, attempt >= OPEN_ATTEMPTS_MAX);
            match entry {
                Entry::Go => {
                    workers.scheduler.push(Arc::clone(&operation), operation.block_count());
                    return Ok((operation, workers));
                }
                Entry::Wait => return Ok((operation, workers)),
                // An earlier store of the same name may have failed and removed the file between
                // its being opened here and this operation's getting in line.
                Entry::Stale => request.keep = operation.withdraw(),
                Entry::Refused => {
                    request.keep = operation.withdraw();
                    return Err(closed());
                }
            }
        }
        let text = "cannot begin to store: a file's name was removed each time it was opened";
        Err(Error::from_os(Errno::STALE.raw_os_error(), text))
    }

    fn prepare(
        &self,
        runtime: &Runtime,
        request: &Request,
        devices: &[DeviceUse],
    ) -> Result<(Arc<Shared>, Arc<Workers>)> {
        let durability = request.durability.unwrap_or(self.options.durability);
        let (parts, places) = join(request);
        let mut files: Vec<OpenedFile> = Vec::with_capacity(request.files.len());
        let opened = self.open_all(runtime, request, durability, &mut files);
        let checked = opened.and_then(|workers| {
            check_files(request, &files)?;
            let terms = (workers.block_bytes, runtime.counters.as_ref());
            let wanted = (&parts[..], devices);
            let chosen = runtime.routes.choose(wanted, &mut files, request.checksums, terms);
            chosen.map(|()| workers)
        });
        let workers = match checked {
            Ok(workers) => workers,
            Err(error) => {
                for opened in &files {
                    runtime.tracker.order().discard(&opened.file);
                }
                return Err(error);
            }
        };
        let plan = Plan {
            direction: request.direction,
            priority: request.priority,
            durability,
            drop_behind: self.options.drop_behind,
            whole_file: request.whole_file,
            require_direct: self.options.direct == DirectMode::Always,
            block_bytes: workers.block_bytes,
            staged_block_bytes: workers.staged_block_bytes,
            device_block_bytes: workers.device_block_bytes,
            sums: request.checksums.then(|| Arc::new(Sums::new(places))),
            parts,
            devices: devices.to_vec(),
            runs: runs_of(request),
            commit: request.commit.clone(),
        };
        let tracker = Arc::clone(&runtime.tracker);
        Ok((Shared::new(plan, files, tracker, &workers.scheduler), workers))
    }

    /// Opens the files, into `opened` as far as it gets; who moves them.
    fn open_all(
        &self,
        runtime: &Runtime,
        request: &Request,
        durability: Durability,
        opened: &mut Vec<OpenedFile>,
    ) -> Result<Arc<Workers>> {
        let mut chosen: Option<Arc<Workers>> = None;
        let store = request.direction == Direction::Store;
        for (target, reach) in request.files.iter().zip(reach_of(request)) {
            let end = reach.end;
            let options = OpenOptions {
                direction: request.direction,
                mode: self.options.direct,
                exact_size: (store && request.whole_file).then_some(end),
                with_directory: store && durability == Durability::Full,
            };
            let mut file = TensorFile::open(target, options, &runtime.mounts)?;
            runtime.tracker.order().made(&file);
            let workers = chosen.get_or_insert_with(|| {
                runtime.workers_for(
                    &file,
                    request.direction,
                    memory_kind_of(request, self.options.device_route),
                )
            });
            let ready = check_end(request, &file, end)
                .and_then(|()| self.go_direct(runtime, workers, &mut file, options));
            let maybe_cached = ready.is_ok() && self.may_be_cached(&file, options, &reach);
            opened.push(OpenedFile::new(file, maybe_cached));
            ready?;
        }
        Ok(chosen.unwrap_or_else(|| Arc::clone(&runtime.workers)))
    }

    /// Opens a file for direct I/O where that is to be had, and takes note of where it isn't.
    fn go_direct(
        &self,
        runtime: &Runtime,
        workers: &Workers,
        file: &mut TensorFile,
        options: OpenOptions,
    ) -> Result<()> {
        file.open_direct(options)?;
        let granule = file.offset_alignment;
        let always = self.options.direct == DirectMode::Always;
        let needed = STAGED_GRANULES_MIN as u64 * granule;
        let block = workers.staged_block_bytes.min(workers.device_block_bytes) as u64;
        if file.is_direct() && needed > block && !always {
            file.give_direct_up(format!("its granule of {granule} bytes exceeds staging blocks"));
        }
        if let Some(reason) = &file.direct_refusal {
            let label = file.mount_label();
            runtime.counters.fallback(&format!("no direct I/O on {label}: {reason}"));
        }
        Ok(())
    }

    fn may_be_cached(&self, file: &TensorFile, options: OpenOptions, reach: &Range<u64>) -> bool {
        // To the kernel, no length is all of the file.
        let length = reach.end - reach.start;
        options.direction == Direction::Load
            && self.options.page_cache
            && self.options.direct != DirectMode::Always
            && file.is_direct()
            && length > 0
            && cached_bytes(file.buffered(), reach.start, length).is_some_and(|cached| cached > 0)
    }

    /// Runs an operation to its end. A short load of bytes in the page cache is done in the
    /// caller's thread.
    ///
    /// # Errors
    ///
    /// As for [`Self::submit`] and [`Operation::wait`].
    ///
    /// # Safety
    ///
    /// As for [`Self::submit`].
    #[expect(unsafe_code, reason = "the request names memory by address")]
    pub unsafe fn run(&self, request: Request) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        if unsafe { self.load_quickly(&request) }? {
            return Ok(());
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.submit(request) }?.wait()
    }

    /// Tries to load from the page cache without a worker, which never waits for a drive; `false`
    /// if it takes one: [`Self::submit`] is next then.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] after [`Self::close`]; everything else is left to the long way.
    ///
    /// # Safety
    ///
    /// As for [`Self::submit`], until it returns.
    #[expect(unsafe_code, reason = "the request names memory by address")]
    pub unsafe fn load_quickly(&self, request: &Request) -> Result<bool> {
        let ([Target::Path(path)], [part]) = (&request.files[..], &request.parts[..]) else {
            return Ok(false);
        };
        let quick = request.direction == Direction::Load
            && self.options.page_cache
            && self.options.direct != DirectMode::Always
            && self.options.throttle_bytes_per_second.is_none()
            && (1..=QUICK_LOAD_BYTES_MAX).contains(&part.length)
            && part.file == 0
            && part.device.is_none()
            && !part.address.is_null()
            && !request.checksums
            && request.commit.is_none();
        if !quick {
            return Ok(false);
        }
        let runtime = self.open_runtime()?;
        // SAFETY: by the caller's promise the memory is valid and nobody else touches it; it holds
        // bytes, for which any value is valid.
        let buffer = unsafe { std::slice::from_raw_parts_mut(part.address, part.length) };
        if !read_if_cached(path, part.offset, buffer) {
            return Ok(false);
        }
        let counters = &runtime.counters;
        for counter in [&counters.bytes_read, &counters.bytes_cached] {
            add(counter, part.length as u64);
        }
        add(&counters.operations, 1);
        add(&counters.transfers, 1);
        Ok(true)
    }

    /// Waits for the operations under way now; `false` if the timeout came first.
    ///
    /// # Errors
    ///
    /// The first failure that nobody has heard of; [`Self::take_unseen_failures`] has the others.
    pub fn drain(&self, timeout: Option<Duration>) -> Result<bool> {
        let runtime = self.runtime()?;
        let in_time = wait_all(&runtime, timeout);
        match runtime.tracker.take_first_unseen() {
            Some(error) => Err(error),
            None => Ok(in_time),
        }
    }

    /// Waits for everything under way and stops the workers. Later requests are refused.
    ///
    /// # Errors
    ///
    /// The first failure that nobody has heard of; [`Self::take_unseen_failures`] has the others.
    pub fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let runtime = self.runtime.load_full();
        if !runtime.belongs_here() {
            return Ok(());
        }
        runtime.tracker.close();
        if !runtime.is_worker_thread() {
            wait_all(&runtime, None);
        }
        runtime.stop();
        match runtime.tracker.take_first_unseen() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Operations under way.
    pub fn pending(&self) -> usize {
        let runtime = self.runtime.load();
        if runtime.belongs_here() { runtime.tracker.pending() } else { 0 }
    }

    /// The failures of finished operations that nobody has heard of, the oldest first.
    pub fn take_unseen_failures(&self) -> Vec<Error> {
        let runtime = self.runtime.load();
        if runtime.belongs_here() { runtime.tracker.take_unseen() } else { Vec::new() }
    }

    /// The options it was made with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Where its memory comes from.
    ///
    /// # Errors
    ///
    /// In a forked child: no worker could be started.
    pub fn pool(&self) -> Result<Arc<Pool>> {
        Ok(Arc::clone(&self.runtime()?.pool))
    }

    /// Where to put what is loaded once and then belongs to the program: the pool that the handle was
    /// given, else memory like any other, which forked children have too.
    ///
    /// # Errors
    ///
    /// As for [`Self::pool`].
    pub fn result_pool(&self) -> Result<Arc<Pool>> {
        if self.options.pool.is_some() { self.pool() } else { Ok(Pool::ordinary()) }
    }

    /// The engine in use.
    pub fn engine(&self) -> EngineKind {
        self.runtime.load().workers.engine
    }

    /// What it did so far; in a forked child, what it did there.
    pub fn stats(&self) -> Stats {
        let runtime = self.runtime.load();
        if runtime.belongs_here() {
            runtime.counters.snapshot(runtime.workers.engine.name())
        } else {
            Stats { engine: runtime.workers.engine.name(), ..Stats::default() }
        }
    }

    /// Takes note of a fallback that somebody above took: it is counted in [`Stats::fallbacks`], and
    /// reported once.
    pub fn note_fallback(&self, text: &str) {
        let runtime = self.runtime.load();
        if runtime.belongs_here() {
            runtime.counters.fallback(text);
        }
    }

    /// Counts bytes that came from a device otherwise than by an operation.
    pub(crate) fn note_device_bytes(&self, bytes: u64) {
        let runtime = self.runtime.load();
        if runtime.belongs_here() {
            add(&runtime.counters.bytes_device, bytes);
        }
    }

    /// Fallbacks that were not reported yet, each once, for a log.
    pub fn notices(&self) -> Vec<String> {
        let runtime = self.runtime.load();
        if runtime.belongs_here() { runtime.counters.notices() } else { Vec::new() }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Failures that nobody asked for are logged: there is nobody left to return them to.
        let first = self.close().err();
        for error in first.into_iter().chain(self.take_unseen_failures()) {
            tracing::error!(target: "forebay", "{error}");
        }
    }
}

/// Marks, on each device that a request uses, where its caller's stream is now.
#[expect(unsafe_code, reason = "the request names streams by their handles")]
fn start_behind_callers(request: &Request) -> Result<Vec<DeviceUse>> {
    let start = |access: &DeviceAccess| {
        let event = Event::new(&access.context)?;
        // SAFETY: whoever made the request promised that its streams live.
        unsafe { event.record_behind(access.stream) }?;
        Ok(DeviceUse { context: Arc::clone(&access.context), start: Arc::new(event) })
    };
    request.devices.iter().map(start).collect()
}

fn wait_all(runtime: &Runtime, timeout: Option<Duration>) -> bool {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    for operation in runtime.tracker.live() {
        if !operation.wait_unacknowledged(deadline) {
            return false;
        }
    }
    true
}

fn enlist(runtime: &Arc<Runtime>) {
    RUNTIMES.rcu(|runtimes| {
        let live = runtimes.iter().filter(|runtime| runtime.strong_count() > 0);
        let mut next: Vec<_> = live.cloned().collect();
        next.push(Arc::downgrade(runtime));
        next
    });
}

fn engines_of(choice: EngineChoice) -> Arc<dyn EngineFactory> {
    match choice {
        EngineChoice::Auto => Arc::new(AutoFactory::default()),
        EngineChoice::Named(kind) => Arc::new(kind),
    }
}

fn throttled(factory: Arc<dyn EngineFactory>, options: &Options) -> Result<Arc<dyn EngineFactory>> {
    Ok(match options.throttle_bytes_per_second {
        Some(rate) => Arc::new(ThrottleFactory::new(factory, rate)?),
        None => factory,
    })
}

/// What builds the engines that the options ask for.
pub(crate) fn factory_of(options: &Options) -> Result<Arc<dyn EngineFactory>> {
    throttled(engines_of(options.engine), options)
}

/// Waits for every operation of this process, for the end of a program.
pub fn drain_all() {
    let runtimes = RUNTIMES.load_full();
    for runtime in runtimes.iter().filter_map(Weak::upgrade) {
        if runtime.belongs_here() {
            wait_all(&runtime, None);
        }
    }
}

/// Which memory a request is tuned for: one with parts in a device's goes by that, and by the route
/// that was asked for. What goes by GPUDirect Storage where that happens to be there is tuned as what
/// goes through the host's memory, which serves both.
fn memory_kind_of(request: &Request, route: DeviceRoute) -> MemoryKind {
    match route {
        _ if request.devices.is_empty() => MemoryKind::Host,
        DeviceRoute::Gds => MemoryKind::Gds,
        DeviceRoute::Auto | DeviceRoute::Host => MemoryKind::Gpu,
    }
}

fn name_of(direction: Direction) -> &'static str {
    match direction {
        Direction::Load => "load",
        Direction::Store => "store",
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the handle is closed")
}
