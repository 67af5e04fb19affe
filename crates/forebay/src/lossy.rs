//! Paths in JSON, which takes Unicode only: what else a path holds becomes `U+FFFD`.

use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

/// Writes a path.
pub(crate) fn path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    path.to_string_lossy().serialize(serializer)
}

/// Writes a path, or nothing.
#[expect(clippy::ref_option, reason = "serde lends the field as it is")]
pub(crate) fn optional_path<S: Serializer>(
    path: &Option<PathBuf>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}
