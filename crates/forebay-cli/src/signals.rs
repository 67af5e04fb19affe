//! Signals that ask the command to end, as a flag to look at, so that it can clean up first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// Takes the signals while it lives; afterwards they do what they do by default.
#[derive(Debug)]
pub(crate) struct Signals {
    seen: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
}

impl Signals {
    /// Takes interrupts, and requests to end and to hang up. What is ignored stays ignored: nohup
    /// does so with SIGHUP.
    pub(crate) fn take() -> anyhow::Result<Self> {
        let signals = Self { seen: Arc::default(), is_over: Arc::default() };
        let ignored = ignored_mask();
        for number in [SIGINT, SIGTERM, SIGHUP] {
            if ignored & (1 << (number - 1)) == 0 {
                // Registered for good: without any action, a signal would be swallowed.
                flag::register_conditional_default(number, Arc::clone(&signals.is_over))?;
                let value = usize::try_from(number)?;
                flag::register_usize(number, Arc::clone(&signals.seen), value)?;
            }
        }
        Ok(signals)
    }

    /// Takes none: a test that takes some is alone with them.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self { seen: Arc::default(), is_over: Arc::default() }
    }

    /// The exit code of the signal that came, if one did.
    pub(crate) fn exit_code(&self) -> Option<u8> {
        match self.seen.load(Ordering::Relaxed) {
            0 => None,
            number => u8::try_from(128 + number).ok(),
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// The signals that this process ignores, from `/proc/self/status`.
fn ignored_mask() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = text.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_is_seen_and_has_its_code() {
        let signals = Signals::take().unwrap();
        assert_eq!(signals.exit_code(), None);
        signal_hook::low_level::raise(SIGINT).unwrap();
        assert_eq!(signals.exit_code(), Some(130));
    }
}
