//! Opening files for transfers: direct or not, alignment, sizes, preallocation, leftovers.
//!
//! A `TensorFile` is one file of one operation. It has a buffered descriptor, for ragged ends
//! and for bytes in the page cache, and, where the file system takes it, one for direct I/O that
//! is the same inode whatever happens to the name meanwhile. A descriptor that the caller owns is
//! opened anew, so its flags and position are left alone, and the caller may close it at once.
//!
//! # Invariants
//!
//! - Whether direct I/O works is known per mount (`Mount`), never per process, and is decided
//!   again by the first transfer that is refused.
//! - A whole-file store leaves exactly the new size; when it fails, the file is gone if the store
//!   made it, and else is no longer than what is known to be right.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags};
use rustix::io::Errno;

use crate::config::DirectMode;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::Direction;
use crate::syscalls::{page_bytes, read_cached};

/// Alignment where neither `statx(2)` nor the block device says: the largest sector in use.
const ALIGNMENT_FALLBACK: u64 = 4096;
/// Attempts at opening a name that another process keeps making and removing.
const OPEN_ATTEMPTS_MAX: usize = 8;

/// Where a tensor is, or goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A file's name.
    Path(PathBuf),
    /// An open descriptor of the caller. It stays the caller's, position and flags untouched.
    Descriptor(RawFd),
}

/// What is known about the file system that a file is on.
#[derive(Debug, Default)]
pub(crate) struct Mount {
    direct_refusal: OnceLock<String>,
    uncached_refused: AtomicBool,
}

impl Mount {
    /// Why direct I/O isn't used on this mount, if it isn't.
    pub(crate) fn direct_refusal(&self) -> Option<&str> {
        self.direct_refusal.get().map(String::as_str)
    }

    /// Remembers that direct I/O doesn't work here; `true` if that is news.
    pub(crate) fn refuse_direct(&self, reason: &str) -> bool {
        self.direct_refusal.set(reason.to_owned()).is_ok()
    }

    /// Whether `RWF_DONTCACHE` is still worth a try.
    pub(crate) fn takes_uncached(&self) -> bool {
        !self.uncached_refused.load(Ordering::Relaxed)
    }

    /// Remembers that `RWF_DONTCACHE` doesn't work here.
    pub(crate) fn refuse_uncached(&self) {
        self.uncached_refused.store(true, Ordering::Relaxed);
    }
}

/// The mounts that a handle has met.
#[derive(Debug, Default)]
pub(crate) struct Mounts(Mutex<HashMap<(u32, u32), Arc<Mount>>>);

impl Mounts {
    fn of(&self, status: &Statx) -> Arc<Mount> {
        let device = (status.stx_dev_major, status.stx_dev_minor);
        let mut mounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(mounts.entry(device).or_default())
    }
}

/// How a file is to be opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenOptions {
    pub(crate) direction: Direction,
    pub(crate) mode: DirectMode,
    /// A store that leaves exactly this size; `None` leaves what is behind it alone.
    pub(crate) exact_size: Option<u64>,
}

/// A file of one operation. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: Option<PathBuf>,
    label: PathBuf,
    buffered: OwnedFd,
    direct: Option<OwnedFd>,
    pub(crate) mount: Arc<Mount>,
    pub(crate) memory_alignment: usize,
    pub(crate) offset_alignment: u64,
    /// Size in bytes when it was opened.
    pub(crate) size: u64,
    created: bool,
    regular: bool,
    exact_size: Option<u64>,
}

