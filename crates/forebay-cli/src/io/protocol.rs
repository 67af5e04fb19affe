//! What the command and its processes tell each other: a line of JSON for each message.
//!
//! The first line that a process gets is its [`Job`](forebay::workload::Job); it answers
//! [`Reply::Ready`], and then each [`Command`] once.

use forebay::workload::{LoopReport, ProcessReport, Way};
use serde::{Deserialize, Serialize};

/// What a process is to do next.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Make the files that are going to be read.
    Prepare,
    /// Move every byte once.
    Loop {
        /// Which way.
        way: Way,
        /// The number of the loop, warm-up included.
        index: u64,
    },
    /// Say what it came to, and end.
    Finish,
}

/// What a process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// It has its memory and its handle, or its files.
    Ready,
    /// It has done a loop.
    Loop(Box<LoopReport>),
    /// It has come to its end.
    Finished(ProcessReport),
    /// It can't go on.
    Failed {
        /// The exit code that this means.
        exit: u8,
        /// What was asked, what happened, what to try.
        text: String,
    },
}

impl Reply {
    pub(super) fn into_loop(self) -> Option<LoopReport> {
        match self {
            Self::Loop(report) => Some(*report),
            _ => None,
        }
    }

    pub(super) fn into_process(self) -> Option<ProcessReport> {
        match self {
            Self::Finished(report) => Some(report),
            _ => None,
        }
    }
}
