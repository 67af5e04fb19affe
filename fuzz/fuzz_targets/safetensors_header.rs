//! Headers of files of tensors, from any bytes, beside the reference library.
//!
//! The first byte says how the rest is taken: as the beginning of a file, or as the JSON of a header
//! in front of so much data as the second byte says.

#![no_main]

use forebay::safetensors::Header;
use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;

fuzz_target!(|bytes: &[u8]| {
    let (mut file, data) = match bytes {
        [0, rest @ ..] => (rest.to_vec(), 0),
        [_, data, json @ ..] => {
            let mut file = (json.len() as u64).to_le_bytes().to_vec();
            file.extend(json);
            (file, usize::from(*data))
        }
        _ => return,
    };
    file.resize(file.len() + data, 0);
    let theirs = SafeTensors::read_metadata(&file);
    let ours = match Header::parse(&file, file.len() as u64) {
        Ok(header) => header,
        Err(error) => {
            let text = error.to_string();
            // What is refused here alone: names that are there twice, and damage to our own headers.
            let is_own = ["there twice", "checksum"].iter().any(|reason| text.contains(reason));
            assert!(theirs.is_err() || is_own, "{text}");
            return;
        }
    };
    let (length, theirs) = theirs.expect("the reference refuses what is taken here");
    assert_eq!(ours.data_start(), length as u64 + 8);
    assert_eq!(ours.file_bytes(), file.len() as u64);
    assert_eq!(ours.tensors().len(), theirs.tensors().len());
    for tensor in ours.tensors() {
        let info = theirs.info(&tensor.name).expect("the reference lacks a tensor");
        assert_eq!(tensor.dtype.name(), info.dtype.to_string());
        assert!(tensor.shape.iter().copied().eq(info.shape.iter().map(|&extent| extent as u64)));
        let (start, end) = info.data_offsets;
        assert_eq!((tensor.start, tensor.end), (start as u64, end as u64));
    }
});
