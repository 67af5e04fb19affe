//! cuFile, the library of GPUDirect Storage: loading it, its driver, what is registered with it, and
//! moving bytes between files and device memory.
//!
//! # Invariants
//!
//! - The driver is opened once for a [`CuFile`] and closed with it, unless another user of the
//!   process had opened it before. It is closed in the first context that it was used in: where none
//!   is current, cuFile 1.17 leaves its own buffers registered with CUDA when it frees them, and
//!   whatever gets their addresses next can't be registered.
//! - cuFile's log goes where cuFile is told to, and by default to the directory of temporary files:
//!   the driver is opened by a thread that has that for a working directory of its own, since the
//!   log is opened before any setting is looked at (cuFile 1.17). Where a container refuses
//!   `unshare(2)`, it is the process's working directory after all.
//! - A registration holds its `CuFile`, and is ended before that.
//! - That the process is out of descriptors is an error of the system: cuFile 1.17 says something
//!   else then, or never returns from opening its driver.
#![expect(unsafe_code, reason = "calls cuFile")]

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use super::codes::{CODE_BASE, CUDA_DRIVER_ERROR, CUFILE_CODES, DRIVER_ALREADY_OPEN};
use super::library::{self, Search, symbol};
use super::symbols::table;
use super::{Context, Cuda, DeviceAddress, Entered};
use crate::config::temporary_directory;
use crate::error::{DeviceCode, Error, Result};
use crate::syscalls::{in_directory, try_descriptors};

/// The names of the library: what its packages have, and what a toolkit links to.
const NAMES: &[&str] = &["libcufile.so.0", "libcufile.so.1", "libcufile.so"];

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const OPAQUE_FD: c_uint = 1;
/// `CU_FILE_NVME_SUPPORTED`, by which its P2P flags are asked for.
const NVME: c_uint = 4;
/// The bit of `CU_FILE_NVME_P2P_SUPPORTED`: how libraries without P2P flags tell of them.
const NVME_P2P_SUPPORTED: c_uint = 1 << 11;
/// The bit of `CUFILE_P2PDMA` among the P2P flags.
const P2PDMA: c_uint = 1;
/// Descriptors that have to be free for opening the driver. In compatibility mode, cuFile 1.17 was
/// seen to use three; `nvidia-fs` has devices (`/dev/nvidia-fs0` and so on) that come on top of that.
const DRIVER_DESCRIPTORS: usize = 32;
/// Room for `CUfileDrvProps_t`, which has 72 bytes in cuFile 1.11, and grows.
const PROPERTIES_BYTES: usize = 512;

/// `CUfileError_t` of `cufile.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    file: c_int,
    driver: c_int,
}

/// `CUfileDescr_t` of `cufile.h`, for a descriptor of Linux.
#[repr(C)]
struct Description {
    kind: c_uint,
    /// A union with a pointer, so it is aligned like one.
    file: FileUnion,
    operations: *const c_void,
}

/// The union of descriptor and pointer in [`Description`].
#[repr(C)]
union FileUnion {
    descriptor: c_int,
    _pointer: *const c_void,
}

/// The beginning of `CUfileDrvProps_t` of `cufile.h`, and room for what may follow it.
#[repr(C)]
struct Properties {
    major_version: c_uint,
    minor_version: c_uint,
    poll_threshold_kib: usize,
    max_direct_io_kib: usize,
    status_flags: c_uint,
    control_flags: c_uint,
    rest: [u8; PROPERTIES_BYTES],
}

table! {
    /// The functions that are used, with the signatures of `cufile.h` (1.11).
    struct Calls {
        driver_open: ["cuFileDriverOpen"] () -> Status,
        driver_close: ["cuFileDriverClose_v2", "cuFileDriverClose"] () -> Status,
        properties: ["cuFileDriverGetProperties"] (*mut Properties) -> Status,
        handle_register: ["cuFileHandleRegister"] (*mut usize, *mut Description) -> Status,
        handle_deregister: ["cuFileHandleDeregister"] (usize) -> (),
        buffer_register: ["cuFileBufRegister"] (usize, usize, c_int) -> Status,
        buffer_deregister: ["cuFileBufDeregister"] (usize) -> Status,
        read: ["cuFileRead"] (usize, usize, usize, i64, i64) -> isize,
        write: ["cuFileWrite"] (usize, usize, usize, i64, i64) -> isize,
    }
}

