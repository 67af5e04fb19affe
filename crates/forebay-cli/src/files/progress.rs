//! How far it is, on a terminal.

use forebay::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error, which shows nothing where that is no terminal.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    total_bytes: u64,
}

impl Progress {
    pub(super) fn new(what: &str, total_bytes: u64) -> Self {
        let bar = ProgressBar::new(total_bytes);
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(what.to_owned());
        Self { bar, total_bytes }
    }

    pub(super) fn show(&self, done_bytes: u64) {
        self.bar.set_position(done_bytes);
        let (done, total) = (ByteSize(done_bytes), ByteSize(self.total_bytes));
        self.bar.set_message(format!("{done} of {total}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
