//! Which way the device memory of an operation's files goes: by GPUDirect Storage, or through the
//! host's memory.
//!
//! What there is to know is looked up from the cheapest on: what the option says, what the machine
//! has, what the file is on, and only then cuFile, which is loaded when the first file comes that it
//! could move directly.
//!
//! # Invariants
//!
//! - With [`DeviceRoute::Auto`], nothing that GPUDirect Storage lacks or refuses fails an operation.
//! - With [`DeviceRoute::Gds`], it does, and before a byte has moved where it can be known.
//! - With [`DeviceRoute::Host`], cuFile is neither looked for nor called.
//! - A file is registered once for the descriptor that an operation has of it, and until that is
//!   closed.
#![expect(unsafe_code, reason = "registers memory that the operation keeps")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::config::{DeviceRoute, Options};
use crate::device::gds::{
    BufferUse, DeviceRange, FileMode, Gds, Judgement, Storage, Whereabouts, judge, platform_gap,
    storage_of,
};
use crate::device::{Context, Devices};
use crate::engine::gds::{Channel, OpenChannel};
use crate::engine::{ChannelNumber, Channels};
use crate::error::{Error, ErrorKind, Result};
use crate::files::TensorFile;
use crate::operation::{DeviceUse, FilePart, OpenedFile};
use crate::stats::Counters;
use crate::syscalls::cached_bytes;

/// Transfers over which the cost of registering memory is spread, at the least: what isn't registered
/// moves as well, so it has to pay. A guess that wasn't measured on hardware.
const AUTOMATIC_TRANSFERS_MIN: usize = 16;

/// What to try where there is no GPUDirect Storage.
const WITHOUT: &str = "device_route=\"auto\" does without";

/// Codes of cuFile that are about more than one file: the driver, the platform, the device, the file
/// system.
const GENERAL_CODES: [i32; 11] = [5001, 5003, 5004, 5005, 5006, 5007, 5008, 5009, 5010, 5033, 5048];

/// A file of an operation, as cuFile knows it.
#[derive(Debug)]
pub(crate) struct GdsFile {
    /// By the number of the device in the plan.
    channels: Vec<(usize, OpenChannel)>,
    /// What refuses it fails the operation.
    required: bool,
    refused: AtomicBool,
}

impl GdsFile {
    fn open(&self, device: usize) -> Option<&OpenChannel> {
        self.channels.iter().find(|(number, _)| *number == device).map(|(_, open)| open)
    }

    /// The channel by which blocks go to and from a device; `None` if they don't, or not any more.
    pub(crate) fn channel(&self, device: usize) -> Option<ChannelNumber> {
        let refused = self.refused.load(Ordering::Relaxed);
        self.open(device).filter(|_| !refused).map(OpenChannel::number)
    }

    /// The channel of a block that is on its way.
    pub(crate) fn number(&self, device: usize) -> Option<ChannelNumber> {
        self.open(device).map(OpenChannel::number)
    }

    /// Whether a range of a device's memory is registered.
    pub(crate) fn is_registered(&self, device: usize, range: DeviceRange) -> bool {
        self.open(device).is_some_and(|open| open.channel().is_registered(range))
    }

    /// Whether there is no other way.
    pub(crate) fn is_required(&self) -> bool {
        self.required
    }

    /// No further block goes this way.
    pub(crate) fn refuse(&self) {
        self.refused.store(true, Ordering::Relaxed);
    }
}

/// See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Routes {
    route: DeviceRoute,
    devices: Option<Arc<Devices>>,
    channels: Arc<Channels>,
    uses_page_cache: bool,
    gap: OnceLock<Option<String>>,
    storages: Mutex<HashMap<Whereabouts, Result<Storage, String>>>,
}

/// What one file's way is to be found from.
struct Wish<'a> {
    opened: &'a OpenedFile,
    parts: Vec<&'a FilePart>,
    devices: &'a [DeviceUse],
    block_bytes: usize,
    /// The checksums of parts are wanted, which are computed in the host's memory.
    checksums: bool,
}

/// Why a file doesn't go by GPUDirect Storage.
struct Obstacle {
    mode: FileMode,
    error: Error,
    /// The machine has it, so that this is worth telling.
    told: bool,
}

