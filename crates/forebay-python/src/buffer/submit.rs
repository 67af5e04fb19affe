//! Hands the memory of arrays to the core.

#![expect(unsafe_code, reason = "promises the core that the memory stays valid")]

use std::path::PathBuf;

use forebay::stripe::Stripe;
use forebay_io::{DeviceAccess, Direction, Durability, Operation, Part, Priority, Request, Target};
use pyo3::prelude::*;

use super::Memory;
use super::cuda::OnDevice;

/// One array and where it is, or goes.
pub(crate) type Item<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, u64);

/// Arrays that are looked up before other threads of Python get a turn: some milliseconds.
const ARRAYS_PER_TURN: usize = 1024;

/// A request whose memory is held.
pub(crate) struct Job {
    request: Request,
    keep: Vec<Py<PyAny>>,
    /// The bytes of each run of each array, if their checksums are wanted.
    run_lengths: Vec<Vec<u64>>,
}

// SAFETY: the addresses in `request` are those of memory that `keep` holds in place, which any
// thread may read and write; Python objects may be sent between threads.
unsafe impl Send for Job {}

// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Job {}

/// The devices of a request, each once for each stream.
#[derive(Default)]
struct Numbered {
    known: Vec<OnDevice>,
    access: Vec<DeviceAccess>,
}

impl Numbered {
    fn number(&mut self, object: &Bound<'_, PyAny>, device: OnDevice) -> PyResult<usize> {
        if let Some(number) = self.known.iter().position(|known| *known == device) {
            return Ok(number);
        }
        self.access.push(device.access(object)?);
        self.known.push(device);
        Ok(self.known.len() - 1)
    }
}

/// What holds of a whole request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) direction: Direction,
    pub(crate) whole_file: bool,
    pub(crate) priority: Priority,
    pub(crate) durability: Option<Durability>,
    pub(crate) checksums: bool,
}

impl Job {
    /// Looks up the memory of every item. Neighbours that name the same file share it.
    pub(crate) fn new(items: Vec<Item<'_>>, terms: Terms) -> PyResult<Self> {
        let mut files: Vec<Target> = Vec::new();
        let mut parts = Vec::with_capacity(items.len());
        let mut keep = Vec::with_capacity(items.len());
        let mut run_lengths = Vec::new();
        let mut devices = Numbered::default();
        let mut numbers = std::collections::HashMap::new();
        for (index, (object, target, offset)) in items.into_iter().enumerate() {
            if index % ARRAYS_PER_TURN == ARRAYS_PER_TURN - 1 {
                object.py().detach(|| ());
            }
            let memory = Memory::in_runs(&object, terms.direction == Direction::Load)?;
            let target = Name::of(&target)?;
            let file = *numbers.entry(target.clone()).or_insert_with(|| {
                files.push(target.into());
                files.len() - 1
            });
            let device = match memory.device {
                Some(device) => Some(devices.number(&object, device)?),
                None => None,
            };
            let pieces = memory.pieces();
            if terms.checksums {
                let lengths = pieces.iter().map(|(_, length, _)| *length as u64);
                run_lengths.push(lengths.collect());
            }
            parts.extend(pieces.into_iter().map(|(address, length, position)| {
                let offset = offset.saturating_add(position as u64);
                Part { file, offset, address, length, device }
            }));
            keep.push(memory.keep);
        }
        let Terms { direction, whole_file, priority, durability, checksums } = terms;
        let request = Request {
            direction,
            files,
            parts,
            devices: devices.access,
            whole_file,
            checksums,
            priority,
            durability,
            commit: None,
            keep: None,
        };
        Ok(Self { request, keep, run_lengths })
    }

    /// The bytes of each run of each array; nothing if no checksums are wanted.
    pub(crate) fn take_run_lengths(&mut self) -> Vec<Vec<u64>> {
        std::mem::take(&mut self.run_lengths)
    }

    /// Starts it. The operation keeps the arrays until its last transfer is through.
    pub(crate) fn submit(self, handle: &forebay_io::Handle) -> forebay_io::Result<Operation> {
        let mut request = self.request;
        request.keep = Some(Box::new(self.keep));
        // SAFETY: the memory is valid while `keep` lives (the promise of `Memory`), and the core
        // drops that after the last completion.
        unsafe { handle.submit(request) }
    }

    /// Turns the names of striped files into their members.
    pub(crate) fn spread(
        self,
        stripe: &Stripe,
        durability: Durability,
    ) -> forebay_io::Result<Self> {
        Ok(Self { request: stripe.spread(self.request, durability)?, ..self })
    }

    /// Does it at once if it is a short load from the page cache; `false` if it isn't.
    pub(crate) fn run_quickly(&self, handle: &forebay_io::Handle) -> forebay_io::Result<bool> {
        // SAFETY: the memory is valid while `keep` lives, which `self` holds.
        unsafe { handle.load_quickly(&self.request) }
    }
}

/// A file's name or descriptor, comparable.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Name {
    Path(PathBuf),
    Descriptor(i32),
}

impl Name {
    fn of(target: &Bound<'_, PyAny>) -> PyResult<Self> {
        match target.extract::<i32>() {
            Ok(descriptor) => Ok(Self::Descriptor(descriptor)),
            Err(_) => target.extract().map(Self::Path),
        }
    }
}

impl From<Name> for Target {
    fn from(name: Name) -> Self {
        match name {
            Name::Path(path) => Self::Path(path),
            Name::Descriptor(descriptor) => Self::Descriptor(descriptor),
        }
    }
}

/// The bytes of an array, for reading.
pub(crate) struct Bytes(Memory);

// SAFETY: the address is that of memory that `keep` holds in place.
unsafe impl Send for Bytes {}

// SAFETY: as above, and only reads are offered.
unsafe impl Sync for Bytes {}

impl Bytes {
    pub(crate) fn of(memory: Memory) -> Self {
        Self(memory)
    }

    /// The address and the number of them, wherever they are.
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.0.address.addr(), self.0.length)
    }

    /// Those of a contiguous array in the host's memory.
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.runs().next().map_or(&[], |(run, _)| run)
    }

    /// Those of an array in the host's memory, run by run, and where each is among its values.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (&[u8], usize)> {
        let pieces = self.0.pieces().into_iter().filter(|(_, length, _)| *length > 0);
        pieces.map(|(address, length, position)| {
            // SAFETY: the memory is valid while `keep` lives, which `self` holds. That no other
            // thread writes to it meanwhile is up to the user, as for any array that two threads
            // share; bytes that change under the comparison make it answer either way, nothing
            // more.
            (unsafe { std::slice::from_raw_parts(address.cast_const(), length) }, position)
        })
    }
}
