//! The rules of the house, each a pure function from the sources to [`Finding`]s.
//!
//! Only [`check_repository`] touches the outside: it asks git for the files and cargo for the
//! manifests. Every rule has a test with a sample that breaks it, so that none can rot into one
//! that never fails.

mod dependencies;
mod python;
mod rust;
mod scan;
mod text;

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Path from the root of the repository.
    path: String,
    /// Line from 1; 0 means the whole file.
    line: usize,
    /// What is wrong and what to do.
    text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.text),
            line => write!(f, "{}:{line}: {}", self.path, self.text),
        }
    }
}

/// A file of the repository, by its path from the root, with `/` between its parts.
#[derive(Debug)]
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn finding(&self, line: usize, text: impl Into<String>) -> Finding {
        Finding { path: self.path.clone(), line, text: text.into() }
    }

    /// The part of the path behind the last dot, if any.
    fn extension(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        name.rsplit_once('.').map_or("", |(_, extension)| extension)
    }
}

/// Checks every file that git knows or would add; returns how many there are and what is wrong.
pub(crate) fn check_repository(root: &Path) -> Result<(usize, Vec<Finding>)> {
    let sources = read_sources(root)?;
    let mut findings = dependencies::check(&metadata(root)?)?;
    findings.extend(sources.iter().flat_map(text::check));
    findings
        .extend(sources.iter().filter(|source| source.extension() == "rs").flat_map(rust::check));
    findings.extend(rust::check_unsafe_list(&sources));
    findings
        .extend(sources.iter().filter(|source| source.extension() == "py").flat_map(python::check));
    findings.sort_by(|one, other| (&one.path, one.line).cmp(&(&other.path, other.line)));
    Ok((sources.len(), findings))
}

fn read_sources(root: &Path) -> Result<Vec<Source>> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let listing = output(Command::new("git").args(arguments).current_dir(root))?;
    let mut sources = Vec::new();
    for path in listing.split('\0').filter(|path| !path.is_empty()) {
        // What isn't text (a picture) or isn't there (deleted, not yet committed) has no lines.
        if let Ok(text) = fs::read_to_string(root.join(path)) {
            sources.push(Source { path: path.to_owned(), text });
        }
    }
    ensure!(!sources.is_empty(), "git lists no files in {}", root.display());
    Ok(sources)
}

fn metadata(root: &Path) -> Result<serde_json::Value> {
    let arguments = ["metadata", "--no-deps", "--format-version", "1"];
    let text = output(Command::new("cargo").args(arguments).current_dir(root))?;
    serde_json::from_str(&text).context("cannot read what cargo metadata says")
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed no UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_file_and_line() {
        let source = Source { path: "a/b.rs".to_owned(), text: String::new() };
        assert_eq!(source.finding(3, "is wrong").to_string(), "a/b.rs:3: is wrong");
        assert_eq!(source.finding(0, "is wrong").to_string(), "a/b.rs: is wrong");
        assert_eq!(source.extension(), "rs");
    }
}
