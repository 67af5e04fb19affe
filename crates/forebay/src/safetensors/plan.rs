//! Plans of loads: which bytes of which file go where in memory. Pure arithmetic over headers.
//!
//! Each file gets one region. What is wanted of the file is read in runs of whole pages, with what
//! lies between two tensors if that is short, and lies in the region so that its address is congruent
//! to its file offset, modulo a page: then it goes straight from the drive. In a file whose data
//! begins at an odd offset, that would misalign the tensors; it gets a shift then, which has
//! transfers go through staging memory. A tensor that is misaligned all the same is copied to a
//! place behind the runs.

use std::collections::HashSet;
use std::sync::Arc;

use forebay_io::{Error, ErrorKind, Result};

use super::header::TensorInfo;
use super::source::{Opened, Place};

/// The longest gap between wanted tensors that is read with them, in bytes: a drive takes about as
/// long for one more request.
const GAP_BYTES_MAX: u64 = 128 << 10;
/// A page, the most that direct I/O asks for.
pub(super) const PAGE_BYTES: u64 = 4096;
/// A huge page of most machines.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Where as much is read of a file, an unused huge page before it is nothing.
const LARGE_BYTES: u64 = 64 << 20;
/// The widest alignment of a dtype.
const SHIFTS: u64 = 8;
/// Where a tensor that is copied begins: a cache line.
const COPY_ALIGNMENT: u64 = 64;
/// The part of a file's bytes that may have to be copied before its region is shifted instead.
const COPIED_SHARE: u64 = 16;

/// Consecutive bytes of a file that go to consecutive bytes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// File offset.
    pub offset: u64,
    /// Place in the region.
    pub position: u64,
    /// Bytes.
    pub length: u64,
}

/// What is read of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePlan {
    /// Index of the file.
    pub file: usize,
    /// In the order of the file.
    pub reads: Vec<Read>,
    /// Bytes of its region: the runs, and the copies behind them.
    pub region_bytes: u64,
}

/// Where a tensor is to lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Where it comes from.
    pub place: Place,
    /// Index of its region, that of its file's plan.
    pub region: usize,
    /// Its first byte there.
    pub position: u64,
    /// Where in the region it is copied from, if it is.
    pub copied_from: Option<u64>,
}

/// How to plan.
#[derive(Clone, Debug, Default)]
pub struct PlanOptions {
    /// The tensors to load; `None`: all.
    pub names: Option<Vec<String>>,
    /// The most memory that the load may take, in bytes.
    pub budget_bytes: Option<u64>,
    /// What transfers may take beside the regions:
    /// [`Options::staging_bytes`](forebay_io::Options::staging_bytes) of the handle.
    pub staging_bytes: u64,
}

/// A plan. See the [module documentation](self).
#[derive(Clone, Debug)]
pub struct LoadPlan {
    opened: Arc<Opened>,
    files: Vec<FilePlan>,
    tensors: Vec<Placed>,
    copied_bytes: u64,
    staging_bytes: u64,
}

impl LoadPlan {
    /// Plans to load tensors of a source.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] for a name that isn't there; [`ErrorKind::OutOfMemory`], with the
    /// numbers, if it takes more than the budget.
    pub fn new(opened: Arc<Opened>, options: &PlanOptions) -> Result<Self> {
        let places = opened.select(options.names.as_deref())?;
        let mut plan = Self::place(opened, &places);
        plan.staging_bytes = options.staging_bytes;
        match options.budget_bytes {
            Some(budget) if plan.peak_bytes() > budget => {
                let text = format!(
                    "the load takes {} bytes of memory at its peak ({} for {} of tensors, {} for \
                     transfers), and the budget is {budget}",
                    plan.peak_bytes(),
                    plan.region_bytes(),
                    plan.tensor_bytes(),
                    plan.staging_bytes,
                );
                Err(Error::new(ErrorKind::OutOfMemory, text)
                    .hint("raise the budget, load fewer tensors, or stream them"))
            }
            _ => Ok(plan),
        }
    }

    /// Places tensors, whatever they take.
    pub(super) fn place(opened: Arc<Opened>, places: &[Place]) -> Self {
        let mut tensors = Vec::with_capacity(places.len());
        let mut region_of = vec![None; opened.files().len()];
        let mut groups: Vec<Vec<Place>> = Vec::new();
        for &place in places {
            let region = *region_of[place.file].get_or_insert(groups.len());
            if region == groups.len() {
                groups.push(Vec::new());
            }
            groups[region].push(place);
        }
        let mut files: Vec<_> = groups.iter().map(|group| plan_file(&opened, group)).collect();
        let mut copied_bytes = 0;
        for &place in places {
            let info = opened.tensor(place);
            let region = region_of[place.file].unwrap_or_default();
            let offset = opened.files()[place.file].header.data_start() + info.start;
            let position = position_of(&files[region].reads, offset, info);
            let mut placed = Placed { place, region, position, copied_from: None };
            if !position.is_multiple_of(info.dtype.alignment()) {
                let end = &mut files[region].region_bytes;
                placed.copied_from = Some(position);
                placed.position = end.next_multiple_of(COPY_ALIGNMENT);
                *end = placed.position + info.bytes();
                copied_bytes += info.bytes();
            }
            tensors.push(placed);
        }
        Self { opened, files, tensors, copied_bytes, staging_bytes: 0 }
    }

