//! Names in a directory of checkpoints: what a step is called, and what is under way.
//!
//! Everything that isn't a checkpoint yet, or none any more, has a name that begins with a dot and
//! ends in a random token and a word, so that writers never meet and a cleaner knows what is whose.

use forebay_io::{Error, ErrorKind, Result};

/// The file that names the newest checkpoint.
pub const LATEST_FILE: &str = "latest";
/// The description of a checkpoint, in its directory.
pub const MANIFEST_FILE: &str = "manifest.json";
/// What of the state isn't tensors, in its directory.
pub const STATE_FILE: &str = "state.json";
/// The largest step: what a signed number of 64 bits holds.
pub const STEP_MAX: u64 = i64::MAX as u64;

const STEP_PREFIX: &str = "step-";
const TOKEN_DIGITS: usize = 16;

/// Words that names of what is under way end in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The directory of a checkpoint that is being written.
    Partial,
    /// The next `latest`.
    Latest,
    /// The directory of a checkpoint that is being removed.
    Removed,
    /// The file that a live writer holds locked.
    Lock,
}

impl Part {
    const ALL: [Self; 4] = [Self::Partial, Self::Latest, Self::Removed, Self::Lock];

    fn word(self) -> &'static str {
        match self {
            Self::Partial => "partial",
            Self::Latest => "latest",
            Self::Removed => "removed",
            Self::Lock => "lock",
        }
    }
}

/// What the directory of a step is called: at least eight digits, so that listings sort.
pub fn step_directory(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// The step of a directory's name; `None` for any other name.
pub(crate) fn parse_step(name: &str) -> Option<u64> {
    let step = name.strip_prefix(STEP_PREFIX)?.parse().ok()?;
    (step <= STEP_MAX && step_directory(step) == name).then_some(step)
}

/// What a shard's file is called; the first is number 1.
pub fn shard_file(index: usize) -> String {
    format!("shard-{:05}.safetensors", index + 1)
}

/// What one writer or remover puts before the words of its names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stem(String);

impl Stem {
    /// One that nobody else has.
    pub(super) fn random(step: u64) -> Result<Self> {
        let mut token = [0; TOKEN_DIGITS / 2];
        getrandom::fill(&mut token).map_err(|error| {
            Error::new(ErrorKind::Unsupported, format!("no random numbers to be had: {error}"))
        })?;
        Ok(Self(format!(".{}-{:016x}", step_directory(step), u64::from_le_bytes(token))))
    }

    /// The name of a part.
    pub(super) fn part(&self, part: Part) -> String {
        format!("{}.{}", self.0, part.word())
    }

    /// Which part of what a name is; `None` for names of others.
    pub(super) fn parse(name: &str) -> Option<(Self, Part)> {
        let (stem, word) = name.rsplit_once('.')?;
        let part = Part::ALL.into_iter().find(|part| part.word() == word)?;
        let (step, token) = stem.strip_prefix('.')?.rsplit_once('-')?;
        let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
        let is_token = token.len() == TOKEN_DIGITS && token.bytes().all(is_digit);
        (is_token && parse_step(step).is_some()).then(|| (Self(stem.to_owned()), part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_any_size_have_one_name_each() {
        for (step, name) in [
            (0, "step-00000000"),
            (42, "step-00000042"),
            (99_999_999, "step-99999999"),
            (100_000_000, "step-100000000"),
            (STEP_MAX, "step-9223372036854775807"),
        ] {
            assert_eq!(step_directory(step), name);
            assert_eq!(parse_step(name), Some(step));
        }
        for name in [
            "step-42",
            "step-000000042",
            "step-+0000042",
            "step-9223372036854775808",
            "step-",
            "step-0000004x",
            "Step-00000042",
            "step-00000042.old",
        ] {
            assert_eq!(parse_step(name), None, "{name}");
        }
    }

    #[test]
    fn parts_are_told_from_the_names_of_others() {
        let stem = Stem::random(STEP_MAX).unwrap();
        for part in Part::ALL {
            assert_eq!(Stem::parse(&stem.part(part)), Some((stem.clone(), part)));
        }
        for name in [
            "step-00000042",
            ".step-00000042.lock",
            ".step-00000042-0123.lock",
            ".step-00000042-0123456789abcdeX.lock",
            ".step-42-0123456789abcdef.lock",
            ".step-00000042-0123456789abcdef.keep",
            "..lock",
        ] {
            assert_eq!(Stem::parse(name), None, "{name}");
        }
        assert_ne!(Stem::random(1).unwrap(), Stem::random(1).unwrap());
    }
}