/// What cuFile's driver says it can reach without the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverFacts {
    /// The kernel module `nvidia-fs` is there.
    pub nvidia_fs: bool,
    /// `CUfileDriverStatusFlags_t`: a bit for each kind of storage that `nvidia-fs` reaches.
    pub status_flags: u32,
    /// NVMe drives are reached by the kernel's own peer-to-peer transfers.
    pub nvme_p2pdma: bool,
}

/// cuFile with its driver open. See the [module documentation](super).
pub struct CuFile {
    cuda: Arc<Cuda>,
    calls: Calls,
    facts: DriverFacts,
    opened_here: bool,
    /// The first context that it was used in, to close it in.
    used_in: OnceLock<Arc<Context>>,
}

impl std::fmt::Debug for CuFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CuFile").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// `cuFileDriverGetP2PFlags`, which only newer libraries have.
type P2pFlags = unsafe extern "C" fn(c_uint, *mut c_uint) -> Status;

impl CuFile {
    /// Loads cuFile and opens its driver.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the library or a function of it
    /// is missing; [`ErrorKind::Device`](crate::ErrorKind::Device) if its driver can't be opened; what
    /// the system has run out of.
    pub fn load(cuda: &Arc<Cuda>, search: &Search) -> Result<Arc<Self>> {
        cuda.refuse_forked()?;
        let library = library::open(NAMES, search)?;
        let calls = Calls::of(library)?;
        try_descriptors(DRIVER_DESCRIPTORS).map_err(|code| {
            Error::from_os(code.raw_os_error(), "cannot open the driver of cuFile")
        })?;
        let status = in_directory(&temporary_directory(), || {
            // SAFETY: the function takes no arguments; opening again is refused, and harmless.
            unsafe { (calls.driver_open)() }
        });
        let opened_here = status.file != DRIVER_ALREADY_OPEN;
        if opened_here {
            check(cuda, status, "cannot open the driver of cuFile")?;
        }
        let facts = DriverFacts::default();
        let (cuda, used_in) = (Arc::clone(cuda), OnceLock::new());
        let mut opened = Self { cuda, calls, facts, opened_here, used_in };
        opened.facts = opened.ask()?;
        // SAFETY: the signature is that of `cufile.h` (1.17).
        if let Ok(ask) = unsafe { symbol::<P2pFlags>(library, &["cuFileDriverGetP2PFlags"]) } {
            let mut flags = 0;
            // SAFETY: the result's pointer is valid.
            let status = unsafe { ask(NVME, &raw mut flags) };
            opened.facts.nvme_p2pdma = status.file == 0 && flags & P2PDMA != 0;
        }
        Ok(Arc::new(opened))
    }

    /// What the driver's properties say.
    fn ask(&self) -> Result<DriverFacts> {
        let mut properties = Properties {
            major_version: 0,
            minor_version: 0,
            poll_threshold_kib: 0,
            max_direct_io_kib: 0,
            status_flags: 0,
            control_flags: 0,
            rest: [0; PROPERTIES_BYTES],
        };
        // SAFETY: there is room for the properties of this version and longer ones.
        let status = unsafe { (self.calls.properties)(&raw mut properties) };
        check(&self.cuda, status, "cannot ask cuFile for its properties")?;
        let Properties { major_version, status_flags, .. } = properties;
        Ok(DriverFacts {
            nvidia_fs: major_version > 0,
            status_flags,
            nvme_p2pdma: status_flags & NVME_P2P_SUPPORTED != 0,
        })
    }

