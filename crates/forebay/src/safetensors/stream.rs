//! Streaming: tensors one after the other, with no more memory than a budget.
//!
//! Tensors are loaded in groups of neighbours, each into a buffer of its own, as far ahead as the
//! budget allows. A buffer belongs to the tensors in it: it goes back to the budget when the last of
//! them is dropped, and is never used again before.
//!
//! # Invariants
//!
//! - What a stream has mapped, and its handle's staging memory, are together within the budget.
//! - A failure is returned again by every later call; running out of time isn't one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_io::{Error, ErrorKind, Handle, OwnedMemory, Pool, PoolBuffer, PoolOptions, Result};

use super::load::{ALIGNMENT, copy, is_checked, memory_bytes, note_unverified, whole};
use super::pieces::{Flight, Flights, cut};
use super::plan::{FilePlan, LoadPlan, PAGE_BYTES};
use super::source::{Opened, Place};
use super::sums::{Checked, sums_of};
use super::{Stop, TensorInfo};

/// Groups that a budget has room for, if tensors are small enough.
const GROUPS_MIN: u64 = 8;
/// Most bytes of a group of more than one tensor: longer ones save nothing.
const GROUP_BYTES_MAX: u64 = 64 << 20;
/// Most bytes to load ahead: more would only slow down what is wanted next.
const AHEAD_BYTES: u64 = 256 << 20;
/// The longest time between two looks at whether to stop.
const SLICE: Duration = Duration::from_millis(50);

/// How to stream.
#[derive(Clone, Debug)]
pub struct StreamOptions {
    /// The tensors, in any order; `None`: all. They come file by file, in the order of their bytes.
    pub names: Option<Vec<String>>,
    /// The most memory, in bytes.
    pub budget_bytes: u64,
    /// Whether tensors are compared with the file's checksums, where it has any.
    pub verify: bool,
    /// How long to wait for tensors to be dropped when the budget is used up.
    pub timeout: Duration,
}

/// A tensor of a stream. Its bytes stay while it, or any other tensor in the same buffer, lives.
#[derive(Clone, Debug)]
pub struct Streamed {
    opened: Arc<Opened>,
    place: Place,
    buffer: Arc<PoolBuffer>,
    position: usize,
}

impl Streamed {
    /// What it is.
    pub fn info(&self) -> &TensorInfo {
        self.opened.tensor(self.place)
    }

    /// Where it came from.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The memory that it is in, perhaps with others.
    pub fn buffer(&self) -> &Arc<PoolBuffer> {
        &self.buffer
    }

    /// Its first byte there.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Its elements.
    pub fn bytes(&self) -> &[u8] {
        let length = usize::try_from(self.info().bytes()).unwrap_or(usize::MAX);
        let end = self.position.saturating_add(length);
        self.buffer.as_slice().get(self.position..end).unwrap_or_default()
    }
}

/// A group on its way.
#[derive(Debug)]
struct UnderWay {
    plan: LoadPlan,
    flights: Flights,
    rest: OwnedMemory,
}

/// An iterator over tensors within a budget. See the [module documentation](self).
#[derive(Debug)]
pub struct Stream {
    opened: Arc<Opened>,
    pool: Arc<Pool>,
    options: StreamOptions,
    groups: VecDeque<LoadPlan>,
    under_way: VecDeque<UnderWay>,
    ready: VecDeque<Streamed>,
    failure: Option<Error>,
}

