//! The moment at which a wait ends, so that a wait that was interrupted goes on for what is left.

use std::time::{Duration, Instant};

/// When to stop waiting; `None` is never.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    /// `timeout` from now. A timeout too long for the clock never ends.
    pub(super) fn after(timeout: Option<Duration>) -> Self {
        Self(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// What is left: `None` is forever, zero is that it has passed.
    pub(super) fn left(self) -> Option<Duration> {
        self.0.map(|end| end.saturating_duration_since(Instant::now()))
    }

    /// It has passed.
    pub(super) fn passed(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_too_long_for_the_clock_never_ends() {
        assert_eq!(Deadline::after(Some(Duration::MAX)).left(), None);
        assert_eq!(Deadline::after(None).left(), None);
        assert!(Deadline::after(Some(Duration::ZERO)).passed());
        assert!(!Deadline::after(Some(Duration::from_secs(60))).passed());
    }
}