    /// Makes a context that it is used in current, and remembers the first one.
    fn enter<'a>(&self, context: &'a Arc<Context>) -> Result<Entered<'a>> {
        let entered = context.enter()?;
        self.used_in.get_or_init(|| Arc::clone(context));
        Ok(entered)
    }

    /// What its driver can reach.
    pub fn facts(&self) -> DriverFacts {
        self.facts
    }

    /// Registers an open file.
    ///
    /// # Errors
    ///
    /// cuFile doesn't take it: its file system, how it was opened, that it has no name, or twice; what
    /// the system has run out of.
    pub fn register_file(self: &Arc<Self>, descriptor: BorrowedFd<'_>) -> Result<FileRegistration> {
        self.cuda.refuse_forked()?;
        let mut description = Description {
            kind: OPAQUE_FD,
            file: FileUnion { descriptor: descriptor.as_raw_fd() },
            operations: std::ptr::null(),
        };
        let mut handle = 0;
        let register = self.calls.handle_register;
        // SAFETY: both pointers are valid, and the descriptor is open.
        let status = unsafe { register(&raw mut handle, &raw mut description) };
        let what = "cannot register a file with cuFile";
        check(&self.cuda, status, what).map_err(|refusal| match try_descriptors(1) {
            Err(code) => Error::from_os(code.raw_os_error(), what),
            Ok(()) => refusal,
        })?;
        Ok(FileRegistration { library: Arc::clone(self), handle })
    }

    /// Registers device memory, so that bytes are moved to and from it without another copy.
    ///
    /// # Errors
    ///
    /// It isn't device memory, is registered already, or can't be pinned.
    ///
    /// # Safety
    ///
    /// The memory isn't freed before what comes back is dropped.
    pub unsafe fn register_buffer(
        self: &Arc<Self>,
        context: &Arc<Context>,
        start: DeviceAddress,
        length: usize,
    ) -> Result<BufferRegistration> {
        let _entered = self.enter(context)?;
        // SAFETY: the caller's promise is passed on; the library looks at the addresses itself.
        let status = unsafe { (self.calls.buffer_register)(start, length, 0) };
        check(&self.cuda, status, "cannot register device memory with cuFile")?;
        Ok(BufferRegistration { library: Arc::clone(self), context: Arc::clone(context), start })
    }
}

impl Drop for CuFile {
    fn drop(&mut self) {
        if self.opened_here && self.cuda.is_here() {
            let _entered = self.used_in.get().map(|context| context.enter());
            // SAFETY: it was opened here, and nothing registered is left.
            let _ = unsafe { (self.calls.driver_close)() };
        }
    }
}

/// A file that cuFile knows. The descriptor must stay open until it is dropped.
#[derive(Debug)]
pub struct FileRegistration {
    library: Arc<CuFile>,
    handle: usize,
}

/// A range of bytes of a file and of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// Where the registered or allocated device memory starts.
    pub base: DeviceAddress,
    /// How far behind that the bytes are.
    pub base_offset: usize,
    /// Where they are in the file.
    pub offset: u64,
    /// How many.
    pub length: usize,
}