impl Stream {
    /// Plans a stream. Nothing is loaded yet.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] for a name that isn't there; [`ErrorKind::OutOfMemory`], with the
    /// numbers, for a tensor that alone exceeds the budget.
    pub fn new(handle: &Handle, opened: Arc<Opened>, options: StreamOptions) -> Result<Self> {
        let mut places = opened.select(options.names.as_deref())?;
        places.sort_by_key(|place| (place.file, place.tensor));
        places.dedup();
        let staging = handle.options().staging_bytes as u64;
        let room = options.budget_bytes.saturating_sub(staging);
        let mut groups = VecDeque::new();
        for group in group(&opened, &places, (room / GROUPS_MIN).min(GROUP_BYTES_MAX)) {
            let plan = LoadPlan::place(Arc::clone(&opened), &group);
            if plan.region_bytes() > room {
                let tensor = opened.tensor(group[0]);
                let text = format!(
                    "streaming the tensor {:?} takes {} bytes of memory ({} for its {} bytes, \
                     {staging} for transfers), and the budget is {}",
                    tensor.name,
                    plan.region_bytes() + staging,
                    plan.region_bytes(),
                    tensor.bytes(),
                    options.budget_bytes
                );
                return Err(Error::new(ErrorKind::OutOfMemory, text).hint("raise the budget"));
            }
            groups.push_back(plan);
        }
        if options.verify {
            opened.files().iter().for_each(|file| note_unverified(handle, file));
        }
        // What a dropped tensor leaves serves the next group of about its size.
        let room = memory_bytes(room)?;
        let pool = handle.result_pool()?.options().clone();
        let pool = PoolOptions { budget_bytes: Some(room), retain_bytes: room, ..pool };
        Ok(Self {
            opened,
            pool: Pool::new(pool),
            options,
            groups,
            under_way: VecDeque::new(),
            ready: VecDeque::new(),
            failure: None,
        })
    }

    /// Where its memory comes from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The next tensor, if that is loaded already.
    pub fn next_ready(&mut self) -> Option<Streamed> {
        self.ready.pop_front()
    }

    /// The next tensor; `None` when all have been returned. The handle is the one that it was made
    /// with.
    ///
    /// # Errors
    ///
    /// As for [`Self::make_ready`].
    pub fn next(&mut self, handle: &Handle, stop: &Stop) -> Result<Option<Streamed>> {
        Ok(if self.make_ready(handle, stop)? { self.next_ready() } else { None })
    }

