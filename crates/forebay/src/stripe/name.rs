//! Names of striped files: relative paths, the same in every directory of the set.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use forebay_io::{Error, ErrorKind, Result};

/// What a manifest's name has behind the member's.
const MANIFEST_SUFFIX: &str = ".stripe.json";
/// What the next manifest's name has, before it takes the place of the other.
const NEXT_SUFFIX: &str = ".stripe.json.new";

/// A checked name: at least one component, none of them `..`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Name(PathBuf);

impl Name {
    /// Reads a name; `a//b` and `./a/b` are `a/b`.
    pub(super) fn new(path: &Path) -> Result<Self> {
        let invalid = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text).path(path));
        let mut name = PathBuf::new();
        for component in path.components() {
            match component {
                Component::Normal(part) => name.push(part),
                Component::CurDir => {}
                Component::ParentDir => {
                    return invalid(
                        "a striped file is named by a path below its directories, without `..`:",
                    );
                }
                Component::RootDir | Component::Prefix(_) => {
                    return invalid(
                        "a striped file has a relative name, which is the same in all directories \
                         of the set; a handle without `stripe` takes other paths:",
                    );
                }
            }
        }
        let Some(last) = name.file_name() else {
            return invalid("a striped file needs a name, this has none:");
        };
        let last = last.as_encoded_bytes();
        if [MANIFEST_SUFFIX, NEXT_SUFFIX].iter().any(|end| last.ends_with(end.as_bytes())) {
            return invalid("names that end in .stripe.json belong to manifests:");
        }
        Ok(Self(name))
    }

    pub(super) fn as_path(&self) -> &Path {
        &self.0
    }

    /// The directories of the name, outermost first; none if it is just a file's name.
    pub(super) fn folders(&self) -> Vec<&Path> {
        let mut folders: Vec<&Path> =
            self.0.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()).collect();
        folders.reverse();
        folders
    }

    /// Where the member is in a directory of the set.
    pub(super) fn member(&self, directory: &Path) -> PathBuf {
        directory.join(&self.0)
    }

    /// Where the member's manifest is.
    pub(super) fn manifest(&self, directory: &Path) -> PathBuf {
        with_suffix(&self.member(directory), MANIFEST_SUFFIX)
    }

    /// Where the next manifest is made.
    pub(super) fn next_manifest(&self, directory: &Path) -> PathBuf {
        with_suffix(&self.member(directory), NEXT_SUFFIX)
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut text = OsString::from(path);
    text.push(OsStr::new(suffix));
    PathBuf::from(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_name_are_one() {
        let name = Name::new(Path::new("a/b")).unwrap();
        for text in ["./a/b", "a//b", "a/./b", "a/b/"] {
            assert_eq!(Name::new(Path::new(text)).unwrap(), name, "{text}");
        }
        assert_eq!(name.folders(), [Path::new("a")]);
        assert_eq!(name.manifest(Path::new("/x")), Path::new("/x/a/b.stripe.json"));
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused_and_say_what_to_do() {
        for (text, said) in [
            ("/a", "relative name"),
            ("a/../b", "without `..`"),
            ("..", "without `..`"),
            ("", "needs a name"),
            (".", "needs a name"),
            ("a.stripe.json", "belong to manifests"),
            ("x/a.stripe.json.new", "belong to manifests"),
        ] {
            let error = Name::new(Path::new(text)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
