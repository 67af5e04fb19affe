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
//!   again by the first transfer that is refused. What one file or one moment refuses says nothing
//!   of the mount.
//! - Opening a file changes nothing in it.
//! - A whole-file store leaves exactly the new size; when it fails halfway, the file is empty
//!   whatever its name is by then, so that it can't be taken for a whole one. Whether a file that a
//!   store made goes with the store is for the order of stores to say.

use std::collections::HashMap;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, Stat, Statx, StatxFlags,
};
use rustix::io::Errno;

use crate::config::DirectMode;
use crate::device::gds::Whereabouts;
use crate::directory::Scratch;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::Direction;
use crate::syscalls::{page_bytes, read_cached};

/// Alignment where neither `statx(2)` nor the block device says: the largest sector in use.
const ALIGNMENT_FALLBACK: u64 = 4096;
/// Attempts at opening a name that another process keeps making and removing.
pub(crate) const OPEN_ATTEMPTS_MAX: usize = 8;

/// Where a tensor is, or goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A file's name.
    Path(PathBuf),
    /// An open descriptor of the caller. It stays the caller's, position and flags untouched.
    Descriptor(RawFd),
}

impl From<&Path> for Target {
    fn from(path: &Path) -> Self {
        Self::Path(path.to_path_buf())
    }
}

impl From<&PathBuf> for Target {
    fn from(path: &PathBuf) -> Self {
        Self::Path(path.clone())
    }
}

impl From<&str> for Target {
    fn from(path: &str) -> Self {
        Self::Path(PathBuf::from(path))
    }
}

impl From<PathBuf> for Target {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

/// The file must stay open until the call that it is given to returns.
impl From<&File> for Target {
    fn from(file: &File) -> Self {
        Self::Descriptor(file.as_raw_fd())
    }
}

/// What is known about the file system that a file is on.
#[derive(Debug, Default)]
pub(crate) struct Mount {
    direct_refusal: OnceLock<String>,
    uncached_refused: AtomicBool,
    gds_refusal: OnceLock<String>,
    gds_told: AtomicBool,
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

    /// What cuFile said that rules GPUDirect Storage out on this mount, if it did.
    pub(crate) fn gds_refusal(&self) -> Option<&str> {
        self.gds_refusal.get().map(String::as_str)
    }

    /// Remembers that GPUDirect Storage doesn't work here.
    pub(crate) fn refuse_gds(&self, reason: &str) {
        // Whoever came first said it.
        let _ = self.gds_refusal.set(reason.to_owned());
    }