impl TensorFile {
    /// Opens a target.
    ///
    /// # Errors
    ///
    /// What the system says of it, [`ErrorKind::InvalidInput`] for what holds no bytes at offsets
    /// (pipes, sockets, terminals), [`ErrorKind::Unsupported`] where direct I/O is demanded and
    /// not to be had.
    pub(crate) fn open(target: &Target, options: OpenOptions, mounts: &Mounts) -> Result<Self> {
        let (buffered, created, label) = match target {
            Target::Path(path) => {
                let (file, created) =
                    open_path(path, options.direction).map_err(|error| error.path(path))?;
                (file, created, path.clone())
            }
            Target::Descriptor(number) => {
                let label = PathBuf::from(format!("descriptor {number}"));
                let file =
                    reopen(*number, options.direction).map_err(|error| error.path(&label))?;
                (file, false, label)
            }
        };
        let path = match target {
            Target::Path(path) => Some(path.clone()),
            Target::Descriptor(_) => None,
        };
        let status = status_of(buffered.as_fd()).map_err(|error| error.path(&label))?;
        let regular = regular_or_block(&status).map_err(|error| error.path(&label))?;
        let mount = mounts.of(&status);
        let mut file = Self {
            path,
            label,
            buffered,
            direct: None,
            mount,
            memory_alignment: 1,
            offset_alignment: page_bytes(),
            size: status.stx_size,
            created,
            regular,
            exact_size: options.exact_size.filter(|_| regular),
        };
        if !regular {
            file.size = rustix::fs::seek(&file.buffered, SeekFrom::End(0))
                .map_err(|code| file.os_error(code, "cannot find the size of"))?;
        }
        let opened = file.open_direct(options, &status).and_then(|()| file.cut_to_exact_size());
        match opened {
            Ok(()) => Ok(file),
            Err(error) => {
                file.remove_if_created();
                Err(error)
            }
        }
    }

    fn open_direct(&mut self, options: OpenOptions, status: &Statx) -> Result<()> {
        if options.mode == DirectMode::Never {
            return Ok(());
        }
        if self.mount.direct_refusal().is_none() {
            match direct_descriptor(self.buffered.as_fd(), options.direction, status) {
                Ok((file, memory_alignment, offset_alignment)) => {
                    self.direct = Some(file);
                    self.memory_alignment = memory_alignment;
                    self.offset_alignment = offset_alignment.max(page_bytes());
                }
                Err(reason) => {
                    self.mount.refuse_direct(&reason);
                }
            }
        }
        match (options.mode, &self.direct) {
            (DirectMode::Always, None) => {
                let reason = self.mount.direct_refusal().unwrap_or_default();
                Err(Error::new(ErrorKind::Unsupported, format!("direct I/O is refused: {reason}"))
                    .path(&self.label)
                    .hint("use direct=\"auto\", or a file system on a drive"))
            }
            _ => Ok(()),
        }
    }

    /// Frees what is behind the new end before the new bytes need the room.
    fn cut_to_exact_size(&mut self) -> Result<()> {
        let Some(exact) = self.exact_size.filter(|exact| *exact < self.size) else {
            return Ok(());
        };
        rustix::fs::ftruncate(&self.buffered, exact)
            .map_err(|code| self.os_error(code, "cannot shorten"))
    }

    /// What messages call it: its path, or the number of the caller's descriptor.
    pub(crate) fn label(&self) -> &Path {
        &self.label
    }

    /// The directory that the file is in, to name its mount by; its label if that isn't known.
    pub(crate) fn mount_label(&self) -> std::path::Display<'_> {
        let parent = self.path.as_deref().and_then(Path::parent);
        parent.filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(&self.label).display()
    }

    /// The descriptor that goes through the page cache.
    pub(crate) fn buffered(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }

    /// The descriptor for a route.
    pub(crate) fn descriptor(&self, direct: bool) -> RawFd {
        match &self.direct {
            Some(file) if direct => file.as_raw_fd(),
            _ => self.buffered.as_raw_fd(),
        }
    }

    /// Whether blocks may go around the page cache, as far as is known by now.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some() && self.mount.direct_refusal().is_none()
    }

    /// The range to reserve before writing up to `end`, for growing files.
    pub(crate) fn missing(&self, end: u64) -> Option<(u64, u64)> {
        (self.regular && end > self.size).then(|| (self.size, end - self.size))
    }

    /// Opens the directory that the file's name is in, to make the name durable.
    pub(crate) fn open_directory(&self) -> Result<Option<OwnedFd>> {
        let Some(path) = &self.path else {
            return Ok(None);
        };
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        rustix::fs::open(
            parent,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map(Some)
        .map_err(|code| {
            Error::from_os(code.raw_os_error(), "cannot open the directory").path(parent)
        })
    }

    /// Puts things right after a store that failed: see the invariants of this module.
    ///
    /// `intact` says that nothing was written yet.
    pub(crate) fn clean_up_failure(&self, intact: bool) {
        if self.remove_if_created() || self.exact_size.is_none() {
            return;
        }
        let keep = if intact { self.size.min(self.exact_size.unwrap_or(u64::MAX)) } else { 0 };
        // The failure is being reported already; there is nothing more to say about the remains.
        let _ = rustix::fs::ftruncate(&self.buffered, keep);
    }

    fn remove_if_created(&self) -> bool {
        let Some(path) = self.path.as_deref().filter(|_| self.created) else {
            return false;
        };
        if same_file(path, self.buffered.as_fd()) {
            let _ = rustix::fs::unlink(path);
        }
        true
    }

    /// Drops the clean pages of a range (to the end of the file without a length) from the page
    /// cache.
    pub(crate) fn drop_cached(&self, offset: u64, length: Option<NonZeroU64>) {
        // Advice: a file system that ignores it is right to.
        let _ = rustix::fs::fadvise(&self.buffered, offset, length, rustix::fs::Advice::DontNeed);
    }

    pub(crate) fn os_error(&self, code: Errno, what: &str) -> Error {
        Error::from_os(code.raw_os_error(), what).path(&self.label)
    }
}

