//! Which tensor goes where: into which shard, at which bytes, in which chunks. Pure arithmetic.
//!
//! Tensors go to shards in the order of the state, until a shard is full; a tensor larger than a
//! shard has one of its own. Within a shard they lie as the format's header has them, one behind
//! the other. A *chunk* is what is captured and written at a time; chunks of a shard begin behind
//! its header.

use forebay_io::Result;

use crate::safetensors::{self, Draft, Dtype};

/// A tensor of a state: what it is, without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// What the state calls it; no two have one name.
    pub name: String,
    /// The type of its items.
    pub dtype: Dtype,
    /// Its extents.
    pub shape: Vec<u64>,
}

/// Where a tensor lies in its shard's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    /// Index of the tensor in the state.
    pub(super) tensor: usize,
    /// Its first byte.
    pub(super) start: u64,
    /// The byte behind its last one.
    pub(super) end: u64,
}

/// What one shard's file holds.
#[derive(Debug)]
pub(super) struct ShardLayout {
    /// Its header, in which the tensors are in the order of [`Self::tensors`].
    pub(super) header: Draft,
    /// By where they lie.
    pub(super) tensors: Vec<Placed>,
}

/// A run of bytes of a shard that is captured and written at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) shard: usize,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// Lays tensors out in shards of at most `shard_bytes` bytes of tensors.
///
/// # Errors
///
/// [`ErrorKind::InvalidInput`]: a tensor that doesn't fit in a file, a name that is there twice, a
/// header that would be longer than the format allows.
pub(super) fn lay_out(tensors: &[TensorSpec], shard_bytes: u64) -> Result<Vec<ShardLayout>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut filled = 0_u64;
    for (index, tensor) in tensors.iter().enumerate() {
        let length = tensor.dtype.bytes_of(&tensor.shape)?;
        let total = filled.saturating_add(length);
        match groups.last_mut() {
            Some(group) if total <= shard_bytes => {
                group.push(index);
                filled = total;
            }
            _ => {
                groups.push(vec![index]);
                filled = length;
            }
        }
    }
    groups.into_iter().map(|group| shard_of(tensors, &group)).collect()
}

fn shard_of(tensors: &[TensorSpec], group: &[usize]) -> Result<ShardLayout> {
    let specs = group.iter().map(|&index| {
        let TensorSpec { name, dtype, shape } = &tensors[index];
        safetensors::TensorSpec { name, dtype: *dtype, shape }
    });
    let header = Draft::new(&specs.collect::<Vec<_>>(), None, true)?;
    let data_start = header.data_start();
    let places = header.tensors().iter().zip(header.order());
    let placed = places.map(|(tensor, &member)| Placed {
        tensor: group[member],
        start: data_start + tensor.start,
        end: data_start + tensor.end,
    });
    let tensors = placed.collect();
    Ok(ShardLayout { header, tensors })
}

impl ShardLayout {
    /// Bytes of its file.
    pub(super) fn bytes(&self) -> u64 {
        self.header.file_bytes()
    }

    /// The tensors that have bytes in `start..end`.
    pub(super) fn within(&self, start: u64, end: u64) -> impl Iterator<Item = &Placed> {
        let first = self.tensors.partition_point(|placed| placed.end <= start);
        let behind = move |placed: &&Placed| placed.start < end;
        self.tensors[first..].iter().take_while(behind).filter(|placed| placed.start < placed.end)
    }
}

/// What is to be captured, in order; no chunk has more than `chunk_bytes`, and all but a shard's
/// last end at a multiple of it.
pub(super) fn chunks(shards: &[ShardLayout], chunk_bytes: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (index, shard) in shards.iter().enumerate() {
        let mut start = shard.header.data_start();
        while start < shard.bytes() {
            let end = shard.bytes().min((start / chunk_bytes + 1) * chunk_bytes);
            chunks.push(Chunk { shard: index, start, end });
            start = end;
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use forebay_io::ErrorKind;
    use proptest::prelude::*;

    use super::*;

    fn tensor(name: String, length: u64) -> TensorSpec {
        TensorSpec { name, dtype: Dtype::U8, shape: vec![length] }
    }

    proptest! {
        #[test]
        fn every_byte_of_every_tensor_is_in_one_chunk(
            lengths in prop::collection::vec(0..5_000_u64, 0..50),
            shard_bytes in 1..20_000_u64,
            pages in 1..4_u64,
        ) {
            let tensors: Vec<TensorSpec> = lengths
                .iter()
                .enumerate()
                .map(|(index, &length)| tensor(format!("t{index}"), length))
                .collect();
            let shards = lay_out(&tensors, shard_bytes).unwrap();
            let mut seen = vec![0; tensors.len()];
            for shard in &shards {
                let sum: u64 = shard.tensors.iter().map(|placed| placed.end - placed.start).sum();
                prop_assert!(sum <= shard_bytes || shard.tensors.len() == 1);
                prop_assert_eq!(shard.header.data_start() + sum, shard.bytes());
            }
            let chunk_bytes = pages * 4096;
            let chunks = chunks(&shards, chunk_bytes);
            for chunk in &chunks {
                prop_assert!(chunk.start < chunk.end && chunk.end - chunk.start <= chunk_bytes);
                for placed in shards[chunk.shard].within(chunk.start, chunk.end) {
                    let (start, end) = (placed.start.max(chunk.start), placed.end.min(chunk.end));
                    prop_assert!(start < end);
                    seen[placed.tensor] += end - start;
                }
            }
            prop_assert_eq!(seen, lengths);
        }
    }

    #[test]
    fn what_has_no_whole_bytes_or_too_many_is_refused() {
        let huge =
            TensorSpec { name: "huge".to_owned(), dtype: Dtype::F64, shape: vec![u64::MAX, 2] };
        assert_eq!(lay_out(&[huge], 1 << 30).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
