//! What the machine, the control group and the resource limits leave: readers and pure parsers.

use std::fmt::Write as _;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::registry;
use crate::error::{Error, ErrorKind, Result};

/// The most that is allocated between two readings of what is available: at 1 MiB a region this
/// spares 255 of 256 readings.
const CREDIT_BYTES_MAX: u64 = 256 << 20;
/// And at most one part in this many of what a reading found.
const CREDIT_SHARE: u64 = 64;

/// Bytes that may be allocated before the next reading.
static CREDIT: AtomicU64 = AtomicU64::new(0);

/// Memory that can still be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// How much, in bytes.
    pub bytes: u64,
    /// The narrowest place it was read from, for a message.
    pub source: String,
}

/// The least of `MemAvailable` and what every memory control group above this process leaves;
/// `None` where neither can be read. Page cache counts as available, as the kernel counts it.
pub fn available_bytes() -> Option<Available> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let bytes = kilobytes(&text, "MemAvailable:")?;
        Some(Available { bytes, source: "MemAvailable in /proc/meminfo".to_owned() })
    });
    machine.into_iter().chain(groups_available()).min_by_key(|available| available.bytes)
}

/// Refuses what the machine or a control group can't give, before a page of it is touched: the
/// kernel would kill the process later. Pool memory that is mapped but not touched yet isn't in
/// the kernel's numbers, so at least what exceeds the process's resident memory is added.
///
/// A reading takes tens of microseconds (five files of `/proc` and the control groups), as long as
/// mapping a short region, so each one lets a small share of what it found pass unread.
pub(super) fn refuse_what_is_not_there(bytes: usize) -> Result<()> {
    let wide = |bytes: usize| u64::try_from(bytes).unwrap_or(u64::MAX);
    let spent = |credit: u64| credit.checked_sub(wide(bytes));
    if CREDIT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spent).is_ok() {
        return Ok(());
    }
    let Some(available) = available_bytes() else {
        return Ok(());
    };
    let resident = resident_anonymous_bytes().unwrap_or(u64::MAX);
    let promised = wide(registry::mapped_bytes()).saturating_sub(resident);
    let needed = wide(bytes).saturating_add(promised);
    if let Some(left) = available.bytes.checked_sub(needed) {
        CREDIT.store(CREDIT_BYTES_MAX.min(left / CREDIT_SHARE), Ordering::Relaxed);
        return Ok(());
    }
    let mut message = format!(
        "cannot allocate {bytes} bytes: {} bytes are available by {}",
        available.bytes, available.source
    );
    if promised > 0 {
        let _ = write!(message, ", {promised} of them for pool memory that isn't touched yet");
    }
    Err(Error::new(ErrorKind::OutOfMemory, message).hint("free memory or ask for less"))
}

/// Why `wanted` bytes couldn't be locked, and what to do about it.
pub(super) fn lock_refusal(wanted: usize, errno: Errno) -> String {
    let mut text = format!("{wanted} bytes of memory aren't locked: ");
    let limit = getrlimit(Resource::Memlock).current;
    match limit {
        Some(limit) if matches!(errno, Errno::NOMEM | Errno::PERM | Errno::AGAIN) => {
            let _ = write!(text, "RLIMIT_MEMLOCK is {limit} bytes");
            if let Some(locked) = locked_bytes() {
                let _ = write!(text, " with {locked} locked already");
            }
            text.push_str(
                "; raise it with `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd) or \
                 --ulimit memlock=-1 (containers), or grant CAP_IPC_LOCK",
            );
        }
        _ => {
            let _ = write!(text, "{}", std::io::Error::from(errno));
        }
    }
    text
}

/// The bytes this process has locked: `VmLck`.
fn locked_bytes() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmLck:")
}

/// Anonymous memory of this process that is resident, from `/proc/self/statm`.
pub(super) fn resident_anonymous_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let page = u64::try_from(rustix::param::page_size()).ok()?;
    parse_statm(&text)?.checked_mul(page)
}

