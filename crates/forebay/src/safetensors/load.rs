//! Loading what a plan says, and checking it meanwhile.
//!
//! The caller's thread keeps a window of pieces on their way, taking turns between devices; the
//! checksums of those that have landed are computed on other threads.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use forebay_io::usage::cached_bytes_within;
use forebay_io::{Error, ErrorKind, Handle, OwnedMemory, Pool, PoolBuffer, PoolOptions, Result};

use super::pieces::{Flight, Flights, Piece, cut};
use super::plan::{FilePlan, LoadPlan, Placed, Read};
use super::source::{OpenedFile, Place};
use super::sums::{Checked, Sum, sums_of};
use super::{ChecksumState, Stop};

/// Bytes on their way to keep for each device: twice what the default options have in flight, so
/// that a piece that lands never leaves a worker idle.
const WINDOW_BYTES: u64 = 256 << 20;
/// Pieces on their way at once, however short they are.
const WINDOW_PIECES: usize = 64;
/// Threads that compute checksums, if there are so many processors: two keep up with drives, more are
/// for what is mapped, where memory is the limit.
const CHECKERS_MAX: usize = 4;
/// The least of a file that is mapped: less is copied in no time, and may share a region.
const MAPPED_BYTES_MIN: u64 = 4 << 20;
/// A file is mapped if no more than one in this many of its bytes isn't in the page cache: those are
/// read by page faults.
const MISSING_SHARE: u64 = 64;
/// Where regions begin: a page, to which plans keep places congruent.
pub(super) const ALIGNMENT: usize = 4096;

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Whether tensors are compared with the file's checksums, where it has any.
    pub verify: bool,
    /// Whether files that are in the page cache are mapped instead of copied, unless the handle was
    /// given a pool: see [`PoolBuffer::map_file`] for what that means.
    pub map: bool,
    /// Ends the call early.
    pub stop: Stop,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { verify: true, map: true, stop: Stop::default() }
    }
}

/// Loads what a plan says into memory of the pool that the handle was given, or of
/// [`Pool::ordinary`] if it was given none: its regions. Where the tensors are in them,
/// [`LoadPlan::tensors`] says.
///
/// A file whose checksums say nothing isn't verified, which is a fallback of the handle's: counted,
/// and reported once.
///
/// # Errors
///
/// What the system says of reading; [`ErrorKind::OutOfMemory`] from the pool;
/// [`ErrorKind::ShortFile`] for a file that was cut meanwhile, and [`ErrorKind::Mismatch`] for one
/// that was written to meanwhile, and for a tensor that doesn't match its checksum, by its name.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use forebay::io::{Handle, Lent, Options};
/// use forebay::safetensors::{
///     Dtype, LoadOptions, LoadPlan, PlanOptions, SaveOptions, Source, TensorData, load, save,
/// };
///
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("model.safetensors");
/// let handle = Handle::new(Options::default())?;
/// let bytes = Lent::Host(&[1, 0, 2, 0]);
/// let tensor = TensorData { name: "w", dtype: Dtype::I16, shape: &[2], bytes };
/// save(&handle, &path, &[tensor], None, &SaveOptions::default())?;
///
/// let opened = Arc::new(Source::of(&path).open()?);
/// let plan = LoadPlan::new(opened, &PlanOptions::default())?;
/// let loaded = load(&handle, &plan, &LoadOptions::default())?;
/// let placed = plan.tensors()[0];
/// assert_eq!(loaded[placed.region].as_slice()[..4], [1, 0, 2, 0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load(handle: &Handle, plan: &LoadPlan, options: &LoadOptions) -> Result<Vec<PoolBuffer>> {
    load_plan(handle, plan, options).map_err(|error| error.operation("load"))
}

