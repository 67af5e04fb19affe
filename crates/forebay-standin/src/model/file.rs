//! cuFile: its driver, handles of files, registered buffers, and the moving of bytes.

use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use super::memory::Allocation;
use super::settings::Gds;
use super::{Model, Outcome, code, current};

/// What lengths and offsets of direct I/O are multiples of.
const ALIGNMENT: u64 = 4096;
/// Bytes moved at a time.
const STEP_BYTES: usize = 1 << 20;

/// A registered file.
#[derive(Debug)]
struct Handle {
    descriptor: i32,
    /// The same file without direct I/O.
    file: Arc<File>,
    /// What has the file's name when it is registered: cuFile 1.17 opens that for lengths and offsets
    /// that are no multiples of [`ALIGNMENT`].
    by_name: Arc<File>,
}

/// See the [module documentation](self).
#[derive(Default)]
pub(crate) struct Files {
    open_count: u32,
    handles: BTreeMap<usize, Handle>,
    /// Registered device memory: start and length.
    buffers: BTreeMap<usize, usize>,
    /// It has moved something, through buffers of its own that it registered with the driver.
    has_own_buffers: bool,
}

/// A move that was checked.
pub(crate) struct Move {
    file: Arc<File>,
    allocation: Arc<Allocation>,
    offset: usize,
    length: usize,
    file_offset: u64,
    load: bool,
}

/// What a caller of cuFile asks to move.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) handle: usize,
    pub(crate) base: usize,
    pub(crate) length: usize,
    pub(crate) file_offset: i64,
    pub(crate) base_offset: i64,
    pub(crate) load: bool,
}

impl Files {
    pub(crate) fn handle_count(&self) -> usize {
        self.handles.len()
    }

    pub(crate) fn buffer_count(&self) -> usize {
        self.buffers.len()
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open_count > 0
    }

    pub(crate) fn use_count(&self) -> u32 {
        self.open_count
    }
}

impl Model {
    pub(crate) fn open_file_driver(&mut self) -> Outcome {
        // It goes on without a log where that can't be written.
        let _log = OpenOptions::new().append(true).create(true).open("cufile.log");
        // So many more descriptors it needs at once: with one of them cuFile 1.17 asks for modules of
        // the kernel for ever.
        let Ok(_first) = File::open("/dev/null") else { return Err(code::FILE_NVFS_SETUP_ERROR) };
        if File::open("/dev/null").is_err() {
            let text = "cuFile's driver is opened with too few descriptors: it would never return";
            self.journal.violation(text.to_owned());
            return Err(code::FILE_NVFS_SETUP_ERROR);
        }
        if self.settings.gds == Gds::Absent {
            return Err(code::FILE_DRIVER_NOT_INITIALIZED);
        }
        if self.files.is_open() {
            return Err(code::FILE_DRIVER_ALREADY_OPEN);
        }
        self.files.open_count += 1;
        Ok(())
    }

    pub(crate) fn close_file_driver(&mut self) -> Outcome {
        self.need_file_driver()?;
        self.files.open_count -= 1;
        if std::mem::take(&mut self.files.has_own_buffers) && current().is_err() {
            let text = "cuFile's driver is closed without a context: its buffers stay registered";
            self.journal.violation(text.to_owned());
        }
        Ok(())
    }

    pub(crate) fn need_file_driver(&self) -> Outcome {
        if self.files.is_open() { Ok(()) } else { Err(code::FILE_DRIVER_NOT_INITIALIZED) }
    }

    pub(crate) fn register_file(&mut self, descriptor: i32) -> Outcome<usize> {
        self.need_file_driver()?;
        if self.settings.gds == Gds::Unsupported {
            return Err(code::FILE_IO_NOT_SUPPORTED);
        }
        if self.files.handles.values().any(|handle| handle.descriptor == descriptor) {
            self.journal.violation(format!("descriptor {descriptor} is registered twice"));
            return Err(code::FILE_HANDLE_ALREADY_REGISTERED);
        }
        // SAFETY: a call on a number.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
        if flags < 0 {
            return Err(code::FILE_INVALID_FILE_TYPE);
        }
        if flags & (libc::O_APPEND | libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOATIME) != 0 {
            return Err(code::FILE_INVALID_FILE_OPEN_FLAG);
        }
        if matches!(self.settings.gds, Gds::Direct | Gds::P2pdma) && flags & libc::O_DIRECT == 0 {
            return Err(code::FILE_DIO_NOT_SET);
        }
        let access = flags & libc::O_ACCMODE;
        let mut how = OpenOptions::new();
        how.read(access != libc::O_WRONLY).write(access != libc::O_RDONLY);
        let link = format!("/proc/self/fd/{descriptor}");
        let name = std::fs::read_link(&link).map_err(|_| code::FILE_INVALID_FILE_TYPE)?;
        let by_name = how.open(name).map_err(|_| code::FILE_GETNEWFD_FAILED)?;
        let file = how.open(link).map_err(|_| code::FILE_GETNEWFD_FAILED)?;
        let (file, by_name) = (Arc::new(file), Arc::new(by_name));
        let handle = self.new_handle();
        self.files.handles.insert(handle, Handle { descriptor, file, by_name });
        Ok(handle)
    }

