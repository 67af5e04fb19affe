//! States whose content follows from their step.

use std::fs;
use std::path::Path;

use forebay::checkpoint::{Reader, State, TensorSpec};
use forebay::safetensors::{Dtype, Stop};
use forebay_io::{Handle, Lent, Result};

use crate::random::Random;

/// Lengths of the tensors: some blocks, an odd rest, nothing, one number.
const LENGTHS: [u64; 5] = [100_000, 4096, 0, 8, 12_345];

/// A state that is told from those of other steps by every byte.
#[derive(Debug)]
pub struct Sample {
    tensors: Vec<TensorSpec>,
    contents: Vec<Vec<u8>>,
    rest: String,
}

impl Sample {
    /// The state of a step, each of its tensors `factor` times as long.
    pub fn new(step: u64, factor: u64) -> Self {
        let mut random = Random::new(step);
        let mut tensors = Vec::new();
        let mut contents = Vec::new();
        for (index, length) in LENGTHS.into_iter().enumerate() {
            let length = length * factor;
            let mut content = vec![0; usize::try_from(length).unwrap_or(0)];
            random.fill(&mut content);
            let name = format!("layers.{index}");
            tensors.push(TensorSpec { name, dtype: Dtype::U8, shape: vec![length] });
            contents.push(content);
        }
        Self { tensors, contents, rest: format!("{{\"step\": {step}}}") }
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> usize {
        self.contents.iter().map(Vec::len).sum()
    }

    /// Calls with the state, to be saved.
    pub fn with<T>(&self, call: impl FnOnce(State<'_>) -> T) -> T {
        let bytes: Vec<Lent<'_>> = self.contents.iter().map(|bytes| Lent::Host(bytes)).collect();
        let rest = self.rest.as_bytes();
        call(State { tensors: &self.tensors, bytes: &bytes, rest })
    }

    /// Whether an open checkpoint holds this state.
    ///
    /// # Errors
    ///
    /// What loading meets.
    pub fn is_in(&self, reader: &Reader, handle: &Handle) -> Result<bool> {
        let manifest = reader.manifest();
        if reader.state() != self.rest.as_bytes() || manifest.tensors.len() != self.tensors.len() {
            return Ok(false);
        }
        let shards = (0..manifest.shards.len())
            .map(|index| reader.load_shard(handle, index, &Stop::default()))
            .collect::<Result<Vec<_>>>()?;
        let has = |(spec, content): (&TensorSpec, &Vec<u8>)| {
            let found = manifest.tensors.iter().find(|tensor| tensor.name == spec.name);
            found.is_some_and(|tensor| {
                let range = usize::try_from(tensor.start).unwrap_or(0)
                    ..usize::try_from(tensor.end).unwrap_or(0);
                tensor.shape == spec.shape && shards[tensor.shard].as_slice()[range] == content[..]
            })
        };
        Ok(self.tensors.iter().zip(&self.contents).all(has))
    }
}

/// The names in a directory that begin with a dot: what saves have left.
///
/// # Panics
///
/// If it can't be listed.
pub fn leftovers(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with('.')).collect()
}
