//! Indices of sharded models, from any bytes: no shard that is taken is outside of the directory.

#![no_main]

use std::path::{Component, Path};

use forebay::safetensors::Index;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(index) = Index::parse(bytes) else { return };
    for shard in index.shards() {
        let path = Path::new("directory").join(shard);
        assert!(path.starts_with("directory") && path != Path::new("directory"));
        assert!(path.components().all(|part| matches!(part, Component::Normal(_))), "{shard:?}");
    }
    assert!(index.weight_map().values().all(|shard| index.shards().contains(&shard.as_str())));
});