impl Routes {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            route: options.device_route,
            devices: options.devices.clone(),
            channels: Arc::default(),
            uses_page_cache: options.page_cache,
            gap: OnceLock::new(),
            storages: Mutex::default(),
        }
    }

    /// What engines need to move device memory; `None` if they never will.
    pub(crate) fn channels(&self) -> Option<&Arc<Channels>> {
        (self.route != DeviceRoute::Host).then_some(&self.channels)
    }

    fn devices(&self) -> Result<Arc<Devices>> {
        self.devices.clone().map_or_else(Devices::global, Ok)
    }

    /// What is missing on this machine for a handle that demands GPUDirect Storage.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] or [`ErrorKind::Device`], with what to do.
    pub(crate) fn check(&self) -> Result<()> {
        if self.route != DeviceRoute::Gds {
            return Ok(());
        }
        let found = self.gap().and_then(|gap| match gap {
            None => self.devices()?.gds().map(drop),
            Some(gap) => Err(Error::new(ErrorKind::Unsupported, gap)),
        });
        found.map_err(|error| {
            error.within("there is no GPUDirect Storage here").hint_if_none(WITHOUT)
        })
    }

    /// What the platform lacks, looked up once, but for moments at which that can't be told.
    fn gap(&self) -> Result<Option<String>> {
        if let Some(gap) = self.gap.get() {
            return Ok(gap.clone());
        }
        let gap = platform_gap(&match &self.devices {
            Some(devices) => devices.facts_root().to_path_buf(),
            None => Devices::root(),
        })?;
        Ok(self.gap.get_or_init(|| gap).clone())
    }

    /// Finds the way of each file's device memory, of which there are these parts as they are
    /// planned: what is joined there is long enough for more.
    ///
    /// # Errors
    ///
    /// With [`DeviceRoute::Gds`], what stands in the way.
    pub(crate) fn choose(
        &self,
        (parts, devices): (&[FilePart], &[DeviceUse]),
        files: &mut [OpenedFile],
        checksums: bool,
        (block_bytes, counters): (usize, &Counters),
    ) -> Result<()> {
        if devices.is_empty() {
            return Ok(());
        }
        for (index, opened) in files.iter_mut().enumerate() {
            let on_devices = |part: &&FilePart| {
                part.file == index && part.device.is_some() && part.span.length > 0
            };
            let parts: Vec<_> = parts.iter().filter(on_devices).collect();
            if parts.is_empty() {
                continue;
            }
            let wish = Wish { opened, parts, devices, block_bytes, checksums };
            let found = self.find(&wish, counters);
            opened.gds = self.settle(&opened.file, found, counters)?;
        }
        Ok(())
    }

    /// Takes note of what was found; an obstacle is an error where there is no other way.
    fn settle(
        &self,
        file: &TensorFile,
        found: Result<(GdsFile, String), Obstacle>,
        counters: &Counters,
    ) -> Result<Option<Arc<GdsFile>>> {
        let (found, Judgement { mode, reason }) = match found {
            Ok((file, reason)) => (Some(file), Judgement { mode: FileMode::Gds, reason }),
            Err(Obstacle { error, .. }) if self.route == DeviceRoute::Gds => {
                return Err(error
                    .path(file.label())
                    .within("GPUDirect Storage was asked for and isn't to be had")
                    .hint_if_none(WITHOUT));
            }
            Err(Obstacle { mode, error, told }) => {
                if told {
                    tell(file, &error, counters);
                }
                (None, Judgement { mode, reason: error.to_string() })
            }
        };
        counters.device_route(&file.label().display().to_string(), mode.name(), &reason);
        Ok(found.filter(|found| !found.channels.is_empty()).map(Arc::new))
    }

    fn find(&self, wish: &Wish<'_>, counters: &Counters) -> Result<(GdsFile, String), Obstacle> {
        let file = &wish.opened.file;
        let host = |error: Error, told| Obstacle { mode: FileMode::Host, error, told };
        let unsupported = |reason: &str| Error::new(ErrorKind::Unsupported, reason);
        if self.route == DeviceRoute::Host {
            return Err(host(unsupported("device_route is \"host\""), false));
        }
        if let Some(gap) = self.gap().map_err(|error| host(error, true))? {
            return Err(host(unsupported(&gap), false));
        }
        if wish.checksums {
            let error = unsupported("its checksums are computed in the host's memory");
            return Err(host(error.hint("do without verification, or with another route"), false));
        }
        if let Some(reason) = file.mount.gds_refusal() {
            return Err(host(unsupported(reason), true));
        }
        let devices = self.devices().map_err(|error| host(error, true))?;
        let storage = self.storage(&devices, file).map_err(|error| host(error, true))?;
        // A file that is on nothing cuFile could reach is no reason to load it.
        let driver = match storage {
            Ok(_) => devices.gds().map_err(|error| host(error, true)).map(Some)?,
            Err(_) => None,
        };
        let refusal = direct_refusal(file);
        let facts = driver.as_ref().map(|gds| gds.cufile().facts()).unwrap_or_default();
        let Judgement { mode, reason } = judge(&storage, refusal.as_deref(), facts);
        let (FileMode::Gds, Some(gds)) = (mode, driver) else {
            return Err(Obstacle { mode, error: unsupported(&reason), told: true });
        };
        if self.route == DeviceRoute::Auto && self.is_cached(wish) {
            return Err(host(unsupported("all of it is in the page cache"), false));
        }
        match self.register(&gds, wish, counters) {
            Ok(file) => Ok((file, reason)),
            Err(error) => {
                take_note(file, &error);
                Err(host(error, true))
            }
        }
    }

    /// What a file is on, looked up once for each mount. What couldn't be looked at for lack of
    /// something isn't remembered.
    fn storage(&self, devices: &Devices, file: &TensorFile) -> Result<Result<Storage, String>> {
        let place = file.whereabouts_of_storage();
        let mut storages = self.storages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = storages.get(&place) {
            return Ok(known.clone());
        }
        let found = storage_of(devices.facts_root(), place)?;
        storages.insert(place, found.clone());
        Ok(found)
    }

    /// Whether all that a load wants is in the page cache, from where it comes sooner.
    fn is_cached(&self, wish: &Wish<'_>) -> bool {
        if !self.uses_page_cache || !wish.opened.maybe_cached {
            return false;
        }
        let file = wish.opened.file.buffered();
        wish.parts.iter().all(|part| {
            let length = part.span.length as u64;
            cached_bytes(file, part.span.offset, length).is_some_and(|cached| cached >= length)
        })
    }

    /// Registers a file and opens its channels, if any of its bytes can go by them.
    fn register(&self, gds: &Arc<Gds>, wish: &Wish<'_>, counters: &Counters) -> Result<GdsFile> {
        let granule = wish.opened.file.offset_alignment;
        let mut file =
            GdsFile { channels: Vec::new(), required: self.is_required(), refused: false.into() };
        let has_core = |part: &&&FilePart| {
            let end = part.span.offset + part.span.length as u64;
            part.span.offset.next_multiple_of(granule) < end - end % granule
        };
        let parts: Vec<&FilePart> = wish.parts.iter().filter(has_core).copied().collect();
        let Some(descriptor) = wish.opened.file.direct().filter(|_| !parts.is_empty()) else {
            return Ok(file);
        };
        let registered = Arc::new(gds.cufile().register_file(descriptor)?);
        for (number, DeviceUse { context, start }) in wish.devices.iter().enumerate() {
            let of_device = parts.iter().filter(|part| part.device == Some(number)).copied();
            let ranges: Vec<DeviceRange> = of_device.map(range_of).collect();
            if ranges.is_empty() {
                continue;
            }
            let buffers = buffers_for(gds, context, ranges, wish.block_bytes, counters);
            let start = Some(Arc::clone(start));
            let channel =
                Channel::new(Arc::clone(&registered), Arc::clone(context), start, buffers);
            file.channels.push((number, self.channels.add(channel)));
        }
        Ok(file)
    }

    fn is_required(&self) -> bool {
        self.route == DeviceRoute::Gds
    }
}

