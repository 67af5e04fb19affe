//! What this host can do, found by trying it.

use std::sync::Arc;

use crate::engine::{EngineFactory, EngineKind, EngineOptions, WakeEvent};

/// Depth of the engines that are set up to see whether they can be.
const PROBE_QUEUE_DEPTH: usize = 4;

/// Whether an engine can be set up here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineProbe {
    /// The engine.
    pub engine: EngineKind,
    /// It was set up.
    pub available: bool,
    /// The features it found, or why it isn't available.
    pub detail: String,
}

/// Sets up and drops one engine of each kind, the preferred first.
pub fn probe_engines() -> Vec<EngineProbe> {
    EngineKind::ALL.into_iter().map(probe).collect()
}

fn probe(engine: EngineKind) -> EngineProbe {
    let built = WakeEvent::new().and_then(|wake| {
        engine.build(&EngineOptions {
            queue_depth: PROBE_QUEUE_DEPTH,
            wake: Arc::new(wake),
            single_submit: false,
            sqpoll: false,
            iopoll: false,
            channels: None,
        })
    });
    match built {
        Ok(built) => EngineProbe {
            engine,
            available: true,
            detail: built.capabilities().features.join(", "),
        },
        Err(error) => EngineProbe { engine, available: false, detail: error.to_string() },
    }
}
