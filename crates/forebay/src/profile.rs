//! Profiles: the options that drives were found to do best with, kept from one run to the next.
//!
//! They are one JSON file ([`profiles_path`]), by the kind of memory and by the
//! [identity](crate::topology::Location::identity) of what a directory is on. [`Profiles`] is what
//! was read of it; as [`Tunings`] it tells handles.
//!
//! # Invariants
//!
//! - The file is replaced whole, by one writer at a time: a reader finds the old or the new one, and
//!   two writers don't lose each other's.
//! - A file that can't be understood is never written over.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind as IoErrorKind, Read as _, Write};
use std::path::{Path, PathBuf};

use forebay_io::{
    Direction, EngineChoice, EngineKind, Error, ErrorKind, MemoryKind, Result, Tuning, Tunings,
};
use serde::{Deserialize, Serialize};

use crate::config::profiles_path;
use crate::regular;
use crate::topology;

/// The layout of the file.
const VERSION: u64 = 1;

/// What one drive, or set of drives, was found to do best with.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Profile {
    /// What it is, for people.
    pub name: String,
    /// When it was measured: seconds since 1970, UTC.
    pub measured_at: u64,
    /// Best for loads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read: Option<Best>,
    /// Best for stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<Best>,
    /// Best for both with the same options.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub both: Option<Best>,
}

/// Options, and what they came to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Which engine moves the blocks.
    #[serde(with = "engine_name")]
    pub engine: EngineKind,
    /// Most bytes in one transfer.
    pub block_size: usize,
    /// Transfers in flight per worker.
    pub queue_depth: usize,
    /// Workers.
    pub parallelism: usize,
    /// Whether each transfer is handed to the kernel by a call of its own.
    pub single_submit: bool,
    /// Memory for staging blocks; `None`: what the handle was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_staging_bytes: Option<usize>,
    /// The rate they came to: of loads, of stores, or the lower of the two for both.
    pub bytes_per_second: f64,
    /// Nothing is known to be faster: the [verdict](crate::tune) of the search, for both that of
    /// the less sure way.
    #[serde(default)]
    pub conclusive: bool,
}

impl From<Best> for Tuning {
    fn from(best: Best) -> Self {
        Self {
            engine: EngineChoice::Named(best.engine),
            block_size: best.block_size,
            queue_depth: best.queue_depth,
            parallelism: best.parallelism,
            single_submit: best.single_submit,
            device_staging_bytes: best.device_staging_bytes,
        }
    }
}

/// Engines by their names in JSON.
pub(crate) mod engine_name {
    use forebay_io::{EngineChoice, EngineKind};
    use serde::{Deserialize, Deserializer, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(crate) fn serialize<S: Serializer>(
        engine: &EngineKind,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(engine.name())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<EngineKind, D::Error> {
        let name = String::deserialize(deserializer)?;
        match name.parse() {
            Ok(EngineChoice::Named(kind)) => Ok(kind),
            _ => Err(serde::de::Error::custom(format!("{name:?} is no engine"))),
        }
    }
}

/// All that is stored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profiles {
    version: u64,
    #[serde(rename = "profiles")]
    host: BTreeMap<String, Profile>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    gpu: BTreeMap<String, Profile>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    gds: BTreeMap<String, Profile>,
}

impl Profiles {
    /// Reads what is stored for this user; nothing if nothing is.
    ///
    /// # Errors
    ///
    /// A file that can't be read or understood, with its path and what to do.
    pub fn load() -> Result<Self> {
        profiles_path().map_or_else(|| Ok(Self::default()), |path| Self::read(&path))
    }

    /// Reads a file; nothing if there is none.
    ///
    /// # Errors
    ///
    /// As for [`Self::load`].
    pub fn read(path: &Path) -> Result<Self> {
        let read = || {
            let mut text = Vec::new();
            regular::open(path)?.read_to_end(&mut text).map(|_| text)
        };
        let text = match read() {
            Ok(text) => text,
            Err(error) if error.kind() == IoErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Error::from_io(error, "cannot read profiles").path(path)),
        };
        let unknown = |text: String| {
            Error::new(ErrorKind::InvalidInput, format!("cannot understand profiles: {text}:"))
                .path(path)
                .hint("remove the file, and tune again")
        };
        let found: Self =
            serde_json::from_slice(&text).map_err(|error| unknown(error.to_string()))?;
        if found.version != VERSION {
            return Err(unknown(format!("version {}, known is {VERSION}", found.version)));
        }
        Ok(found)
    }

