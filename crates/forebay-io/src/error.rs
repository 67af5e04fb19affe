//! The one error type of this crate: what was asked, what happened, what to try.
//!
//! An [`Error`] is one pointer wide. Its [`ErrorKind`] is what programs match on; the rest (path,
//! offset, wanted and done bytes, engine, OS code) is what a person needs to act on it. Codes that
//! come from the kernel stay integers.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for a program to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system refused or failed a call; [`Error::os_code`] has its `errno`.
    Os,
    /// The file ended before the buffer was full.
    ShortFile,
    /// An argument is out of range, misaligned or of the wrong sort.
    InvalidInput,
    /// The pool's budget, the machine's free memory or the control group's limit is too small.
    OutOfMemory,
    /// What was asked for isn't there on this host: an engine, direct I/O, a kernel feature.
    Unsupported,
    /// The operation was cancelled before its last byte moved.
    Cancelled,
    /// The time given to a wait ran out; the operation goes on.
    TimedOut,
    /// The handle is closed, or the object belongs to the process that this one was forked from.
    Closed,
    /// What was read back differs from what was written.
    Mismatch,
    /// A file breaks the rules of its format.
    Corrupt,
    /// A device's library refused or failed a call; [`Error::device_code`] has what it said.
    Device,
}

/// What a device's library said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceCode {
    /// `"cuda"` or `"cufile"`.
    pub library: &'static str,
    /// Its status code.
    pub code: i32,
    /// The code's name in the library's header; empty if it has none that is known.
    pub name: String,
}

/// An error of this crate. See the [module documentation](self).
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    operation: Option<&'static str>,
    path: Option<PathBuf>,
    offset: Option<u64>,
    wanted_bytes: Option<u64>,
    done_bytes: Option<u64>,
    engine: Option<&'static str>,
    os_code: Option<i32>,
    device_code: Option<DeviceCode>,
    hint: Option<String>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `message` is lower case, without a full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            operation: None,
            path: None,
            offset: None,
            wanted_bytes: None,
            done_bytes: None,
            engine: None,
            os_code: None,
            device_code: None,
            hint: None,
            source: None,
        }))
    }

    /// The failure of a system call, by its `errno`; `message` says what was being done. Where there
    /// is no room, what can be done is said as well.
    pub fn from_os(code: i32, message: impl Into<String>) -> Self {
        let mut error = Self::new(ErrorKind::Os, message);
        error.0.os_code = Some(code);
        error.0.hint = lack_hint(code).map(str::to_owned);
        error
    }

    /// The failure of the system call that an [`io::Error`] reports.
    pub fn from_io(source: io::Error, message: impl Into<String>) -> Self {
        if let Some(code) = source.raw_os_error() {
            return Self::from_os(code, message);
        }
        let mut error = Self::new(ErrorKind::Os, message);
        error.0.source = Some(Arc::new(source));
        error
    }

    /// Says what the failure was part of, before the rest of the message.
    #[must_use]
    pub fn within(mut self, whole: impl fmt::Display) -> Self {
        self.0.message = format!("{whole}: {}", self.0.message);
        self
    }

    /// The failure of a call of a device's library; `message` says what was being done.
    pub fn from_device(code: DeviceCode, message: impl Into<String>) -> Self {
        let mut error = Self::new(ErrorKind::Device, message);
        error.0.device_code = Some(code);
        error
    }

    /// Names the operation, such as `"store"`.
    #[must_use]
    pub fn operation(mut self, operation: &'static str) -> Self {
        self.0.operation.get_or_insert(operation);
        self
    }

    /// Names the file. The first path given stays.
    #[must_use]
    pub fn path(mut self, path: impl AsRef<Path>) -> Self {
        self.0.path.get_or_insert_with(|| path.as_ref().to_path_buf());
        self
    }

    /// Names the file by another name than so far: one that was handed over as a descriptor.
    #[must_use]
    pub fn path_instead(mut self, path: impl AsRef<Path>) -> Self {
        self.0.path = Some(path.as_ref().to_path_buf());
        self
    }

    /// The file offset, in bytes, at which it happened.
    #[must_use]
    pub fn offset(mut self, offset: u64) -> Self {
        self.0.offset = Some(offset);
        self
    }

    /// How many bytes were asked for and how many had moved.
    #[must_use]
    pub fn bytes(mut self, wanted: u64, done: u64) -> Self {
        self.0.wanted_bytes = Some(wanted);
        self.0.done_bytes = Some(done);
        self
    }

    /// Names the engine that reported it.
    #[must_use]
    pub fn engine(mut self, engine: &'static str) -> Self {
        self.0.engine = Some(engine);
        self
    }

    /// What the user can try.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// What the user can try, unless that was said already.
    #[must_use]
    pub fn hint_if_none(mut self, hint: impl Into<String>) -> Self {
        self.0.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// What to match on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The `errno`, when the operating system gave one.
    pub fn os_code(&self) -> Option<i32> {
        self.0.os_code
    }

    /// The status code, when a device's library gave one.
    pub fn device_code(&self) -> Option<&DeviceCode> {
        self.0.device_code.as_ref()
    }

    /// The file it is about.
    pub fn path_ref(&self) -> Option<&Path> {
        self.0.path.as_deref()
    }

    /// The file offset in bytes.
    pub fn offset_bytes(&self) -> Option<u64> {
        self.0.offset
    }

    /// How many bytes were asked for.
    pub fn wanted_bytes(&self) -> Option<u64> {
        self.0.wanted_bytes
    }

    /// How many bytes had moved.
    pub fn done_bytes(&self) -> Option<u64> {
        self.0.done_bytes
    }

    /// The engine that reported it.
    pub fn engine_name(&self) -> Option<&'static str> {
        self.0.engine
    }

    /// The operation, such as `"store"`.
    pub fn operation_name(&self) -> Option<&'static str> {
        self.0.operation
    }
}

