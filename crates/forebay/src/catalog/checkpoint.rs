//! The directory of a checkpoint's step: which shards belong to it, and what they are to hold.
//!
//! `docs/format.md` has the manifest byte by byte. Of it, this reads what listing and verifying take:
//! names and checksums, which are held against those of the shards.
//!
//! # Invariants
//!
//! - A name in the manifest is never a path: it has to be the one that its place gives it.

use std::io::Read;
use std::path::{Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::{Catalog, Entry};
use crate::safetensors::{crc32c, open_file};

/// The file that makes a directory a checkpoint.
const MANIFEST_NAME: &str = "manifest.json";
/// The file of what isn't tensors.
const STATE_NAME: &str = "state.json";
/// How the names of steps begin.
const STEP_PREFIX: &str = "step-";
const FORMAT: &str = "forebay-checkpoint";
const VERSION: u64 = 1;
/// Longest manifest, by the format.
const MANIFEST_BYTES_MAX: u64 = 256 << 20;
/// Bytes behind the manifest's own checksum: a quote, a newline, a brace, a newline.
const TAIL_BYTES: usize = 4;
const DIGITS: usize = 8;

/// What this reads of a manifest; the rest of its fields is left to loading.
#[derive(Deserialize)]
pub(super) struct Manifest {
    format: String,
    version: u64,
    state: State,
    shards: Vec<Shard>,
    tensors: Vec<Tensor>,
    crc32c: String,
}

#[derive(Deserialize)]
struct State {
    file: String,
    crc32c: String,
}

#[derive(Deserialize)]
struct Shard {
    file: String,
}

#[derive(Deserialize)]
struct Tensor {
    name: String,
    shard: usize,
    crc32c: String,
}

impl Manifest {
    /// The manifest in a directory; `None` if that is no checkpoint's.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>> {
        if !is_checkpoint(directory) {
            return Ok(None);
        }
        let path = directory.join(MANIFEST_NAME);
        let mut bytes = Vec::new();
        open_file(&path)
            .map_err(|error| error.path(&path))?
            .take(MANIFEST_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| Error::from_io(error, "cannot read").path(&path))?;
        Self::parse(&mut bytes).map(Some).map_err(|error| error.path(&path))
    }

    /// Parses a manifest, and puts zeros where its own checksum is.
    fn parse(bytes: &mut [u8]) -> Result<Self> {
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(corrupt("the manifest is longer than its format allows:"));
        }
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| corrupt(format!("the manifest can't be read ({error}):")))?;
        if manifest.format != FORMAT || manifest.version != VERSION {
            let text = format!("{:?} of version {}", manifest.format, manifest.version);
            let text = format!("the manifest is {text}, and {FORMAT:?} of {VERSION} is known:");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let end = bytes.len().saturating_sub(TAIL_BYTES);
        bytes[end.saturating_sub(DIGITS)..end].fill(b'0');
        if checksum(&manifest.crc32c)? != crc32c(bytes) {
            return Err(corrupt("the manifest doesn't match its own checksum:"));
        }
        let are_ours = manifest
            .shards
            .iter()
            .enumerate()
            .all(|(index, shard)| shard.file == format!("shard-{:05}.safetensors", index + 1));
        if !are_ours || manifest.state.file != STATE_NAME {
            return Err(corrupt("the manifest has names that no checkpoint has:"));
        }
        Ok(manifest)
    }

    /// Where its shards are.
    pub(super) fn shards(&self, directory: &Path) -> Vec<PathBuf> {
        self.shards.iter().map(|shard| directory.join(&shard.file)).collect()
    }

    /// Holds the catalog of the shards against the manifest, whose checksums are to be those that
    /// tensors are verified by.
    pub(super) fn hold_against(&self, directory: &Path, catalog: &mut Catalog) -> Result<()> {
        let path = directory.join(MANIFEST_NAME);
        let refuse = |text: String| Err(corrupt(text).path(&path));
        if self.tensors.len() != catalog.tensors.len() {
            let (wanted, found) = (self.tensors.len(), catalog.tensors.len());
            return refuse(format!("{found} tensors are in the shards, and {wanted} by"));
        }
        for (entry, Tensor { name, shard, crc32c }) in catalog.tensors.iter_mut().zip(&self.tensors)
        {
            if entry.name != *name || entry.file != *shard {
                return refuse(format!("the tensor {:?} isn't where it is by", entry.name));
            }
            let wanted = checksum(crc32c)?;
            if let Entry { checksum: Some(found), .. } = entry
                && *found != wanted
            {
                let file = &self.shards[*shard].file;
                return refuse(format!("the tensor {name:?} of {file} is another than by"));
            }
            entry.checksum = Some(wanted);
        }
        catalog.state = Some((directory.join(STATE_NAME), checksum(&self.state.crc32c)?));
        Ok(())
    }
}

