//! What this machine can do, and how to get what is missing: findings, from facts.
//!
//! [`Facts`] are gathered once, from files and by trying; each finding is a function of them, so
//! every level of every finding can be had from made-up facts.
//!
//! # Invariants
//!
//! - A check that fails keeps no other from being made.
//! - What isn't here and needn't be (a GPU, Python) is one line to know, not a failure.
//! - A fix is a command, with capitals for what only its user knows, and says if it takes root.

mod config;
mod directory;
mod drive;
mod facts;
mod gpu;
mod limits;
mod python;
mod route;
mod system;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub use directory::{Alignment, DirectoryFacts, RoomFacts, StorageFacts, TrialFacts};
pub use facts::{Facts, Sources};
pub use gpu::{CudaFacts, Gpu, GpuFacts};
pub use limits::{Limit, LimitFacts};
pub use python::PythonFacts;
pub use system::{EngineFacts, SystemFacts};

/// How a finding is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Good to know.
    Info,
    /// It works, but not as well as it could.
    Warning,
    /// It doesn't work.
    Failure,
}

/// A command that changes what was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fix {
    /// The command.
    pub command: String,
    /// It takes root.
    pub root: bool,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its name for programs, the same in all versions.
    pub id: &'static str,
    /// How it is to be taken.
    pub level: Level,
    /// What it is about.
    pub title: String,
    /// What was found, and what that means.
    pub detail: String,
    /// What can be done, where something can.
    pub fix: Option<Fix>,
}

impl Finding {
    fn new(id: &'static str, level: Level, title: &str, detail: impl Into<String>) -> Self {
        Self { id, level, title: title.to_owned(), detail: detail.into(), fix: None }
    }

    /// Adds what any user can do.
    fn fix(mut self, command: impl Into<String>) -> Self {
        self.fix = Some(Fix { command: command.into(), root: false });
        self
    }

    /// Adds what root can do.
    fn fix_as_root(mut self, command: impl Into<String>) -> Self {
        self.fix = Some(Fix { command: command.into(), root: true });
        self
    }
}

/// Findings about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Section {
    /// `system`, `limits`, `engines`, `directory`, `gpu` or `python`.
    pub id: &'static str,
    /// What it is about; of a directory, its path.
    pub title: String,
    /// What was found.
    pub findings: Vec<Finding>,
}

/// Findings by level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// As it should be.
    pub ok: usize,
    /// Good to know.
    pub info: usize,
    /// Not as well as it could be.
    pub warning: usize,
    /// Doesn't work.
    pub failure: usize,
}

/// All that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Version of Forebay.
    pub version: &'static str,
    /// How much of it is how.
    pub counts: Counts,
    /// The findings.
    pub sections: Vec<Section>,
    /// What they were made from.
    pub facts: Facts,
}

impl Report {
    /// Judges facts.
    pub fn of(facts: Facts) -> Self {
        let section = |id, title: &str, findings| Section { id, title: title.to_owned(), findings };
        let mut sections = vec![
            section("system", "System", system::findings(&facts.system)),
            section("limits", "Limits", limits::findings(&facts.limits, &facts.engines)),
            section("engines", "Engines", system::engine_findings(&facts.engines)),
        ];
        for found in &facts.directories {
            let whole = found.location.as_ref().map_or(&found.path, |location| &location.path);
            let title = whole.display().to_string();
            sections.push(section("directory", &title, directory::findings(found, &facts)));
        }
        let gpu = gpu::findings(&facts.gpu, &facts.system, facts.python.as_ref());
        sections.push(section("gpu", "GPU", gpu));
        sections.push(section("python", "Python", python::findings(facts.python.as_ref())));
        let mut counts = Counts::default();
        for finding in sections.iter().flat_map(|section| &section.findings) {
            *match finding.level {
                Level::Ok => &mut counts.ok,
                Level::Info => &mut counts.info,
                Level::Warning => &mut counts.warning,
                Level::Failure => &mut counts.failure,
            } += 1;
        }
        Self { version: env!("CARGO_PKG_VERSION"), counts, sections, facts }
    }
}
