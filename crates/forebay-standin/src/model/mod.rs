//! What the stand-in knows: one [`Model`] behind one lock, and how a call comes to it.
//!
//! Nothing here is called with the lock held by the threads of streams while they run a task.

pub(crate) mod clock;
pub(crate) mod code;
pub(crate) mod file;
pub(crate) mod journal;
pub(crate) mod memory;
pub(crate) mod queue;
pub(crate) mod settings;
pub(crate) mod stream;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use self::clock::Order;
use self::file::Files;
use self::journal::Journal;
use self::memory::Memory;
use self::settings::Settings;
use self::stream::{Event, Stream};

/// What a function of the driver gives: nothing, or a code that isn't 0.
pub(crate) type Outcome<T = ()> = Result<T, i32>;

/// What must be there for a function to work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Driver,
    Context,
}

/// A device's primary context.
#[derive(Default)]
pub(crate) struct Context {
    pub(crate) retained: u32,
    /// How often it was destroyed by a reset of its device.
    resets: usize,
    /// It was destroyed, and nobody has asked for it since.
    destroyed: bool,
}

/// Everything. See the [module documentation](self).
pub(crate) struct Model {
    pub(crate) settings: Settings,
    /// The process that called `cuInit`, if any did.
    pub(crate) process: Option<u32>,
    /// By device.
    pub(crate) contexts: BTreeMap<i32, Context>,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) events: BTreeMap<usize, Event>,
    pub(crate) memory: Memory,
    pub(crate) order: Order,
    pub(crate) journal: Journal,
    pub(crate) files: Files,
    /// How often the context of each device broke: what was enqueued before never runs.
    pub(crate) breaks: BTreeMap<i32, u64>,
    next_handle: usize,
}

static MODEL: LazyLock<Mutex<Model>> = LazyLock::new(|| Mutex::new(Model::new()));

thread_local! {
    static CURRENT: RefCell<Vec<i32>> = const { RefCell::new(Vec::new()) };
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
}

/// Handles of contexts: this, and 16 times the device's number, which is below the limit, plus that
/// limit times how often the device was reset.
const CONTEXT_BASE: usize = 0xC000_0000;
const DEVICES_MAX: usize = 64;
/// Handles of everything else, counted up from here in steps of 16.
const HANDLE_BASE: usize = 0xE000_0000;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: i32 = 2;

/// How this thread takes captures of graphs from now on; how it did before.
pub(crate) fn exchange_capture_mode(mode: i32) -> i32 {
    CAPTURE_MODE.replace(mode)
}

/// The model, locked.
pub(crate) fn model() -> MutexGuard<'static, Model> {
    MODEL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a function of the driver: counts it, fails it if that is planned, checks what it needs.
pub(crate) fn call<T>(
    symbol: &'static str,
    needs: Needs,
    body: impl FnOnce(&mut Model) -> Outcome<T>,
) -> Outcome<T> {
    let mut model = model();
    let number = model.journal.count(symbol);
    if IN_HOST_FUNCTION.get() {
        model.journal.violation(format!("{symbol} is called from a host function"));
        return Err(code::NOT_PERMITTED);
    }
    if let Some(code) = model.settings.planned_failure(symbol, number) {
        return Err(code);
    }
    if model.settings.deinitialised {
        return Err(code::DEINITIALIZED);
    }
    if needs != Needs::Nothing && model.process != Some(std::process::id()) {
        return Err(code::NOT_INITIALIZED);
    }
    if needs == Needs::Context {
        let device = current()?;
        if CAPTURE_MODE.get() != RELAXED && model.streams.values().any(|it| it.is_capturing) {
            model.journal.violation(format!("{symbol} breaks a graph that is being captured"));
        }
        if model.contexts.get(&device).is_some_and(|context| context.destroyed) {
            return Err(code::CONTEXT_IS_DESTROYED);
        }
        if let Some(code) = model.breakage_of(device) {
            return Err(code);
        }
    }
    body(&mut model)
}

/// The code of an outcome.
pub(crate) fn status(outcome: Outcome) -> i32 {
    outcome.err().unwrap_or(code::SUCCESS)
}

/// The device whose context is current on this thread.
pub(crate) fn current() -> Outcome<i32> {
    CURRENT.with_borrow(|stack| stack.last().copied()).ok_or(code::INVALID_CONTEXT)
}

pub(crate) fn push_current(device: i32) {
    CURRENT.with_borrow_mut(|stack| stack.push(device));
}

pub(crate) fn pop_current() -> Outcome<i32> {
    CURRENT.with_borrow_mut(Vec::pop).ok_or(code::INVALID_CONTEXT)
}

/// Calls a host function, from which the driver must not be called.
pub(crate) fn in_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

