//! Whether the directories and the machine can take a plan: looked at beforehand, with numbers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use forebay::ByteSize;
use forebay::io::memory::limits::available_bytes;
use forebay::io::{facts, usage};
use forebay::workload::Job;
use serde::Serialize;

use super::plan::{Plan, label};
use crate::exit::Failure;

/// File systems that keep files in memory.
const IN_MEMORY: [&str; 4] = ["tmpfs", "ramfs", "devtmpfs", "hugetlbfs"];
/// Memory of a process beside what it moves: program, staging blocks, histograms.
const PROCESS_BYTES: u64 = 64 << 20;
/// Descriptors of a process beside those of requests and workers.
const DESCRIPTORS_SPARE: u64 = 32;

/// What a directory is like.
#[derive(Debug, Serialize)]
pub(super) struct Place {
    pub(super) path: String,
    /// The kind of file system.
    pub(super) file_system: String,
    /// Its files can be read and written around the page cache.
    pub(super) direct: bool,
    /// Why not.
    pub(super) reason: Option<String>,
}

/// Looks at directories, and refuses what isn't one on a drive.
pub(super) fn check_directories(directories: &[PathBuf]) -> Result<Vec<Place>> {
    directories.iter().map(|directory| check_directory(directory)).collect()
}

fn check_directory(directory: &Path) -> Result<Place> {
    let path = directory.display();
    let Some(status) = fs::metadata(directory).ok().filter(fs::Metadata::is_dir) else {
        let text = format!("{path} is not a directory; pass another --dir");
        return Err(Failure::environment(text).into());
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let file_system = file_system_of(&mounts, status.dev());
    if IN_MEMORY.contains(&file_system.as_str()) {
        let text = format!("{path} is on {file_system}, which is memory, not a drive");
        return Err(Failure::environment(format!("{text}: pass a --dir on a drive")).into());
    }
    // What can't be opened without a name can be all the same: some file systems have only names.
    let (direct, reason) = match facts(directory) {
        Ok(facts) => (facts.direct, facts.reason),
        Err(error) => (false, Some(error.to_string())),
    };
    Ok(Place { path: label(directory), file_system, direct, reason })
}

/// The kind of file system of a device number (`st_dev`), from `mountinfo` (`proc(5)`).
fn file_system_of(mounts: &str, device: u64) -> String {
    // As glibc's `gnu_dev_major` and `gnu_dev_minor` take a number apart.
    let major = ((device >> 8) & 0xfff) | ((device >> 32) & !0xfff);
    let minor = (device & 0xff) | ((device >> 12) & !0xff);
    let name = format!("{major}:{minor}");
    let kind = mounts.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        (mount.split(' ').nth(2)? == name).then(|| source.split(' ').next())?
    });
    kind.unwrap_or("unknown").to_owned()
}

/// Refuses a plan for which there is too little space, memory, or too few descriptors.
pub(super) fn check_room(plan: &Plan) -> Result<()> {
    check_space(plan)?;
    let wanted: u64 = plan.processes.iter().map(|(_, job)| job.host_memory_bytes()).sum();
    let wanted = wanted.saturating_add(PROCESS_BYTES * plan.processes.len() as u64);
    if let Some(available) = available_bytes().filter(|available| available.bytes < wanted) {
        let (needs, has) = (ByteSize(wanted), ByteSize(available.bytes));
        let text = format!("{needs} of memory are needed, {has} are there by {}", available.source);
        let tip = "pass a smaller --io-size or --request-size, or fewer --processes";
        return Err(Failure::environment(format!("{text}: {tip}")).into());
    }
    let limit = descriptors_limit();
    for (_, job) in &plan.processes {
        let wanted = descriptors_of(job);
        if limit.is_some_and(|limit| limit < wanted) {
            let text = format!("{wanted} open files are needed, {} may be", limit.unwrap_or(0));
            let tip = "raise the limit with `ulimit -n`, or pass a smaller --in-flight";
            return Err(Failure::environment(format!("{text}: {tip}")).into());
        }
    }
    Ok(())
}

/// Adds up what directories of one file system need.
fn check_space(plan: &Plan) -> Result<()> {
    let mut needed: BTreeMap<u64, (u64, &Path)> = BTreeMap::new();
    for (directory, bytes) in plan.directories.iter().zip(plan.needed_bytes()) {
        let device = fs::metadata(directory).map_or(0, |status| status.dev());
        let entry = needed.entry(device).or_insert((0, directory.as_path()));
        entry.0 = entry.0.saturating_add(bytes);
    }
    for (bytes, directory) in needed.into_values() {
        let free = usage::free_bytes(directory)?;
        if free < bytes.saturating_add(bytes / 50) {
            let (path, has, needs) = (directory.display(), ByteSize(free), ByteSize(bytes));
            let text = format!("{path} has {has} free, {needs} are needed");
            let tip = "free some space, or pass a smaller --io-size";
            return Err(Failure::environment(format!("{text}: {tip}")).into());
        }
    }
    Ok(())
}

/// Two for each request under way, two for each worker.
fn descriptors_of(job: &Job) -> u64 {
    let requests = job.requests_count().min(job.in_flight as u64);
    2 * requests + 2 * job.handle.parallelism as u64 + DESCRIPTORS_SPARE
}

/// The most files that a process may have open; `None` where that isn't known or limited.
fn descriptors_limit() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_is_found_by_its_device() {
        let mounts = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            30 22 0:26 / /dev/shm rw - tmpfs tmpfs rw\n";
        assert_eq!(file_system_of(mounts, 254 << 8), "ext4");
        assert_eq!(file_system_of(mounts, 26), "tmpfs");
        assert_eq!(file_system_of(mounts, 27), "unknown");
    }

    #[test]
    fn the_limit_of_this_process_is_read() {
        assert!(descriptors_limit().is_none_or(|limit| limit > 2));
    }
}