impl FileRegistration {
    /// Reads into device memory, and waits for that. How many bytes: fewer at the file's end.
    ///
    /// # Errors
    ///
    /// What the file or cuFile met.
    ///
    /// # Safety
    ///
    /// The device memory is valid, and nothing else uses it meanwhile.
    pub unsafe fn read(&self, context: &Arc<Context>, range: FileRange) -> Result<usize> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.transfer(self.library.calls.read, context, range, "read") }
    }

    /// Writes from device memory, and waits for that. How many bytes were written.
    ///
    /// # Errors
    ///
    /// What the file or cuFile met.
    ///
    /// # Safety
    ///
    /// The device memory is valid, and nothing changes it meanwhile.
    pub unsafe fn write(&self, context: &Arc<Context>, range: FileRange) -> Result<usize> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.transfer(self.library.calls.write, context, range, "write") }
    }

    /// # Safety
    ///
    /// As for [`Self::read`] and [`Self::write`].
    unsafe fn transfer(
        &self,
        function: unsafe extern "C" fn(usize, usize, usize, i64, i64) -> isize,
        context: &Arc<Context>,
        range: FileRange,
        what: &str,
    ) -> Result<usize> {
        let _entered = self.library.enter(context)?;
        let FileRange { base, base_offset, offset, length } = range;
        let place = i64::try_from(offset).unwrap_or(i64::MAX);
        let base_offset = i64::try_from(base_offset).unwrap_or(i64::MAX);
        // SAFETY: the handle is registered, the memory valid by the caller's promise.
        let moved = unsafe { function(self.handle, base, length, place, base_offset) };
        if let Ok(bytes) = usize::try_from(moved) {
            return Ok(bytes);
        }
        let code = match moved {
            -1 => std::io::Error::last_os_error().raw_os_error().unwrap_or_default(),
            _ => c_int::try_from(-moved).unwrap_or(c_int::MAX),
        };
        let error = transfer_error(code, format!("cannot {what} through cuFile"));
        Err(error.offset(offset).bytes(length as u64, 0))
    }
}

impl Drop for FileRegistration {
    fn drop(&mut self) {
        if self.library.cuda.is_here() {
            // SAFETY: it was registered, and isn't used after this.
            unsafe { (self.library.calls.handle_deregister)(self.handle) };
        }
    }
}

/// Device memory that cuFile knows, until it is dropped.
#[derive(Debug)]
pub struct BufferRegistration {
    library: Arc<CuFile>,
    context: Arc<Context>,
    start: DeviceAddress,
}

impl Drop for BufferRegistration {
    fn drop(&mut self) {
        if self.library.cuda.is_here() {
            // It is to be tried in a context that is broken, too.
            let _entered = self.context.enter();
            // SAFETY: it was registered, and is still allocated by the promise made then.
            let _ = unsafe { (self.library.calls.buffer_deregister)(self.start) };
        }
    }
}

/// A status as a result; `what` says what was being done.
fn check(cuda: &Cuda, status: Status, what: &str) -> Result<()> {
    match status.file {
        0 => Ok(()),
        CUDA_DRIVER_ERROR if status.driver != 0 => cuda.check(status.driver, what),
        code => Err(file_error(code, what.to_owned())),
    }
}

/// The error for a code of `"cuda"` or `"cufile"`, with its name and what to try.
pub(crate) fn device_error(library: &str, code: i32, context: &Context, what: &str) -> Error {
    let error = match library {
        "cuda" => context.cuda().check(code, what).err(),
        _ => None,
    };
    error.unwrap_or_else(|| file_error(code, what.to_owned()))
}

/// An error of a transfer. Its documentation has cuFile return its own codes negated, and -1 with the
/// system's in `errno`; cuFile 1.17 returns -1, with its own codes in `errno`, and with 1 where a
/// system call failed, whatever that said (5 for writes from memory that it takes for the host's).
fn transfer_error(code: c_int, what: String) -> Error {
    if code > CODE_BASE {
        return file_error(code, what);
    }
    let told = if code == 0 { libc::EPERM } else { code };
    Error::from_io(std::io::Error::from_raw_os_error(told), what)
}

