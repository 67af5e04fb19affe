//! A directory: its file system, and what engines can do there.

use std::path::{Path, PathBuf};

use forebay_io::EngineKind;
use forebay_io::device::gds::{Whereabouts, storage_of};
use forebay_io::directory::{Trial, room, try_out};
use serde::Serialize;

use super::{Facts, Finding, Level, drive, route};
use crate::ByteSize;
use crate::lossy;
use crate::topology::{Location, Mount, locate};

/// Less room than this is about to be none: one layer of a large model.
const ROOM_BYTES_MIN: u64 = 1 << 30;

/// Room on the file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RoomFacts {
    /// All there is.
    pub total_bytes: u64,
    /// What this user can still fill.
    pub available_bytes: u64,
}

/// What direct I/O asks of files in the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alignment {
    /// Transfers go around the page cache.
    pub direct: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Alignment of memory in bytes; 1 if not direct.
    pub memory_bytes: usize,
    /// Granule of direct offsets and lengths in bytes.
    pub offset_bytes: u64,
}

/// What came of moving bytes with an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TrialFacts {
    /// The engine.
    pub engine: String,
    /// Why it failed; `None` if every byte came back.
    pub failure: Option<String>,
    /// Bytes went around the page cache.
    pub direct: bool,
    /// Bytes moved through memory that is registered with the engine.
    pub registered: bool,
    /// What was done otherwise than asked, and why.
    pub fallbacks: Vec<String>,
}

impl From<Trial> for TrialFacts {
    fn from(trial: Trial) -> Self {
        let Trial { engine, failure, direct, registered, fallbacks } = trial;
        Self { engine: engine.to_string(), failure, direct, registered, fallbacks }
    }
}

/// What GPUDirect Storage would find files in the directory on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StorageFacts {
    /// A kind that cuFile may reach from a GPU.
    pub kind: Option<String>,
    /// Why it is none of those.
    pub obstacle: Option<String>,
}

/// What was found in a directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DirectoryFacts {
    /// Its path, as given.
    #[serde(serialize_with = "lossy::path")]
    pub path: PathBuf,
    /// Why nothing more could be found.
    pub error: Option<String>,
    /// What it is on.
    pub location: Option<Location>,
    /// Room on its file system.
    pub room: Option<RoomFacts>,
    /// What direct I/O asks; `None` if no file could be made.
    pub alignment: Option<Alignment>,
    /// What GPUDirect Storage would find it on; `None` where that can't be looked at.
    pub storage: Option<StorageFacts>,
    /// One trial for each engine that can be set up.
    pub trials: Vec<TrialFacts>,
}

/// Looks at a directory, and tries engines out in it.
pub(super) fn gather(path: &Path, engines: &[EngineKind]) -> DirectoryFacts {
    let facts = DirectoryFacts { path: path.to_owned(), ..DirectoryFacts::default() };
    let fail = |error: String| DirectoryFacts { error: Some(error), ..facts.clone() };
    match std::fs::metadata(path) {
        Err(error) => return fail(format!("cannot be looked at: {error}")),
        Ok(status) if !status.is_dir() => return fail("is not a directory".to_owned()),
        Ok(_) => {}
    }
    let location = locate(path).ok();
    DirectoryFacts {
        storage: location.as_ref().map(storage),
        location,
        room: room(path).ok().map(|room| RoomFacts {
            total_bytes: room.total_bytes,
            available_bytes: room.available_bytes,
        }),
        alignment: forebay_io::facts(path).ok().map(|facts| Alignment {
            direct: facts.direct,
            reason: facts.reason,
            memory_bytes: facts.memory_alignment,
            offset_bytes: facts.offset_alignment,
        }),
        trials: engines.iter().map(|engine| try_out(path, *engine).into()).collect(),
        ..facts
    }
}

fn storage(location: &Location) -> StorageFacts {
    let Mount { device, number, .. } = location.mount;
    match storage_of(Path::new("/"), Whereabouts { device, mount: Some(number) }) {
        Ok(Ok(kind)) => StorageFacts { kind: Some(kind.name().to_owned()), obstacle: None },
        Ok(Err(obstacle)) => StorageFacts { kind: None, obstacle: Some(obstacle) },
        Err(error) => StorageFacts { kind: None, obstacle: Some(error.to_string()) },
    }
}

pub(super) fn findings(found: &DirectoryFacts, all: &Facts) -> Vec<Finding> {
    if let Some(error) = &found.error {
        return vec![Finding::new("directory.path", Level::Failure, "directory", error)];
    }
    let mut findings = Vec::new();
    if let Some(location) = &found.location {
        findings.extend(file_system(location, all.system.kernel.as_deref()));
        findings.extend(drive::findings(location, all.system.numa_nodes));
    } else {
        let detail = "what it is on isn't shown here: /proc/self/mountinfo can't be read";
        findings.push(Finding::new("directory.file_system", Level::Info, "file system", detail));
    }
    findings.extend(found.room.map(room_left));
    findings.extend(found.alignment.as_ref().map(direct));
    findings.extend(found.trials.iter().map(trial));
    findings.extend(route::findings(found, &all.gpu));
    findings
}

