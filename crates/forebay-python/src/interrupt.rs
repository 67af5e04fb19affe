//! Long calls of the core that an interrupt ends.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use forebay::safetensors::Stop;
use forebay_io::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::operation::SLICE;

/// Runs `work` on a thread of its own, with the GIL released, and gives Python's signal handlers
/// their turn meanwhile. What they raise asks `work` to stop, and is raised when it has.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Stop) -> forebay_io::Result<T> + Send,
) -> PyResult<T> {
    let stop = Stop::default();
    let (answer, raised) = py.detach(|| {
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("forebay-call".to_owned());
            let stop = &stop;
            let spawned = thread.spawn_scoped(scope, move || {
                // The receiver outlives the thread.
                let _ = sender.send(work(stop));
            });
            if let Err(error) = spawned {
                return (Err(Error::from_io(error, "cannot start a thread")), None);
            }
            let mut raised = None;
            loop {
                match receiver.recv_timeout(SLICE) {
                    Ok(answer) => return (answer, raised),
                    Err(RecvTimeoutError::Timeout) if raised.is_none() => {
                        raised = Python::attach(|py| py.check_signals().err());
                        if raised.is_some() {
                            stop.request();
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        let text = "the call ended without an answer: this is a bug";
                        return (Err(Error::new(ErrorKind::Closed, text)), raised);
                    }
                }
            }
        })
    });
    match raised {
        Some(raised) => Err(raised),
        None => answer.or_raise(py),
    }
}