/// Whether a directory is that of a checkpoint's step, which may lack a file. A `manifest.json` alone
/// can be anybody's.
pub(super) fn is_checkpoint(directory: &Path) -> bool {
    let name = directory.file_name().map(|name| name.to_string_lossy());
    let is_named = name.is_some_and(|name| name.starts_with(STEP_PREFIX));
    directory.join(MANIFEST_NAME).is_file() && (is_named || directory.join(STATE_NAME).is_file())
}

/// The newest step among the names in a directory.
pub(super) fn step_in(names: &[String]) -> Option<&String> {
    names.iter().rev().find(|name| name.starts_with(STEP_PREFIX))
}

/// Reads what isn't tensors, and compares.
pub(crate) fn verify_state(path: &Path, wanted: u32) -> Result<()> {
    let mut bytes = Vec::new();
    open_file(path)
        .map_err(|error| error.path(path))?
        .read_to_end(&mut bytes)
        .map_err(|error| Error::from_io(error, "cannot read").path(path))?;
    let found = crc32c(&bytes);
    if found == wanted {
        return Ok(());
    }
    let text = format!("the CRC32C is {found:08x}, and by the manifest {wanted:08x}, of");
    Err(corrupt(text).path(path))
}

fn checksum(digits: &str) -> Result<u32> {
    let parsed = u32::from_str_radix(digits, 16).ok().filter(|_| digits.len() == DIGITS);
    parsed.ok_or_else(|| corrupt(format!("{digits:?} is no checksum, in")))
}

fn corrupt(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A manifest as it is written, with its own checksum.
    fn manifest(shard: &str) -> Vec<u8> {
        let text = format!(
            "{{\n\"format\": \"forebay-checkpoint\",\n\"version\": 1,\n\"step\": 42,\n\
             \"piece_bytes\": 16777216,\n\
             \"state\": {{\"file\":\"state.json\",\"bytes\":2,\"crc32c\":\"5a1e6c2f\"}},\n\
             \"shards\": [\n{{\"file\":\"{shard}\",\"bytes\":9,\"pieces\":[\"90c3ab21\"]}}],\n\
             \"tensors\": [],\n\"crc32c\": \"00000000\"\n}}\n"
        );
        let own = format!("{:08x}", crc32c(text.as_bytes()));
        text.replace("\"00000000\"\n}", &format!("\"{own}\"\n}}")).into_bytes()
    }

    #[test]
    fn a_manifest_is_taken_as_it_was_written_and_no_other_way() {
        let whole = manifest("shard-00001.safetensors");
        let parsed = Manifest::parse(&mut whole.clone()).unwrap();
        let shards = parsed.shards(Path::new("/a"));
        assert_eq!(shards, [Path::new("/a/shard-00001.safetensors")]);
        for position in 0..whole.len() {
            let mut changed = whole.clone();
            changed[position] ^= 1;
            assert!(Manifest::parse(&mut changed).is_err(), "{position}");
        }
        for length in 0..whole.len() {
            assert!(Manifest::parse(&mut whole[..length].to_vec()).is_err(), "{length}");
        }
    }

    #[test]
    fn a_name_in_a_manifest_leads_nowhere_else() {
        for name in ["../x.safetensors", "/etc/passwd", "shard-00002.safetensors"] {
            assert!(Manifest::parse(&mut manifest(name)).is_err(), "{name}");
        }
    }
}
