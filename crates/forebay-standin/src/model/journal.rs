//! What was called, and what was found to be wrong with it.

use std::collections::BTreeMap;

/// Violations kept: one is enough to fail a test, and a loop makes many.
const VIOLATIONS_MAX: usize = 64;
/// Calls kept in order.
const CALLS_MAX: usize = 1 << 16;

/// See the [module documentation](self).
#[derive(Default)]
pub(crate) struct Journal {
    counts: BTreeMap<&'static str, u64>,
    calls: Vec<&'static str>,
    violations: Vec<String>,
}

impl Journal {
    /// Takes note of a call: the how-manieth of its function it is.
    pub(crate) fn count(&mut self, symbol: &'static str) -> u64 {
        let count = self.counts.entry(symbol).or_default();
        *count += 1;
        if self.calls.len() < CALLS_MAX {
            self.calls.push(symbol);
        }
        *count
    }

    pub(crate) fn calls_of(&self, symbol: &str) -> u64 {
        self.counts.get(symbol).copied().unwrap_or(0)
    }

    pub(crate) fn violation(&mut self, text: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(text);
        }
    }

    /// The violations, a line each, so far.
    pub(crate) fn violations(&self) -> String {
        self.violations.join("\n")
    }

    /// The calls in order, a line each.
    pub(crate) fn calls(&self) -> String {
        self.calls.join("\n")
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}
