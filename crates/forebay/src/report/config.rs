//! What the environment says about where libraries and their settings are; the one place of this
//! module that reads it.

use std::env;
use std::path::PathBuf;

/// The folders that the dynamic linker looks into first.
pub(super) fn library_folders() -> Vec<PathBuf> {
    let listed = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::split_paths(&listed).filter(|folder| folder.is_absolute()).collect()
}

/// The settings that cuFile is told to read in place of `/etc/cufile.json`.
pub(super) fn cufile_settings() -> Option<PathBuf> {
    env::var_os("CUFILE_ENV_PATH_JSON").map(PathBuf::from)
}