fn load_plan(handle: &Handle, plan: &LoadPlan, options: &LoadOptions) -> Result<Vec<PoolBuffer>> {
    let pool = handle.result_pool()?;
    let files = plan.opened().files();
    let mut rests = Vec::with_capacity(plan.files().len());
    let mut mapped: Vec<Piece> = Vec::new();
    let mut queues: Vec<(u64, VecDeque<Piece>)> = Vec::new();
    let may_map = options.map && handle.options().page_cache && handle.options().pool.is_none();
    for file in plan.files() {
        let in_place = if may_map { map(file, &files[file.file])? } else { None };
        let is_mapped = in_place.is_some();
        let buffer = match in_place {
            Some(buffer) => buffer,
            None => pool.allocate(memory_bytes(file.region_bytes)?, ALIGNMENT)?,
        };
        let (pieces, rest) = cut(buffer, file.file, &file.reads)?;
        rests.push(rest);
        if is_mapped {
            mapped.extend(pieces);
            continue;
        }
        let device = files[file.file].device;
        match queues.iter_mut().find(|(other, _)| *other == device) {
            Some((_, queue)) => queue.extend(pieces),
            None => queues.push((device, pieces)),
        }
    }
    let window = WINDOW_BYTES * queues.len() as u64;
    let pieces = take_turns(queues.into_iter().map(|(_, queue)| queue).collect());
    if options.verify && plan.files().iter().any(|file| is_checked(&files[file.file])) {
        let mut checked = fly_checked(handle, files, mapped, pieces, window, &options.stop)?;
        check_all(plan, &mut checked)?;
    } else {
        drop(mapped);
        fly(handle, files, pieces, window, &options.stop, drop)?;
    }
    for file in plan.files() {
        let file = &files[file.file];
        file.check_unchanged()?;
        if options.verify {
            note_unverified(handle, file);
        }
    }
    let regions: Result<Vec<_>> = rests.into_iter().map(whole).collect();
    let mut regions = regions?;
    copy(plan, &mut regions);
    Ok(regions)
}

/// A region with what is read of a file mapped into it, if enough of that is in the page cache.
fn map(plan: &FilePlan, file: &OpenedFile) -> Result<Option<PoolBuffer>> {
    let wanted: u64 = plan.reads.iter().map(|read| read.length).sum();
    let cached = |read: &Read| cached_bytes_within(file.file(), read.offset, read.length);
    let cached: u64 = plan.reads.iter().filter_map(cached).sum();
    if wanted < MAPPED_BYTES_MIN || cached < wanted - wanted / MISSING_SHARE {
        return Ok(None);
    }
    // Nothing of it is to be touched ahead: no page of its own is used.
    let options = PoolOptions { pinned: false, touch: false, ..PoolOptions::default() };
    let mut buffer = Pool::new(options).allocate(memory_bytes(plan.region_bytes)?, ALIGNMENT)?;
    for (index, read) in plan.reads.iter().enumerate() {
        let (position, length) = (memory_bytes(read.position)?, memory_bytes(read.length)?);
        if !buffer.map_file(position, file.file(), read.offset, length)? {
            // The first one tells whether the file can be mapped; a later one isn't left out.
            let text = "cannot map a part of the file";
            return if index == 0 {
                Ok(None)
            } else {
                Err(Error::new(ErrorKind::Unsupported, text))
            };
        }
    }
    Ok(Some(buffer))
}

/// Whether there is something to compare its bytes with.
pub(super) fn is_checked(file: &OpenedFile) -> bool {
    file.header.checksums() == ChecksumState::Ours
}

/// Takes note of a file that was loaded, if its checksums say nothing: a fallback of the handle's.
pub fn note_unverified(handle: &Handle, file: &OpenedFile) {
    if file.header.checksums() == ChecksumState::Stale {
        handle.note_fallback(&format!(
            "{} is not verified: its checksums were copied from another file by the library that \
             wrote it",
            file.path.display()
        ));
    }
}

pub(super) fn memory_bytes(bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| Error::new(ErrorKind::OutOfMemory, format!("{bytes} bytes exceed memory")))
}

/// The buffer of which no piece is left but this.
pub(super) fn whole(rest: OwnedMemory) -> Result<PoolBuffer> {
    rest.into_pool_buffer().map_err(|_| {
        Error::new(ErrorKind::Closed, "a piece of loaded memory was not given back: this is a bug")
    })
}

/// One piece from each queue in turn.
fn take_turns(mut queues: Vec<VecDeque<Piece>>) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(queues.iter().map(VecDeque::len).sum());
    while !queues.is_empty() {
        pieces.extend(queues.iter_mut().filter_map(VecDeque::pop_front));
        queues.retain(|queue| !queue.is_empty());
    }
    pieces
}