/// Resident pages less shared ones (`proc_pid_statm(5)`: size, resident, shared, …).
fn parse_statm(text: &str) -> Option<u64> {
    let mut fields = text.split_ascii_whitespace().skip(1).map(|field| field.parse::<u64>().ok());
    let resident = fields.next()??;
    Some(resident.saturating_sub(fields.next()??))
}

/// The value of `key` in a text of `Key:  123 kB` lines, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The two kinds of memory control group, whose files have different names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// File names of the limit and of the usage, and the keys of page cache in `memory.stat`.
    fn names(self) -> (&'static str, &'static str, [&'static str; 2]) {
        match self {
            Self::V1 => (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ["total_active_file", "total_inactive_file"],
            ),
            Self::V2 => ("memory.max", "memory.current", ["active_file", "inactive_file"]),
        }
    }
}

/// What each memory control group from this process's own up to the mount's root leaves.
fn groups_available() -> Vec<Available> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut found = Vec::new();
    for (version, mount_point, folder) in group_folders(&groups, &mounts) {
        for folder in folder.ancestors().take_while(|folder| folder.starts_with(&mount_point)) {
            found.extend(group_available(version, folder));
        }
    }
    found
}

fn group_available(version: Version, folder: &Path) -> Option<Available> {
    let (limit_file, usage_file, cache_keys) = version.names();
    let limit = parse_limit(&fs::read_to_string(folder.join(limit_file)).ok()?)?;
    let usage = fs::read_to_string(folder.join(usage_file)).ok()?.trim().parse::<u64>().ok()?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache = cache_keys.iter().filter_map(|key| counter(&stat, key)).sum::<u64>();
    Some(Available {
        bytes: limit.saturating_sub(usage.saturating_sub(cache)),
        source: format!("{} of {limit} bytes", folder.join(limit_file).display()),
    })
}

/// A limit in bytes; `None` for none, which v2 writes as `max` and v1 as a number near 2^63.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse::<u64>().ok().filter(|&limit| limit < 1 << 62)
}

/// The value of `key` in a text of `key 123` lines.
fn counter(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        (name == key).then(|| value.trim().parse().ok())?
    })
}

/// The folders of the memory control groups in `/proc/self/cgroup` (`cgroups(7)`), with the mount
/// points found in `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`) that they lie under.
fn group_folders(groups: &str, mounts: &str) -> Vec<(Version, PathBuf, PathBuf)> {
    let paths = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let version = match controllers {
            "" => Version::V2,
            list if list.split(',').any(|name| name == "memory") => Version::V1,
            _ => return None,
        };
        Some((version, fields.next()?))
    });
    paths
        .flat_map(|(version, path)| {
            mounts.lines().filter_map(move |line| {
                let (mounted, root, point) = parse_mount(line)?;
                (mounted == version)
                    .then(|| (version, PathBuf::from(point), folder(root, point, path)))
            })
        })
        .collect()
}

/// The kind, the root within the hierarchy and the mount point of a memory control group mount.
fn parse_mount(line: &str) -> Option<(Version, &str, &str)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    match kind.next()? {
        "cgroup2" => Some((Version::V2, root, point)),
        "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => {
            Some((Version::V1, root, point))
        }
        _ => None,
    }
}

