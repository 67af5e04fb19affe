//! `auto`: the first engine, in order of preference, that can be set up here.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::{Engine, EngineFactory, EngineKind, EngineOptions};
use crate::error::{Error, ErrorKind, Result};

/// An engine that was tried and couldn't be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The engine that was tried.
    pub engine: EngineKind,
    /// Cause and, where there is one, cure.
    pub reason: String,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "engine {} is not available: {}", self.engine, self.reason)
    }
}

/// Tries io_uring, then Linux AIO, then threads, and remembers why the earlier ones failed.
#[derive(Debug, Default)]
pub struct AutoFactory {
    fallbacks: Mutex<Vec<Fallback>>,
}

impl EngineFactory for AutoFactory {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        for kind in EngineKind::ALL {
            match kind.build(options) {
                Ok(engine) => return Ok(engine),
                Err(error) => self.remember(Fallback { engine: kind, reason: error.to_string() }),
            }
        }
        let reasons: Vec<String> = self.fallbacks().iter().map(ToString::to_string).collect();
        let text = format!("no engine can be set up on this host: {}", reasons.join("; "));
        Err(Error::new(ErrorKind::Unsupported, text))
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl AutoFactory {
    fn remember(&self, fallback: Fallback) {
        let mut fallbacks = self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner);
        if !fallbacks.contains(&fallback) {
            fallbacks.push(fallback);
        }
    }
}