    fn of(&self, memory: MemoryKind) -> &BTreeMap<String, Profile> {
        match memory {
            MemoryKind::Host => &self.host,
            MemoryKind::Gpu => &self.gpu,
            MemoryKind::Gds => &self.gds,
        }
    }

    fn of_mut(&mut self, memory: MemoryKind) -> &mut BTreeMap<String, Profile> {
        match memory {
            MemoryKind::Host => &mut self.host,
            MemoryKind::Gpu => &mut self.gpu,
            MemoryKind::Gds => &mut self.gds,
        }
    }

    /// Stores the profile of what has this identity, for one kind of memory, in place of an earlier
    /// one. A side that the new one lacks is taken from the earlier one.
    ///
    /// # Errors
    ///
    /// As for [`Self::load`], and what writing met.
    pub fn store(identity: &str, memory: MemoryKind, profile: Profile) -> Result<()> {
        change(&path_or_error()?, |profiles| {
            let before = profiles.of_mut(memory).remove(identity).unwrap_or_default();
            let profile = Profile {
                read: profile.read.or(before.read),
                write: profile.write.or(before.write),
                both: profile.both.or(before.both),
                ..profile
            };
            profiles.of_mut(memory).insert(identity.to_owned(), profile);
        })
    }

    /// Forgets the profiles of what has this identity, of all kinds of memory; whether there was
    /// one.
    ///
    /// # Errors
    ///
    /// As for [`Self::store`].
    pub fn forget(identity: &str) -> Result<bool> {
        let mut found = false;
        change(&path_or_error()?, |profiles| {
            for memory in MemoryKind::ALL {
                found |= profiles.of_mut(memory).remove(identity).is_some();
            }
        })?;
        Ok(found)
    }

    /// The profile of what has this identity, for one kind of memory.
    pub fn get(&self, identity: &str, memory: MemoryKind) -> Option<&Profile> {
        self.of(memory).get(identity)
    }

    /// All profiles with their identities and kinds of memory.
    pub fn iter(&self) -> impl Iterator<Item = (&str, MemoryKind, &Profile)> {
        MemoryKind::ALL.into_iter().flat_map(move |memory| {
            let entries = self.of(memory).iter();
            entries.map(move |(identity, profile)| (identity.as_str(), memory, profile))
        })
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }
}

impl Tunings for Profiles {
    /// What was found for the host's memory stands in for a GPU's on the way through the host's,
    /// which is the same engine and the same drive, but not for GPUDirect Storage, which is neither.
    fn tuning(&self, file: &Path, direction: Direction, memory: MemoryKind) -> Option<Tuning> {
        let identity = topology::locate(file).ok()?.identity();
        let best_of = |memory| {
            let profile = self.get(&identity, memory)?;
            let best = match direction {
                Direction::Load => profile.read,
                Direction::Store => profile.write,
            };
            best.or(profile.both)
        };
        let best = match memory {
            MemoryKind::Gpu => best_of(MemoryKind::Gpu).or_else(|| best_of(MemoryKind::Host)),
            MemoryKind::Host | MemoryKind::Gds => best_of(memory),
        };
        best.map(Tuning::from)
    }
}

fn path_or_error() -> Result<PathBuf> {
    profiles_path().ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, "there is no place for profiles: HOME isn't set")
            .hint("set FOREBAY_PROFILES to a file")
    })
}

