//! The stand-in as Rust tests see it.
#![expect(clippy::missing_panics_doc, reason = "for tests, which panic when it refuses them")]

use std::ffi::{c_char, c_int, c_uint};
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::Library;
use tempfile::TempDir;

/// The stand-in is one for the whole process.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// The names under which it is found.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcufile.so.0"];
/// The name under which cargo builds it.
const BUILT: &str = "libforebay_standin.so";
/// Texts of the stand-in are shorter than this.
const TEXT_BYTES_MAX: usize = 4 << 20;

/// The stand-in, for one test at a time. See the [crate's documentation](crate).
///
/// It begins with the settings and the empty journal of a fresh one, and with the contexts of all
/// devices held, as by an application that uses them.
#[derive(Debug)]
pub struct Standin {
    library: Library,
    folder: TempDir,
    devices: c_int,
    _exclusive: MutexGuard<'static, ()>,
}

/// A stream of the application that a test plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The device's number.
    pub device: i32,
    /// The driver's handle.
    pub handle: usize,
}

/// What a kernel reads, once its stream has got there. To drop it without waiting is to let the
/// kernel write to memory that isn't its own.
#[derive(Debug)]
#[must_use]
pub struct KernelRead {
    stream: Stream,
    bytes: Vec<u8>,
}

impl KernelRead {
    /// Waits for the kernel's stream.
    pub fn wait(self, standin: &Standin) -> Vec<u8> {
        standin.synchronize(self.stream);
        self.bytes
    }
}

/// A stream is kept from starting anything.
#[derive(Debug)]
#[must_use]
pub struct Held<'a> {
    standin: &'a Standin,
    stream: Stream,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.standin.set_held(self.stream, 0);
    }
}

/// A device's context is current on this thread.
#[derive(Debug)]
#[must_use]
pub struct Current<'a> {
    standin: &'a Standin,
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        self.standin.device_call("forebay_standin_make_current", -1);
    }
}

impl Standin {
    /// Waits for other tests of this process to be done with it, and has it to itself.
    ///
    /// # Errors
    ///
    /// The shared object isn't beside the test (`cargo build -p forebay-standin`), or links to it
    /// can't be made.
    pub fn new() -> io::Result<Self> {
        let exclusive = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let built = Self::path()?;
        let folder = tempfile::tempdir()?;
        for name in NAMES {
            std::os::unix::fs::symlink(&built, folder.path().join(name))?;
        }
        // SAFETY: initialising the library runs no code but Rust's.
        let library = unsafe { Library::new(&built) }.map_err(io::Error::other)?;
        let mut standin = Self { library, folder, devices: 0, _exclusive: exclusive };
        standin.call::<extern "C" fn()>("forebay_standin_reset")();
        while standin.device_call("forebay_standin_retain", standin.devices) == 0 {
            standin.devices += 1;
        }
        Ok(standin)
    }

    /// The shared object, beside the test that runs or above it.
    ///
    /// # Errors
    ///
    /// It isn't there.
    pub fn path() -> io::Result<PathBuf> {
        let test = std::env::current_exe()?;
        let folders = test.ancestors().skip(1).take(2);
        let found = folders.map(|folder| folder.join(BUILT)).find(|path| path.exists());
        found.ok_or_else(|| io::Error::other(format!("no {BUILT} beside {}", test.display())))
    }