    /// The source that it was made for.
    pub fn opened(&self) -> &Arc<Opened> {
        &self.opened
    }

    /// What is read of each file: one region each.
    pub fn files(&self) -> &[FilePlan] {
        &self.files
    }

    /// Where the tensors are to lie, in the order that they were asked for in.
    pub fn tensors(&self) -> &[Placed] {
        &self.tensors
    }

    /// Bytes of the tensors.
    pub fn tensor_bytes(&self) -> u64 {
        let bytes = |placed: &Placed| self.opened.tensor(placed.place).bytes();
        self.tensors.iter().map(bytes).sum()
    }

    /// Bytes of the files' regions, in whole pages.
    pub fn region_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.region_bytes.next_multiple_of(PAGE_BYTES)).sum()
    }

    /// Bytes that are read.
    pub fn read_bytes(&self) -> u64 {
        self.files.iter().flat_map(|file| &file.reads).map(|read| read.length).sum()
    }

    /// Bytes of tensors that are copied to a better place, and so are there twice.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// The most memory that the load takes at any moment: all regions, and what transfers need.
    pub fn peak_bytes(&self) -> u64 {
        self.region_bytes() + self.staging_bytes
    }
}

/// The reads of one file, and what they take.
fn plan_file(opened: &Opened, places: &[Place]) -> FilePlan {
    let file = places.first().map_or(0, |place| place.file);
    let header = &opened.files()[file].header;
    let data_start = header.data_start();
    let mut seen = HashSet::new();
    let mut infos: Vec<&TensorInfo> = places
        .iter()
        .filter(|place| seen.insert(place.tensor))
        .map(|&place| opened.tensor(place))
        .filter(|info| info.bytes() > 0)
        .collect();
    infos.sort_by_key(|info| info.start);
    let shift = choose_shift(&infos, data_start);
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for info in &infos {
        let (start, end) = (data_start + info.start, data_start + info.end);
        let start = start - start % PAGE_BYTES;
        let end = end.next_multiple_of(PAGE_BYTES).min(header.file_bytes());
        match runs.last_mut() {
            Some(run) if start <= run.1 + GAP_BYTES_MAX => run.1 = end,
            _ => runs.push((start, end)),
        }
    }
    // Congruent modulo a huge page too, which the kernel can then map the page cache with.
    let least = runs.first().map_or(0, |(start, _)| (start + shift) % HUGE_PAGE_BYTES);
    let is_large = runs.iter().map(|(start, end)| end - start).sum::<u64>() >= LARGE_BYTES;
    let mut next = if is_large { least } else { 0 };
    let mut reads = Vec::with_capacity(runs.len());
    for (start, end) in runs {
        let wanted = (start + shift) % PAGE_BYTES;
        let position = next + (wanted + PAGE_BYTES - next % PAGE_BYTES) % PAGE_BYTES;
        let length = end - start;
        reads.push(Read { offset: start, position, length });
        next = position + length;
    }
    FilePlan { file, reads, region_bytes: next }
}

/// How far a file's bytes are shifted against congruence: not at all, unless that leaves too many
/// tensors misaligned.
fn choose_shift(infos: &[&TensorInfo], data_start: u64) -> u64 {
    let misaligned = |shift: u64| -> u64 {
        let is_off = |info: &&&TensorInfo| {
            !(data_start + info.start + shift).is_multiple_of(info.dtype.alignment())
        };
        infos.iter().filter(is_off).map(|info| info.bytes()).sum()
    };
    let total: u64 = infos.iter().map(|info| info.bytes()).sum();
    if misaligned(0) <= total / COPIED_SHARE {
        return 0;
    }
    (0..SHIFTS).min_by_key(|&shift| misaligned(shift)).unwrap_or(0)
}

/// Where in the region the tensor at a file offset lies.
fn position_of(reads: &[Read], offset: u64, info: &TensorInfo) -> u64 {
    if info.bytes() == 0 {
        return 0;
    }
    let after = reads.partition_point(|read| read.offset <= offset);
    reads.get(after.wrapping_sub(1)).map_or(0, |read| read.position + (offset - read.offset))
}
