//! The JSON of a header, entry by entry: strict where the reference is, and without a copy of it
//! in between.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use forebay_io::Result;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::Dtype;
use super::header::{METADATA_NAME, TensorInfo, corrupt};

/// What is in a header.
#[derive(Debug)]
pub(super) struct Entries {
    /// By their bytes, then their names.
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
}

/// Parses a header's text. Offsets and shapes are as they stand there.
pub(super) fn parse(text: &str) -> Result<Entries> {
    let mut entries: Entries = serde_json::from_str(text)
        .map_err(|error| corrupt(format!("the header is not what it should be: {error}")))?;
    let place = |tensor: &TensorInfo| (tensor.start, tensor.end);
    entries.tensors.sort_by(|left, right| {
        place(left).cmp(&place(right)).then_with(|| left.name.cmp(&right.name))
    });
    let mut names = HashSet::with_capacity(entries.tensors.len());
    match entries.tensors.iter().find(|tensor| !names.insert(tensor.name.as_str())) {
        Some(twice) => Err(corrupt(format!("the tensor {:?} is there twice", twice.name))),
        None => Ok(entries),
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor)
    }
}

struct EntriesVisitor;

impl<'de> Visitor<'de> for EntriesVisitor {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Entries, A::Error> {
        let mut tensors = Vec::new();
        let mut metadata: Option<Option<Strings>> = None;
        while let Some(name) = map.next_key::<String>()? {
            if name != METADATA_NAME {
                let Fields { dtype, shape, data_offsets: (start, end) } = map.next_value()?;
                tensors.push(TensorInfo { name, dtype, shape, start, end });
            } else if metadata.replace(map.next_value()?).is_some() {
                return Err(A::Error::custom("the metadata is there twice"));
            }
        }
        let metadata = metadata.flatten().map(|strings| strings.0);
        Ok(Entries { tensors, metadata })
    }
}

/// One tensor's fields, by name or, as derived code takes them too, in order.
struct Fields {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        const NAMES: &[&str] = &["dtype", "shape", "data_offsets"];
        deserializer.deserialize_struct("tensor", NAMES, FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Fields, A::Error> {
        let missing = |count| A::Error::invalid_length(count, &self);
        let dtype = seq.next_element()?.ok_or_else(|| missing(0))?;
        let shape = seq.next_element()?.ok_or_else(|| missing(1))?;
        let data_offsets = seq.next_element()?.ok_or_else(|| missing(2))?;
        Ok(Fields { dtype, shape, data_offsets })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Fields, A::Error> {
        let (mut dtype, mut shape, mut data_offsets) = (None, None, None);
        while let Some(name) = map.next_key::<String>()? {
            let is_twice = match name.as_str() {
                "dtype" => dtype.replace(map.next_value()?).is_some(),
                "shape" => shape.replace(map.next_value()?).is_some(),
                "data_offsets" => data_offsets.replace(map.next_value()?).is_some(),
                _ => {
                    map.next_value::<Skipped>()?;
                    false
                }
            };
            if is_twice {
                return Err(A::Error::custom(format!("{name} is there twice")));
            }
        }
        Ok(Fields {
            dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
            shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
            data_offsets: data_offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
        })
    }
}

/// Any value, looked through and dropped. `serde::de::IgnoredAny` skips without looking: numbers
/// that are none and any depth.
struct Skipped;

impl<'de> Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Skipped {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Self, A::Error> {
        while seq.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self, A::Error> {
        while map.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}

/// An object of strings, each name once.
pub(super) struct Strings(pub(super) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(StringsVisitor)
    }
}

struct StringsVisitor;

impl<'de> Visitor<'de> for StringsVisitor {
    type Value = Strings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Strings, A::Error> {
        let mut strings = BTreeMap::new();
        while let Some((name, value)) = map.next_entry::<String, String>()? {
            if strings.contains_key(&name) {
                let text = format!("{name:?} is there twice");
                return Err(A::Error::custom(text));
            }
            strings.insert(name, value);
        }
        Ok(Strings(strings))
    }
}