    /// Whether nobody has told yet that files here don't go by GPUDirect Storage.
    pub(crate) fn tell_of_gds(&self) -> bool {
        !self.gds_told.swap(true, Ordering::Relaxed)
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

/// Names a mount: the device and the mount's number; for a block device, itself.
type MountKey = (u32, u32, u64);

/// The mounts that a handle has met.
#[derive(Debug, Default)]
pub(crate) struct Mounts(Mutex<HashMap<MountKey, Arc<Mount>>>);

impl Mounts {
    fn of(&self, status: &Statx) -> Arc<Mount> {
        let key = match FileType::from_raw_mode(u32::from(status.stx_mode)) {
            FileType::BlockDevice => (status.stx_rdev_major, status.stx_rdev_minor, 0),
            _ => (status.stx_dev_major, status.stx_dev_minor, status.stx_mnt_id),
        };
        let mut mounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(mounts.entry(key).or_default())
    }
}

/// How a file is to be opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenOptions {
    pub(crate) direction: Direction,
    pub(crate) mode: DirectMode,
    /// A store that leaves exactly this size; `None` leaves what is behind it alone.
    pub(crate) exact_size: Option<u64>,
    /// Open the directory too, to make the file's name durable.
    pub(crate) with_directory: bool,
}

/// Names a file whatever its path: device and inode; a block device, whatever its node: its number.
pub(crate) type FileKey = (u32, u32, u64);

/// A file of one operation. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: Option<PathBuf>,
    label: PathBuf,
    buffered: OwnedFd,
    direct: Option<OwnedFd>,
    /// Why this file isn't open for direct I/O, if that was tried in vain.
    pub(crate) direct_refusal: Option<String>,
    directory: Option<OwnedFd>,
    pub(crate) key: FileKey,
    pub(crate) mount: Arc<Mount>,
    pub(crate) memory_alignment: usize,
    pub(crate) offset_alignment: u64,
    /// Size in bytes when it was opened.
    pub(crate) size: u64,
    /// Opening it made it.
    created: bool,
    regular: bool,
    status: Statx,
    exact_size: Option<u64>,
}

/// Why a file has no direct descriptor.
enum NoDirect {
    /// No file of the mount will have one.
    Mount(String),
    /// This file has none.
    File(String),
    /// Something ran out; the operation fails.
    Failed(Errno),
}

impl TensorFile {
    /// Opens a target, without direct I/O so far. Nothing in an existing file is changed.
    ///
    /// # Errors
    ///
    /// What the system says of it, [`ErrorKind::InvalidInput`] for what holds no bytes at offsets
    /// (pipes, sockets, terminals).
    pub(crate) fn open(target: &Target, options: OpenOptions, mounts: &Mounts) -> Result<Self> {
        let (path, label) = match target {
            Target::Path(path) => (Some(path.clone()), path.clone()),
            Target::Descriptor(number) => (None, name_of(*number)),
        };
        let directory = match &path {
            Some(path) if options.with_directory => Some(open_directory(path)?),
            _ => None,
        };
        let opened = match target {
            Target::Path(path) => open_path(path, options.direction),
            Target::Descriptor(number) => {
                reopen(*number, options.direction).map(|file| (file, false))
            }
        };
        let (buffered, created) = opened.map_err(|error| error.path(&label))?;
        let directory = match directory {
            Some(directory) if is_link(&label) => Some(open_directory_behind(&label, directory)),
            directory => directory,
        };
        let status = status_of(buffered.as_fd()).map_err(|error| error.path(&label))?;
        let regular = regular_or_block(&status).map_err(|error| error.path(&label))?;
        let mount = mounts.of(&status);
        let mut file = Self {
            path,
            label,
            buffered,
            direct: None,
            direct_refusal: None,
            directory,
            key: if regular {
                (status.stx_dev_major, status.stx_dev_minor, status.stx_ino)
            } else {
                (status.stx_rdev_major, status.stx_rdev_minor, 0)
            },
            mount,
            memory_alignment: 1,
            offset_alignment: page_bytes(),
            size: status.stx_size,
            created,
            regular,
            status,
            exact_size: options.exact_size.filter(|_| regular),
        };
        if !regular {
            file.size = rustix::fs::seek(&file.buffered, SeekFrom::End(0))
                .map_err(|code| file.os_error(code, "cannot find the size of"))?;
        }
        Ok(file)
    }

    /// Opens it for direct I/O too, where that is wanted and to be had.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] where direct I/O is demanded and not to be had; what the system
    /// has run out of.
    pub(crate) fn open_direct(&mut self, options: OpenOptions) -> Result<()> {
        if options.mode == DirectMode::Never {
            return Ok(());
        }
        let refusal = match self.mount.direct_refusal() {
            Some(reason) => Some(reason.to_owned()),
            None => match self.direct_descriptor(options.direction) {
                Ok(()) => None,
                Err(NoDirect::Mount(reason)) => {
                    self.mount.refuse_direct(&reason);
                    Some(reason)
                }
                Err(NoDirect::File(reason)) => Some(reason),
                Err(NoDirect::Failed(code)) => {
                    return Err(self.os_error(code, "cannot open"));
                }
            },
        };
        if let (DirectMode::Always, Some(reason)) = (options.mode, &refusal) {
            let text = format!("direct I/O is refused: {reason}");
            return Err(Error::new(ErrorKind::Unsupported, text)
                .path(&self.label)
                .hint("use direct=\"auto\", or a file system on a drive"));
        }
        self.direct_refusal = refusal;
        Ok(())
    }

    fn direct_descriptor(&mut self, direction: Direction) -> Result<(), NoDirect> {
        let status = &self.status;
        let told = StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::DIOALIGN);
        if told && status.stx_dio_offset_align == 0 {
            let reason = "the file system says that this file has no direct I/O (statx)";
            return Err(NoDirect::File(reason.to_owned()));
        }
        let flags = access(direction) | OFlags::DIRECT;
        let file = match open_again(self.buffered.as_fd(), flags) {
            Err(Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::LOOP) => {
                self.open_by_name_again(flags)
            }
            opened => opened,
        };
        let file = file.map_err(|code| match code {
            Errno::INVAL | Errno::OPNOTSUPP => {
                NoDirect::Mount(format!("O_DIRECT is refused at open: {code}"))
            }
            Errno::MFILE | Errno::NFILE | Errno::NOMEM => NoDirect::Failed(code),
            _ => NoDirect::File(format!("the file can't be opened a second time: {code}")),
        })?;
        let (memory, offset) = if told {
            (status.stx_dio_mem_align, u64::from(status.stx_dio_offset_align))
        } else {
            let alignment = device_block_bytes(status).unwrap_or(ALIGNMENT_FALLBACK);
            (u32::try_from(alignment).unwrap_or(u32::MAX), alignment)
        };
        self.direct = Some(file);
        self.memory_alignment = memory.next_power_of_two() as usize;
        self.offset_alignment = offset.next_power_of_two().max(page_bytes());
        Ok(())
    }

