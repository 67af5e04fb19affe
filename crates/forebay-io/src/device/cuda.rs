//! The CUDA driver: loading it, its devices, and its codes as errors.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;

use super::library::{self, Search};
use super::pinned::Pinned;
use super::symbols::Driver;
use crate::error::{DeviceCode, Error, ErrorKind, Result};
use crate::memory::process;

/// The names of the driver's library: what its package has, and what a toolkit links to.
pub(super) const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];
/// Room for a device's name.
const NAME_BYTES: usize = 256;

/// `CUDA_ERROR_NOT_READY`, which is an answer and no failure.
pub(super) const NOT_READY: c_int = 600;

/// What to try where the library isn't there.
const NO_DRIVER: &str = "it comes with NVIDIA's driver; a container needs the --gpus option";

/// What to try while a graph is being captured.
pub(super) const IN_CAPTURE: &str = "load and store before or after a CUDA graph is captured";

/// What to try, by the codes of `cuda.h` that have an answer.
const HINTS: &[(c_int, &str)] = &[
    (2, "free device memory, or lower device_staging_bytes or the pool's budget"),
    (3, "the driver can't be used in a process forked from one that used it; spawn it instead"),
    (4, "the driver is shutting down with the process"),
    (400, "is the stream one of another device, or ended?"),
    (709, "the device was reset (cudaDeviceReset) while it was in use: start the process anew"),
    (34, "the library is a stub of the toolkit: put the driver's own before it"),
    (
        46,
        "the device is busy or not allowed here: see CUDA_VISIBLE_DEVICES and nvidia-smi -q -d COMPUTE",
    ),
    (100, "no GPU is visible: see CUDA_VISIBLE_DEVICES and the container's --gpus option"),
    (700, "a kernel before it broke the context: run with CUDA_LAUNCH_BLOCKING=1 to find it"),
    (719, "a kernel before it broke the context: run with CUDA_LAUNCH_BLOCKING=1 to find it"),
    (802, "the fabric manager isn't up yet: see systemctl status nvidia-fabricmanager"),
    (803, "the driver is older than the library: reboot, or update the driver"),
    (804, "the driver is older than the library: reboot, or update the driver"),
    (906, IN_CAPTURE),
    (999, "the driver failed for no known reason: see dmesg for NVRM lines"),
];

/// The CUDA driver, loaded and initialised. See the [module documentation](super).
pub struct Cuda {
    pub(super) driver: Driver,
    pub(super) pinned: Arc<Pinned>,
    process: u64,
    version: i32,
    device_count: u32,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda")
            .field("version", &self.version)
            .field("device_count", &self.device_count)
            .finish_non_exhaustive()
    }
}

impl Cuda {
    /// Loads the driver and initialises it. No context is made.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] if the library or one of its functions is missing;
    /// [`ErrorKind::Device`] if the driver finds no device or can't start.
    pub fn load(search: &Search) -> Result<Arc<Self>> {
        let library =
            library::open(NAMES, search).map_err(|error| error.hint_if_none(NO_DRIVER))?;
        let driver = Driver::of(library)?;
        let pinned = Pinned::new(driver);
        let mut cuda =
            Self { driver, pinned, process: process::number(), version: 0, device_count: 0 };
        // SAFETY: the driver takes no memory here, and may be initialised any number of times.
        cuda.check(unsafe { (driver.init)(0) }, "cannot start the CUDA driver")?;
        // SAFETY: the result's pointer is valid.
        let code = unsafe { (driver.version)(&raw mut cuda.version) };
        cuda.check(code, "cannot ask the CUDA driver for its version")?;
        let mut count = 0;
        // SAFETY: the result's pointer is valid.
        let code = unsafe { (driver.device_count)(&raw mut count) };
        cuda.check(code, "cannot count the CUDA devices")?;
        cuda.device_count = u32::try_from(count).unwrap_or(0);
        Ok(Arc::new(cuda))
    }

    /// The newest CUDA that the driver can do: 1000 times the major number, 10 times the minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// How many devices this process may use.
    pub fn device_count(&self) -> u32 {
        self.device_count
    }

