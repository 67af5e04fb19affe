//! Which tensors go into which file, and the index that says so: pure.

use std::collections::BTreeMap;

use forebay_io::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::catalog::Catalog;

/// Into how many files tensors are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// This many, of about the same size.
    Count(usize),
    /// Files with at most this many bytes of tensors; a larger tensor has one of its own.
    Bytes(u64),
}

/// Divides tensors of these sizes; each shard has the indexes of its own, in order.
pub(super) fn divide(sizes: &[u64], sharding: Sharding) -> Result<Vec<Vec<usize>>> {
    match sharding {
        Sharding::Count(count) => by_count(sizes, count),
        Sharding::Bytes(bytes) => Ok(by_bytes(sizes, bytes)),
    }
}

fn by_count(sizes: &[u64], count: usize) -> Result<Vec<Vec<usize>>> {
    if count == 0 || count > sizes.len() {
        let text = format!("{} tensors can't be divided into {count} files", sizes.len());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let total: u128 = sizes.iter().map(|size| u128::from(*size)).sum();
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut before: u128 = 0;
    for (index, size) in sizes.iter().enumerate() {
        // A tensor belongs to the shard in whose share of all bytes its middle is, unless that
        // would leave a shard without any.
        let middle = before * 2 + u128::from(*size);
        let ends_share = middle * count as u128 >= total * 2 * shards.len() as u128;
        let left = sizes.len() - index;
        let is_needed = left <= count - shards.len();
        let begun = shards.last().is_some_and(|shard| !shard.is_empty());
        if begun && shards.len() < count && (is_needed || ends_share) {
            shards.push(Vec::new());
        }
        if let Some(shard) = shards.last_mut() {
            shard.push(index);
        }
        before += u128::from(*size);
    }
    Ok(shards)
}

fn by_bytes(sizes: &[u64], most: u64) -> Vec<Vec<usize>> {
    let mut shards: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for (index, size) in sizes.iter().enumerate() {
        match shards.last_mut() {
            Some(shard) if size.saturating_add(bytes) <= most => {
                shard.push(index);
                bytes += size;
            }
            _ => {
                shards.push(vec![index]);
                bytes = *size;
            }
        }
    }
    if shards.is_empty() {
        shards.push(Vec::new());
    }
    shards
}

/// The name of a shard.
pub(super) fn name(index: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", index + 1)
}

#[derive(Serialize)]
struct Index<'a> {
    metadata: Total,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct Total {
    total_size: u64,
}

/// The index of shards with these names.
pub(super) fn index(catalog: &Catalog, shards: &[Vec<usize>], names: &[String]) -> Vec<u8> {
    let mut weight_map = BTreeMap::new();
    for (shard, name) in shards.iter().zip(names) {
        weight_map.extend(
            shard.iter().map(|tensor| (catalog.tensors[*tensor].name.as_str(), name.as_str())),
        );
    }
    let index = Index { metadata: Total { total_size: catalog.bytes() }, weight_map };
    // Text and numbers: there is nothing in it that JSON can't say.
    let mut text = serde_json::to_vec_pretty(&index).unwrap_or_default();
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shards_are_about_equal() {
        let divided = divide(&[4, 4, 4, 4, 8, 8], Sharding::Count(2)).unwrap();
        assert_eq!(divided, [vec![0, 1, 2, 3], vec![4, 5]]);
        let divided = divide(&[100, 1, 1], Sharding::Count(3)).unwrap();
        assert_eq!(divided, [[0], [1], [2]]);
    }

    #[test]
    fn a_tensor_above_the_size_has_a_shard_of_its_own() {
        let divided = divide(&[5, 5, 1, 99, 2, 0], Sharding::Bytes(10)).unwrap();
        assert_eq!(divided, [vec![0, 1], vec![2], vec![3], vec![4, 5]]);
        assert_eq!(divide(&[], Sharding::Bytes(10)).unwrap(), [[0; 0]]);
    }

    #[test]
    fn more_files_than_tensors_are_refused() {
        for count in [0, 3] {
            let error = divide(&[1, 1], Sharding::Count(count)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
    }

    proptest! {
        #[test]
        fn every_tensor_is_in_one_shard_and_no_shard_is_empty(
            sizes in prop::collection::vec(0_u64..u64::MAX / 64, 1..30), count in 1_usize..30,
        ) {
            prop_assume!(count <= sizes.len());
            let shards = divide(&sizes, Sharding::Count(count)).unwrap();
            prop_assert_eq!(shards.len(), count);
            prop_assert!(shards.iter().all(|shard| !shard.is_empty()));
            let all: Vec<usize> = shards.concat();
            prop_assert_eq!(all, (0..sizes.len()).collect::<Vec<_>>());
        }
    }
}
