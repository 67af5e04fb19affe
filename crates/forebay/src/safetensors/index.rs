//! `model.safetensors.index.json`: which shard of a model has which tensor.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path};

use forebay_io::{Error, Result};
use serde::Deserialize;

use super::header::{HEADER_BYTES_MAX, corrupt, open};
use super::json::Strings;

/// Its usual name.
pub const INDEX_NAME: &str = "model.safetensors.index.json";
/// How the names of indices end.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// An index. See the [module documentation](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Fields {
    weight_map: Strings,
}

impl Index {
    /// Reads an index.
    ///
    /// # Errors
    ///
    /// What the system says of it; [`ErrorKind::Corrupt`](forebay_io::ErrorKind::Corrupt) for one
    /// that is longer than a header may be, isn't what it should be, or leads out of its directory.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let read = || {
            let failed = |error| Error::from_io(error, "cannot read the index");
            let bytes = open(path)?.metadata().map_err(failed)?.len();
            if bytes > HEADER_BYTES_MAX {
                let text = format!("the index has {bytes} bytes, {HEADER_BYTES_MAX} are allowed");
                return Err(corrupt(text));
            }
            Self::parse(&fs::read(path).map_err(failed)?)
        };
        read().map_err(|error| error.path(path))
    }

    /// Parses the bytes of an index.
    ///
    /// # Errors
    ///
    /// As for [`Self::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let fields: Fields = serde_json::from_slice(bytes)
            .map_err(|error| corrupt(format!("the index is not what it should be: {error}")))?;
        let weight_map = fields.weight_map.0;
        for (name, shard) in &weight_map {
            let is_plain = |part| matches!(part, Component::Normal(_));
            if shard.is_empty()
                || shard.contains('\0')
                || !Path::new(shard).components().all(is_plain)
            {
                let text = format!(
                    "the index puts the tensor {name:?} into {shard:?}, which is no file below its \
                     directory"
                );
                return Err(corrupt(text));
            }
        }
        Ok(Self { weight_map })
    }

    /// For each tensor, its shard, a path within the directory of the index.
    pub fn weight_map(&self) -> &BTreeMap<String, String> {
        &self.weight_map
    }

    /// The shards, in order of their names.
    pub fn shards(&self) -> Vec<&str> {
        let mut shards: Vec<&str> = self.weight_map.values().map(String::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        shards
    }
}

#[cfg(test)]
mod tests {
    use forebay_io::ErrorKind;

    use super::*;

    #[test]
    fn shards_are_listed_once_and_in_order() {
        let text = r#"{"metadata": {"total_size": 12, "more": [1]}, "weight_map":
            {"b": "two.safetensors", "a": "one.safetensors", "c": "sub/one.safetensors",
             "d": "one.safetensors"}}"#;
        let index = Index::parse(text.as_bytes()).unwrap();
        assert_eq!(index.shards(), ["one.safetensors", "sub/one.safetensors", "two.safetensors"]);
        assert_eq!(index.weight_map()["b"], "two.safetensors");
    }

    #[test]
    fn paths_that_lead_out_of_the_directory_are_refused() {
        for shard in ["/etc/passwd", "../x", "a/../../x", "./x", "", "a\\u0000b"] {
            let text = format!(r#"{{"weight_map": {{"w": "{shard}"}}}}"#);
            let error = Index::parse(text.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{shard}");
            assert!(error.to_string().contains("\"w\""), "{error}");
        }
    }

    #[test]
    fn what_is_no_index_is_refused() {
        for text in [
            "",
            "{}",
            "[]",
            r#"{"weight_map": {"w": 1}}"#,
            r#"{"weight_map": ["w"]}"#,
            r#"{"weight_map": {"w": "a", "w": "b"}}"#,
            "{\"weight_map\": {\"w\": \"\u{0}\"}}",
        ] {
            assert_eq!(Index::parse(text.as_bytes()).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        assert_eq!(Index::parse(b"\xff").unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