fn access(direction: Direction) -> OFlags {
    match direction {
        Direction::Load => OFlags::RDONLY,
        Direction::Store => OFlags::WRONLY,
    }
}

/// Opens a name; the flag tells whether this call made the file.
fn open_path(path: &Path, direction: Direction) -> Result<(OwnedFd, bool)> {
    // NONBLOCK: opening a FIFO returns instead of waiting for its other end.
    let flags = access(direction) | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let failed = |code: Errno| Error::from_os(code.raw_os_error(), "cannot open");
    for _ in 0..OPEN_ATTEMPTS_MAX {
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => return blocking(file).map(|file| (file, false)),
            Err(Errno::NOENT) if direction == Direction::Store => {}
            Err(Errno::INTR) => continue,
            Err(code) => return Err(failed(code)),
        }
        let mode = Mode::from_raw_mode(0o666);
        match rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
            Ok(file) => return blocking(file).map(|file| (file, true)),
            // Another process was faster, or the name is a link to a file that isn't there.
            Err(Errno::EXIST) => match rustix::fs::open(path, flags | OFlags::CREATE, mode) {
                Ok(file) => return blocking(file).map(|file| (file, false)),
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(code) => return Err(failed(code)),
            },
            Err(Errno::INTR) => {}
            Err(code) => return Err(failed(code)),
        }
    }
    Err(failed(Errno::NOENT))
}

/// Takes `O_NONBLOCK` off again: io_uring fails transfers on such files instead of waiting.
fn blocking(file: OwnedFd) -> Result<OwnedFd> {
    rustix::fs::fcntl_setfl(&file, OFlags::empty())
        .map_err(|code| Error::from_os(code.raw_os_error(), "cannot set up"))?;
    Ok(file)
}

/// A descriptor of our own for the file behind the caller's, without `O_APPEND` and `O_DIRECT`.
fn reopen(number: RawFd, direction: Direction) -> Result<OwnedFd> {
    let failed = |code: Errno| Error::from_os(code.raw_os_error(), "cannot use");
    let duplicate = duplicate(number).map_err(failed)?;
    // Opening a FIFO anew would wait for its other end: look first.
    regular_or_block(&status_of(duplicate.as_fd())?)?;
    let flags = rustix::fs::fcntl_getfl(&duplicate).map_err(failed)?;
    let forbidden = match direction {
        Direction::Load => OFlags::WRONLY,
        Direction::Store => OFlags::RDONLY,
    };
    if flags.contains(OFlags::PATH) || flags & OFlags::RWMODE == forbidden {
        return Err(failed(Errno::BADF));
    }
    match open_again(duplicate.as_fd(), access(direction)) {
        Ok(file) => Ok(file),
        Err(_) if !flags.intersects(OFlags::APPEND | OFlags::DIRECT) => Ok(duplicate),
        Err(code) => Err(failed(code)
            .hint("pass the path, or a descriptor opened without O_APPEND and O_DIRECT")),
    }
}

fn duplicate(number: RawFd) -> std::result::Result<OwnedFd, Errno> {
    if number < 0 {
        return Err(Errno::BADF);
    }
    crate::syscalls::duplicate(number)
}

