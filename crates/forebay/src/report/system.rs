//! The machine, its kernel, and which engines that lets be set up.

use std::path::Path;

use forebay_io::EngineProbe;
use forebay_io::memory::limits::available_bytes;
use serde::Serialize;

use super::{Finding, Level};
use crate::ByteSize;
use crate::kernel_files::text;

/// First Linux whose io_uring has all that the engine uses (`IORING_FEAT_EXT_ARG`).
const KERNEL_FOR_URING: (u32, u32) = (5, 11);

/// The machine and its kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SystemFacts {
    /// The kernel's release.
    pub kernel: Option<String>,
    /// The architecture that this program was built for.
    pub architecture: &'static str,
    /// Processors that this process may use.
    pub processors: usize,
    /// Bytes of memory that can still be had.
    pub memory_available_bytes: Option<u64>,
    /// What says so: the machine, or the control group with the least.
    pub memory_source: Option<String>,
    /// NUMA nodes.
    pub numa_nodes: usize,
    /// Whether memory can have huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
}

impl SystemFacts {
    pub(super) fn gather(root: &Path) -> Self {
        let available = available_bytes();
        let nodes = std::fs::read_dir(root.join("sys/devices/system/node"));
        let is_node = |name: &str| {
            name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok())
        };
        Self {
            kernel: text(root.join("proc/sys/kernel/osrelease")),
            architecture: std::env::consts::ARCH,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_available_bytes: available.as_ref().map(|available| available.bytes),
            memory_source: available.map(|available| available.source),
            numa_nodes: nodes.map_or(1, |nodes| {
                let names = nodes.flatten().map(|node| node.file_name());
                names.filter(|name| name.to_str().is_some_and(is_node)).count().max(1)
            }),
            huge_pages: text(root.join("sys/kernel/mm/transparent_hugepage/enabled"))
                .as_deref()
                .and_then(chosen),
        }
    }
}

/// The word in brackets.
fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Whether an engine can be set up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EngineFacts {
    /// `uring`, `aio` or `threads`.
    pub engine: String,
    /// It was set up.
    pub available: bool,
    /// What it can do here, or why it can't be set up.
    pub detail: String,
}

impl From<EngineProbe> for EngineFacts {
    fn from(probe: EngineProbe) -> Self {
        let EngineProbe { engine, available, detail } = probe;
        Self { engine: engine.to_string(), available, detail }
    }
}

pub(super) fn findings(facts: &SystemFacts) -> Vec<Finding> {
    vec![kernel(facts), memory(facts), huge_pages(facts)]
}

fn kernel(facts: &SystemFacts) -> Finding {
    let Some(release) = &facts.kernel else {
        let detail = "unknown: /proc isn't mounted, and much of this report is read from there";
        return Finding::new("system.kernel", Level::Warning, "kernel", detail);
    };
    let machine = format!("{}, {} processors", facts.architecture, facts.processors);
    let detail = format!("Linux {release}, {machine}");
    match version(release) {
        Some(version) if version < KERNEL_FOR_URING => {
            let (major, minor) = KERNEL_FOR_URING;
            let detail = format!("{detail}; the io_uring engine takes {major}.{minor} or later");
            Finding::new("system.kernel", Level::Warning, "kernel", detail)
        }
        _ => Finding::new("system.kernel", Level::Ok, "kernel", detail),
    }
}

/// Major and minor version in a release such as `6.1.0-13-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|char: char| !char.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn memory(facts: &SystemFacts) -> Finding {
    let (Some(bytes), Some(source)) = (facts.memory_available_bytes, &facts.memory_source) else {
        let detail = "how much can be had isn't known here";
        return Finding::new("system.memory", Level::Info, "memory", detail);
    };
    let nodes = match facts.numa_nodes {
        1 => String::new(),
        count => format!(", {count} NUMA nodes"),
    };
    let detail = format!("{} available by {source}{nodes}", ByteSize(bytes));
    Finding::new("system.memory", Level::Ok, "memory", detail)
}

fn huge_pages(facts: &SystemFacts) -> Finding {
    let (level, detail) = match facts.huge_pages.as_deref() {
        Some("never") => (Level::Info, "never: touching new memory takes more processor time"),
        Some("always" | "madvise") => (Level::Ok, "given to who asks, as pinned memory does"),
        _ => (Level::Info, "this kernel doesn't say whether it has them"),
    };
    let finding = Finding::new("system.huge_pages", level, "huge pages", detail);
    if facts.huge_pages.as_deref() == Some("never") {
        return finding.fix_as_root("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    }
    finding
}

pub(super) fn engine_findings(facts: &[EngineFacts]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let first = facts.iter().find(|engine| engine.available);
    for engine in facts {
        let id = match engine.engine.as_str() {
            "uring" => "engines.uring",
            "aio" => "engines.aio",
            _ => "engines.threads",
        };
        let is_first = first == Some(engine);
        let (level, detail) = match (engine.available, first) {
            (true, _) => {
                let features = Some(&engine.detail).filter(|detail| !detail.is_empty());
                let features = features.map(|detail| format!(": {detail}")).unwrap_or_default();
                let chosen = if is_first { ", and is what auto takes" } else { "" };
                (Level::Ok, format!("can be set up{chosen}{features}"))
            }
            (false, Some(instead)) => {
                (Level::Failure, format!("{}; {} is used instead", engine.detail, instead.engine))
            }
            (false, None) => (Level::Failure, engine.detail.clone()),
        };
        findings.push(Finding::new(id, level, &engine.engine, detail));
    }
    findings
}