    /// A device's name.
    ///
    /// # Errors
    ///
    /// There is no such device.
    pub fn device_name(&self, ordinal: u32) -> Result<String> {
        let device = self.device(ordinal)?;
        let mut name = [0 as c_char; NAME_BYTES];
        let room = c_int::try_from(NAME_BYTES).unwrap_or(0);
        // SAFETY: `name` has the room that the call is told of.
        let code = unsafe { (self.driver.device_name)(name.as_mut_ptr(), room, device) };
        self.check(code, "cannot ask for a device's name")?;
        let bytes: Vec<u8> =
            name.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Whether somebody in this process has a primary context on the device.
    ///
    /// # Errors
    ///
    /// There is no such device.
    pub fn is_active(&self, ordinal: u32) -> Result<bool> {
        let device = self.device(ordinal)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the results' pointers are valid.
        let code = unsafe { (self.driver.state)(device, &raw mut flags, &raw mut active) };
        self.check(code, "cannot ask for a context's state")?;
        Ok(active != 0)
    }

    /// The driver's handle of a device.
    pub(super) fn device(&self, ordinal: u32) -> Result<c_int> {
        self.refuse_forked()?;
        let mut device = 0;
        let wanted = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the result's pointer is valid.
        let code = unsafe { (self.driver.device)(&raw mut device, wanted) };
        self.check(code, &format!("there is no CUDA device {ordinal}"))
            .map_err(|error| error.hint(format!("this process sees {}", self.device_count)))?;
        Ok(device)
    }

    /// Whether this is the process that loaded it.
    pub(super) fn is_here(&self) -> bool {
        self.process == process::number()
    }

    /// Refuses a forked child, in which the driver doesn't work.
    pub(super) fn refuse_forked(&self) -> Result<()> {
        if self.is_here() {
            return Ok(());
        }
        let text = "CUDA belongs to the process that this one was forked from";
        Err(Error::new(ErrorKind::Closed, text).hint("start the process by spawn, not by fork"))
    }

    /// A status code as a result; `what` says what was being done.
    pub(super) fn check(&self, code: c_int, what: &str) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.refusal(code, what)) }
    }

    /// A status code that isn't 0 as an error, likewise.
    pub(super) fn refusal(&self, code: c_int, what: &str) -> Error {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the result's pointer is valid.
        let known = unsafe { (self.driver.error_name)(code, &raw mut name) };
        let name = if known != 0 || name.is_null() {
            String::new()
        } else {
            // SAFETY: the driver gives a string of its own, which stays.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        let error = Error::from_device(DeviceCode { library: "cuda", code, name }, what);
        match HINTS.iter().find(|(known, _)| *known == code) {
            Some((_, hint)) => error.hint(*hint),
            None => error,
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.is_here() {
            self.pinned.unpin_all();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;

    use forebay_standin::Standin;

    use super::*;

    /// The driver that a stand-in has in its folder, and no other.
    pub(in crate::device) fn stand_in(standin: &Standin) -> Search {
        Search { folders: vec![standin.folder().to_path_buf()], system: false }
    }

    #[test]
    fn the_driver_is_found_and_asked() {
        let standin = Standin::new().unwrap();
        standin.configure("devices=3");
        let cuda = Cuda::load(&stand_in(&standin)).unwrap();
        assert_eq!((cuda.device_count(), cuda.version()), (3, 12_040));
        assert_eq!(cuda.device_name(2).unwrap(), "Stand-in 2");
        // The stand-in begins with two devices, whose contexts the test holds.
        assert!(cuda.is_active(1).unwrap());
        assert!(!cuda.is_active(2).unwrap());
        let error = cuda.device_name(3).unwrap_err();
        assert_eq!(error.device_code().unwrap().name, "CUDA_ERROR_INVALID_DEVICE");
        assert!(error.to_string().contains("no CUDA device 3"), "{error}");
        assert!(error.to_string().contains("sees 3"), "{error}");
    }

    #[test]
    fn a_driver_that_cannot_start_says_why_and_what_to_try() {
        let standin = Standin::new().unwrap();
        standin.configure("devices=0");
        let error = Cuda::load(&stand_in(&standin)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        assert_eq!(
            error.to_string(),
            "cannot start the CUDA driver: CUDA_ERROR_NO_DEVICE (cuda error 100); no GPU is \
             visible: see CUDA_VISIBLE_DEVICES and the container's --gpus option"
        );
        standin.configure("devices=1 fail=cuDeviceGetCount:1:12345");
        let error = Cuda::load(&stand_in(&standin)).unwrap_err();
        assert_eq!(error.device_code().unwrap().code, 12_345);
        assert_eq!(error.to_string(), "cannot count the CUDA devices: (cuda error 12345)");
    }

    #[test]
    fn a_missing_library_or_symbol_is_a_value() {
        let folder = tempfile::tempdir().unwrap();
        let search = Search { folders: vec![folder.path().to_path_buf()], system: false };
        let error = Cuda::load(&search).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("libcuda.so.1 is not here"), "{error}");
        // A library of that name, found under its second name, without the driver's functions.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.lines().find_map(|line| {
            line.split_whitespace().last().filter(|path| path.contains("/libc.so"))
        });
        symlink(libc.unwrap(), folder.path().join("libcuda.so")).unwrap();
        let error = Cuda::load(&search).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("no cuInit"), "{error}");
    }
}
