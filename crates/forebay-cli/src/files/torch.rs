//! Files of torch: torch says where their bytes are, or makes them with room for the bytes.
//!
//! Nothing here reads or writes a tensor.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry::{Occupied, Vacant};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use forebay::Stamp;
use forebay::catalog::{Catalog, CatalogFile, Entry};
use forebay::convert::Room;
use forebay::safetensors::{ChecksumState, Dtype};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::line;
use crate::exit::{Exit, Failure};
use crate::host::Host;
use crate::output::complain;

/// What is wanted of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    /// The most memory to take, in bytes.
    pub(super) budget: u64,
    /// Where the bytes of tensors go that the file hasn't in one piece; without it, they have no
    /// place.
    pub(super) scratch: Option<&'a Path>,
    /// One tensor only.
    pub(super) name: Option<&'a str>,
}

/// What a file of torch has beside tensors.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Notes {
    /// What isn't a tensor.
    pub(super) left_out: Vec<LeftOut>,
    /// Names of the same tensor.
    pub(super) tied: Vec<Vec<String>>,
}

/// Something that isn't a tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LeftOut {
    name: String,
    kind: String,
}

impl Notes {
    /// Says on standard error what a copy doesn't have.
    pub(super) fn complain(&self) {
        if !self.left_out.is_empty() {
            let listed =
                self.left_out.iter().map(|LeftOut { name, kind }| format!("{name} ({kind})"));
            let listed = line(&listed.collect::<Vec<_>>().join(", "));
            complain(&format!("forebay: left out, since it is no tensor: {listed}"));
        }
        for names in &self.tied {
            let names = line(&names.join(", "));
            complain(&format!("forebay: each a copy of its own now, one tensor before: {names}"));
        }
    }
}

#[derive(Deserialize)]
struct Described {
    tensors: Vec<Tensor>,
    #[serde(flatten)]
    notes: Notes,
}

#[derive(Deserialize)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    file: PathBuf,
    offset: Option<u64>,
}

/// A tensor that is to have room in a file.
#[derive(Serialize)]
struct Wish<'a> {
    name: &'a str,
    dtype: &'a str,
    shape: &'a [u64],
    bytes: u64,
}

/// Has torch say which tensors are in a file.
pub(super) fn describe(
    path: &Path,
    host: &dyn Host,
    wanted: Wanted<'_>,
) -> Result<(Catalog, Notes)> {
    let Wanted { budget, scratch, name } = wanted;
    let stamp = Stamp::at(path)?;
    let scratch = scratch.map(text_of).transpose()?;
    let path = text_of(path)?;
    let options = json!({ "path": path, "budget": budget, "scratch": scratch, "name": name });
    let Described { tensors, notes } = ask(host, "torch.describe", &options)?;
    let mut catalog = Catalog::default();
    let mut files: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for Tensor { name, dtype, shape, bytes, file, offset } in tensors {
        let dtype: Dtype = dtype.parse().map_err(|_| {
            let text = format!("the tensor {name:?} is {dtype}, which safetensors hasn't");
            Failure::usage(format!("{text}: {path}"))
        })?;
        let next = catalog.files.len();
        let file = match files.entry(file) {
            Occupied(entry) => *entry.get(),
            Vacant(entry) => {
                catalog.files.push(file_at(entry.key())?);
                *entry.insert(next)
            }
        };
        let (swapped_bytes, fortran_order, checksum) = (1, false, None);
        catalog.tensors.push(Entry {
            name,
            dtype,
            shape,
            file,
            offset,
            bytes,
            swapped_bytes,
            fortran_order,
            checksum,
        });
    }
    stamp.hold_against(&Stamp::at(path.as_ref())?, path.as_ref())?;
    Ok((catalog, notes))
}

fn file_at(path: &Path) -> Result<CatalogFile> {
    let facts = std::fs::metadata(path);
    let facts = facts.with_context(|| format!("cannot look at {}", path.display()))?;
    Ok(CatalogFile {
        path: path.to_path_buf(),
        bytes: facts.len(),
        checksums: ChecksumState::Absent,
        stamp: Stamp::at(path)?,
    })
}

/// Has torch make a file with room for tensors; where the bytes of each are to go.
pub(super) fn create(path: &Path, catalog: &Catalog, host: &dyn Host) -> Result<Vec<Room>> {
    let wanted = catalog.tensors.iter().map(|tensor| Wish {
        name: &tensor.name,
        dtype: tensor.dtype.name(),
        shape: &tensor.shape,
        bytes: tensor.bytes,
    });
    let wanted: Vec<Wish<'_>> = wanted.collect();
    ask(host, "torch.create", &json!({ "path": text_of(path)?, "tensors": wanted }))
}

/// A path as text, which is all that JSON can hold.
fn text_of(path: &Path) -> Result<&str> {
    let refused = || format!("the name of {} isn't Unicode: rename it for torch", path.display());
    Ok(path.to_str().ok_or_else(|| Failure::usage(refused()))?)
}

/// Asks the host, whose answer is what it found, or why it failed.
fn ask<T: for<'de> Deserialize<'de>>(
    host: &dyn Host,
    question: &str,
    options: &Value,
) -> Result<T> {
    #[derive(Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Answer {
        Found(Value),
        Failure { message: String, exit: u8 },
    }
    let unreadable = || format!("cannot read what torch says to {question}");
    let answer = serde_json::from_value(host.ask(question, options)?).with_context(unreadable)?;
    match answer {
        Answer::Found(found) => serde_json::from_value(found).with_context(unreadable),
        Answer::Failure { message, exit } => {
            let exits = [Exit::Usage, Exit::Environment, Exit::Interrupted];
            let exit = exits.into_iter().find(|known| *known as u8 == exit);
            Err(Failure::new(exit.unwrap_or(Exit::Failed), message).into())
        }
    }
}
