//! Every level of every finding, from made-up facts: the facts are here, with nothing wrong.

mod directory;
mod machine;
mod route;

use super::*;
use crate::topology::{Device, DeviceKind, Drive, Link, Location, Mount, PcieFunction, Queue};

/// The finding of an id, if there is one.
fn find<'a>(findings: &'a [Finding], id: &str) -> Option<&'a Finding> {
    findings.iter().find(|finding| finding.id == id)
}

/// Level, a part of the detail, and the fix, of one finding.
fn assert_found(findings: &[Finding], id: &str, level: Level, words: &str, fix: Option<&str>) {
    let finding = find(findings, id).unwrap_or_else(|| panic!("no {id} in {findings:?}"));
    assert_eq!(finding.level, level, "{finding:?}");
    assert!(finding.detail.contains(words), "{words:?} in {finding:?}");
    assert_eq!(finding.fix.as_ref().map(|fix| &*fix.command), fix, "{finding:?}");
}

fn system() -> SystemFacts {
    SystemFacts {
        kernel: Some("6.8.0-45-generic".to_owned()),
        architecture: "x86_64",
        processors: 96,
        memory_available_bytes: Some(1 << 40),
        memory_source: Some("MemAvailable in /proc/meminfo".to_owned()),
        numa_nodes: 2,
        huge_pages: Some("madvise".to_owned()),
    }
}

fn engines(uring: bool, aio: bool) -> Vec<EngineFacts> {
    let engine = |name: &str, available, detail: &str| EngineFacts {
        engine: name.to_owned(),
        available,
        detail: detail.to_owned(),
    };
    vec![
        engine("uring", uring, if uring { "deferred-taskrun" } else { "io_uring is refused" }),
        engine("aio", aio, if aio { "polls" } else { "fs.aio-max-nr is exhausted" }),
        engine("threads", true, ""),
    ]
}

fn limits() -> LimitFacts {
    LimitFacts {
        memlock: Some(Limit { soft: None, hard: None }),
        cap_ipc_lock: false,
        nofile: Some(Limit { soft: Some(1 << 20), hard: Some(1 << 20) }),
        aio_max: Some(65536),
        aio_taken: Some(0),
        io_uring_disabled: Some(0),
        seccomp: Some(0),
    }
}

fn drive(name: &str) -> Device {
    let link = Link { width: 4, gigatransfers: 16.0 };
    Device {
        name: name.to_owned(),
        kind: DeviceKind::Drive,
        size_bytes: 4 << 40,
        queue: Some(Queue {
            scheduler: Some("none".to_owned()),
            nr_requests: Some(1023),
            max_sectors_kb: Some(128),
            io_poll: Some(true),
            logical_block_bytes: Some(4096),
            rotational: Some(false),
            ..Queue::default()
        }),
        drive: Some(Drive {
            transport: Some("nvme".to_owned()),
            model: Some("PM9A3".to_owned()),
            functions: vec![PcieFunction {
                address: "0000:41:00.0".to_owned(),
                link: Some(link),
                link_max: Some(link),
                bottleneck: None,
                numa_node: Some(1),
                upstream: vec!["pci0000:40".to_owned()],
            }],
            numa_node: Some(1),
            ..Drive::default()
        }),
        members: Vec::new(),
    }
}

fn trial_of(engine: &str) -> TrialFacts {
    TrialFacts {
        engine: engine.to_owned(),
        failure: None,
        direct: true,
        registered: true,
        fallbacks: Vec::new(),
    }
}

fn directory() -> DirectoryFacts {
    DirectoryFacts {
        path: "/nvme".into(),
        error: None,
        location: Some(Location {
            path: "/nvme".into(),
            mount: Mount {
                number: 31,
                point: "/nvme".into(),
                file_system: "ext4".to_owned(),
                source: "/dev/nvme0n1".to_owned(),
                options: vec!["rw".to_owned(), "noatime".to_owned()],
                device: (259, 0),
            },
            devices: vec![drive("nvme0n1")],
        }),
        room: Some(RoomFacts { total_bytes: 4 << 40, available_bytes: 2 << 40 }),
        alignment: Some(Alignment {
            direct: true,
            reason: None,
            memory_bytes: 4,
            offset_bytes: 4096,
        }),
        storage: Some(StorageFacts { kind: Some("NVMe".to_owned()), obstacle: None }),
        trials: ["uring", "aio", "threads"].map(trial_of).to_vec(),
    }
}

fn facts() -> Facts {
    Facts {
        system: system(),
        limits: limits(),
        engines: engines(true, true),
        directories: vec![directory()],
        gpu: GpuFacts::default(),
        python: None,
    }
}