fn file_error(code: c_int, what: String) -> Error {
    let known = CUFILE_CODES.iter().find(|(known, ..)| *known == code);
    let name = known.map_or_else(String::new, |(_, name, _)| format!("CU_FILE_{name}"));
    let error = Error::from_device(DeviceCode { library: "cufile", code, name }, what);
    match known {
        Some((_, _, hint)) if !hint.is_empty() => error.hint(*hint),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use forebay_standin::Standin;

    use super::super::cuda::tests::stand_in;
    use super::*;

    const LENGTH: usize = 100_003;

    fn bytes(seed: usize) -> Vec<u8> {
        (0..LENGTH).map(|index| u8::try_from((index * 31 + seed) % 251).unwrap()).collect()
    }

    /// Where the build is, as `/tmp` may not take direct I/O.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
    }

    fn load(standin: &Standin) -> Result<Arc<CuFile>> {
        let search = stand_in(standin);
        CuFile::load(&Cuda::load(&search)?, &search)
    }

    /// A file that is open for direct I/O, on a file system that takes it.
    fn file(folder: &Path, content: &[u8]) -> File {
        let path = folder.join("tensor.bin");
        std::fs::write(&path, content).unwrap();
        let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap()
    }

    #[test]
    fn bytes_move_between_a_file_and_device_memory() {
        let standin = Standin::new().unwrap();
        let before = standin.census();
        let folder = folder();
        let file = file(folder.path(), &bytes(1));
        let memory = standin.allocate(1, LENGTH + 7);
        {
            let cufile = load(&standin).unwrap();
            assert!(cufile.facts().nvidia_fs);
            let context = Context::retain(&cufile.cuda, 1).unwrap();
            let registered = cufile.register_file(file.as_fd()).unwrap();
            // SAFETY: the memory is freed below.
            let buffer = unsafe { cufile.register_buffer(&context, memory, LENGTH + 7) }.unwrap();
            let range = FileRange { base: memory, base_offset: 7, offset: 3, length: LENGTH };
            // SAFETY: nothing else uses the memory.
            let read = unsafe { registered.read(&context, range) }.unwrap();
            assert_eq!(read, LENGTH - 3, "the file ends there");
            assert_eq!(standin.peek(memory + 7, read), bytes(1)[3..]);
            standin.poke(memory, &bytes(2));
            let range = FileRange { base_offset: 0, offset: 1, ..range };
            // SAFETY: nothing else uses the memory.
            let written = unsafe { registered.write(&context, range) }.unwrap();
            assert_eq!(written, LENGTH);
            drop(buffer);
        }
        let stored = std::fs::read(folder.path().join("tensor.bin")).unwrap();
        assert_eq!((&stored[..1], &stored[1..]), (&bytes(1)[..1], &bytes(2)[..]));
        standin.free(memory);
        assert_eq!(standin.census(), before);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn what_cufile_refuses_is_named_with_its_code_and_a_hint() {
        let standin = Standin::new().unwrap();
        let folder = folder();
        let file = file(folder.path(), b"tensor");
        standin.configure("gds=absent");
        let error = load(&standin).unwrap_err();
        assert_eq!(error.device_code().unwrap().name, "CU_FILE_DRIVER_NOT_INITIALIZED");
        assert!(error.to_string().contains("nvidia-fs"), "{error}");
        standin.configure("gds=unsupported");
        let cufile = load(&standin).unwrap();
        let error = cufile.register_file(file.as_fd()).unwrap_err();
        assert_eq!(error.device_code().unwrap().code, 5008);
        assert!(error.to_string().contains("file system"), "{error}");
        standin.configure("gds=direct fail=cuFileHandleRegister:2:2");
        let error = cufile.register_file(file.as_fd()).unwrap_err();
        assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_OUT_OF_MEMORY");
        let registered = cufile.register_file(file.as_fd()).unwrap();
        standin.configure("fail=cuFileRead:1:5012");
        let context = Context::retain(&cufile.cuda, 0).unwrap();
        let range = FileRange { base: 4096, base_offset: 0, offset: 9, length: 1 };
        // SAFETY: the call fails before it touches memory.
        let error = unsafe { registered.read(&context, range) }.unwrap_err();
        assert_eq!(error.offset_bytes(), Some(9));
        assert!(error.to_string().contains("CU_FILE_CUDA_POINTER_INVALID"), "{error}");
    }

    #[test]
    fn codes_come_by_either_way_and_those_of_the_system_perhaps_not_at_all() {
        let standin = Standin::new().unwrap();
        let cufile = load(&standin).unwrap();
        let context = Context::retain(&cufile.cuda, 0).unwrap();
        let folder = folder();
        drop(file(folder.path(), &bytes(1)));
        // Registered all the same, and it can't be written to.
        let file = File::open(folder.path().join("tensor.bin")).unwrap();
        rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::DIRECT).unwrap();
        let registered = cufile.register_file(file.as_fd()).unwrap();
        let memory = standin.allocate(0, 4096);
        let range = FileRange { base: memory, base_offset: 0, offset: 0, length: 4096 };
        for (number, settings, code) in [(1, "", libc::EPERM), (2, "documented=1", libc::EBADF)] {
            standin.configure(settings);
            // SAFETY: the memory is freed below.
            let error = unsafe { registered.write(&context, range) }.unwrap_err();
            assert_eq!(error.os_code(), Some(code));
            standin.configure(&format!("fail=cuFileRead:{number}:5017"));
            // SAFETY: the call fails before it touches memory.
            let error = unsafe { registered.read(&context, range) }.unwrap_err();
            assert_eq!(error.device_code().unwrap().name, "CU_FILE_INVALID_MAPPING_RANGE");
        }
        standin.free(memory);
    }

    #[test]
    fn compat_mode_is_not_taken_for_direct() {
        let standin = Standin::new().unwrap();
        standin.configure("gds=compat");
        let first = load(&standin).unwrap();
        assert_eq!(first.facts(), DriverFacts::default());
        // One driver for the process: who came second doesn't close it.
        drop(load(&standin).unwrap());
        assert_eq!(standin.count("cuFileDriverClose_v2"), 0);
        drop(first);
        assert_eq!(standin.count("cuFileDriverClose_v2"), 1);
    }

    #[test]
    fn the_driver_is_closed_in_a_context_that_it_was_used_in() {
        let standin = Standin::new().unwrap();
        let cufile = load(&standin).unwrap();
        let folder = folder();
        let file = file(folder.path(), &bytes(1));
        let memory = standin.allocate(1, LENGTH);
        {
            let context = Context::retain(&cufile.cuda, 1).unwrap();
            let registered = cufile.register_file(file.as_fd()).unwrap();
            let range = FileRange { base: memory, base_offset: 0, offset: 0, length: LENGTH };
            // SAFETY: nothing else uses the memory, which is freed below.
            assert_eq!(unsafe { registered.read(&context, range) }.unwrap(), LENGTH);
        }
        drop(cufile);
        assert_eq!(standin.count("cuFileDriverClose_v2"), 1);
        assert_eq!(standin.current(), None);
        standin.free(memory);
        assert_eq!(standin.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_descriptor_that_is_closed_before_its_registration_ends_is_found() {
        let standin = Standin::new().unwrap();
        let cufile = load(&standin).unwrap();
        let folder = folder();
        let first = file(folder.path(), &bytes(1));
        let registered = cufile.register_file(first.as_fd()).unwrap();
        drop(first);
        drop(registered);
        let found = standin.violations();
        assert!(found.len() == 1 && found[0].contains("closed while registered"), "{found:?}");
    }

    #[test]
    fn the_description_has_the_layout_of_the_header() {
        assert_eq!(std::mem::offset_of!(Description, file), size_of::<usize>());
        assert_eq!(std::mem::offset_of!(Description, operations), 2 * size_of::<usize>());
        assert_eq!(std::mem::offset_of!(Properties, status_flags), 24);
    }

    #[test]
    fn peer_to_peer_transfers_are_told_from_nvidia_fs() {
        let standin = Standin::new().unwrap();
        standin.configure("gds=p2pdma");
        let facts = load(&standin).unwrap().facts();
        assert_eq!(facts, DriverFacts { nvme_p2pdma: true, ..DriverFacts::default() });
    }

    #[test]
    fn the_log_of_cufile_does_not_appear_in_the_working_directory() {
        let standin = Standin::new().unwrap();
        load(&standin).unwrap();
        assert!(!Path::new("cufile.log").exists());
        assert!(temporary_directory().join("cufile.log").exists());
    }
}