/// Where group `path` is seen under a mount of `root` at `point`. In a container the path can be
/// the host's, outside what is mounted: the mount point is its group then.
fn folder(root: &str, point: &str, path: &str) -> PathBuf {
    let inside = Path::new(path).strip_prefix(root).ok();
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    match inside {
        Some(inside) if inside.components().all(plain) => Path::new(point).join(inside),
        _ => PathBuf::from(point),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kilobyte_lines_are_read_by_their_whole_key() {
        let text = "MemTotal:  100 kB\nMemFree:   7 kB\nMemAvailable:   42 kB\n";
        assert_eq!(kilobytes(text, "MemAvailable:"), Some(42 * 1024));
        assert_eq!(kilobytes(text, "Mem:"), None);
        assert_eq!(kilobytes("VmLck:\t      12 kB", "VmLck:"), Some(12 * 1024));
        assert_eq!(kilobytes("VmLck: 99999999999999999999 kB", "VmLck:"), None);
        assert_eq!(kilobytes("VmLck: 18446744073709551615 kB", "VmLck:"), None);
    }

    #[test]
    fn resident_anonymous_pages_are_resident_less_shared() {
        assert_eq!(parse_statm("1000 300 100 1 0 50 0\n"), Some(200));
        assert_eq!(parse_statm("1000 300"), None);
        assert_eq!(parse_statm(""), None);
    }

    #[test]
    fn no_limit_is_written_in_two_ways() {
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("9223372036854771712\n"), None);
        assert_eq!(parse_limit("1073741824\n"), Some(1 << 30));
        assert_eq!(parse_limit(""), None);
    }

    #[test]
    fn counters_are_read_by_their_whole_key() {
        let text = "file 9\ninactive_file 5\ntotal_inactive_file 7\nx\n";
        assert_eq!(counter(text, "inactive_file"), Some(5));
        assert_eq!(counter(text, "total_inactive_file"), Some(7));
        assert_eq!(counter(text, "active_file"), None);
    }

    const MOUNTS: &str = "\
        30 25 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755\n\
        31 30 0:27 / /sys/fs/cgroup/memory rw,nosuid shared:10 - cgroup cgroup rw,memory\n\
        32 30 0:28 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n\
        33 30 0:29 / /sys/fs/cgroup/unified rw,nosuid shared:11 - cgroup2 cgroup2 rw\n";

    #[test]
    fn both_hierarchies_of_a_hybrid_host_are_found() {
        let groups = "9:name=systemd:/\n4:memory:/jobs/a\n1:cpu:/jobs\n0::/user/b\n";
        let found = group_folders(groups, MOUNTS);
        let expected = |version, point: &str, rest: &str| {
            (version, PathBuf::from(point), PathBuf::from(format!("{point}/{rest}")))
        };
        assert_eq!(
            found,
            [
                expected(Version::V1, "/sys/fs/cgroup/memory", "jobs/a"),
                expected(Version::V2, "/sys/fs/cgroup/unified", "user/b"),
            ]
        );
        assert_eq!(group_folders("", MOUNTS), []);
        assert_eq!(group_folders(groups, "nonsense\n1 2 - cgroup\n"), []);
    }

    #[test]
    fn a_group_outside_the_mount_is_the_mount_itself() {
        let point = "/sys/fs/cgroup";
        assert_eq!(folder("/docker/x", point, "/docker/x/y"), Path::new("/sys/fs/cgroup/y"));
        assert_eq!(folder("/docker/x", point, "/docker/x"), Path::new(point));
        assert_eq!(folder("/docker/x", point, "/other"), Path::new(point));
        assert_eq!(folder("/", point, "/../../other"), Path::new(point));
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_it_uses_without_page_cache() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(group.path().join(name), text).unwrap();
        write("memory.max", "1000000\n");
        assert_eq!(group_available(Version::V2, group.path()), None);
        write("memory.current", "700000\n");
        write("memory.stat", "anon 600000\nactive_file 30000\ninactive_file 70000\n");
        let available = group_available(Version::V2, group.path()).unwrap();
        assert_eq!(available.bytes, 400_000);
        assert!(available.source.ends_with("memory.max of 1000000 bytes"), "{}", available.source);
        assert_eq!(group_available(Version::V1, group.path()), None);
        write("memory.max", "max\n");
        assert_eq!(group_available(Version::V2, group.path()), None);
    }

    #[test]
    fn this_machine_has_memory_left() {
        let available = available_bytes().unwrap();
        assert!(available.bytes > 0, "{available:?}");
    }
}