/// Has all pieces loaded, and hands each over in the order of their start.
fn fly(
    handle: &Handle,
    files: &[OpenedFile],
    pieces: Vec<Piece>,
    window: u64,
    stop: &Stop,
    mut landed: impl FnMut(Piece),
) -> Result<()> {
    let mut flights = Flights::default();
    for piece in pieces {
        stop.check()?;
        while flights.bytes() >= window || flights.count() >= WINDOW_PIECES {
            landed_one(&mut flights, files, stop, &mut landed)?;
        }
        flights.push(Flight::start(handle, &files[piece.file], piece)?);
    }
    while landed_one(&mut flights, files, stop, &mut landed)? {}
    stop.check()
}

fn landed_one(
    flights: &mut Flights,
    files: &[OpenedFile],
    stop: &Stop,
    landed: &mut impl FnMut(Piece),
) -> Result<bool> {
    let piece = flights.land(files, stop)?;
    let some = piece.is_some();
    piece.into_iter().for_each(landed);
    Ok(some)
}

/// As [`fly`], and computes the checksums of what has landed, and of what is mapped; by file.
fn fly_checked(
    handle: &Handle,
    files: &[OpenedFile],
    mapped: Vec<Piece>,
    pieces: Vec<Piece>,
    window: u64,
    stop: &Stop,
) -> Result<Vec<Checked>> {
    let mut all: Vec<Checked> = files.iter().map(|_| Checked::default()).collect();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let count = (mapped.len() + pieces.len()).min(processors).min(CHECKERS_MAX);
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel::<Piece>();
        let receiver = Arc::new(Mutex::new(receiver));
        let mut checkers = Vec::with_capacity(count);
        for _ in 0..count {
            let receiver = Arc::clone(&receiver);
            let thread = thread::Builder::new().name("forebay-check".to_owned());
            let checker = thread.spawn_scoped(scope, move || check_pieces(files, &receiver, stop));
            match checker {
                Ok(checker) => checkers.push(checker),
                Err(error) if checkers.is_empty() => {
                    return Err(Error::from_io(error, "cannot start a thread"));
                }
                Err(_) => break,
            }
        }
        // A checker that is gone has panicked, which the scope passes on.
        for piece in mapped {
            drop(sender.send(piece));
        }
        let flown = fly(handle, files, pieces, window, stop, |piece| drop(sender.send(piece)));
        drop(sender);
        for checker in checkers {
            for (file, sums) in checker.join().unwrap_or_default() {
                all[file].add(sums);
            }
        }
        flown
    })?;
    Ok(all)
}

/// A checker: the sums of the pieces that come, by file.
fn check_pieces(
    files: &[OpenedFile],
    pieces: &Mutex<Receiver<Piece>>,
    stop: &Stop,
) -> Vec<(usize, Vec<Sum>)> {
    let mut all = Vec::new();
    loop {
        let next = pieces.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(piece) = next else { return all };
        if stop.check().is_err() {
            // Whoever flies the pieces says so; what is left isn't looked at.
            continue;
        }
        let file = &files[piece.file];
        if is_checked(file) {
            all.push((piece.file, sums_of(&file.header, piece.offset, piece.bytes())));
        }
    }
}

fn check_all(plan: &LoadPlan, checked: &mut [Checked]) -> Result<()> {
    let mut places: Vec<Place> = plan.tensors().iter().map(|placed| placed.place).collect();
    places.sort_by_key(|place| (place.file, place.tensor));
    places.dedup();
    for Place { file, tensor } in places {
        checked[file].check(&plan.opened().files()[file], tensor)?;
    }
    Ok(())
}

/// Copies the tensors that would be misaligned to their places.
pub(super) fn copy(plan: &LoadPlan, regions: &mut [PoolBuffer]) {
    for Placed { place, region, position, copied_from } in plan.tensors() {
        let Some(from) = copied_from else { continue };
        let bytes = plan.opened().tensor(*place).bytes();
        let range = memory_bytes(*from).and_then(|start| Ok(start..memory_bytes(from + bytes)?));
        if let (Ok(range), Ok(position)) = (range, memory_bytes(*position)) {
            regions[*region].as_mut_slice().copy_within(range, position);
        }
    }
}
