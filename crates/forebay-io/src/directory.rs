//! What a directory can take: the room on its file system, and transfers, tried out with a file;
//! and names that change places.
//!
//! The trial's file has no name wherever the file system can make one without, so nothing is left behind
//! whatever ends the process. Elsewhere its name goes when it is dropped.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::config::{EngineChoice, Options};
use crate::engine::EngineKind;
use crate::error::{Error, ErrorKind, Result};
use crate::handle::Handle;
use crate::memory::Pool;
use crate::syscalls::page_bytes;

/// Names that are tried where a file must have one: others can have taken some.
const NAMES_MAX: u32 = 16;
/// Block of the trial: several of them make up its file, but it takes no time.
const BLOCK_BYTES: usize = 64 << 10;
/// Size of the trial's file: whole blocks and an odd rest.
const FILE_BYTES: usize = 5 * BLOCK_BYTES + 1027;
/// Where, and how much of it, is stored once more in place: aligned to nothing.
const PATCH: std::ops::Range<usize> = 4099..4099 + 2 * BLOCK_BYTES + 513;
/// Size that the file is cut down to at the end.
const SHORT_BYTES: usize = 513;

/// Room on a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// All there is.
    pub total_bytes: u64,
    /// What this user can still fill.
    pub available_bytes: u64,
}

/// The room on the file system that a path is on.
///
/// # Errors
///
/// What the system says of `statvfs(3)`.
pub fn room(path: &Path) -> Result<Room> {
    let status = rustix::fs::statvfs(path).map_err(|code| {
        Error::from_os(code.raw_os_error(), "cannot see the room on the file system of").path(path)
    })?;
    Ok(Room {
        total_bytes: status.f_blocks.saturating_mul(status.f_frsize),
        available_bytes: status.f_bavail.saturating_mul(status.f_frsize),
    })
}

/// Has two names change places, in one moment (`RENAME_EXCHANGE`, `renameat2(2)`, Linux 3.15).
///
/// # Errors
///
/// What the system says; [`std::io::ErrorKind::InvalidInput`] from a file system that can't.
pub fn exchange(one: &Path, other: &Path) -> std::io::Result<()> {
    let here = rustix::fs::CWD;
    Ok(rustix::fs::renameat_with(here, one, here, other, RenameFlags::EXCHANGE)?)
}

/// What came of moving bytes with an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The engine.
    pub engine: EngineKind,
    /// Why it failed; `None` if every byte came back.
    pub failure: Option<String>,
    /// Bytes went around the page cache.
    pub direct: bool,
    /// Bytes moved through memory that is registered with the engine.
    pub registered: bool,
    /// What was done otherwise than asked, and why.
    pub fallbacks: Vec<String>,
}

/// Stores, changes, cuts, loads and compares a file of odd size in a directory with one engine.
pub fn try_out(directory: &Path, engine: EngineKind) -> Trial {
    let mut trial =
        Trial { engine, failure: None, direct: false, registered: false, fallbacks: Vec::new() };
    let scratch = match Scratch::make(directory) {
        Ok(scratch) => scratch,
        Err(error) => return Trial { failure: Some(error.to_string()), ..trial },
    };
    // An unnamed file is opened by its descriptor's name, which says nothing to a person.
    let in_words = |text: &str| {
        let label = directory.display().to_string();
        text.replace(&*scratch.path.to_string_lossy(), &label).replace("/proc/self/fd", &label)
    };
    let options = Options {
        engine: EngineChoice::Named(engine),
        block_size: BLOCK_BYTES,
        queue_depth: 4,
        page_cache: false,
        ..Options::default()
    };
    let handle = match Handle::new(options) {
        Ok(handle) => handle,
        Err(error) => return Trial { failure: Some(error.to_string()), ..trial },
    };
    let moved = move_and_compare(&handle, &scratch.path);
    let stats = handle.stats();
    let closed = handle.close();
    trial.failure = moved.and(closed).err().map(|error| in_words(&error.to_string()));
    trial.direct = stats.bytes_direct + stats.bytes_staged > 0;
    trial.registered = stats.bytes_registered > 0;
    trial.fallbacks = stats.fallbacks.iter().map(|(text, _)| in_words(text)).collect();
    trial
}

fn move_and_compare(handle: &Handle, path: &Path) -> Result<()> {
    let mut wanted = Pool::global().allocate(FILE_BYTES, page_bytes_usize())?;
    let mut found = Pool::global().allocate(FILE_BYTES, page_bytes_usize())?;
    fill(wanted.as_mut_slice(), 1);
    found.as_mut_slice().fill(0);
    handle.store(path, wanted.as_slice())?;
    fill(&mut wanted.as_mut_slice()[PATCH], 2);
    handle.store_at(path, PATCH.start as u64, &wanted.as_slice()[PATCH])?;
    handle.load(path, 0, found.as_mut_slice())?;
    compare(wanted.as_slice(), found.as_slice(), path)?;
    fill(&mut wanted.as_mut_slice()[..SHORT_BYTES], 3);
    handle.store(path, &wanted.as_slice()[..SHORT_BYTES])?;
    found.as_mut_slice().fill(0);
    handle.load(path, 0, &mut found.as_mut_slice()[..SHORT_BYTES])?;
    compare(&wanted.as_slice()[..SHORT_BYTES], &found.as_slice()[..SHORT_BYTES], path)?;
    let size = std::fs::metadata(path)
        .map_err(|error| Error::from_io(error, "cannot look at").path(path))?
        .len();
    if size == SHORT_BYTES as u64 {
        return Ok(());
    }
    let text = format!("a file of {SHORT_BYTES} bytes was stored, it has {size}:");
    Err(Error::new(ErrorKind::Mismatch, text).path(path))
}