/// What can be done about a lack of room, or of descriptors, wherever it is met.
fn lack_hint(code: i32) -> Option<&'static str> {
    match Errno::from_raw_os_error(code) {
        Errno::NOSPC => Some("free some space, or store to another file system"),
        Errno::DQUOT => Some("the disk quota is used up"),
        Errno::FBIG => Some("see `ulimit -f` and the limits of the file system"),
        Errno::MFILE => Some("too few descriptors: see `ulimit -n`"),
        Errno::NFILE => Some("the system is out of descriptors: see sysctl fs.file-max"),
        _ => None,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if let Some(operation) = inner.operation {
            write!(f, "{operation}: ")?;
        }
        f.write_str(&inner.message)?;
        if let Some(path) = &inner.path {
            write!(f, " {}", path.display())?;
        }
        if let Some(offset) = inner.offset {
            write!(f, " at offset {offset}")?;
        }
        if let (Some(wanted), Some(done)) = (inner.wanted_bytes, inner.done_bytes) {
            write!(f, ": {done} of {wanted} bytes done")?;
        }
        if let Some(code) = inner.os_code {
            write!(f, ": {}", io::Error::from_raw_os_error(code))?;
        } else if let Some(source) = &inner.source {
            write!(f, ": {source}")?;
        }
        if let Some(DeviceCode { library, code, name }) = &inner.device_code {
            let space = if name.is_empty() { "" } else { " " };
            write!(f, ": {name}{space}({library} error {code})")?;
        }
        if let Some(engine) = inner.engine {
            write!(f, " [engine {engine}]")?;
        }
        if let Some(hint) = &inner.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_what_was_asked_what_happened_and_what_to_try() {
        let error = Error::from_os(28, "cannot write")
            .operation("store")
            .path("/nvme/w.bin")
            .offset(4096)
            .bytes(8192, 4096)
            .engine("uring")
            .hint("free some space");
        assert_eq!(
            error.to_string(),
            "store: cannot write /nvme/w.bin at offset 4096: 4096 of 8192 bytes done: \
             No space left on device (os error 28) [engine uring]; free some space"
        );
        assert_eq!(size_of::<Error>(), size_of::<usize>());
    }

    #[test]
    fn whatever_meets_a_full_drive_says_what_to_do() {
        let tip = "; free some space, or store to another file system";
        let source = io::Error::from_raw_os_error(28);
        for error in [Error::from_os(28, "cannot make"), Error::from_io(source, "cannot make")] {
            assert!(error.to_string().ends_with(tip), "{error}");
            assert!(error.hint("wait").to_string().ends_with("; wait"));
        }
    }

    #[test]
    fn whatever_lacks_a_descriptor_says_which_limit_it_is() {
        for (code, limit) in [(24, "ulimit -n"), (23, "fs.file-max")] {
            let error = Error::from_io(io::Error::from_raw_os_error(code), "cannot open");
            assert!(error.to_string().contains(limit), "{error}");
        }
    }

    #[test]
    fn a_cause_without_a_code_is_in_the_text() {
        let source = io::Error::new(io::ErrorKind::WriteZero, "nothing was taken");
        let error = Error::from_io(source, "cannot write").path("/a");
        assert_eq!(error.to_string(), "cannot write /a: nothing was taken");
    }

    #[test]
    fn what_a_failure_was_part_of_comes_before_it() {
        let error = Error::from_os(5, "cannot write").path("/a").within("step 7 wasn't saved");
        let text = "step 7 wasn't saved: cannot write /a: Input/output error (os error 5)";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn a_device_code_is_shown_with_its_name_where_it_has_one() {
        let code = |name: &str| DeviceCode { library: "cuda", code: 700, name: name.to_owned() };
        let named = Error::from_device(code("CUDA_ERROR_ILLEGAL_ADDRESS"), "cannot copy");
        assert_eq!(named.to_string(), "cannot copy: CUDA_ERROR_ILLEGAL_ADDRESS (cuda error 700)");
        let nameless = Error::from_device(code(""), "cannot copy");
        assert_eq!(nameless.to_string(), "cannot copy: (cuda error 700)");
    }

    #[test]
    fn the_first_path_given_stays() {
        let error = Error::new(ErrorKind::Os, "x").path("/a").path("/b");
        assert_eq!(error.path_ref(), Some(Path::new("/a")));
        assert_eq!(error.path_instead("/b").path_ref(), Some(Path::new("/b")));
    }
}