/// Changes the file, while no other does.
fn change(path: &Path, change: impl FnOnce(&mut Profiles)) -> Result<()> {
    let failed = |what: &'static str| move |error| Error::from_io(error, what).path(path);
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    fs::create_dir_all(directory).map_err(failed("cannot make the directory of profiles"))?;
    // A file beside it: the one that is replaced can't hold the lock.
    let lock = File::create(path.with_extension("lock")).map_err(failed("cannot lock profiles"))?;
    lock.lock().map_err(failed("cannot lock profiles"))?;
    let mut profiles = Profiles::read(path)?;
    profiles.version = VERSION;
    change(&mut profiles);
    let text = serde_json::to_vec_pretty(&profiles)
        .map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))?;
    let fresh = path.with_extension("new");
    let written = File::create(&fresh).and_then(|mut file| {
        file.write_all(&text)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    });
    written.map_err(|error| {
        // What is left of it is of no use; that it can't be removed either changes nothing.
        let _ = fs::remove_file(&fresh);
        Error::from_io(error, "cannot write profiles").path(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(queue_depth: usize) -> Best {
        Best {
            engine: EngineKind::Threads,
            block_size: 1 << 20,
            queue_depth,
            parallelism: 2,
            single_submit: false,
            device_staging_bytes: None,
            bytes_per_second: 1.5e9,
            conclusive: true,
        }
    }

    fn add(path: &Path, identity: &str, profile: &Profile) {
        change(path, |profiles| {
            profiles.host.insert(identity.to_owned(), profile.clone());
        })
        .unwrap();
    }

    #[test]
    fn what_is_stored_is_read_again_and_nothing_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep").join("profiles.json");
        assert!(Profiles::read(&path).unwrap().is_empty());
        let profile =
            Profile { name: "a drive".to_owned(), read: Some(best(8)), ..Profile::default() };
        add(&path, "one", &profile);
        add(&path, "two", &Profile { both: Some(best(4)), ..Profile::default() });
        let found = Profiles::read(&path).unwrap();
        assert_eq!(found.get("one", MemoryKind::Host), Some(&profile));
        assert_eq!(found.iter().count(), 2);
    }

    #[test]
    fn writers_at_once_lose_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("profiles.json");
        std::thread::scope(|scope| {
            for writer in 0..8 {
                let path = &path;
                scope.spawn(move || {
                    for index in 0..10 {
                        add(path, &format!("{writer}-{index}"), &Profile::default());
                    }
                });
            }
        });
        assert_eq!(Profiles::read(&path).unwrap().iter().count(), 80);
    }

    #[test]
    fn what_cannot_be_understood_is_told_of_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("profiles.json");
        for text in ["", "[]", r#"{"version": 2, "profiles": {}}"#, "{\"version\": 1,"] {
            fs::write(&path, text).unwrap();
            let error = Profiles::read(&path).unwrap_err();
            assert!(error.to_string().contains("profiles.json"), "{error}");
            assert!(change(&path, |_| ()).is_err());
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn each_direction_has_its_own_best_and_both_stands_in() {
        let directory = tempfile::tempdir().unwrap();
        let identity = topology::locate(directory.path()).unwrap().identity();
        let mut profiles = Profiles { version: VERSION, ..Profiles::default() };
        let depth = |profiles: &Profiles, direction| {
            let tuning = profiles.tuning(directory.path(), direction, MemoryKind::Host);
            tuning.map(|tuning| tuning.queue_depth)
        };
        assert_eq!(depth(&profiles, Direction::Load), None);
        let profile = Profile { read: Some(best(8)), both: Some(best(4)), ..Profile::default() };
        profiles.host.insert(identity, profile);
        assert_eq!(depth(&profiles, Direction::Load), Some(8));
        assert_eq!(depth(&profiles, Direction::Store), Some(4));
        let nowhere = Path::new("/no/such/file");
        assert!(profiles.tuning(nowhere, Direction::Load, MemoryKind::Host).is_none());
    }

    #[test]
    fn each_kind_of_memory_has_its_own_best_and_the_hosts_stands_in_on_its_own_way() {
        let directory = tempfile::tempdir().unwrap();
        let identity = topology::locate(directory.path()).unwrap().identity();
        let mut profiles = Profiles { version: VERSION, ..Profiles::default() };
        let depths = |profiles: &Profiles| {
            MemoryKind::ALL.map(|memory| {
                let tuning = profiles.tuning(directory.path(), Direction::Load, memory);
                tuning.map(|tuning| (tuning.queue_depth, tuning.device_staging_bytes))
            })
        };
        let profile = |best| Profile { read: Some(best), ..Profile::default() };
        profiles.host.insert(identity.clone(), profile(best(8)));
        assert_eq!(depths(&profiles), [Some((8, None)), Some((8, None)), None]);
        let staged = Best { device_staging_bytes: Some(1 << 20), ..best(16) };
        profiles.gpu.insert(identity.clone(), profile(staged));
        profiles.gds.insert(identity.clone(), profile(best(32)));
        let wanted = [Some((8, None)), Some((16, Some(1 << 20))), Some((32, None))];
        assert_eq!(depths(&profiles), wanted);
        let path = directory.path().join("profiles.json");
        change(&path, |stored| *stored = profiles.clone()).unwrap();
        let found = Profiles::read(&path).unwrap();
        assert_eq!(found, profiles);
        let kinds: Vec<MemoryKind> = found.iter().map(|(_, memory, _)| memory).collect();
        assert_eq!(kinds, MemoryKind::ALL);
    }
}
