//! Finding shared libraries, under all their usual names.
//!
//! A library that was loaded stays so until the process ends: its threads may run at any time.
#![expect(unsafe_code, reason = "loads libraries and looks up their symbols")]

use std::error::Error as _;
use std::fmt::Write as _;
use std::path::PathBuf;

use libloading::Library;

use crate::error::{Error, ErrorKind, Result};
use crate::syscalls::is_shortage;

/// What the loader says of a library that is nowhere.
const NO_SUCH_FILE: &str = "No such file or directory";

/// Where to look for libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    /// Folders to look in first, such as those of NVIDIA's Python packages, in this order.
    pub folders: Vec<PathBuf>,
    /// Look where the system's loader does after that.
    pub system: bool,
}

impl Default for Search {
    /// Where the system's loader looks.
    fn default() -> Self {
        Self { folders: Vec::new(), system: true }
    }
}

/// Loads the first of `names` that there is, in the first folder that has one.
pub(super) fn open(names: &[&str], search: &Search) -> Result<&'static Library> {
    let in_folders =
        search.folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    // The file is looked at first: a name with a slash that isn't there is no news.
    let found = in_folders.filter(|path| path.is_file());
    let by_name = names.iter().map(PathBuf::from).filter(|_| search.system);
    let mut refusals = String::new();
    for path in found.chain(by_name) {
        // SAFETY: these are NVIDIA's libraries, or what the caller put in their place, whose
        // initialisers may be run at any time by design.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok(Box::leak(Box::new(library))),
            Err(error) => {
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                // That it isn't there is said once, of all its names.
                if !reason.contains(NO_SUCH_FILE) {
                    let _ = write!(refusals, "; {reason}");
                }
            }
        }
    }
    if let Some(code) = shortage() {
        return Err(Error::from_os(code, format!("cannot load {}", names[0])));
    }
    let text = format!("{} is not here{refusals}", names[0]);
    Err(Error::new(ErrorKind::Unsupported, text))
}

/// What keeps files from being opened at the moment: the loader only has words for it.
fn shortage() -> Option<i32> {
    let opened = std::fs::File::open("/");
    opened.err().and_then(|error| error.raw_os_error()).filter(|code| is_shortage(*code))
}

/// The first of `names` that is loaded already, looked for in the same places.
pub(super) fn loaded(names: &[&str], search: &Search) -> Option<&'static Library> {
    let in_folders =
        search.folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    let found = in_folders.filter(|path| path.is_file());
    let by_name = names.iter().map(PathBuf::from).filter(|_| search.system);
    let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
    // SAFETY: what isn't loaded isn't loaded now either, so nothing is initialised.
    let open = |path| unsafe { libloading::os::unix::Library::open(Some(path), flags) };
    let library = found.chain(by_name).find_map(|path| open(path).ok())?;
    Some(Box::leak(Box::new(Library::from(library))))
}

/// How often libraries were loaded so far, as the loader counts.
pub(super) fn load_count() -> u64 {
    extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        _: usize,
        count: *mut std::ffi::c_void,
    ) -> std::ffi::c_int {
        // SAFETY: the loader gives a valid description, which nobody changes meanwhile.
        let adds = unsafe { (*info).dlpi_adds };
        // SAFETY: it is the address of the count below.
        unsafe { *count.cast::<u64>() = adds };
        1
    }
    let mut count = 0u64;
    // SAFETY: the function keeps what `dl_iterate_phdr(3)` asks of it, and ends at the first library.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut count).cast()) };
    count
}

/// The function called `name`, or the next of its names, with the type `F`.
///
/// # Safety
///
/// `F` is a function pointer with the signature that the library's header gives all the names.
pub(super) unsafe fn symbol<F: Copy>(library: &Library, names: &[&str]) -> Result<F> {
    for name in names {
        // SAFETY: the caller's promise is passed on.
        if let Ok(found) = unsafe { library.get::<F>(*name) } {
            return Ok(*found);
        }
    }
    let text = format!("the library has no {}", names[0]);
    Err(Error::new(ErrorKind::Unsupported, text).hint("a newer driver is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_nowhere_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let search = Search { folders: vec![folder.path().to_path_buf()], system: false };
        let error = open(&["libforebay-none.so.1", "libforebay-none.so"], &search).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.to_string(), "libforebay-none.so.1 is not here");
    }

    #[test]
    fn a_file_that_is_no_library_is_named_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libfalse.so"), "not a library").unwrap();
        let search = Search { folders: vec![folder.path().to_path_buf()], system: false };
        let error = open(&["libfalse.so.1", "libfalse.so"], &search).unwrap_err().to_string();
        assert!(error.contains("libfalse.so.1 is not here; "), "{error}");
        assert!(error.contains(&folder.path().join("libfalse.so").display().to_string()));
    }

    #[test]
    fn a_symbol_is_found_under_its_other_name_or_is_an_error() {
        let library = open(&["libc.so.6"], &Search::default()).unwrap();
        // SAFETY: `getpid` has this signature.
        let found =
            unsafe { symbol::<unsafe extern "C" fn() -> i32>(library, &["getpid_v9", "getpid"]) };
        // SAFETY: the function has no arguments and no effects.
        let process = unsafe { found.unwrap()() };
        assert_eq!(u32::try_from(process).unwrap(), std::process::id());
        // SAFETY: nothing is found, and nothing called.
        let missing = unsafe { symbol::<unsafe extern "C" fn()>(library, &["cuInit_v9"]) };
        assert!(missing.unwrap_err().to_string().contains("no cuInit_v9"));
    }
}