    /// Opens the file by its name, where `/proc` is missing, if that is still the same file.
    fn open_by_name_again(&self, flags: OFlags) -> std::result::Result<OwnedFd, Errno> {
        let path = self.path.as_deref().ok_or(Errno::NOENT)?;
        let file = rustix::fs::open(path, flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())?;
        if same_file(path, self.buffered.as_fd()) { Ok(file) } else { Err(Errno::NOENT) }
    }

    /// Gives direct I/O up for this file: its granule is too large for the staging blocks.
    pub(crate) fn give_direct_up(&mut self, reason: String) {
        self.direct = None;
        self.direct_refusal = Some(reason);
    }

    /// Whether the path still names this file. A descriptor of the caller always does.
    pub(crate) fn is_current(&self) -> bool {
        self.path.as_deref().is_none_or(|path| same_file(path, self.buffered.as_fd()))
    }

    /// Whether the file has a name at all, so that what is stored in it isn't lost.
    pub(crate) fn is_named(&self) -> bool {
        rustix::fs::fstat(&self.buffered).is_ok_and(|status| status.st_nlink > 0)
    }

    /// Its size in bytes now.
    pub(crate) fn current_size(&self) -> u64 {
        if self.regular {
            rustix::fs::fstat(&self.buffered)
                .map_or(self.size, |status| u64::try_from(status.st_size).unwrap_or(0))
        } else {
            self.size
        }
    }

    /// It is a regular file, whose size and space can change.
    pub(crate) fn is_regular(&self) -> bool {
        self.regular
    }

    /// A store leaves exactly its bytes in it.
    pub(crate) fn is_replaced(&self) -> bool {
        self.exact_size.is_some()
    }

    /// Cuts off what was longer before a whole-file store, and makes room where that ends with an
    /// empty tensor behind all bytes.
    ///
    /// # Errors
    ///
    /// What the system says of `ftruncate(2)`.
    pub(crate) fn trim(&self) -> Result<()> {
        let Some(exact) = self.exact_size.filter(|exact| *exact != self.current_size()) else {
            return Ok(());
        };
        rustix::fs::ftruncate(&self.buffered, exact)
            .map_err(|code| self.os_error(code, "cannot set the size of"))
    }

    /// What messages call it: its path, or what [`name_of`] the caller's descriptor is.
    pub(crate) fn label(&self) -> &Path {
        &self.label
    }

    /// Where the file is in the tree, links followed; its label if it has no name.
    pub(crate) fn whereabouts(&self) -> PathBuf {
        let link = format!("/proc/self/fd/{}", self.buffered.as_raw_fd());
        std::fs::read_link(link).unwrap_or_else(|_| self.label.clone())
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

    /// The descriptor for direct I/O, where there is one.
    pub(crate) fn direct(&self) -> Option<BorrowedFd<'_>> {
        self.direct.as_ref().map(AsFd::as_fd)
    }

    /// What tells which storage the file is on.
    pub(crate) fn whereabouts_of_storage(&self) -> Whereabouts {
        let (major, minor, _) = self.key;
        let mount = self.regular.then_some(self.status.stx_mnt_id);
        Whereabouts { device: (major, minor), mount }
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

    /// The directory that the file's name is in, if its durability was asked for.
    pub(crate) fn directory(&self) -> Option<BorrowedFd<'_>> {
        self.directory.as_ref().map(AsFd::as_fd)
    }

    /// Makes a file that a whole-file store failed to replace one that doesn't look whole.
    ///
    /// `spoiled`: some of its content was overwritten. `size_before`: its size, if it has only
    /// been made longer.
    pub(crate) fn cut_after_failure(&self, spoiled: bool, size_before: Option<u64>) {
        let keep = if spoiled { Some(0) } else { size_before };
        if let Some(keep) = keep.filter(|_| self.is_replaced()) {
            // The failure is being reported already; there is no more to say about the remains.
            let _ = rustix::fs::ftruncate(&self.buffered, keep);
        }
    }

    /// The name that opening it made, if it did.
    pub(crate) fn made_as(&self) -> Option<&Path> {
        self.path.as_deref().filter(|_| self.created)
    }

