//! Requests: what is to be moved, and whether that can be.
//!
//! The checks here look at a request alone, at memory, or at files that are open already; nothing
//! is changed. Opening files and moving bytes are elsewhere.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::commit::Commit;
use crate::config::{Durability, Priority};
use crate::device::{CallerStream, Context};
use crate::error::{Error, ErrorKind, Result};
use crate::files::{Target, TensorFile};
use crate::operation::{ALLOCATE_BYTES_MIN, OpenedFile};
use crate::plan::Direction;
use crate::syscalls::first_inaccessible;

/// A run of bytes in memory and in one of the request's files.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Index into [`Request::files`].
    pub file: usize,
    /// File offset in bytes.
    pub offset: u64,
    /// First byte in memory.
    pub address: *mut u8,
    /// Bytes.
    pub length: usize,
    /// Index into [`Request::devices`] of the device whose memory the address is; `None`: the
    /// host's.
    pub device: Option<usize>,
}

/// A device whose memory a request uses.
#[derive(Clone, Debug)]
pub struct DeviceAccess {
    /// The device's context.
    pub context: Arc<Context>,
    /// Where the caller works on that memory: nothing touches it before what this stream had to do
    /// when the request was submitted. Once the operation is done, the host has seen its last copy,
    /// so that whatever the caller enqueues then, on any stream, comes after it.
    pub stream: CallerStream,
}

/// What to move: any number of tensors to or from any number of files, as one operation.
#[derive(Debug)]
pub struct Request {
    /// From files to memory, or back.
    pub direction: Direction,
    /// The files. Each is opened once.
    pub files: Vec<Target>,
    /// What goes where. Parts of a load don't overlap in memory, those of a store not in a file.
    pub parts: Vec<Part>,
    /// The devices whose memory parts name.
    pub devices: Vec<DeviceAccess>,
    /// A store that makes each file exactly as long as its furthest part reaches; without it,
    /// what is behind that stays. What is between parts stays either way.
    pub whole_file: bool,
    /// Whether the CRC32C of each part is computed on the way: see [`Operation::checksums`](crate::Operation::checksums).
    /// Every byte goes through the host's memory then.
    pub checksums: bool,
    /// What goes first when several operations are under way.
    pub priority: Priority,
    /// How far a store goes before it is done; `None` takes the handle's option.
    pub durability: Option<Durability>,
    /// What is done before the first byte moves and after the last one, to make several files one.
    pub commit: Option<Arc<dyn Commit>>,
    /// Kept until the last transfer is through, and then until [`Operation::take_keep`](crate::Operation::take_keep) or the
    /// last reference to the operation goes.
    pub keep: Option<Box<dyn Any + Send>>,
}

impl Request {
    /// A request of one part.
    pub fn new(
        direction: Direction,
        target: Target,
        offset: u64,
        address: *mut u8,
        length: usize,
    ) -> Self {
        Self {
            direction,
            files: vec![target],
            parts: vec![Part { file: 0, offset, address, length, device: None }],
            devices: Vec::new(),
            whole_file: false,
            checksums: false,
            priority: Priority::Demand,
            durability: None,
            commit: None,
            keep: None,
        }
    }
}

/// Checks what can be checked before any file is touched.
pub(crate) fn check_parts(request: &Request) -> Result<()> {
    let invalid = |message: String| Err(Error::new(ErrorKind::InvalidInput, message));
    for part in &request.parts {
        let Part { file, offset, address, length, device } = *part;
        if file >= request.files.len() {
            return invalid(format!("part of file {file}, but there are {}", request.files.len()));
        }
        if let Some(device) = device
            && device >= request.devices.len()
        {
            let count = request.devices.len();
            return invalid(format!(
                "part in the memory of device {device}, but there are {count}"
            ));
        }
        if address.is_null() && length > 0 {
            return invalid(format!("{length} bytes of memory at a null address"));
        }
        if address.addr().checked_add(length).is_none() {
            return invalid(format!("{length} bytes of memory from {address:p} on don't exist"));
        }
        let end = offset.checked_add(length as u64);
        if end.is_none_or(|end| i64::try_from(end).is_err()) {
            return invalid(format!("offset {offset} and length {length} don't fit in a file"));
        }
    }
    Ok(())
}