impl Model {
    fn new() -> Self {
        let mut settings = Settings::default();
        let mut journal = Journal::default();
        if let Some(text) = std::env::var_os("FOREBAY_STANDIN")
            && let Err(error) = settings.read(&text.to_string_lossy())
        {
            journal.violation(format!("FOREBAY_STANDIN: {error}"));
        }
        Self {
            settings,
            process: None,
            contexts: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            memory: Memory::default(),
            order: Order::default(),
            journal,
            files: Files::default(),
            breaks: BTreeMap::new(),
            next_handle: HANDLE_BASE,
        }
    }

    pub(crate) fn new_handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    /// The handle of a device's context.
    pub(crate) fn context_handle(&self, device: i32) -> usize {
        let resets = self.contexts.get(&device).map_or(0, |context| context.resets);
        CONTEXT_BASE + 16 * (usize::try_from(device).unwrap_or(0) + DEVICES_MAX * resets)
    }

    /// The device of a context's handle, if that is retained.
    pub(crate) fn device_of(&self, handle: usize) -> Outcome<i32> {
        let device = handle
            .checked_sub(CONTEXT_BASE)
            .filter(|offset| offset % 16 == 0)
            .and_then(|offset| i32::try_from(offset / 16 % DEVICES_MAX).ok());
        let device = device.ok_or(code::INVALID_CONTEXT)?;
        match self.contexts.get(&device) {
            Some(context) if context.destroyed || self.context_handle(device) != handle => {
                Err(code::CONTEXT_IS_DESTROYED)
            }
            Some(context) if context.retained > 0 => Ok(device),
            _ => Err(code::INVALID_CONTEXT),
        }
    }

    /// The error that sticks to a device's context.
    pub(crate) fn breakage_of(&self, device: i32) -> Option<i32> {
        self.settings.broken.and_then(|breakage| breakage.code_on(device))
    }

    /// How often a device's context broke.
    pub(crate) fn breaks_of(&self, device: i32) -> u64 {
        self.breaks.get(&device).copied().unwrap_or(0)
    }

    pub(crate) fn check_device(&self, device: i32) -> Outcome {
        if (0..self.settings.devices).contains(&device) {
            Ok(())
        } else {
            Err(code::INVALID_DEVICE)
        }
    }

    /// Reads settings. When contexts break, nothing that is enqueued in them runs any more.
    pub(crate) fn configure(&mut self, text: &str) -> Result<(), String> {
        let before = self.settings.clone();
        self.settings.read(text)?;
        if self.settings.deinitialised && !before.deinitialised {
            self.memory.forget_registrations();
            for stream in self.streams.values() {
                stream.queue.hold(false);
            }
        }
        let gone = |settings: &Settings, device| {
            let broken = settings.broken.and_then(|breakage| breakage.code_on(device));
            settings.deinitialised || broken.is_some()
        };
        for device in 0..self.settings.devices {
            if gone(&self.settings, device) && !gone(&before, device) {
                *self.breaks.entry(device).or_default() += 1;
                self.order.forget();
            }
        }
        Ok(())
    }

    /// Destroys the context of a device, as `cudaDeviceReset` does, and all that is in it; what is
    /// enqueued never runs. Host memory is registered with no context then, since it was with one.
    pub(crate) fn reset_device(&mut self, device: i32) -> Outcome {
        self.check_device(device)?;
        let context = self.contexts.entry(device).or_default();
        context.destroyed = true;
        context.resets += 1;
        *self.breaks.entry(device).or_default() += 1;
        self.order.forget();
        self.events.retain(|_, event| event.device != device);
        self.streams.retain(|_, stream| {
            if stream.device == device {
                stream.queue.close();
            }
            stream.device != device
        });
        self.memory.forget_registrations();
        self.memory.free_all_of(device)
    }

    /// One more or one fewer holds the context of a device.
    pub(crate) fn retain(&mut self, device: i32) -> Outcome<usize> {
        self.check_device(device)?;
        let context = self.contexts.entry(device).or_default();
        context.retained += 1;
        context.destroyed = false;
        Ok(self.context_handle(device))
    }

    pub(crate) fn release(&mut self, device: i32) -> Outcome {
        let context = self.contexts.entry(device).or_default();
        context.retained = context.retained.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        let is_last = context.retained == 0;
        let streams = self.streams.values().filter(|stream| stream.is_made_for(device)).count();
        if is_last && streams > 0 {
            let text = format!("the context of device {device} goes before {streams} streams");
            self.journal.violation(text);
        }
        Ok(())
    }

    /// What is there, in words, for tests that look for leaks.
    pub(crate) fn census(&self) -> String {
        let streams = self.streams.values().filter(|stream| stream.is_made()).count();
        let contexts: u32 = self.contexts.values().map(|context| context.retained).sum();
        format!(
            "contexts={contexts} streams={streams} events={} allocations={} registrations={} \
             handles={} buffers={}",
            self.events.len(),
            self.memory.allocation_count(),
            self.memory.registration_count(),
            self.files.handle_count(),
            self.files.buffer_count(),
        )
    }
}
