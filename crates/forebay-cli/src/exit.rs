//! Exit codes, and failures that carry one.

use std::fmt;

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All is well.
    Done = 0,
    /// Something that was checked or tried failed.
    Failed = 1,
    /// The arguments can't be used.
    Usage = 2,
    /// The machine or the directory can't take it.
    Environment = 3,
    /// Ctrl-C.
    Interrupted = 130,
}

/// An error that says how the command ends; any other ends it with [`Exit::Failed`].
#[derive(Clone, Debug)]
pub struct Failure {
    exit: Exit,
    text: String,
}

impl Failure {
    /// A failure with its code.
    pub fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self { exit, text: text.into() }
    }

    /// Arguments that can't be used.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(Exit::Usage, text)
    }

    /// A machine or directory that can't take it.
    pub fn environment(text: impl Into<String>) -> Self {
        Self::new(Exit::Environment, text)
    }

    /// The code to end with.
    pub fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}
