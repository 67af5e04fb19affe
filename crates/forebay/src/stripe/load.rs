//! What a load does around its transfers: it looks whether another store came in between.

use std::sync::Arc;

use forebay_io::{Commit, Error, ErrorKind, Result};

use super::name::Name;
use super::set::Set;
use super::state::{self, Record};

/// Watches the files of a load.
#[derive(Debug)]
pub(super) struct LoadWatch {
    pub(super) set: Arc<Set>,
    pub(super) files: Vec<(Name, Record)>,
}

impl Commit for LoadWatch {
    fn begin(&self) -> Result<()> {
        Ok(())
    }

    /// A whole-file store changes the manifests before its first byte: if they are still those
    /// that were there before the load, none of its bytes can have been read.
    fn finish(&self) -> Result<()> {
        self.set.check_directories()?;
        let _lock = self.set.lock_shared()?;
        for (name, before) in &self.files {
            let now = state::look(&self.set, name)?;
            let is_same = matches!(
                &now,
                state::State::Whole(now)
                    if now.generation == before.generation && now.layout == before.layout
            );
            if !is_same {
                let text = "the striped file was stored anew while it was loaded:";
                return Err(Error::new(ErrorKind::Mismatch, text)
                    .path(name.as_path())
                    .hint("wait for stores before loading"));
            }
        }
        Ok(())
    }

    fn abandon(&self, _is_spoiled: bool) {}
}
