//! The small file beside each member that says what the member is part of.
//!
//! One JSON object. It comes from outside: whatever its bytes, reading it gives a manifest whose
//! numbers agree with each other, or what is wrong with it.

use forebay_io::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::layout::Layout;

/// What [`Manifest`] calls its format.
const FORMAT: &str = "forebay-stripe";
/// Version of the format.
const VERSION: u32 = 1;
/// Most bytes that a manifest can have: 64 members of 20 digits take 2 KiB.
pub const MANIFEST_BYTES_MAX: u64 = 16 << 10;
/// Characters of a [`Generation`].
const GENERATION_DIGITS: usize = 32;

/// Tells one whole-file store from all others: 128 random bits in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(String);

impl Generation {
    /// One that nobody else has.
    ///
    /// # Errors
    ///
    /// The system has no random numbers.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; GENERATION_DIGITS / 2];
        getrandom::fill(&mut bytes).map_err(|error| {
            Error::new(ErrorKind::Unsupported, format!("no random numbers to be had: {error}"))
        })?;
        Ok(Self(format!("{:032x}", u128::from_le_bytes(bytes))))
    }
}

/// What is known of a striped file, and which member this is of: the content of `NAME.stripe.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Every byte is there: the store that wrote it has ended well.
    pub is_complete: bool,
    /// The whole-file store that it is of; the same in all members.
    pub generation: Generation,
    /// How the logical file is cut up.
    pub layout: Layout,
    /// Bytes of the logical file.
    pub logical_bytes: u64,
    /// Which member lies beside it.
    pub member_index: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    format: String,
    version: u32,
    complete: bool,
    generation: Generation,
    logical_bytes: u64,
    stripe_bytes: u64,
    member_count: usize,
    member_index: usize,
    member_bytes: Vec<u64>,
}

#[derive(Deserialize)]
struct Heading {
    format: String,
    version: u32,
}

impl Manifest {
    /// The bytes of its file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let fields = Fields {
            format: FORMAT.to_owned(),
            version: VERSION,
            complete: self.is_complete,
            generation: self.generation.clone(),
            logical_bytes: self.logical_bytes,
            stripe_bytes: self.layout.stripe_bytes(),
            member_count: self.layout.member_count(),
            member_index: self.member_index,
            member_bytes: self.members_bytes(),
        };
        let mut bytes = serde_json::to_vec_pretty(&fields).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// Reads the bytes of its file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Mismatch`], saying what is wrong with them: no JSON, another format, a later
    /// version, numbers that don't agree.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let wrong = |text: String| {
            let text = format!("the manifest of a striped file is damaged, {text}:");
            Error::new(ErrorKind::Mismatch, text)
        };
        if bytes.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(wrong(format!("it has more than {MANIFEST_BYTES_MAX} bytes")));
        }
        let heading: Heading =
            serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        if heading.format != FORMAT {
            return Err(wrong(format!("its format is {:?}", heading.format)));
        }
        if heading.version != VERSION {
            let text = format!("the manifest is of version {}:", heading.version);
            return Err(Error::new(ErrorKind::Unsupported, text)
                .hint(format!("this Forebay reads version {VERSION}, another wrote it")));
        }
        let fields: Fields =
            serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        let digits = fields.generation.0.as_bytes();
        if digits.len() != GENERATION_DIGITS || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(wrong("its generation isn't 32 hexadecimal digits".to_owned()));
        }
        let layout = Layout::new(fields.stripe_bytes, fields.member_count)
            .map_err(|error| wrong(error.to_string()))?;
        let manifest = Self {
            is_complete: fields.complete,
            generation: fields.generation,
            layout,
            logical_bytes: fields.logical_bytes,
            member_index: fields.member_index,
        };
        if manifest.member_index >= layout.member_count() {
            return Err(wrong(format!(
                "member {} of {}",
                manifest.member_index,
                layout.member_count()
            )));
        }
        if i64::try_from(manifest.logical_bytes).is_err() {
            return Err(wrong(format!("{} bytes don't fit in a file", manifest.logical_bytes)));
        }
        if fields.member_bytes != manifest.members_bytes() {
            return Err(wrong("its sizes don't agree".to_owned()));
        }
        Ok(manifest)
    }

    fn members_bytes(&self) -> Vec<u64> {
        let bytes = |member| self.layout.member_bytes(member, self.logical_bytes);
        (0..self.layout.member_count()).map(bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            is_complete: true,
            generation: Generation::random().unwrap(),
            layout: Layout::new(1 << 20, 3).unwrap(),
            logical_bytes: (5 << 20) + 17,
            member_index: 2,
        }
    }

    fn parsed(change: impl Fn(&mut serde_json::Value)) -> Result<Manifest> {
        let mut value = serde_json::from_slice(&manifest().to_bytes()).unwrap();
        change(&mut value);
        Manifest::parse(&serde_json::to_vec(&value).unwrap())
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_back(
            is_complete: bool,
            logical_bytes in 0..u64::MAX >> 1,
            pages in 1..300_u64,
            (member_count, member_index) in
                (1..65_usize).prop_flat_map(|count| (Just(count), 0..count)),
        ) {
            let layout = Layout::new(pages * 4096, member_count).unwrap();
            let generation = Generation::random().unwrap();
            let manifest =
                Manifest { is_complete, generation, layout, logical_bytes, member_index };
            let bytes = manifest.to_bytes();
            prop_assert!(bytes.len() as u64 <= MANIFEST_BYTES_MAX);
            prop_assert_eq!(Manifest::parse(&bytes).unwrap(), manifest);
        }

        #[test]
        fn any_bytes_are_a_manifest_or_an_error(bytes: Vec<u8>) {
            prop_assert!(Manifest::parse(&bytes).is_err());
        }

        #[test]
        fn a_cut_manifest_is_an_error(cut in 0..100_usize) {
            let bytes = manifest().to_bytes();
            prop_assert!(Manifest::parse(&bytes[..bytes.len().saturating_sub(2 + cut)]).is_err());
        }
    }

    #[test]
    fn numbers_that_do_not_agree_are_refused() {
        type Change = fn(&mut serde_json::Value);
        assert!(parsed(|_| {}).is_ok());
        let changes: [Change; 11] = [
            |value| value["format"] = "zip".into(),
            |value| value["logical_bytes"] = 17.into(),
            |value| value["logical_bytes"] = u64::MAX.into(),
            |value| value["logical_bytes"] = (-1).into(),
            |value| value["stripe_bytes"] = 0.into(),
            |value| value["stripe_bytes"] = 4097.into(),
            |value| value["member_count"] = u64::MAX.into(),
            |value| value["member_index"] = 3.into(),
            |value| value["member_bytes"] = serde_json::json!([1, 2]),
            |value| value["generation"] = "xyz".into(),
            |value| value["more"] = 1.into(),
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let error = parsed(change).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{index}: {error}");
        }
    }

    #[test]
    fn a_later_version_is_named_whatever_else_it_has() {
        let error = parsed(|value| {
            value["version"] = 2.into();
            value["more"] = 1.into();
        })
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("version 2"), "{error}");
    }
}