/// Opens the same inode once more. Works after a rename or unlink too, needs `/proc`.
fn open_again(file: BorrowedFd<'_>, flags: OFlags) -> std::result::Result<OwnedFd, Errno> {
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(name, flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
}

/// The direct descriptor with the alignment of memory and of offsets, or why there is none.
fn direct_descriptor(
    buffered: BorrowedFd<'_>,
    direction: Direction,
    status: &Statx,
) -> std::result::Result<(OwnedFd, usize, u64), String> {
    let told = StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::DIOALIGN);
    if told && status.stx_dio_offset_align == 0 {
        return Err("the file system says that it has no direct I/O (statx)".to_owned());
    }
    let file = open_again(buffered, access(direction) | OFlags::DIRECT)
        .map_err(|code| format!("O_DIRECT is refused at open: {code}"))?;
    if told {
        let memory = usize::try_from(status.stx_dio_mem_align).unwrap_or(usize::MAX);
        return Ok((file, memory.next_power_of_two(), u64::from(status.stx_dio_offset_align)));
    }
    let alignment = device_block_bytes(status).unwrap_or(ALIGNMENT_FALLBACK);
    Ok((file, usize::try_from(alignment).unwrap_or(usize::MAX), alignment))
}

/// The logical block size of the device that the file is on, from sysfs.
fn device_block_bytes(status: &Statx) -> Option<u64> {
    let device = format!("/sys/dev/block/{}:{}", status.stx_dev_major, status.stx_dev_minor);
    // A partition's queue is its disk's.
    let read = |queue: &str| std::fs::read_to_string(format!("{device}/{queue}")).ok();
    read("queue/logical_block_size")
        .or_else(|| read("../queue/logical_block_size"))
        .and_then(|text| text.trim().parse::<u64>().ok())
        .filter(|bytes| bytes.is_power_of_two())
}

fn status_of(file: BorrowedFd<'_>) -> Result<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN;
    rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)
        .map_err(|code| Error::from_os(code.raw_os_error(), "cannot look at"))
}

fn regular_or_block(status: &Statx) -> Result<bool> {
    match FileType::from_raw_mode(u32::from(status.stx_mode)) {
        FileType::RegularFile => Ok(true),
        FileType::BlockDevice => Ok(false),
        FileType::Directory => {
            Err(Error::from_os(Errno::ISDIR.raw_os_error(), "cannot move tensors to or from"))
        }
        _ => Err(Error::new(
            ErrorKind::InvalidInput,
            "cannot move tensors to or from what is neither a file nor a block device:",
        )),
    }
}

fn same_file(path: &Path, file: BorrowedFd<'_>) -> bool {
    match (rustix::fs::lstat(path), rustix::fs::fstat(file)) {
        (Ok(named), Ok(open)) => named.st_dev == open.st_dev && named.st_ino == open.st_ino,
        _ => false,
    }
}

/// Loads from the page cache if all bytes are there; `false` leaves everything else, errors
/// included, to the long way.
pub(crate) fn read_if_cached(path: &Path, offset: u64, buffer: &mut [u8]) -> bool {
    let flags = access(Direction::Load) | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else {
        return false;
    };
    let regular = rustix::fs::fstat(&file)
        .is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::RegularFile);
    regular && read_cached(file.as_fd(), buffer, offset) == Some(buffer.len())
}

/// What direct I/O asks of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFacts {
    /// Transfers go around the page cache.
    pub direct: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Alignment of memory in bytes; 1 if not direct.
    pub memory_alignment: usize,
    /// Granule of direct offsets and lengths in bytes.
    pub offset_alignment: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Looks at an existing file, or at a directory by means of an unnamed file in it.
///
/// # Errors
///
/// What the system says of opening it.
pub fn facts(path: &Path) -> Result<FileFacts> {
    let mounts = Mounts::default();
    let options =
        OpenOptions { direction: Direction::Load, mode: DirectMode::Auto, exact_size: None };
    let file = if path.is_dir() {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let unnamed =
            rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).map_err(|code| {
                Error::from_os(code.raw_os_error(), "cannot make a file in").path(path)
            })?;
        let target = Target::Descriptor(unnamed.as_raw_fd());
        TensorFile::open(&target, options, &mounts).map_err(|error| error.path(path))?
    } else {
        TensorFile::open(&Target::Path(path.to_path_buf()), options, &mounts)?
    };
    Ok(FileFacts {
        direct: file.is_direct(),
        reason: file.mount.direct_refusal().map(str::to_owned),
        memory_alignment: file.memory_alignment,
        offset_alignment: file.offset_alignment,
        size: file.size,
    })
}
