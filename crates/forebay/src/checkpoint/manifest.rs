//! The description of a checkpoint, `manifest.json`: its files, its tensors, and their checksums.
//!
//! It comes from outside: whatever its bytes, reading them gives a manifest whose numbers agree
//! with each other, or what is wrong with it. `docs/format.md` has it byte by byte. The last thing
//! in it is a checksum of itself, so that a change to a name, a shape or another checksum is noticed.

use std::fmt::Write as _;

use forebay_io::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::checksum::{PIECE_BYTES, hex, parse_hex, piece_count};
use super::name::{STATE_FILE, STEP_MAX, shard_file};
use crate::safetensors::{Dtype, crc32c};

/// What a manifest calls its format.
const FORMAT: &str = "forebay-checkpoint";
/// Version of the format.
const VERSION: u32 = 1;
/// Most bytes that a manifest can have: more than a million tensors.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;
/// Most bytes of `state.json`: what of a state isn't tensors is small.
pub const STATE_BYTES_MAX: u64 = 1 << 30;
/// What is before the manifest's own checksum, and what is behind it.
const TAIL: (&str, &str) = ("\n\"crc32c\": \"", "\"\n}\n");
/// Characters of a checksum.
const CHECKSUM_DIGITS: usize = 8;

/// What is known of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The step that it is of.
    pub step: u64,
    /// Bytes of `state.json`.
    pub state_bytes: u64,
    /// CRC32C of `state.json`.
    pub state_checksum: u32,
    /// The files that hold the tensors, in their order.
    pub shards: Vec<Shard>,
    /// The tensors, by shard and by where they are in it.
    pub tensors: Vec<TensorEntry>,
}

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its size.
    pub bytes: u64,
    /// CRC32C of each piece of it, the last one shorter.
    pub piece_checksums: Vec<u32>,
}

/// A tensor in a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// What the state, and the shard's header, call it.
    pub name: String,
    /// Index of its shard.
    pub shard: usize,
    /// The type of its items.
    pub dtype: Dtype,
    /// Its extents.
    pub shape: Vec<u64>,
    /// Its first byte in the shard's file.
    pub start: u64,
    /// The byte behind its last one.
    pub end: u64,
    /// CRC32C of its bytes.
    pub checksum: u32,
}

#[derive(Deserialize)]
struct Heading {
    format: String,
    version: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "the heading and the checksum are looked at before the fields")]
