//! Manifests of checkpoints, from any bytes.
//!
//! What is accepted keeps its promises: it is written and read back the same, and every tensor lies
//! in its shard and overlaps no other. Bytes are tried as they are, and with a checksum that fits.

#![no_main]

use forebay::checkpoint::{Manifest, PIECE_BYTES};
use forebay::safetensors::crc32c;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    let mut sealed = bytes.to_vec();
    sealed.extend(b"\n\"crc32c\": \"00000000\"\n}\n");
    let digits = format!("{:08x}", crc32c(&sealed));
    let end = sealed.len() - 4;
    sealed[end - 8..end].copy_from_slice(digits.as_bytes());
    check(&sealed);
});

fn check(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(bytes) else { return };
    let written = manifest.to_bytes().expect("what was read is short enough to be written");
    assert_eq!(Manifest::parse(&written).expect("its own bytes are a manifest"), manifest);
    for shard in &manifest.shards {
        assert_eq!(shard.piece_checksums.len() as u64, shard.bytes.div_ceil(PIECE_BYTES));
    }
    for pair in manifest.tensors.windows(2) {
        assert!(pair[0].shard < pair[1].shard || pair[0].end <= pair[1].start);
    }
    for tensor in &manifest.tensors {
        assert!(tensor.end <= manifest.shards[tensor.shard].bytes);
        assert_eq!(tensor.dtype.bytes_of(&tensor.shape).ok(), Some(tensor.length()));
    }
}