fn page_bytes_usize() -> usize {
    usize::try_from(page_bytes()).unwrap_or(BLOCK_BYTES)
}

/// Bytes that differ from position to position, and from seed to seed: a block in the wrong place,
/// or an old one, shows. (The finaliser of `MurmurHash3`.)
fn fill(bytes: &mut [u8], seed: u32) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        let mut mixed = u32::try_from(index).unwrap_or(u32::MAX) ^ (seed << 24);
        mixed = (mixed ^ (mixed >> 16)).wrapping_mul(0x85eb_ca6b);
        mixed = (mixed ^ (mixed >> 13)).wrapping_mul(0xc2b2_ae35);
        *byte = mixed.to_le_bytes()[3];
    }
}

fn compare(wanted: &[u8], found: &[u8], path: &Path) -> Result<()> {
    let Some(at) = wanted.iter().zip(found).position(|(wanted, found)| wanted != found) else {
        return Ok(());
    };
    let text = "what was read back differs from what was written to";
    Err(Error::new(ErrorKind::Mismatch, text).path(path).offset(at as u64))
}

/// A file in a directory for a while, without a name where that can be.
#[derive(Debug)]
pub(crate) struct Scratch {
    file: OwnedFd,
    path: PathBuf,
    named: bool,
}

impl Scratch {
    /// Makes one.
    ///
    /// # Errors
    ///
    /// What the system says of making a file there.
    pub(crate) fn make(directory: &Path) -> Result<Self> {
        let failed = |code: Errno| {
            Error::from_os(code.raw_os_error(), "cannot make a file in").path(directory)
        };
        let mode = Mode::from_raw_mode(0o600);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(directory, flags | OFlags::TMPFILE, mode) {
            Ok(file) => {
                let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
                // Without /proc, it takes a name to open a file a second time.
                if path.exists() {
                    return Ok(Self { file, path, named: false });
                }
            }
            // Kernels and file systems that don't know the flag open the directory instead.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
            Err(code) => return Err(failed(code)),
        }
        let process = std::process::id();
        for number in 0..NAMES_MAX {
            let path = directory.join(format!(".forebay-trial-{process}-{number}"));
            match rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
                Ok(file) => return Ok(Self { file, path, named: true }),
                Err(Errno::EXIST) => {}
                Err(code) => return Err(failed(code)),
            }
        }
        Err(failed(Errno::EXIST))
    }

    /// Its descriptor.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.named {
            // There is nobody to tell, and nothing to try.
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_engine_that_can_be_had_moves_and_compares_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        for probe in crate::probe_engines() {
            let trial = try_out(directory.path(), probe.engine);
            assert_eq!(trial.failure.is_none(), probe.available, "{trial:?}");
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let missing = Path::new("/no/such/directory");
        let failure = try_out(missing, EngineKind::Threads).failure.unwrap();
        assert!(failure.contains("cannot make a file in /no/such/directory"), "{failure}");
        assert!(room(missing).unwrap_err().to_string().contains("/no/such/directory"));
    }

    #[test]
    fn a_difference_is_found_with_its_offset() {
        let mut wanted = vec![0; 5000];
        fill(&mut wanted, 1);
        let mut found = wanted.clone();
        compare(&wanted, &found, Path::new("/x")).unwrap();
        found[4321] ^= 1;
        let error = compare(&wanted, &found, Path::new("/x")).unwrap_err();
        assert_eq!((error.kind(), error.offset_bytes()), (ErrorKind::Mismatch, Some(4321)));
    }

    #[test]
    fn blocks_in_the_wrong_place_and_of_another_time_differ() {
        let (mut first, mut second) = (vec![0; FILE_BYTES], vec![0; FILE_BYTES]);
        fill(&mut first, 1);
        fill(&mut second, 2);
        for at in 0..4 {
            let block = |bytes: &[u8], at: usize| bytes[at * BLOCK_BYTES..][..4096].to_vec();
            assert_ne!(block(&first, at), block(&first, at + 1));
            assert_ne!(block(&first, at), block(&second, at));
        }
    }

    #[test]
    fn there_is_no_more_room_than_there_is() {
        let room = room(Path::new("/")).unwrap();
        assert!(room.total_bytes > 0 && room.available_bytes <= room.total_bytes, "{room:?}");
    }
}