struct Fields {
    format: String,
    version: u32,
    step: u64,
    piece_bytes: u64,
    state: StateFields,
    shards: Vec<ShardFields>,
    tensors: Vec<TensorFields>,
    crc32c: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFields {
    file: String,
    bytes: u64,
    crc32c: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardFields {
    file: String,
    bytes: u64,
    pieces: Option<Vec<String>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorFields {
    name: String,
    shard: usize,
    dtype: String,
    shape: Vec<u64>,
    start: u64,
    end: u64,
    crc32c: Option<String>,
}

impl Manifest {
    /// The bytes of its file: one line for each shard and each tensor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`]: it has more than [`MANIFEST_BYTES_MAX`].
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut text = String::new();
        let state = line(&StateFields {
            file: STATE_FILE.to_owned(),
            bytes: self.state_bytes,
            crc32c: Some(hex(self.state_checksum)),
        });
        let _ = write!(
            text,
            "{{\n\"format\": \"{FORMAT}\",\n\"version\": {VERSION},\n\"step\": {},\n\
             \"piece_bytes\": {PIECE_BYTES},\n\"state\": {state},\n\"shards\": [",
            self.step
        );
        let shards = self.shards.iter().enumerate();
        list(&mut text, shards.map(|(index, shard)| shard.to_line(index)));
        text.push_str("],\n\"tensors\": [");
        list(&mut text, self.tensors.iter().map(TensorEntry::to_line));
        text.push_str("],");
        text.push_str(TAIL.0);
        let digits = text.len()..text.len() + CHECKSUM_DIGITS;
        text.push_str(&"0".repeat(CHECKSUM_DIGITS));
        text.push_str(TAIL.1);
        let checksum = hex(crc32c(text.as_bytes()));
        text.replace_range(digits, &checksum);
        if text.len() as u64 > MANIFEST_BYTES_MAX {
            let count = self.tensors.len();
            let text = format!("a manifest of {count} tensors exceeds {MANIFEST_BYTES_MAX} bytes");
            return Err(Error::new(ErrorKind::InvalidInput, text).hint("save fewer, larger ones"));
        }
        Ok(text.into_bytes())
    }

    /// Reads the bytes of its file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Mismatch`], saying what is wrong with them: no JSON, another format, a checksum
    /// that is missing or doesn't fit, numbers that don't agree. [`ErrorKind::Unsupported`] for a
    /// later version.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(wrong(&format!("it has more than {MANIFEST_BYTES_MAX} bytes")));
        }
        let heading: Heading =
            serde_json::from_slice(bytes).map_err(|error| wrong(&error.to_string()))?;
        if heading.format != FORMAT {
            return Err(wrong(&format!("its format is {:?}", heading.format)));
        }
        if heading.version != VERSION {
            let text = format!("the manifest is of version {}:", heading.version);
            return Err(Error::new(ErrorKind::Unsupported, text)
                .hint(format!("this Forebay reads version {VERSION}, another wrote it")));
        }
        check_own_checksum(bytes)?;
        let fields: Fields =
            serde_json::from_slice(bytes).map_err(|error| wrong(&error.to_string()))?;
        if fields.step > STEP_MAX {
            return Err(wrong(&format!("step {} is out of range", fields.step)));
        }
        if fields.piece_bytes != PIECE_BYTES {
            return Err(wrong(&format!("its pieces have {} bytes", fields.piece_bytes)));
        }
        if fields.state.file != STATE_FILE || fields.state.bytes > STATE_BYTES_MAX {
            return Err(wrong("its state can't be that"));
        }
        let state_checksum = checksum(fields.state.crc32c.as_deref(), || STATE_FILE.to_owned())?;
        let shards: Vec<Shard> = fields
            .shards
            .into_iter()
            .enumerate()
            .map(|(index, shard)| Shard::from_fields(index, shard))
            .collect::<Result<_>>()?;
        let tensors: Vec<TensorEntry> = fields
            .tensors
            .into_iter()
            .map(|tensor| TensorEntry::from_fields(tensor, &shards))
            .collect::<Result<_>>()?;
        check_order(&tensors)?;
        Ok(Self {
            step: fields.step,
            state_bytes: fields.state.bytes,
            state_checksum,
            shards,
            tensors,
        })
    }

    /// The bytes of all shards.
    pub fn shard_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }
}

impl Shard {
    fn to_line(&self, index: usize) -> String {
        line(&ShardFields {
            file: shard_file(index),
            bytes: self.bytes,
            pieces: Some(self.piece_checksums.iter().map(|&checksum| hex(checksum)).collect()),
        })
    }

    fn from_fields(index: usize, fields: ShardFields) -> Result<Self> {
        let ShardFields { file, bytes, pieces } = fields;
        if file != shard_file(index) {
            return Err(wrong(&format!("its shard {} is called {file:?}", index + 1)));
        }
        if bytes == 0 || i64::try_from(bytes).is_err() {
            return Err(wrong(&format!("{file} can't have {bytes} bytes")));
        }
        let pieces = pieces.unwrap_or_default();
        if pieces.len() as u64 != piece_count(bytes) {
            let (has, needs) = (pieces.len(), piece_count(bytes));
            return Err(wrong(&format!("{file} has {has} checksums of {needs} pieces")));
        }
        let of_piece = |text: &String| checksum(Some(text), || format!("a piece of {file}"));
        Ok(Self { bytes, piece_checksums: pieces.iter().map(of_piece).collect::<Result<_>>()? })
    }
}

impl TensorEntry {
    /// Its bytes.
    pub fn length(&self) -> u64 {
        self.end - self.start
    }

    fn to_line(&self) -> String {
        line(&TensorFields {
            name: self.name.clone(),
            shard: self.shard,
            dtype: self.dtype.name().to_owned(),
            shape: self.shape.clone(),
            start: self.start,
            end: self.end,
            crc32c: Some(hex(self.checksum)),
        })
    }

    fn from_fields(fields: TensorFields, shards: &[Shard]) -> Result<Self> {
        let TensorFields { name, shard, dtype, shape, start, end, crc32c } = fields;
        let Some(bytes) = shards.get(shard).map(|shard| shard.bytes) else {
            return Err(wrong(&format!("tensor {name:?} is in shard {shard} of {}", shards.len())));
        };
        let dtype: Dtype =
            dtype.parse().map_err(|error| wrong(&format!("tensor {name:?}: {error}")))?;
        if start > end || end > bytes {
            return Err(wrong(&format!(
                "tensor {name:?} is at {start} to {end} of {bytes} bytes in {}",
                shard_file(shard)
            )));
        }
        if dtype.bytes_of(&shape).ok() != Some(end - start) {
            let (has, dtype) = (end - start, dtype.name());
            return Err(wrong(&format!(
                "tensor {name:?} has {has} bytes, its shape {shape:?} of {dtype} takes others"
            )));
        }
        let checksum =
            checksum(crc32c.as_deref(), || format!("tensor {name:?} in {}", shard_file(shard)))?;
        Ok(Self { name, shard, dtype, shape, start, end, checksum })
    }
}

