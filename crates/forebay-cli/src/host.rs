//! What the command is started from, and what it can ask there.

use std::ffi::OsString;

use serde_json::Value;

use crate::exit::Failure;

/// The program that the command runs in.
pub trait Host {
    /// What is known about Python here: versions of the interpreter and of what is installed, and
    /// what is switched on. `None` without Python.
    ///
    /// # Errors
    ///
    /// Python's.
    fn facts(&self) -> anyhow::Result<Option<Value>>;

    /// Carries out a subcommand that is written in Python; returns its exit code.
    ///
    /// # Errors
    ///
    /// Python's, or that there is none.
    fn call(&self, subcommand: &str, options: &Value) -> anyhow::Result<u8>;

    /// Answers a question about a file that takes Python: an object with what it `found`, or with a
    /// `failure` that has a `message` and its `exit` code.
    ///
    /// # Errors
    ///
    /// Python's, or that there is none.
    fn ask(&self, question: &str, options: &Value) -> anyhow::Result<Value>;

    /// The program, and arguments, that start this command again.
    ///
    /// # Errors
    ///
    /// Python's, or that the program can't be found.
    fn command(&self) -> anyhow::Result<Vec<OsString>>;
}

/// A host without Python.
#[derive(Clone, Copy, Debug)]
pub struct NoPython;

impl Host for NoPython {
    fn facts(&self) -> anyhow::Result<Option<Value>> {
        Ok(None)
    }

    fn call(&self, subcommand: &str, _: &Value) -> anyhow::Result<u8> {
        let text = format!("{subcommand} needs Python: pip install forebay, and use its command");
        Err(Failure::environment(text).into())
    }

    fn ask(&self, _: &str, _: &Value) -> anyhow::Result<Value> {
        let text = "a file of torch's needs Python: pip install forebay torch, and use its command";
        Err(Failure::environment(text).into())
    }

    fn command(&self) -> anyhow::Result<Vec<OsString>> {
        Ok(vec![std::env::current_exe()?.into_os_string()])
    }
}
