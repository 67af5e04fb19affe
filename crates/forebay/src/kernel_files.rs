//! Reads the small files of `/proc` and `/sys`.

use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The text of a file without the blanks around it; `None` if there is none.
pub(crate) fn text(path: impl AsRef<Path>) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|char: char| char.is_whitespace() || char == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

/// The number in a file.
pub(crate) fn number<T: FromStr>(path: impl AsRef<Path>) -> Option<T> {
    text(path)?.parse().ok()
}

/// The switch in a file.
pub(crate) fn flag(path: impl AsRef<Path>) -> Option<bool> {
    number::<u32>(path).map(|value| value != 0)
}

/// The last part of what a symbolic link points to.
pub(crate) fn link_name(path: impl AsRef<Path>) -> Option<String> {
    let target = std::fs::read_link(path).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// What is in a directory, by name; nothing if there is none.
pub(crate) fn entries(path: impl AsRef<Path>) -> Vec<PathBuf> {
    let Ok(listing) = std::fs::read_dir(path) else { return Vec::new() };
    let mut entries: Vec<PathBuf> = listing.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

/// The last part of a path.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