    pub(crate) fn deregister_file(&mut self, handle: usize) {
        let Some(Handle { descriptor, file, .. }) = self.files.handles.remove(&handle) else {
            let text = "a cuFile handle is deregistered that isn't registered".to_owned();
            return self.journal.violation(text);
        };
        if !is_open_as(descriptor, &file) {
            let text = format!("descriptor {descriptor} was closed while registered with cuFile");
            self.journal.violation(text);
        }
    }

    pub(crate) fn register_buffer(&mut self, start: usize, length: usize) -> Outcome {
        self.need_file_driver()?;
        if self.memory.at(start).is_none() {
            return Err(code::FILE_CUDA_MEMORY_TYPE_INVALID);
        }
        if self.memory.device(&(start..start + length)).is_err() {
            return Err(code::FILE_CUDA_POINTER_RANGE_ERROR);
        }
        if self.files.buffers.contains_key(&start) {
            self.journal.violation("a cuFile buffer is registered twice".to_owned());
            return Err(code::FILE_MEMORY_ALREADY_REGISTERED);
        }
        self.files.buffers.insert(start, length);
        Ok(())
    }

    pub(crate) fn deregister_buffer(&mut self, start: usize) -> Outcome {
        self.need_file_driver()?;
        if self.files.buffers.remove(&start).is_none() {
            self.journal.violation("a cuFile buffer is deregistered that isn't".to_owned());
            return Err(code::FILE_MEMORY_NOT_REGISTERED);
        }
        Ok(())
    }

    /// The registered buffers that reach into device memory which is about to be freed.
    pub(crate) fn check_freed(&mut self, bytes: &Range<usize>) {
        let held = self
            .files
            .buffers
            .iter()
            .any(|(start, length)| *start < bytes.end && bytes.start < start + length);
        if held {
            self.journal
                .violation("device memory is freed while registered with cuFile".to_owned());
        }
    }

    /// Checks a move. The device memory that it uses comes with it.
    pub(crate) fn plan_move(&mut self, wanted: &Wanted) -> Outcome<(Move, Range<usize>)> {
        self.need_file_driver()?;
        let handle =
            self.files.handles.get(&wanted.handle).ok_or(code::FILE_HANDLE_NOT_REGISTERED)?;
        let base_offset =
            usize::try_from(wanted.base_offset).map_err(|_| code::FILE_INVALID_VALUE)?;
        let file_offset =
            u64::try_from(wanted.file_offset).map_err(|_| code::FILE_INVALID_VALUE)?;
        let is_aligned = file_offset.is_multiple_of(ALIGNMENT)
            && (wanted.length as u64).is_multiple_of(ALIGNMENT);
        let file = Arc::clone(if is_aligned { &handle.file } else { &handle.by_name });
        let start = wanted.base + base_offset;
        let bytes = start..start + wanted.length;
        if let Some(length) = self.files.buffers.get(&wanted.base)
            && bytes.end > wanted.base + length
        {
            return Err(code::FILE_CUDA_POINTER_RANGE_ERROR);
        }
        let (allocation, offset) = self.memory.device(&bytes).map_err(|(_, text)| {
            self.journal.violation(format!("cuFile uses {text}"));
            code::FILE_CUDA_POINTER_INVALID
        })?;
        self.files.has_own_buffers = true;
        let Wanted { length, load, .. } = *wanted;
        Ok((Move { file, allocation, offset, length, file_offset, load }, bytes))
    }
}

/// Whether a descriptor is still one of this file.
fn is_open_as(descriptor: i32, file: &File) -> bool {
    let key = |status: Metadata| (status.dev(), status.ino());
    let open = std::fs::metadata(format!("/proc/self/fd/{descriptor}")).map(key);
    open.ok() == file.metadata().map(key).ok()
}

impl Move {
    /// Moves the bytes: how many, fewer at the end of a file; or a negated `errno`.
    pub(crate) fn run(&self) -> isize {
        let mut block = vec![0u8; STEP_BYTES.min(self.length)];
        let mut done = 0;
        while done < self.length {
            let step = block.len().min(self.length - done);
            match self.step(&mut block[..step], done) {
                Ok(0) => break,
                Ok(moved) => done += moved,
                Err(error) => {
                    return -isize::try_from(error.raw_os_error().unwrap_or(5)).unwrap_or(5);
                }
            }
        }
        isize::try_from(done).unwrap_or(isize::MAX)
    }

    fn step(&self, block: &mut [u8], done: usize) -> std::io::Result<usize> {
        let at = self.file_offset + done as u64;
        let address = block.as_mut_ptr().expose_provenance();
        if self.load {
            let moved = self.file.read_at(block, at)?;
            self.allocation.copy_in(self.offset + done, address, moved);
            return Ok(moved);
        }
        self.allocation.copy_out(self.offset + done, address, block.len());
        self.file.write_all_at(block, at)?;
        Ok(block.len())
    }
}
