//! Two devices of the stand-in for CUDA, a folder for files, and requests between them.
#![expect(clippy::missing_panics_doc, reason = "for tests, which panic where it can't be set up")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_io::device::{CallerStream, Context, Cuda, Search};
use forebay_io::{DeviceAccess, Direction, Request, Target};
use forebay_standin::{Standin, Stream};
use tempfile::TempDir;

/// See the [module documentation](self).
#[derive(Debug)]
pub struct DeviceRig {
    // Fields are dropped in order: the stand-in is the last to go.
    /// The contexts of the devices, by their numbers.
    pub contexts: Vec<Arc<Context>>,
    /// Where files go.
    pub folder: TempDir,
    /// The driver, and the application.
    pub standin: Standin,
}

impl DeviceRig {
    /// Sets the stand-in up in the words of [`Standin::configure`], and has files in a new folder in
    /// `directory`.
    pub fn new(settings: &str, directory: &str) -> Self {
        let standin = Standin::new().unwrap();
        standin.configure(settings);
        let folders = vec![standin.folder().to_path_buf()];
        let cuda = Cuda::load(&Search { folders, system: false }).unwrap();
        let contexts = (0..2).map(|ordinal| Context::retain(&cuda, ordinal).unwrap()).collect();
        let folder = tempfile::tempdir_in(directory).unwrap();
        Self { contexts, folder, standin }
    }

    /// A file's name in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The device of a stream, behind that stream.
    pub fn access(&self, stream: Stream) -> DeviceAccess {
        let device = usize::try_from(stream.device).unwrap();
        let context = Arc::clone(&self.contexts[device]);
        DeviceAccess { context, stream: CallerStream(stream.handle) }
    }

    /// Moves device memory, by its address and length, behind a stream of that device.
    pub fn request(
        &self,
        direction: Direction,
        path: &Path,
        offset: u64,
        stream: Stream,
        (address, length): (usize, usize),
    ) -> Request {
        let address = std::ptr::without_provenance_mut(address);
        let target = Target::Path(path.to_path_buf());
        let mut request = Request::new(direction, target, offset, address, length);
        request.parts[0].device = Some(0);
        request.devices = vec![self.access(stream)];
        request
    }

    /// Fails if the stand-in found anything wrong.
    pub fn no_violations(&self) {
        assert_eq!(self.standin.violations(), Vec::<String>::new());
    }
}
