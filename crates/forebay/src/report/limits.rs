//! What this process may have: locked memory, open files, operations in flight, io_uring.

use std::path::Path;

use forebay_io::Options;
use serde::Serialize;

use super::{EngineFacts, Finding, Level};
use crate::ByteSize;
use crate::kernel_files::{number, text};

/// Staging blocks of a few handles and some tensors: with less, most memory stays unlocked.
const MEMLOCK_BYTES_MIN: u64 = 64 << 20;
/// Each file that is open takes two descriptors, each worker some: with less, loading a model of
/// many files can run out.
const NOFILE_MIN: u64 = 1024;
/// `CAP_IPC_LOCK` in the sets of `/proc/self/status` (`linux/capability.h`).
const CAP_IPC_LOCK: u32 = 14;
/// Seccomp's mode of a filter (`SECCOMP_MODE_FILTER`).
const SECCOMP_FILTER: u64 = 2;

/// A limit that a user can raise up to its hard end; `None` is without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// What holds.
    pub soft: Option<u64>,
    /// How far it can be raised without root.
    pub hard: Option<u64>,
}

/// What this process may have; `None` is what isn't shown here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LimitFacts {
    /// `RLIMIT_MEMLOCK`, in bytes.
    pub memlock: Option<Limit>,
    /// The capability to lock memory without limit.
    pub cap_ipc_lock: bool,
    /// `RLIMIT_NOFILE`.
    pub nofile: Option<Limit>,
    /// `fs.aio-max-nr`.
    pub aio_max: Option<u64>,
    /// `fs.aio-nr`: how much of it is taken.
    pub aio_taken: Option<u64>,
    /// `kernel.io_uring_disabled`; kernels before 6.6 have none.
    pub io_uring_disabled: Option<u64>,
    /// Seccomp's mode: 0 none, 1 strict, 2 a filter.
    pub seccomp: Option<u64>,
}

impl LimitFacts {
    pub(super) fn gather(root: &Path) -> Self {
        let proc = root.join("proc");
        let limits = text(proc.join("self/limits")).unwrap_or_default();
        let status = text(proc.join("self/status")).unwrap_or_default();
        let capabilities =
            field(&status, "CapEff:").and_then(|set| u64::from_str_radix(set, 16).ok());
        Self {
            memlock: limit(&limits, "Max locked memory"),
            cap_ipc_lock: capabilities.is_some_and(|set| set >> CAP_IPC_LOCK & 1 == 1),
            nofile: limit(&limits, "Max open files"),
            aio_max: number(proc.join("sys/fs/aio-max-nr")),
            aio_taken: number(proc.join("sys/fs/aio-nr")),
            io_uring_disabled: number(proc.join("sys/kernel/io_uring_disabled")),
            seccomp: field(&status, "Seccomp:").and_then(|mode| mode.parse().ok()),
        }
    }
}

/// A line of `/proc/self/limits`.
fn limit(table: &str, name: &str) -> Option<Limit> {
    let line = table.lines().find_map(|line| line.strip_prefix(name))?;
    let mut values = line.split_whitespace().map(|value| match value {
        "unlimited" => Some(None),
        value => value.parse().ok().map(Some),
    });
    Some(Limit { soft: values.next()??, hard: values.next()?? })
}

/// The value of a line of `/proc/self/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim())
}

pub(super) fn findings(facts: &LimitFacts, engines: &[EngineFacts]) -> Vec<Finding> {
    let uring = engines.iter().find(|engine| engine.engine == "uring");
    let uring_works = uring.is_none_or(|engine| engine.available);
    vec![
        memlock(facts),
        nofile(facts),
        aio(facts),
        io_uring(facts, uring_works),
        seccomp(facts, uring_works),
    ]
}

fn memlock(facts: &LimitFacts) -> Finding {
    let say =
        |level, detail: String| Finding::new("limits.memlock", level, "locked memory", detail);
    if facts.cap_ipc_lock {
        return say(Level::Ok, "without limit (CAP_IPC_LOCK)".to_owned());
    }
    let Some(limit) = facts.memlock else {
        return say(Level::Info, "the limit isn't shown here".to_owned());
    };
    let Some(soft) = limit.soft else {
        return say(Level::Ok, "without limit".to_owned());
    };
    let level = if soft < MEMLOCK_BYTES_MIN { Level::Warning } else { Level::Info };
    let finding = say(
        level,
        format!(
            "{} (RLIMIT_MEMLOCK): memory beyond isn't pinned or registered, which costs processor \
             time, not bytes; in a container: --ulimit memlock=-1",
            ByteSize(soft)
        ),
    );
    match limit.hard {
        None => finding.fix("ulimit -l unlimited"),
        Some(hard) if hard > soft => finding.fix(format!("ulimit -l {}", hard >> 10)),
        Some(_) => finding
            .fix_as_root("echo '* - memlock unlimited' > /etc/security/limits.d/forebay.conf"),
    }
}