fn range_of(part: &FilePart) -> DeviceRange {
    DeviceRange { start: part.span.address, length: part.span.length }
}

/// The registered memory that holds the given ranges, as far as any does.
fn buffers_for(
    gds: &Gds,
    context: &Arc<Context>,
    mut ranges: Vec<DeviceRange>,
    block_bytes: usize,
    counters: &Counters,
) -> Vec<BufferUse> {
    ranges.sort_by_key(|range| range.start);
    let mut buffers: Vec<BufferUse> = Vec::new();
    for range in ranges {
        if buffers.last().is_some_and(|last| last.range().holds(&range)) {
            continue;
        }
        let is_long = range.length / AUTOMATIC_TRANSFERS_MIN >= block_bytes;
        // SAFETY: whoever made the request keeps the memory until the operation is done, and the
        // operation drops its channels, and this with them, before it is.
        match unsafe { gds.buffers().enter(gds.cufile(), context, range, is_long) } {
            Ok(entered) => buffers.extend(entered),
            Err(error) => {
                counters.fallback(&format!("device memory isn't registered with cuFile: {error}"));
            }
        }
    }
    buffers
}

/// Why a file isn't open for direct I/O, if it isn't.
fn direct_refusal(file: &TensorFile) -> Option<String> {
    if file.is_direct() {
        return None;
    }
    let known = file.direct_refusal.as_deref().or_else(|| file.mount.direct_refusal());
    Some(known.unwrap_or("direct I/O is switched off").to_owned())
}

/// Counts a file that doesn't go by GPUDirect Storage, once for its mount.
fn tell(file: &TensorFile, error: &Error, counters: &Counters) {
    if file.mount.tell_of_gds() {
        let label = file.mount_label();
        counters.fallback(&format!("no GPUDirect Storage on {label}: {error}"));
    }
}

/// Remembers of a mount what cuFile said that holds of all its files.
fn take_note(file: &TensorFile, error: &Error) {
    let general =
        |code: &crate::DeviceCode| code.library == "cufile" && GENERAL_CODES.contains(&code.code);
    if error.device_code().is_some_and(general) {
        file.mount.refuse_gds(&error.to_string());
    }
}

/// cuFile refused a block of a file on the way: the rest of the operation goes through the host's
/// memory.
pub(crate) fn give_up(file: &TensorFile, gds: &GdsFile, error: &Error, counters: &Counters) {
    gds.refuse();
    take_note(file, error);
    let label = file.label().display().to_string();
    let reason = format!("a transfer was refused: {error}");
    counters.fallback(&format!("no GPUDirect Storage for {label}: {error}"));
    counters.device_route(&label, FileMode::Host.name(), &reason);
}
