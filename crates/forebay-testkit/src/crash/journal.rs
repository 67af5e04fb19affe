//! Writes down what is done to files and directories, or has some of it fail.

#![expect(
    unsafe_code,
    reason = "passes the promises of `Engine::submit` on; copies what it writes"
)]

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay::checkpoint::storage::{FileSystem, Storage, Sync};
use forebay_io::engine::{
    Capabilities, Command, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Transfer,
};
use forebay_io::error::Result;

/// Something that was done. All paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A directory was made.
    CreateDirectory(PathBuf),
    /// A file was made, with this content.
    CreateFile(PathBuf, Vec<u8>),
    /// Bytes of a file were written.
    Write {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What.
        bytes: Vec<u8>,
    },
    /// A file was synced.
    SyncFile(PathBuf),
    /// A directory was synced.
    SyncDirectory(PathBuf),
    /// A name was changed.
    Rename(PathBuf, PathBuf),
    /// Two names changed places.
    Exchange(PathBuf, PathBuf),
    /// A file was removed.
    RemoveFile(PathBuf),
    /// A directory was removed.
    RemoveDirectory(PathBuf),
    /// A save of this step returned.
    Returned(u64),
}

/// The events so far. A clone is the same journal; it is a [`Storage`] that writes into itself.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Vec<Event>>>);

impl Journal {
    /// All events, in order.
    pub fn events(&self) -> Vec<Event> {
        self.lock().clone()
    }

    /// Adds an event.
    pub fn add(&self, event: Event) {
        self.lock().push(event);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn done<T>(&self, done: io::Result<T>, event: impl FnOnce() -> Event) -> io::Result<T> {
        if done.is_ok() {
            self.add(event());
        }
        done
    }
}

impl Storage for Journal {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        let done = FileSystem.create_directory(path);
        self.done(done, || Event::CreateDirectory(path.to_owned()))
    }

    fn create_file(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let done = FileSystem.create_file(path, bytes);
        let content = vec![0; usize::try_from(bytes).unwrap_or(0)];
        self.done(done, || Event::CreateFile(path.to_owned(), content))
    }

    fn write_file(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let done = FileSystem.write_file(path, content);
        self.done(done, || Event::CreateFile(path.to_owned(), content.to_vec()))
    }

    fn create_lock(&self, path: &Path) -> io::Result<File> {
        let done = FileSystem.create_lock(path);
        self.done(done, || Event::CreateFile(path.to_owned(), Vec::new()))
    }

    fn sync_file(&self, path: &Path, sync: Sync) -> io::Result<()> {
        let done = FileSystem.sync_file(path, sync);
        self.done(done, || Event::SyncFile(path.to_owned()))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let done = FileSystem.sync_directory(path);
        self.done(done, || Event::SyncDirectory(path.to_owned()))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let done = FileSystem.rename(from, to);
        self.done(done, || Event::Rename(from.to_owned(), to.to_owned()))
    }

    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        let done = FileSystem.exchange(one, other);
        self.done(done, || Event::Exchange(one.to_owned(), other.to_owned()))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let done = FileSystem.remove_file(path);
        self.done(done, || Event::RemoveFile(path.to_owned()))
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        let done = FileSystem.remove_directory(path);
        self.done(done, || Event::RemoveDirectory(path.to_owned()))
    }
}

/// The real file system, but for one call, which fails before it does anything.
#[derive(Debug)]
pub struct FaultStorage {
    /// What it fails with; `None`: it ends its thread.
    code: Option<i32>,
    left: AtomicUsize,
}

impl FaultStorage {
    /// Has the call number `at`, from 0, fail with this `errno`.
    pub fn new(at: usize, code: i32) -> Self {
        Self { code: Some(code), left: AtomicUsize::new(at) }
    }

    /// Has the call number `at`, from 0, panic.
    pub fn panicking(at: usize) -> Self {
        Self { code: None, left: AtomicUsize::new(at) }
    }

    /// Whether the call has come.
    pub fn has_failed(&self) -> bool {
        self.left.load(Ordering::SeqCst) == usize::MAX
    }

    fn check(&self) -> io::Result<()> {
        let count = |left: usize| (left < usize::MAX).then(|| left.wrapping_sub(1));
        match self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count) {
            Ok(0) => match self.code {
                Some(code) => Err(io::Error::from_raw_os_error(code)),
                // A panic without its message, which would look like a test's.
                None => std::panic::resume_unwind(Box::new("the call that was to end its thread")),
            },
            _ => Ok(()),
        }
    }
}

impl Storage for FaultStorage {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.create_directory(path))
    }

    fn create_file(&self, path: &Path, bytes: u64) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.create_file(path, bytes))
    }

    fn write_file(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.write_file(path, content))
    }

    fn create_lock(&self, path: &Path) -> io::Result<File> {
        self.check().and_then(|()| FileSystem.create_lock(path))
    }

    fn sync_file(&self, path: &Path, sync: Sync) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.sync_file(path, sync))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.sync_directory(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.rename(from, to))
    }

    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.exchange(one, other))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.remove_file(path))
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        self.check().and_then(|()| FileSystem.remove_directory(path))
    }
}

/// Builds engines whose writes go into a journal.
#[derive(Debug)]
pub struct JournalEngines {
    /// Builds what they wrap.
    pub inner: Arc<dyn EngineFactory>,
    /// Where writes are written down.
    pub journal: Journal,
}

impl EngineFactory for JournalEngines {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        let inner = self.inner.build(options)?;
        Ok(Box::new(JournalEngine { inner, journal: self.journal.clone() }))
    }
}

#[derive(Debug)]
struct JournalEngine {
    inner: Box<dyn Engine>,
    journal: Journal,
}

impl Engine for JournalEngine {
    fn kind(&self) -> EngineKind {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        // SAFETY: the caller's promise, passed on.
        let accepted = unsafe { self.inner.submit(transfers) }?;
        for transfer in transfers[..accepted].iter().filter(|one| one.command == Command::Write) {
            let link = format!("/proc/self/fd/{}", transfer.descriptor);
            let path = fs::read_link(link).unwrap_or_default();
            // SAFETY: the memory is valid until the completion has been reaped, which this thread
            // does later, and a write only reads from it.
            let bytes = unsafe { std::slice::from_raw_parts(transfer.address, transfer.length) };
            self.journal.add(Event::Write { path, offset: transfer.offset, bytes: bytes.to_vec() });
        }
        Ok(accepted)
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        self.inner.reap(timeout, completions)
    }
}