    /// A folder with `libcuda.so.1` and `libcufile.so.0`.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn call<F: Copy>(&self, symbol: &str) -> F {
        // SAFETY: the types that are asked for below are those of `exports/control.rs`.
        let found = unsafe { self.library.get::<F>(symbol) };
        match found {
            Ok(found) => *found,
            Err(error) => panic!("{symbol}: {error}"),
        }
    }

    fn device_call(&self, symbol: &str, device: c_int) -> c_int {
        self.call::<extern "C" fn(c_int) -> c_int>(symbol)(device)
    }

    /// Sets it up, by words with spaces between them:
    ///
    /// - `devices=N`; `seed=N` and `delay_us=N`, for how late tasks are;
    /// - `fail=SYMBOL:N:CODE`, `fail=SYMBOL:N+:CODE`: the N-th call of a function, or all from it
    ///   on, fail with that code, and do nothing else;
    /// - `broken=CODE`: an error that sticks to every context (0: none), `broken=CODE@DEVICE` to one;
    /// - `deinitialised=1`: the driver is gone, as at the end of a process, and every call says so;
    /// - `gds=direct|compat|absent|unsupported|p2pdma`.
    ///
    /// # Panics
    ///
    /// A word isn't understood.
    pub fn configure(&self, text: &str) {
        let configure =
            self.call::<extern "C" fn(*const c_char, usize) -> c_int>("forebay_standin_configure");
        assert_eq!(configure(text.as_ptr().cast(), text.len()), 0, "not understood: {text}");
    }

    /// Destroys a device's context, with its streams, events and memory, as `cudaDeviceReset` does.
    pub fn reset_device(&self, device: i32) {
        assert_eq!(self.device_call("forebay_standin_reset_device", device), 0);
    }

    /// Makes a device's context current on this thread until what comes back is dropped.
    pub fn make_current(&self, device: i32) -> Current<'_> {
        assert_eq!(self.device_call("forebay_standin_make_current", device), 0);
        Current { standin: self, on_this_thread: PhantomData }
    }

    /// The device whose context is current on this thread.
    pub fn current(&self) -> Option<i32> {
        let device = self.call::<extern "C" fn() -> c_int>("forebay_standin_current")();
        (device >= 0).then_some(device)
    }

    /// How often a function of the driver was called.
    pub fn count(&self, symbol: &str) -> u64 {
        let count =
            self.call::<extern "C" fn(*const c_char, usize) -> u64>("forebay_standin_count");
        count(symbol.as_ptr().cast(), symbol.len())
    }

    fn text(&self, kind: c_uint) -> String {
        let text =
            self.call::<extern "C" fn(c_uint, *mut c_char, usize) -> usize>("forebay_standin_text");
        let mut bytes = vec![0u8; TEXT_BYTES_MAX];
        let length = text(kind, bytes.as_mut_ptr().cast(), bytes.len());
        bytes.truncate(length);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What was found to be wrong so far.
    pub fn violations(&self) -> Vec<String> {
        self.text(0).lines().map(str::to_owned).collect()
    }

    /// The functions of the driver that were called, in order.
    pub fn calls(&self) -> Vec<String> {
        self.text(1).lines().map(str::to_owned).collect()
    }

    /// How many contexts, streams, events, allocations and registrations there are, in words that
    /// are equal when those are.
    pub fn census(&self) -> String {
        self.text(2)
    }

    /// Device memory of the application. It stays until it is freed.
    pub fn allocate(&self, device: i32, length: usize) -> usize {
        self.allocate_as(device, length, false)
    }

    /// Memory of the application that host and device share.
    pub fn allocate_managed(&self, device: i32, length: usize) -> usize {
        self.allocate_as(device, length, true)
    }

    fn allocate_as(&self, device: i32, length: usize, managed: bool) -> usize {
        let allocate = self.call::<extern "C" fn(c_int, usize, c_int, *mut usize) -> c_int>(
            "forebay_standin_allocate",
        );
        let mut address = 0;
        assert_eq!(allocate(device, length, c_int::from(managed), &raw mut address), 0);
        address
    }

    /// Frees memory of the application; that it is in use is a violation.
    pub fn free(&self, address: usize) {
        let free = self.call::<extern "C" fn(usize) -> c_int>("forebay_standin_free");
        assert_eq!(free(address), 0);
    }

    /// A stream of the application.
    pub fn stream(&self, device: i32) -> Stream {
        let make = self.call::<extern "C" fn(c_int, *mut usize) -> c_int>("forebay_standin_stream");
        let mut handle = 0;
        assert_eq!(make(device, &raw mut handle), 0);
        Stream { device, handle }
    }

    /// Ends a stream of the application.
    pub fn end(&self, stream: Stream) {
        let end = self.call::<extern "C" fn(usize) -> c_int>("forebay_standin_destroy_stream");
        assert_eq!(end(stream.handle), 0);
    }

    /// Keeps a stream from starting anything until what comes back is dropped.
    pub fn hold(&self, stream: Stream) -> Held<'_> {
        self.set_held(stream, 1);
        Held { standin: self, stream }
    }

    fn set_held(&self, stream: Stream, held: c_int) {
        let hold = self.call::<extern "C" fn(c_int, usize, c_int) -> c_int>("forebay_standin_hold");
        assert_eq!(hold(stream.device, stream.handle, held), 0);
    }

    /// Begins to capture a graph on a stream, as for replay: until that ends, work of threads that
    /// don't take it calmly is a violation, and so is work on that stream by others.
    pub fn begin_capture(&self, stream: Stream) {
        self.set_capture(stream, 1);
    }

    /// Ends what [`Self::begin_capture`] began.
    pub fn end_capture(&self, stream: Stream) {
        self.set_capture(stream, 0);
    }

    fn set_capture(&self, stream: Stream, captures: c_int) {
        let capture =
            self.call::<extern "C" fn(c_int, usize, c_int) -> c_int>("forebay_standin_capture");
        assert_eq!(capture(stream.device, stream.handle, captures), 0);
    }

    /// A kernel on a stream that writes these bytes.
    pub fn kernel_write(&self, stream: Stream, address: usize, bytes: &[u8]) {
        let write = self.call::<extern "C" fn(c_int, usize, usize, *const c_char, usize) -> c_int>(
            "forebay_standin_kernel_write",
        );
        let Stream { device, handle } = stream;
        assert_eq!(write(device, handle, address, bytes.as_ptr().cast(), bytes.len()), 0);
    }

    /// What a kernel on a stream reads, which is waited for.
    pub fn kernel_read(&self, stream: Stream, address: usize, length: usize) -> Vec<u8> {
        self.start_kernel_read(stream, address, length).wait(self)
    }

    /// A kernel on a stream that reads.
    pub fn start_kernel_read(&self, stream: Stream, address: usize, length: usize) -> KernelRead {
        let read = self.call::<extern "C" fn(c_int, usize, usize, usize, usize) -> c_int>(
            "forebay_standin_kernel_read",
        );
        let mut bytes = vec![0u8; length];
        let to = bytes.as_mut_ptr().expose_provenance();
        assert_eq!(read(stream.device, stream.handle, address, to, length), 0);
        KernelRead { stream, bytes }
    }

    /// Waits for all that a stream has to do.
    pub fn synchronize(&self, stream: Stream) {
        let wait = self.call::<extern "C" fn(c_int, usize) -> c_int>("forebay_standin_synchronize");
        assert_eq!(wait(stream.device, stream.handle), 0);
    }

    /// Device memory as it is now; that something may still be writing it is a violation.
    pub fn peek(&self, address: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; length];
        let to = bytes.as_mut_ptr().expose_provenance();
        self.touch("forebay_standin_peek", address, to, length);
        bytes
    }

    /// Changes device memory now; that something may still be using it is a violation.
    pub fn poke(&self, address: usize, bytes: &[u8]) {
        let from = bytes.as_ptr().expose_provenance();
        self.touch("forebay_standin_poke", address, from, bytes.len());
    }

    fn touch(&self, symbol: &str, address: usize, host: usize, length: usize) {
        let touch = self.call::<extern "C" fn(usize, usize, usize) -> c_int>(symbol);
        assert_eq!(touch(address, host, length), 0, "{:?}", self.violations());
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        for device in 0..self.devices {
            self.device_call("forebay_standin_release", device);
        }
    }
}
