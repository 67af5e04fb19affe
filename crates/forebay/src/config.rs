//! Where things are kept: the one place that reads the environment for it.

use std::env;
use std::path::PathBuf;

/// Where the options that drives do best with are stored: `FOREBAY_PROFILES`, or else
/// `forebay/profiles.json` in the user's directory for state (`XDG_STATE_HOME`, or else
/// `.local/state` at home; XDG Base Directory Specification 0.8). `None` without a home.
pub fn profiles_path() -> Option<PathBuf> {
    if let Some(path) = env::var_os("FOREBAY_PROFILES").filter(|path| !path.is_empty()) {
        return Some(path.into());
    }
    Some(state_directory()?.join("profiles.json"))
}

/// Where what outlives a run is kept. `None` without a home.
pub fn state_directory() -> Option<PathBuf> {
    // The specification has relative paths ignored.
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local").join("state")))?;
    Some(state.join("forebay"))
}