    /// Has the next tensor loaded for [`Self::next_ready`], which nothing can interrupt; `false` when
    /// all have been returned.
    ///
    /// # Errors
    ///
    /// As for [`load`](super::load()), the same each time. [`ErrorKind::TimedOut`] if the budget is
    /// used up by tensors that are still alive; the stream goes on once they are dropped.
    pub fn make_ready(&mut self, handle: &Handle, stop: &Stop) -> Result<bool> {
        while self.ready.is_empty() {
            if let Some(failure) = &self.failure {
                return Err(failure.clone());
            }
            match self.advance(handle, stop) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => {
                    let error = error.operation("stream");
                    if !matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Cancelled) {
                        self.under_way.clear();
                        self.failure = Some(error.clone());
                    }
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    /// Gets tensors ready; `false` when there are no more.
    fn advance(&mut self, handle: &Handle, stop: &Stop) -> Result<bool> {
        stop.check()?;
        self.load_ahead(handle)?;
        if self.under_way.is_empty() {
            let Some(plan) = self.groups.pop_front() else {
                self.pool.trim();
                return Ok(false);
            };
            match self.wait_for_room(&plan, stop) {
                Ok(buffer) => self.start(handle, plan, buffer)?,
                Err(error) => {
                    self.groups.push_front(plan);
                    return Err(error);
                }
            }
        }
        let Some(mut group) = self.under_way.pop_front() else { return Ok(false) };
        match self.land(&mut group, stop) {
            Ok(checked) => self.hand_out(group, checked)?,
            Err(error) => {
                if error.kind() == ErrorKind::Cancelled {
                    // What has landed of it is lost with the rest: it starts anew.
                    self.groups.push_front(group.plan);
                }
                return Err(error);
            }
        }
        self.load_ahead(handle)?;
        Ok(true)
    }

    /// Starts groups for as long as there is room for them at once.
    fn load_ahead(&mut self, handle: &Handle) -> Result<()> {
        loop {
            let ahead: u64 = self.under_way.iter().map(|group| group.flights.bytes()).sum();
            let Some(plan) = self.groups.front().filter(|_| ahead < AHEAD_BYTES) else {
                return Ok(());
            };
            match self.pool.allocate(memory_bytes(plan.region_bytes())?, ALIGNMENT) {
                Ok(buffer) => {
                    let Some(plan) = self.groups.pop_front() else { return Ok(()) };
                    self.start(handle, plan, buffer)?;
                }
                // There is no room yet; a limit of the machine's is met by who waits for room.
                Err(error) if error.kind() == ErrorKind::OutOfMemory => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn wait_for_room(&self, plan: &LoadPlan, stop: &Stop) -> Result<PoolBuffer> {
        let bytes = memory_bytes(plan.region_bytes())?;
        let begun = Instant::now();
        loop {
            stop.check()?;
            let left = self.options.timeout.saturating_sub(begun.elapsed());
            match self.pool.allocate_wait(bytes, ALIGNMENT, Some(left.min(SLICE))) {
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    if left <= SLICE {
                        return Err(self.no_room(plan));
                    }
                }
                answer => return answer,
            }
        }
    }

    fn no_room(&self, plan: &LoadPlan) -> Error {
        let stats = self.pool.stats();
        let held = stats.used_bytes;
        let room = stats.budget_bytes.map_or(u64::MAX, |bytes| bytes as u64);
        let next = plan.tensors().first().map(|placed| self.opened.tensor(placed.place));
        let text = format!(
            "the next tensor, {:?}, needs {} bytes, and {held} of the budget of {} bytes are held by \
             tensors that are still alive after {:?}, {} are for transfers",
            next.map_or("", |info| info.name.as_str()),
            plan.region_bytes(),
            self.options.budget_bytes,
            self.options.timeout,
            self.options.budget_bytes.saturating_sub(room)
        );
        Error::new(ErrorKind::TimedOut, text)
            .hint("drop tensors of the stream, or raise its budget")
    }

    fn start(&mut self, handle: &Handle, plan: LoadPlan, buffer: PoolBuffer) -> Result<()> {
        let [file] = plan.files() else { return Ok(()) };
        let (pieces, rest) = cut(buffer, file.file, &file.reads)?;
        let mut flights = Flights::default();
        for piece in pieces {
            flights.push(Flight::start(handle, &self.opened.files()[piece.file], piece)?);
        }
        self.under_way.push_back(UnderWay { plan, flights, rest });
        Ok(())
    }

    /// Waits for a group, and checks it meanwhile.
    fn land(&self, group: &mut UnderWay, stop: &Stop) -> Result<Checked> {
        let files = self.opened.files();
        let mut checked = Checked::default();
        while let Some(piece) = group.flights.land(files, stop)? {
            let file = &files[piece.file];
            if self.options.verify && is_checked(file) {
                checked.add(sums_of(&file.header, piece.offset, piece.bytes()));
            }
        }
        Ok(checked)
    }

    fn hand_out(&mut self, group: UnderWay, mut checked: Checked) -> Result<()> {
        let UnderWay { plan, rest, .. } = group;
        let [FilePlan { file, .. }] = plan.files() else { return Ok(()) };
        let file = &self.opened.files()[*file];
        file.check_unchanged()?;
        for placed in plan.tensors().iter().filter(|_| self.options.verify) {
            checked.check(file, placed.place.tensor)?;
        }
        let mut buffers = [whole(rest)?];
        copy(&plan, &mut buffers);
        let [buffer] = buffers;
        let buffer = Arc::new(buffer);
        for placed in plan.tensors() {
            self.ready.push_back(Streamed {
                opened: Arc::clone(&self.opened),
                place: placed.place,
                buffer: Arc::clone(&buffer),
                position: memory_bytes(placed.position)?,
            });
        }
        Ok(())
    }
}

/// Puts neighbours together, up to so many bytes; a longer tensor is a group of its own.
fn group(opened: &Opened, places: &[Place], bytes_max: u64) -> Vec<Vec<Place>> {
    let mut groups: Vec<Vec<Place>> = Vec::new();
    let mut first = 0;
    for &place in places {
        let TensorInfo { start, end, .. } = opened.tensor(place);
        // What a run may have more at its ends.
        let fits = end.saturating_sub(first) + 2 * PAGE_BYTES <= bytes_max;
        match groups.last_mut() {
            Some(group) if fits && group[0].file == place.file => group.push(place),
            _ => {
                first = *start;
                groups.push(vec![place]);
            }
        }
    }
    groups
}
