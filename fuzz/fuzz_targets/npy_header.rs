//! Headers of `.npy` files, from any bytes.
//!
//! What is accepted agrees with the file's length, and its shape is written and read back the same;
//! any name of a file is a tensor's, and leads back to a file in the same directory.

#![no_main]

use std::path::{Component, Path};

use forebay::npy::{Header, file_name, tensor_name};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (&[u8], u16, &str)| {
    let (bytes, more, name) = input;
    if let Ok(file) = file_name(name) {
        assert_eq!(tensor_name(&file).as_deref(), Some(name));
        let parts: Vec<Component<'_>> = Path::new(&file).components().collect();
        assert_eq!(parts, [Component::Normal(file.as_ref())]);
    }
    let file_bytes = bytes.len() as u64 + u64::from(more);
    let Ok(header) = Header::parse(bytes, file_bytes) else { return };
    assert_eq!(header.data_start + header.array_bytes(), file_bytes);
    let written = Header::to_bytes(header.element.dtype, &header.shape).expect("it was read");
    let again = Header::parse(&written, written.len() as u64 + header.array_bytes());
    let again = again.expect("its own bytes are a header");
    assert_eq!((again.element.dtype, again.shape), (header.element.dtype, header.shape));
});
