//! Headers beside the reference library: what one refuses the other does, but for names that are
//! there twice; hostile ones cost nothing.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;

use forebay::io::{Error, ErrorKind};
use forebay::safetensors::{Dtype, HEADER_BYTES_MAX, Header};
use proptest::prelude::*;
use safetensors::SafeTensors;

/// A file of this header and so many bytes of data.
fn file(json: &[u8], data_bytes: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

fn parse(bytes: &[u8]) -> Result<Header, Error> {
    Header::parse(bytes, bytes.len() as u64)
}

/// Whether both say the same of a file; the difference if they don't.
fn compare(bytes: &[u8]) -> Result<(), String> {
    match (parse(bytes), SafeTensors::read_metadata(bytes)) {
        (Err(error), Ok(_)) if error.to_string().contains("there twice") => Ok(()),
        (Err(error), Ok(_)) => Err(format!("refused here: {error}")),
        (Ok(_), Err(error)) => Err(format!("refused by the reference: {error}")),
        (Err(error), Err(_)) => match error.kind() {
            ErrorKind::Corrupt | ErrorKind::ShortFile => Ok(()),
            kind => Err(format!("{kind:?}: {error}")),
        },
        (Ok(ours), Ok((length, theirs))) => {
            if ours.data_start() != length as u64 + 8 {
                return Err(format!("the data begins at {}", ours.data_start()));
            }
            let metadata = ours.metadata().map(|metadata| metadata.clone().into_iter().collect());
            if metadata != *theirs.metadata() {
                return Err("the metadata differs".to_owned());
            }
            if ours.tensors().len() != theirs.tensors().len() {
                return Err("the number of tensors differs".to_owned());
            }
            for tensor in ours.tensors() {
                let info = theirs.info(&tensor.name).ok_or("a tensor that is not there")?;
                let shape: Vec<u64> = info.shape.iter().map(|&extent| extent as u64).collect();
                let offsets = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
                let theirs = (info.dtype.to_string(), shape, offsets);
                let ours =
                    (tensor.dtype.to_string(), tensor.shape.clone(), (tensor.start, tensor.end));
                if ours != theirs {
                    return Err(format!("{ours:?} is {theirs:?} there"));
                }
            }
            Ok(())
        }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    /// Added to its end.
    off: i64,
}

fn entry() -> impl Strategy<Value = Entry> {
    let name = prop_oneof![8 => ".{0,6}", 1 => "[ab]", 1 => Just("__metadata__".to_owned())];
    let shape = prop::collection::vec(prop_oneof![9 => 0..5_u64, 1 => any::<u64>()], 0..4);
    let off = prop_oneof![30 => Just(0), 1 => -2..2_i64];
    (name, prop::sample::select(Dtype::ALL), shape, off)
        .prop_map(|(name, dtype, shape, off)| Entry { name, dtype, shape, off })
}

/// The header of these tensors, one behind the other as far as that goes.
fn header(entries: &[Entry], metadata: Option<&str>) -> (String, usize) {
    let mut text = String::from("{");
    let mut end = 0_i64;
    for Entry { name, dtype, shape, off } in entries {
        let bytes = dtype.bytes_of(shape).ok().filter(|bytes| *bytes < 1 << 20).unwrap_or(3);
        let start = end;
        end = start + i64::try_from(bytes).unwrap() + off;
        let name = serde_json::to_string(name).unwrap();
        write!(text, "{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},").unwrap();
        write!(text, "\"data_offsets\":[{start},{end}]}},").unwrap();
    }
    match metadata {
        Some(metadata) => write!(text, "\"__metadata__\":{metadata}").unwrap(),
        None => text.truncate(text.trim_end_matches(',').len()),
    }
    text.push('}');
    (text, usize::try_from(end.max(0)).unwrap())
}

fn metadata() -> impl Strategy<Value = Option<&'static str>> {
    prop::sample::select(vec![
        None,
        Some("null"),
        Some("{}"),
        Some("{\"a\":\"b\",\"\":\"\"}"),
        Some("{\"a\":1}"),
        Some("[]"),
        Some("{\"a\":null}"),
    ])
}

/// Pieces of JSON that change what it means.
fn fragment() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "",
        " ",
        "\n",
        ",",
        ":",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "0",
        "-",
        "-1",
        "1.0",
        "1e2",
        "null",
        "true",
        "\\u0000",
        "\\ud800",
        "\u{FEFF}",
        "18446744073709551615",
        "18446744073709551616",
        "\"x\":[[[1,{\"y\":-0.5e3}]]],",
        "\"dtype\":\"F32\",",
        "\"shape\":[],",
        "BF16",
        "f32",
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn headers_are_taken_or_refused_as_the_reference_does(
        entries in prop::collection::vec(entry(), 0..5),
        metadata in metadata(),
        order in any::<u64>(),
        extra in prop_oneof![9 => Just(0), 1 => 1..3_usize],
    ) {
        let (mut text, bytes) = header(&entries, metadata);
        text.push_str(&" ".repeat(usize::try_from(order % 12).unwrap()));
        prop_assert_eq!(compare(&file(text.as_bytes(), bytes + extra)), Ok(()));
    }

    #[test]
    fn headers_with_a_changed_place_are_taken_or_refused_as_the_reference_does(
        entries in prop::collection::vec(entry(), 1..3),
        metadata in metadata(),
        at in any::<prop::sample::Index>(),
        removed in 0..6_usize,
        put in fragment(),
    ) {
        let (text, bytes) = header(&entries, metadata);
        let mut text = text.into_bytes();
        let at = at.index(text.len());
        let end = (at + removed).min(text.len());
        text.splice(at..end, put.bytes());
        prop_assert_eq!(compare(&file(&text, bytes)), Ok(()));
    }

    #[test]
    fn any_bytes_are_taken_or_refused_as_the_reference_does(
        bytes in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        prop_assert_eq!(compare(&bytes), Ok(()));
    }
}