fn wrong(text: &str) -> Error {
    let text = format!("the manifest of a checkpoint is damaged, {text}:");
    Error::new(ErrorKind::Mismatch, text)
}

fn line(fields: &impl Serialize) -> String {
    serde_json::to_string(fields).unwrap_or_default()
}

fn list(text: &mut String, lines: impl Iterator<Item = String>) {
    for (index, line) in lines.enumerate() {
        text.push_str(if index == 0 { "\n" } else { ",\n" });
        text.push_str(&line);
    }
}

fn checksum(text: Option<&str>, what: impl Fn() -> String) -> Result<u32> {
    match text {
        None => Err(wrong(&format!("there is no checksum of {}", what()))),
        Some(text) => {
            parse_hex(text).ok_or_else(|| wrong(&format!("the checksum of {} is {text:?}", what())))
        }
    }
}

/// Compares a manifest with the checksum at its end, taken with its digits as zeros.
fn check_own_checksum(bytes: &[u8]) -> Result<()> {
    let missing = || wrong("it has no checksum of itself at its end");
    let rest = bytes.strip_suffix(TAIL.1.as_bytes()).ok_or_else(missing)?;
    let before = rest.len().checked_sub(CHECKSUM_DIGITS).ok_or_else(missing)?;
    let (before, digits) = rest.split_at(before);
    if !before.ends_with(TAIL.0.as_bytes()) {
        return Err(missing());
    }
    let wanted = std::str::from_utf8(digits).ok().and_then(parse_hex).ok_or_else(missing)?;
    let mut zeroed = bytes.to_vec();
    zeroed[before.len()..rest.len()].fill(b'0');
    let found = crc32c(&zeroed);
    if found == wanted {
        Ok(())
    } else {
        let (wanted, found) = (hex(wanted), hex(found));
        Err(wrong(&format!("its checksum is {found}, not {wanted} as when it was written")))
    }
}