/// Refuses memory of the host that can't be touched, which would otherwise end the process where bytes are
/// copied: read-only mappings, and pool memory in a forked child. Looks at the ends of each run of
/// memory; parts that follow each other are one.
pub(crate) fn check_memory(request: &Request) -> Result<()> {
    let mut bytes: Vec<usize> = Vec::new();
    for part in request.parts.iter().filter(|part| part.length > 0 && part.device.is_none()) {
        let first = part.address.expose_provenance();
        let last = first + (part.length - 1);
        match bytes.last_mut() {
            Some(end) if *end + 1 == first => *end = last,
            _ => bytes.extend([first, last]),
        }
    }
    let load = request.direction == Direction::Load;
    match first_inaccessible(&bytes, load) {
        None => Ok(()),
        Some(address) => {
            let how = if load { "written to" } else { "read" };
            let text = format!("the tensor's memory at {address:#x} can't be {how}");
            Err(Error::new(ErrorKind::InvalidInput, text)
                .hint("is it mapped read-only, unmapped, or pool memory of the parent process?"))
        }
    }
}

/// Where in each file the parts begin, and how far they reach.
pub(crate) fn reach_of(request: &Request) -> Vec<Range<u64>> {
    let mut reach: Vec<Option<Range<u64>>> = vec![None; request.files.len()];
    for part in &request.parts {
        let end = part.offset + part.length as u64;
        let range = reach[part.file].get_or_insert(part.offset..end);
        *range = range.start.min(part.offset)..range.end.max(end);
    }
    reach.into_iter().map(Option::unwrap_or_default).collect()
}

/// Refuses a load behind the end of a file, and a store behind the end of a device.
pub(crate) fn check_end(request: &Request, file: &TensorFile, end: u64) -> Result<()> {
    let fixed = request.direction == Direction::Load || !file.is_regular();
    if !fixed || end <= file.size {
        return Ok(());
    }
    let size = file.size;
    let error = match request.parts.iter().find(|part| part.offset + part.length as u64 == end) {
        Some(part) => {
            let there = size.saturating_sub(part.offset);
            let text = format!(
                "the tensor has {} bytes, the file only {there} from offset {} on (its size is \
                 {size}):",
                part.length, part.offset
            );
            Error::new(ErrorKind::ShortFile, text).bytes(part.length as u64, 0)
        }
        None => Error::new(ErrorKind::ShortFile, "the file is too short:"),
    };
    Err(error.path(file.label()))
}

/// Refuses stores whose parts would overwrite each other.
pub(crate) fn check_files(request: &Request, files: &[OpenedFile]) -> Result<()> {
    if request.direction == Direction::Load {
        return Ok(());
    }
    let overwritten = |file: &TensorFile, text: &str| {
        Err(Error::new(ErrorKind::InvalidInput, text).path(file.label()))
    };
    let mut keys: Vec<_> = files.iter().map(|opened| (opened.file.key, &opened.file)).collect();
    keys.sort_by_key(|(key, _)| *key);
    if let Some(pair) = keys.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return overwritten(pair[1].1, "one file is named twice in one store, as");
    }
    let mut parts: Vec<_> = request.parts.iter().filter(|part| part.length > 0).collect();
    let place = |part: &&Part| (part.file, part.offset);
    if !parts.is_sorted_by_key(place) {
        parts.sort_by_key(place);
    }
    let overlap = parts.windows(2).find(|pair| {
        pair[0].file == pair[1].file && pair[0].offset + pair[0].length as u64 > pair[1].offset
    });
    match overlap {
        Some(pair) => overwritten(&files[pair[1].file].file, "tensors of one store overlap in"),
        None => Ok(()),
    }
}

/// The runs of bytes that the parts cover, neighbours joined where they follow each other in their
/// file, whatever parts of other files are between them.
pub(crate) fn runs_of(request: &Request) -> Vec<(usize, u64, u64)> {
    let mut runs: Vec<(usize, u64, u64)> = Vec::new();
    if request.direction == Direction::Load {
        return runs;
    }
    let mut last_runs: Vec<Option<usize>> = vec![None; request.files.len()];
    for part in &request.parts {
        let end = part.offset + part.length as u64;
        let last = last_runs[part.file].filter(|&index| runs[index].2 == part.offset);
        if let Some(index) = last {
            runs[index].2 = end;
        } else {
            last_runs[part.file] = Some(runs.len());
            runs.push((part.file, part.offset, end));
        }
    }
    runs.retain(|(_, start, end)| end - start >= ALLOCATE_BYTES_MIN);
    runs
}