fn file_system(location: &Location, kernel: Option<&str>) -> Vec<Finding> {
    let id = "directory.file_system";
    let mount = &location.mount;
    let place = format!("{} on {}", mount.file_system, mount.point.display());
    let say = |level, what: &str| {
        let detail = if what.is_empty() { place.clone() } else { format!("{place}: {what}") };
        Finding::new(id, level, "file system", detail)
    };
    let first = if mount.has("ro") {
        let command = format!("mount -o remount,rw {}", argument(&mount.point));
        say(Level::Failure, "mounted read-only").fix_as_root(command)
    } else if location.is_memory() {
        say(Level::Info, "memory, not a drive")
    } else if location.is_remote() {
        say(Level::Info, &format!("of {}, by a network or a program", mount.source))
    } else {
        say(Level::Ok, &format!("source {}", mount.source))
    };
    let mut findings = vec![first];
    findings.extend(options(location, kernel));
    findings
}

/// Mount options that cost speed.
fn options(location: &Location, kernel: Option<&str>) -> Vec<Finding> {
    let mount = &location.mount;
    let id = "directory.mount_options";
    let say = |level, detail: String| Finding::new(id, level, "mount option", detail);
    let mut findings = Vec::new();
    let is = |name: &str| mount.file_system == name;
    if mount.value("data") == Some("journal") {
        findings.push(say(
            Level::Warning,
            "data=journal: every byte is written twice, and never around the page cache; mount it \
             with data=ordered"
                .to_owned(),
        ));
    }
    for option in ["sync", "dirsync"].into_iter().filter(|option| mount.has(option)) {
        let detail = format!("{option}: every write waits for the drive");
        let command = format!("mount -o remount,async {}", argument(&mount.point));
        findings.push(say(Level::Warning, detail).fix_as_root(command));
    }
    if mount.has("discard") && !is("btrfs") && !is("tmpfs") {
        let detail = "discard: deleting large files also keeps the drive busy; fstrim.timer does \
                      that at night";
        findings.push(say(Level::Info, detail.to_owned()));
    }
    if is("btrfs") && !mount.has("nodatasum") && !mount.has("nodatacow") {
        let release = kernel.map(|kernel| format!(" (this is {kernel})")).unwrap_or_default();
        let detail = format!(
            "checksums of data: Linux 6.15 and later write such files through the page \
             cache{release}; new files in a directory can do without"
        );
        findings
            .push(say(Level::Info, detail).fix(format!("chattr +C {}", argument(&location.path))));
    }
    if let Some(compress) = mount.value("compress").or_else(|| mount.value("compress-force")) {
        let detail =
            format!("compress={compress}: weights hardly get smaller, and it takes a core");
        findings.push(say(Level::Info, detail));
    }
    findings
}

/// A path as one word of a shell's command.
fn argument(path: &Path) -> String {
    let path = path.to_string_lossy();
    // Only a null character can't be quoted, which no path has.
    shlex::try_quote(&path).map_or_else(|_| path.to_string(), Into::into)
}

fn room_left(room: RoomFacts) -> Finding {
    let say = |level, detail| Finding::new("directory.room", level, "room", detail);
    let detail =
        format!("{} free of {}", ByteSize(room.available_bytes), ByteSize(room.total_bytes));
    match room.available_bytes {
        // File systems without blocks of their own (some network ones) say 0 of 0.
        0 if room.total_bytes == 0 => say(Level::Info, "the file system doesn't say".to_owned()),
        0 => say(Level::Failure, format!("{detail}: it is full")),
        bytes if bytes < ROOM_BYTES_MIN => say(Level::Warning, detail),
        _ => say(Level::Ok, detail),
    }
}

fn direct(alignment: &Alignment) -> Finding {
    let say = |level, detail| Finding::new("directory.direct", level, "O_DIRECT", detail);
    if alignment.direct {
        return say(
            Level::Ok,
            format!(
                "yes: memory at multiples of {}, offsets and lengths of {}",
                alignment.memory_bytes, alignment.offset_bytes
            ),
        );
    }
    let reason = alignment.reason.as_deref().unwrap_or("the file system has none");
    say(Level::Warning, format!("no, all goes through the page cache: {reason}"))
}

fn trial(trial: &TrialFacts) -> Finding {
    let id = match trial.engine.as_str() {
        "uring" => "directory.uring",
        "aio" => "directory.aio",
        _ => "directory.threads",
    };
    let say = |level, detail| Finding::new(id, level, &format!("try {}", trial.engine), detail);
    if let Some(reason) = &trial.failure {
        return say(Level::Failure, reason.clone());
    }
    let route = if trial.direct { "direct" } else { "through the page cache" };
    let registered = if trial.registered { ", registered memory" } else { "" };
    let detail = format!("stored, changed, loaded and compared every byte; {route}{registered}");
    if trial.fallbacks.is_empty() {
        return say(Level::Ok, detail);
    }
    say(Level::Warning, format!("{detail}; {}", trial.fallbacks.join("; ")))
}