#[test]
fn forms_that_few_writers_use_are_taken_or_refused_as_the_reference_does() {
    let entry = |fields: &str| format!("{{\"a\":{fields}}}");
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let texts = [
        entry(r#"["F32",[1],[0,4]]"#),
        entry(r#"["F32",[1],[0,4],5]"#),
        entry(r#"["F32",[1]]"#),
        entry(r#"{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}"#),
        entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":{"x":[1.5,"y",false]}}"#),
        entry(r#"{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}"#),
        entry(r#"{"shape":[1],"data_offsets":[0,4]}"#),
        entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#),
        entry(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4.0]}"#),
        entry(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#),
        entry(r#"{"dtype":"F32","shape":null,"data_offsets":[0,4]}"#),
        entry(r#"{"dtype":"F33","shape":[1],"data_offsets":[0,4]}"#),
        entry(&format!(r#"{{"x":{},"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, deep(100))),
        entry(&format!(r#"{{"x":{},"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, deep(200))),
        entry(r#"{"x":1e999,"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#),
        r#"{"__metadata__":{},"__metadata__":{}}"#.to_owned(),
        deep(100_000),
        "null".to_owned(),
        "\"\"".to_owned(),
        "[]".to_owned(),
        String::new(),
        " {}".to_owned(),
        "{} {}".to_owned(),
    ];
    for text in texts {
        for bytes in [0, 4] {
            assert_eq!(compare(&file(text.as_bytes(), bytes)), Ok(()), "{text}");
        }
    }
    for bytes in [&b"\xff{}"[..], b"{\"\xc3\x28\":1}", b"\xef\xbb\xbf{}"] {
        assert_eq!(compare(&file(bytes, 0)), Ok(()));
    }
}

#[test]
fn names_that_are_there_twice_are_refused_by_name() {
    let tensor = r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let error = parse(&file(format!("{{{tensor},{tensor}}}").as_bytes(), 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    // The second is what the order of the bytes puts behind the first: either rule refuses it.
    assert!(error.to_string().contains("\"a\""), "{error}");
    let empty = r#""a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let error = parse(&file(format!("{{{empty},{empty}}}").as_bytes(), 0)).unwrap_err();
    assert!(error.to_string().contains("there twice"), "{error}");
    let metadata = r#"{"__metadata__":{"k":"1","k":"2"}}"#;
    assert_eq!(parse(&file(metadata.as_bytes(), 0)).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn overlaps_gaps_and_lengths_that_do_not_fit_are_refused_by_name() {
    let tensor = |name: &str, shape: &str, start: u64, end: u64| {
        format!(r#""{name}":{{"dtype":"U16","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    for (entries, named) in [
        ([tensor("a", "[2]", 0, 4), tensor("b", "[2]", 2, 6)], "\"b\""),
        ([tensor("a", "[2]", 0, 4), tensor("b", "[2]", 6, 10)], "\"b\""),
        ([tensor("a", "[2]", 0, 4), tensor("b", "[9]", 4, 10)], "\"b\""),
        ([tensor("a", "[2]", 4, 0), tensor("b", "[2]", 0, 4)], "\"a\""),
        ([tensor("a", "[4294967296,4294967296]", 0, 4), tensor("b", "[2]", 4, 8)], "\"a\""),
        ([tensor("a", "[2]", 0, 4), tensor("b", "[2]", 4, u64::MAX)], "\"b\""),
    ] {
        let text = format!("{{{}}}", entries.join(","));
        let error = parse(&file(text.as_bytes(), 10)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}");
        assert!(error.to_string().contains(named), "{error}");
    }
}

#[test]
fn a_cut_file_is_refused_with_both_sizes_wherever_it_is_cut() {
    let text = r#"{"a":{"dtype":"U8","shape":[100],"data_offsets":[0,100]}}"#;
    let whole = file(text.as_bytes(), 100);
    for length in 0..whole.len() {
        let error = parse(&whole[..length]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ShortFile, "{length}");
        let wanted = match length {
            0..8 => 8,
            _ if length < text.len() + 8 => text.len() + 8,
            _ => whole.len(),
        };
        let sizes = (error.wanted_bytes(), error.done_bytes());
        assert_eq!(sizes, (Some(wanted as u64), Some(length as u64)), "{error}");
    }
    let mut longer = whole;
    longer.push(0);
    assert_eq!(parse(&longer).unwrap_err().kind(), ErrorKind::Corrupt);
}

/// Writes the first bytes of a file that is `bytes` long and has nothing behind them.
fn sparse(path: &Path, start: &[u8], bytes: u64) {
    fs::write(path, start).unwrap();
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_header_longer_than_allowed_is_refused_before_it_is_read() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    for length in [HEADER_BYTES_MAX + 1, u64::MAX, 1 << 63] {
        sparse(&path, &length.to_le_bytes(), 1 << 40);
        let error = Header::read(&path).unwrap_err();
        assert_eq!((error.kind(), error.path_ref()), (ErrorKind::Corrupt, Some(&*path)));
        assert!(error.to_string().contains(&length.to_string()), "{error}");
    }
    sparse(&path, &HEADER_BYTES_MAX.to_le_bytes(), 1000);
    assert_eq!(Header::read(&path).unwrap_err().kind(), ErrorKind::ShortFile);
}

#[test]
fn the_longest_header_is_read() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("m.safetensors");
    let mut bytes = HEADER_BYTES_MAX.to_le_bytes().to_vec();
    bytes.extend(br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#);
    bytes.resize(8 + usize::try_from(HEADER_BYTES_MAX).unwrap(), b' ');
    sparse(&path, &bytes, bytes.len() as u64 + 1);
    assert_eq!(Header::read(&path).unwrap().data_start(), bytes.len() as u64);
}

#[test]
fn what_is_no_file_is_refused() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let error = Header::read(directory.path()).unwrap_err();
    assert_eq!((error.os_code(), error.path_ref()), (Some(21), Some(directory.path())));
    assert_eq!(Header::read("/dev/null").unwrap_err().kind(), ErrorKind::InvalidInput);
    let error = Header::read(directory.path().join("gone")).unwrap_err();
    assert_eq!(error.os_code(), Some(2));
}

#[test]
fn a_file_that_ends_before_its_size_says_is_short() {
    // Files of sysfs say that they have a page, and have a line.
    let error = Header::read("/sys/devices/system/cpu/possible").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShortFile, "{error}");
    assert!(error.to_string().contains("/sys/devices/system/cpu/possible"), "{error}");
}