fn nofile(facts: &LimitFacts) -> Finding {
    let say = |level, detail: String| Finding::new("limits.nofile", level, "open files", detail);
    let Some(limit) = facts.nofile else {
        return say(Level::Info, "the limit isn't shown here".to_owned());
    };
    match limit.soft {
        None => say(Level::Ok, "without limit".to_owned()),
        Some(soft) if soft >= NOFILE_MIN => say(Level::Ok, soft.to_string()),
        Some(soft) => {
            let finding = say(
                Level::Warning,
                format!("{soft} (RLIMIT_NOFILE): loading a model of many files can run out"),
            );
            match limit.hard {
                None => finding.fix("ulimit -n 65536"),
                Some(hard) if hard > soft => finding.fix(format!("ulimit -n {hard}")),
                Some(_) => finding.fix_as_root(
                    "echo '* - nofile 65536' > /etc/security/limits.d/forebay-files.conf",
                ),
            }
        }
    }
}

fn aio(facts: &LimitFacts) -> Finding {
    let say = |level, detail: String| Finding::new("limits.aio", level, "fs.aio-max-nr", detail);
    let (Some(max), Some(taken)) = (facts.aio_max, facts.aio_taken) else {
        return say(Level::Info, "this kernel has no Linux AIO, or doesn't show it".to_owned());
    };
    let options = Options::default();
    let needed = (options.queue_depth * options.parallelism) as u64;
    let detail = format!("{max}, of which all users have taken {taken}");
    if max.saturating_sub(taken) >= needed {
        return say(Level::Ok, detail);
    }
    let detail = format!("{detail}: too few left for the {needed} of one handle");
    say(Level::Warning, detail).fix_as_root(format!("sysctl -w fs.aio-max-nr={}", 1 << 20))
}

fn io_uring(facts: &LimitFacts, works: bool) -> Finding {
    let title = "io_uring sysctl";
    let say = |level, detail: &str| Finding::new("limits.io_uring", level, title, detail);
    let cure = "sysctl -w kernel.io_uring_disabled=0";
    match facts.io_uring_disabled {
        None => say(Level::Ok, "this kernel has none to refuse it"),
        Some(0) => say(Level::Ok, "kernel.io_uring_disabled is 0: allowed to all"),
        Some(1) if works => {
            say(Level::Ok, "kernel.io_uring_disabled is 1: allowed to some, of which this is one")
        }
        Some(1) => {
            let detail = "kernel.io_uring_disabled is 1: only for the group kernel.io_uring_group \
                          and for CAP_SYS_ADMIN";
            say(Level::Warning, detail).fix_as_root(cure)
        }
        Some(_) => {
            say(Level::Warning, "kernel.io_uring_disabled is 2: refused to all").fix_as_root(cure)
        }
    }
}

fn seccomp(facts: &LimitFacts, uring_works: bool) -> Finding {
    let say = |level, detail: &str| Finding::new("limits.seccomp", level, "seccomp", detail);
    match facts.seccomp {
        None => say(Level::Info, "whether there is a filter isn't shown here"),
        Some(SECCOMP_FILTER) if !uring_works && facts.io_uring_disabled.unwrap_or(0) == 0 => {
            let detail = "a filter is in force and io_uring is refused, as container runtimes do \
                          by default: allow io_uring_setup, io_uring_enter and io_uring_register \
                          in its profile";
            say(Level::Warning, detail).fix("docker run --security-opt seccomp=PROFILE IMAGE")
        }
        Some(SECCOMP_FILTER) if uring_works => {
            say(Level::Ok, "a filter is in force, which lets io_uring through")
        }
        Some(0) => say(Level::Ok, "no filter"),
        Some(_) => say(Level::Info, "a filter is in force"),
    }
}