/// Tensors follow each other, none overlaps another, and no name is there twice.
fn check_order(tensors: &[TensorEntry]) -> Result<()> {
    let apart = |one: &TensorEntry, other: &TensorEntry| {
        (one.shard, one.end) <= (other.shard, other.start) || one.shard < other.shard
    };
    if let Some(pair) = tensors.windows(2).find(|pair| !apart(&pair[0], &pair[1])) {
        let (one, other) = (&pair[0].name, &pair[1].name);
        return Err(wrong(&format!("tensors {one:?} and {other:?} overlap or aren't in order")));
    }
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(wrong(&format!("tensor {:?} is there twice", pair[0]))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tensor(name: &str, shard: usize, start: u64, count: u64) -> TensorEntry {
        TensorEntry {
            name: name.to_owned(),
            shard,
            dtype: Dtype::F32,
            shape: vec![count],
            start,
            end: start + 4 * count,
            checksum: 0xdead_beef,
        }
    }

    fn manifest() -> Manifest {
        let long = 2 * PIECE_BYTES + 4096;
        Manifest {
            step: 42,
            state_bytes: 17,
            state_checksum: 1,
            shards: vec![
                Shard { bytes: long, piece_checksums: vec![1, 2, 3] },
                Shard { bytes: 4096, piece_checksums: vec![u32::MAX] },
            ],
            tensors: vec![
                tensor("b \"quoted\"\n\u{1f40e}", 0, 4096, 10),
                tensor("a", 0, 4136, 1000),
                tensor("empty", 0, 8136, 0),
                tensor("second", 1, 4000, 24),
            ],
        }
    }

    /// Changes the JSON and gives it a checksum that fits.
    fn parsed(change: impl Fn(&mut serde_json::Value)) -> Result<Manifest> {
        let bytes = manifest().to_bytes().unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        change(&mut value);
        let mut fields = value.as_object().unwrap().clone();
        fields.remove("crc32c");
        let text = serde_json::to_string(&fields).unwrap();
        Manifest::parse(&sealed(text.strip_suffix('}').unwrap()))
    }

    fn sealed(text: &str) -> Vec<u8> {
        let zeros = "0".repeat(CHECKSUM_DIGITS);
        let checksum = hex(crc32c(format!("{text},{}{zeros}{}", TAIL.0, TAIL.1).as_bytes()));
        format!("{text},{}{checksum}{}", TAIL.0, TAIL.1).into_bytes()
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_back(
            step in 0..=STEP_MAX,
            state_checksum: u32,
            lengths in prop::collection::vec(0..9_000_u64, 0..40),
            names in prop::collection::hash_set(".*", 40),
        ) {
            let mut at = 4096;
            let mut tensors = Vec::new();
            for (count, name) in lengths.into_iter().zip(names) {
                tensors.push(tensor(&name, 0, at, count));
                at += 4 * count;
            }
            prop_assert_eq!(piece_count(at), 1);
            let piece_checksums = vec![7];
            let shards = vec![Shard { bytes: at, piece_checksums }];
            let manifest = Manifest { step, state_bytes: 3, state_checksum, shards, tensors };
            prop_assert_eq!(Manifest::parse(&manifest.to_bytes().unwrap()).unwrap(), manifest);
        }

        #[test]
        fn any_bytes_are_a_manifest_or_an_error(bytes: Vec<u8>) {
            prop_assert!(Manifest::parse(&bytes).is_err());
        }

        #[test]
        fn a_flipped_bit_is_noticed_wherever_it_is(place: prop::sample::Index, bit in 0..8_u32) {
            let mut bytes = manifest().to_bytes().unwrap();
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
            prop_assert!(Manifest::parse(&bytes).is_err());
        }

        #[test]
        fn a_cut_manifest_is_an_error(cut: prop::sample::Index) {
            let bytes = manifest().to_bytes().unwrap();
            prop_assert!(Manifest::parse(&bytes[..cut.index(bytes.len())]).is_err());
        }
    }

    #[test]
    fn a_manifest_without_tensors_is_one() {
        let bare = Manifest { shards: vec![], tensors: vec![], ..manifest() };
        assert_eq!(Manifest::parse(&bare.to_bytes().unwrap()).unwrap(), bare);
    }

    #[test]
    fn numbers_that_do_not_agree_are_refused_and_said() {
        type Change = fn(&mut serde_json::Value);
        assert_eq!(parsed(|_| {}).unwrap(), manifest());
        let changes: [(&str, Change); 19] = [
            ("format", |value| value["format"] = "zip".into()),
            ("step", |value| value["step"] = u64::MAX.into()),
            ("invalid", |value| value["step"] = (-1).into()),
            ("pieces", |value| value["piece_bytes"] = 1.into()),
            ("state", |value| value["state"]["file"] = "../x".into()),
            ("state", |value| value["state"]["bytes"] = u64::MAX.into()),
            ("no checksum of state.json", |value| value["state"]["crc32c"] = ().into()),
            ("called", |value| value["shards"][0]["file"] = "../../etc/passwd".into()),
            ("can't have", |value| value["shards"][0]["bytes"] = u64::MAX.into()),
            ("0 checksums of 3 pieces", |value| value["shards"][0]["pieces"] = ().into()),
            ("2 checksums of 3 pieces", |value| {
                value["shards"][0]["pieces"].as_array_mut().unwrap().truncate(2);
            }),
            ("shard 7 of 2", |value| value["tensors"][0]["shard"] = 7.into()),
            ("F33", |value| value["tensors"][0]["dtype"] = "F33".into()),
            ("takes others", |value| value["tensors"][0]["shape"] = serde_json::json!([u64::MAX])),
            ("overlap", |value| {
                value["tensors"][1]["start"] = 4100.into();
                value["tensors"][1]["end"] = 8100.into();
            }),
            ("4000 to 1 of", |value| {
                value["tensors"][3]["end"] = 1.into();
            }),
            ("no checksum of tensor \"second\" in shard-00002", |value| {
                value["tensors"][3].as_object_mut().unwrap().remove("crc32c");
            }),
            ("twice", |value| value["tensors"][3]["name"] = "a".into()),
            ("unknown field", |value| value["more"] = 1.into()),
        ];
        for (said, change) in changes {
            let error = parsed(change).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(error.to_string().contains(said), "{said}: {error}");
        }
    }

    #[test]
    fn a_later_version_is_named_whatever_else_it_has() {
        let error = Manifest::parse(b"{\"format\":\"forebay-checkpoint\",\"version\":2,\"x\":1}");
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("version 2"), "{error}");
    }
}
