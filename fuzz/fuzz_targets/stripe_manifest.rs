//! Manifests of striped files, from any bytes.
//!
//! What is accepted keeps its promises: it is written and read back the same, and its numbers
//! agree with the layout's definition.

#![no_main]

use forebay::stripe::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(manifest) = Manifest::parse(bytes) else { return };
    let again = Manifest::parse(&manifest.to_bytes()).expect("its own bytes are a manifest");
    assert_eq!(again, manifest);
    let layout = manifest.layout;
    assert!(manifest.member_index < layout.member_count());
    let total: u64 = (0..layout.member_count())
        .map(|member| layout.member_bytes(member, manifest.logical_bytes))
        .sum();
    assert_eq!(total, manifest.logical_bytes);
    if let Some(last) = manifest.logical_bytes.checked_sub(1) {
        let (member, offset) = layout.locate(last);
        assert_eq!(layout.member_bytes(member, manifest.logical_bytes), offset + 1);
    }
});