    /// Removes a name, if it is still this file's.
    pub(crate) fn unlink(&self, path: &Path) {
        if is_same(rustix::fs::lstat(path), self.buffered()) {
            let _ = rustix::fs::unlink(path);
        }
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
    let failed = |code: Errno| {
        if code == Errno::NXIO {
            return not_a_file();
        }
        Error::from_os(code.raw_os_error(), "cannot open")
    };
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

/// Where the file behind a descriptor is, or the descriptor's number if that is nowhere.
fn name_of(descriptor: RawFd) -> PathBuf {
    let named = |path: &PathBuf| path.is_absolute() && path.exists();
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}"));
    link.ok().filter(named).unwrap_or_else(|| PathBuf::from(format!("descriptor {descriptor}")))
}

/// A descriptor of our own for the file behind the caller's, without `O_APPEND` and `O_DIRECT`.
fn reopen(number: RawFd, direction: Direction) -> Result<OwnedFd> {
    let failed = |code: Errno| Error::from_os(code.raw_os_error(), "cannot use");
    let duplicate = duplicate(number).map_err(failed)?;
    // Opening a FIFO anew would wait for its other end: look first.
    regular_or_block(&status_of(duplicate.as_fd())?)?;
    let flags = rustix::fs::fcntl_getfl(&duplicate).map_err(failed)?;
    let (forbidden, opened) = match direction {
        Direction::Load => (OFlags::WRONLY, "it is open for writing only"),
        Direction::Store => (OFlags::RDONLY, "it is open for reading only"),
    };
    if flags.contains(OFlags::PATH) {
        return Err(failed(Errno::BADF).hint("it was opened with O_PATH, for neither direction"));
    }
    if flags & OFlags::RWMODE == forbidden {
        return Err(failed(Errno::BADF).hint(opened));
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

/// Opens the directory that a file's name is in.
fn open_directory(path: &Path) -> Result<OwnedFd> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(parent, flags, Mode::empty()).map_err(|code| {
        Error::from_os(code.raw_os_error(), "cannot open the directory").path(parent)
    })
}

fn is_link(path: &Path) -> bool {
    rustix::fs::lstat(path)
        .is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::Symlink)
}

/// The directory of the file that a link leads to; that of the link where it can't be had (a
/// descriptor's name in `/proc` leads to files that have none).
fn open_directory_behind(link: &Path, of_link: OwnedFd) -> OwnedFd {
    let target = link.canonicalize().ok();
    target.and_then(|target| open_directory(&target).ok()).unwrap_or(of_link)
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
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN | StatxFlags::MNT_ID;
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
        _ => Err(not_a_file()),
    }
}

fn not_a_file() -> Error {
    let text = "cannot move tensors to or from what is neither a file nor a block device:";
    Error::new(ErrorKind::InvalidInput, text)
}

fn same_file(path: &Path, file: BorrowedFd<'_>) -> bool {
    is_same(rustix::fs::stat(path), file)
}

fn is_same(named: std::result::Result<Stat, Errno>, file: BorrowedFd<'_>) -> bool {
    match (named, rustix::fs::fstat(file)) {
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

/// Reserves room for the first `length` bytes of a file and makes it at least that long, so that a
/// full disk is met before the first byte moves. Where the file system has no such call, it is made
/// as long.
///
/// # Errors
///
/// What the system says of `fallocate(2)`.
pub fn reserve(file: &File, length: u64) -> Result<()> {
    if length == 0 {
        return Ok(());
    }
    let reserved = loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length) {
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => break rustix::fs::ftruncate(file, length),
            answer => break answer,
        }
    };
    reserved.map_err(|code| {
        Error::from_os(code.raw_os_error(), "cannot reserve space for").bytes(length, 0)
    })
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

/// Looks at an existing file, or at a directory by means of a file in it.
///
/// # Errors
///
/// What the system says of opening it.
pub fn facts(path: &Path) -> Result<FileFacts> {
    let mounts = Mounts::default();
    let options = OpenOptions {
        direction: Direction::Load,
        mode: DirectMode::Auto,
        exact_size: None,
        with_directory: false,
    };
    let mut file = if path.is_dir() {
        let scratch = Scratch::make(path)?;
        let target = Target::Descriptor(scratch.descriptor());
        TensorFile::open(&target, options, &mounts).map_err(|error| error.path(path))?
    } else {
        TensorFile::open(&Target::Path(path.to_path_buf()), options, &mounts)?
    };
    file.open_direct(options).map_err(|error| error.path(path))?;
    Ok(FileFacts {
        direct: file.is_direct(),
        reason: file.direct_refusal.clone(),
        memory_alignment: file.memory_alignment,
        offset_alignment: file.offset_alignment,
        size: file.size,
    })
}
