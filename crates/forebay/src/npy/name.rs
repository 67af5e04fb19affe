//! Names of tensors as names of files in a directory, and back.
//!
//! What a file's name can't have, or what would steer a terminal or lead elsewhere, is written as
//! `%` and the two hexadecimal digits of each byte, as in a URL: `layer/0` is `layer%2F0.npy`.

use std::fmt::Write;

use forebay_io::{Error, ErrorKind, Result};

const SUFFIX: &str = ".npy";
/// Longest name of a file on Linux (`NAME_MAX`).
const FILE_NAME_BYTES_MAX: usize = 255;
/// The file of the tensor whose name is empty: no other name is encoded so.
const EMPTY: &str = "%";

/// The name of a tensor's file: reversible, within the directory, and never hidden.
///
/// # Errors
///
/// [`ErrorKind::InvalidInput`] if it is longer than a file's name can be.
///
/// # Examples
///
/// ```
/// use forebay::npy::{file_name, tensor_name};
///
/// assert_eq!(file_name("../größe")?, "%2E.%2Fgröße.npy");
/// assert_eq!(tensor_name("%2E.%2Fgröße.npy").as_deref(), Some("../größe"));
/// # Ok::<(), forebay_io::Error>(())
/// ```
pub fn file_name(tensor: &str) -> Result<String> {
    let mut name = String::with_capacity(tensor.len() + SUFFIX.len());
    for (index, char) in tensor.char_indices() {
        let hidden = index == 0 && char == '.';
        if hidden || matches!(char, '/' | '%') || char.is_control() {
            for byte in char.encode_utf8(&mut [0; 4]).bytes() {
                // Writing to text can't fail.
                let _ = write!(name, "%{byte:02X}");
            }
        } else {
            name.push(char);
        }
    }
    if name.is_empty() {
        name.push_str(EMPTY);
    }
    name.push_str(SUFFIX);
    if name.len() > FILE_NAME_BYTES_MAX {
        let start: String = tensor.chars().take(40).collect();
        let text =
            format!("the tensor's name {start:?}… takes a file name of {} bytes", name.len());
        let hint = format!("a file system takes {FILE_NAME_BYTES_MAX}; keep it in safetensors");
        return Err(Error::new(ErrorKind::InvalidInput, text).hint(hint));
    }
    Ok(name)
}

/// The name of the tensor in a file; `None` for a file without `.npy`. What [`file_name`] wouldn't
/// write, as a `%` without its digits, stays as it is.
pub fn tensor_name(file: &str) -> Option<String> {
    let stem = file.strip_suffix(SUFFIX)?;
    if stem == EMPTY {
        return Some(String::new());
    }
    let bytes = decoded(stem.as_bytes());
    // Digits that don't make Unicode weren't written by this module.
    Some(String::from_utf8(bytes).unwrap_or_else(|_| stem.to_owned()))
}

fn decoded(stem: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(stem.len());
    let mut rest = stem;
    while let [first, tail @ ..] = rest {
        let code = match tail {
            [high, low, ..] if *first == b'%' => digit(*high).zip(digit(*low)),
            _ => None,
        };
        bytes.push(code.map_or(*first, |(high, low)| high << 4 | low));
        rest = if code.is_some() { &tail[2..] } else { tail };
    }
    bytes
}

fn digit(sign: u8) -> Option<u8> {
    char::from(sign).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::{Component, Path};

    #[test]
    fn names_stay_readable_where_they_can() {
        for (tensor, file) in [
            ("model.layers.0.weight", "model.layers.0.weight.npy"),
            ("größe", "größe.npy"),
            ("a/b", "a%2Fb.npy"),
            ("..", "%2E..npy"),
            (".hidden", "%2Ehidden.npy"),
            ("100%", "100%25.npy"),
            ("a\nb\0", "a%0Ab%00.npy"),
            ("", "%.npy"),
            ("%", "%25.npy"),
        ] {
            assert_eq!(file_name(tensor).unwrap(), file);
            assert_eq!(tensor_name(file).as_deref(), Some(tensor));
        }
    }

    #[test]
    fn names_by_others_are_taken_as_they_are() {
        assert_eq!(tensor_name("50%.npy").as_deref(), Some("50%"));
        assert_eq!(tensor_name("%ff.npy").as_deref(), Some("%ff"));
        assert_eq!(tensor_name("a.txt"), None);
    }

    #[test]
    fn a_name_that_no_file_can_have_is_refused() {
        assert!(file_name(&"a".repeat(251)).is_ok());
        let error = file_name(&"ü".repeat(126)).unwrap_err().to_string();
        assert!(error.contains("256 bytes") && error.contains("üüü"), "{error}");
    }

    proptest! {
        #[test]
        fn any_name_is_a_file_in_the_directory_and_comes_back(tensor in any::<String>()) {
            prop_assume!(tensor.len() < 60);
            let file = file_name(&tensor).unwrap();
            let parts: Vec<Component> = Path::new(&file).components().collect();
            prop_assert_eq!(parts, [Component::Normal(file.as_ref())]);
            prop_assert!(!file.starts_with('.') && !file.contains(char::is_control));
            prop_assert_eq!(tensor_name(&file), Some(tensor));
        }
    }
}
