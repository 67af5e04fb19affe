//! Files of tensors: listed, verified, converted, printed.
//!
//! What the formats are is in [`forebay::catalog`] and [`forebay::convert`]; files of torch are
//! described, and made, by torch itself ([`torch`]). Here are the options, and what is shown.

mod cat;
mod convert;
mod ls;
mod progress;
mod torch;
mod verify;

use std::path::Path;

use anyhow::Result;
use forebay::catalog::{Catalog, Kind};
use forebay::io::{Error, ErrorKind};
use serde::Serialize;

pub(crate) use cat::Cat;
pub(crate) use convert::Convert;
pub(crate) use ls::Ls;
pub(crate) use verify::Verify;

use crate::exit::Failure;
use crate::host::Host;
use crate::output::printable;

pub(crate) use cat::run as cat;
pub(crate) use convert::run as convert;
pub(crate) use ls::run as ls;
pub(crate) use verify::run as verify;

/// Values of `errno` that say what is to be done about an error, from `errno(3)`.
mod code {
    pub(super) const MISSING: [i32; 3] = [2, 20, 21];
    pub(super) const NO_ROOM: [i32; 4] = [13, 28, 30, 122];
}

/// What the files are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Format {
    /// .safetensors files
    Safetensors,
    /// A directory of .npy files
    Npy,
    /// A file that torch.load reads
    Torch,
}

impl From<Kind> for Format {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Safetensors => Self::Safetensors,
            Kind::Npy => Self::Npy,
            Kind::Torch => Self::Torch,
        }
    }
}

/// What is at a path, whatever its format.
#[derive(Debug)]
struct Opened {
    format: Format,
    catalog: Catalog,
    /// What torch says beside that.
    notes: torch::Notes,
}

impl Opened {
    /// Reads headers, or has torch read them.
    fn at(path: &Path, host: &dyn Host, wanted: torch::Wanted<'_>) -> Result<Self> {
        let kind = Kind::of(path).map_err(failure)?;
        let (catalog, notes) = match kind {
            Kind::Torch => torch::describe(path, host, wanted)?,
            _ => (Catalog::read(path).map_err(failure)?, torch::Notes::default()),
        };
        Ok(Self { format: kind.into(), catalog, notes })
    }
}

/// An error with the exit code that its cause has: what was asked for can't be, there is no room
/// for it, or it went wrong.
fn failure(error: Error) -> anyhow::Error {
    let is_one_of = |codes: &[i32]| error.os_code().is_some_and(|code| codes.contains(&code));
    match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::Unsupported => {
            Failure::usage(error.to_string()).into()
        }
        ErrorKind::OutOfMemory => Failure::environment(error.to_string()).into(),
        ErrorKind::Os if is_one_of(&code::MISSING) => Failure::usage(error.to_string()).into(),
        ErrorKind::Os if is_one_of(&code::NO_ROOM) => {
            Failure::environment(error.to_string()).into()
        }
        _ => error.into(),
    }
}

/// Text on one line, whatever the names in it hold.
fn line(text: &str) -> String {
    printable(text).replace('\n', "\\n")
}

/// A number of things.
fn counted(count: usize, word: &str) -> String {
    if count == 1 { format!("1 {word}") } else { format!("{count} {word}s") }
}
