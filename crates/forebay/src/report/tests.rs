//! Every level of every finding, from made-up facts; and facts from a made-up machine.

use std::fs;
use std::path::{Path, PathBuf};

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
            }],
            numa_node: Some(1),
            ..Drive::default()
        }),
        members: Vec::new(),
    }
}

fn layer(name: &str, kind: DeviceKind, members: Vec<Device>) -> Device {
    Device { kind, members, drive: None, queue: None, ..drive(name) }
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

/// The findings about a directory that was changed.
fn directory_findings(change: impl FnOnce(&mut DirectoryFacts)) -> Vec<Finding> {
    let mut found = directory();
    change(&mut found);
    super::directory::findings(&found, &facts())
}

/// The findings about a directory on another mount or device.
fn location_findings(change: impl FnOnce(&mut Location)) -> Vec<Finding> {
    directory_findings(|found| change(found.location.as_mut().unwrap()))
}

#[test]
fn a_machine_as_it_should_be_has_no_warning() {
    let report = Report::of(facts());
    assert_eq!((report.counts.warning, report.counts.failure), (0, 0), "{report:#?}");
    let ids: Vec<&str> = report.sections.iter().map(|section| section.id).collect();
    assert_eq!(ids, ["system", "limits", "engines", "directory", "gpu", "python"]);
    let count: usize = report.sections.iter().map(|section| section.findings.len()).sum();
    assert_eq!(report.counts.ok + report.counts.info, count);
}

#[test]
fn an_old_kernel_or_a_hidden_one_is_a_warning() {
    let of = |kernel: Option<&str>| {
        super::system::findings(&SystemFacts { kernel: kernel.map(str::to_owned), ..system() })
    };
    assert_found(&of(Some("6.8.0")), "system.kernel", Level::Ok, "96 processors", None);
    assert_found(&of(Some("5.11.0-27")), "system.kernel", Level::Ok, "5.11", None);
    assert_found(&of(Some("5.10.0-30-amd64")), "system.kernel", Level::Warning, "5.11 or", None);
    assert_found(&of(None), "system.kernel", Level::Warning, "/proc isn't mounted", None);
}

#[test]
fn memory_and_huge_pages_are_said() {
    let findings = super::system::findings(&system());
    assert_found(&findings, "system.memory", Level::Ok, "1 TiB available by Mem", None);
    assert_found(&findings, "system.huge_pages", Level::Ok, "given", None);
    let unknown = SystemFacts { memory_source: None, huge_pages: None, ..system() };
    let findings = super::system::findings(&unknown);
    assert_found(&findings, "system.memory", Level::Info, "isn't known", None);
    assert_found(&findings, "system.huge_pages", Level::Info, "doesn't say", None);
    let never = SystemFacts { huge_pages: Some("never".to_owned()), ..system() };
    let findings = super::system::findings(&never);
    let fix = find(&findings, "system.huge_pages").unwrap().fix.clone().unwrap();
    assert!(fix.root && fix.command.contains("transparent_hugepage"), "{fix:?}");
}

#[test]
fn an_engine_that_cannot_be_set_up_says_why_and_what_is_used_instead() {
    let findings = super::system::engine_findings(&engines(true, true));
    assert_found(&findings, "engines.uring", Level::Ok, "is what auto takes: deferred", None);
    assert_found(&findings, "engines.threads", Level::Ok, "can be set up", None);
    let findings = super::system::engine_findings(&engines(false, true));
    let words = "io_uring is refused; aio is used instead";
    assert_found(&findings, "engines.uring", Level::Failure, words, None);
    assert_found(&findings, "engines.aio", Level::Ok, "is what auto takes", None);
    let findings = super::system::engine_findings(&engines(true, false));
    assert_found(&findings, "engines.aio", Level::Failure, "exhausted; uring is used", None);
    let none: Vec<EngineFacts> = engines(false, false)
        .into_iter()
        .map(|engine| EngineFacts { available: false, ..engine })
        .collect();
    let findings = super::system::engine_findings(&none);
    assert!(findings.iter().all(|finding| finding.level == Level::Failure));
    assert!(!findings[0].detail.contains("instead"), "{findings:?}");
}

#[test]
fn little_locked_memory_has_the_command_that_this_user_can_use() {
    let of = |soft, hard, cap_ipc_lock| {
        let memlock = Some(Limit { soft, hard });
        let facts = LimitFacts { memlock, cap_ipc_lock, ..limits() };
        super::limits::findings(&facts, &engines(true, true))
    };
    let id = "limits.memlock";
    assert_found(&of(None, None, false), id, Level::Ok, "without limit", None);
    assert_found(&of(Some(65536), Some(65536), true), id, Level::Ok, "CAP_IPC_LOCK", None);
    let findings = of(Some(65536), None, false);
    assert_found(&findings, id, Level::Warning, "64 KiB", Some("ulimit -l unlimited"));
    let findings = of(Some(65536), Some(1 << 30), false);
    assert_found(&findings, id, Level::Warning, "64 KiB", Some("ulimit -l 1048576"));
    let findings = of(Some(1 << 30), Some(1 << 30), false);
    let finding = find(&findings, id).unwrap();
    assert_eq!(finding.level, Level::Info);
    assert!(finding.fix.as_ref().unwrap().root);
    let hidden = LimitFacts { memlock: None, ..limits() };
    let findings = super::limits::findings(&hidden, &engines(true, true));
    assert_found(&findings, id, Level::Info, "isn't shown", None);
}

#[test]
fn few_open_files_have_the_command_that_this_user_can_use() {
    let of = |limit: Option<Limit>| {
        let facts = LimitFacts { nofile: limit, ..limits() };
        super::limits::findings(&facts, &engines(true, true))
    };
    let id = "limits.nofile";
    let limit = |soft, hard| Some(Limit { soft, hard });
    assert_found(&of(limit(Some(1024), Some(4096))), id, Level::Ok, "1024", None);
    assert_found(&of(limit(None, None)), id, Level::Ok, "without limit", None);
    assert_found(&of(None), id, Level::Info, "isn't shown", None);
    let findings = of(limit(Some(256), Some(4096)));
    assert_found(&findings, id, Level::Warning, "256", Some("ulimit -n 4096"));
    let findings = of(limit(Some(256), None));
    assert_found(&findings, id, Level::Warning, "256", Some("ulimit -n 65536"));
    let findings = of(limit(Some(256), Some(256)));
    assert!(find(&findings, id).unwrap().fix.as_ref().unwrap().root);
}

#[test]
fn too_few_asynchronous_operations_left_are_a_warning() {
    let of = |aio_max, aio_taken| {
        let facts = LimitFacts { aio_max, aio_taken, ..limits() };
        super::limits::findings(&facts, &engines(true, true))
    };
    let id = "limits.aio";
    assert_found(&of(Some(65536), Some(65000)), id, Level::Ok, "65000", None);
    let fix = Some("sysctl -w fs.aio-max-nr=1048576");
    assert_found(&of(Some(65536), Some(65530)), id, Level::Warning, "too few left", fix);
    assert_found(&of(None, None), id, Level::Info, "no Linux AIO", None);
}

#[test]
fn who_refuses_io_uring_is_told_apart() {
    let of = |io_uring_disabled, seccomp, works| {
        let facts = LimitFacts { io_uring_disabled, seccomp, ..limits() };
        super::limits::findings(&facts, &engines(works, true))
    };
    let (sysctl, filter) = ("limits.io_uring", "limits.seccomp");
    let cure = Some("sysctl -w kernel.io_uring_disabled=0");
    assert_found(&of(None, Some(0), true), sysctl, Level::Ok, "none to refuse", None);
    assert_found(&of(Some(0), Some(0), true), sysctl, Level::Ok, "allowed to all", None);
    assert_found(&of(Some(1), Some(0), true), sysctl, Level::Ok, "this is one", None);
    assert_found(&of(Some(1), Some(0), false), sysctl, Level::Warning, "only for the", cure);
    let refused = of(Some(2), Some(2), false);
    assert_found(&refused, sysctl, Level::Warning, "refused to all", cure);
    assert_found(&refused, filter, Level::Info, "in force", None);
    assert_found(&of(Some(0), Some(0), true), filter, Level::Ok, "no filter", None);
    assert_found(&of(Some(0), Some(2), true), filter, Level::Ok, "lets io_uring through", None);
    assert_found(&of(Some(0), None, true), filter, Level::Info, "isn't shown", None);
    let findings = of(Some(0), Some(2), false);
    assert_eq!(find(&findings, filter).unwrap().level, Level::Warning);
    assert!(find(&findings, filter).unwrap().fix.is_some());
}

#[test]
fn a_directory_that_cannot_be_looked_at_is_one_failure() {
    let findings = directory_findings(|found| found.error = Some("is not a directory".into()));
    assert_eq!(findings.len(), 1);
    assert_found(&findings, "directory.path", Level::Failure, "is not a directory", None);
}

#[test]
fn file_systems_are_told_apart() {
    let id = "directory.file_system";
    let of = |file_system: &str, option: &str| {
        location_findings(|location| {
            location.mount.file_system = file_system.to_owned();
            location.mount.options.push(option.to_owned());
        })
    };
    assert_found(&of("ext4", "rw"), id, Level::Ok, "ext4 on /nvme", None);
    assert_found(&of("tmpfs", "rw"), id, Level::Info, "memory, not a drive", None);
    assert_found(&of("nfs4", "rw"), id, Level::Info, "by a network", None);
    let fix = Some("mount -o remount,rw /nvme");
    assert_found(&of("ext4", "ro"), id, Level::Failure, "read-only", fix);
    let findings = directory_findings(|found| found.location = None);
    assert_found(&findings, id, Level::Info, "mountinfo", None);
}

#[test]
fn mount_options_that_cost_speed_are_said() {
    let id = "directory.mount_options";
    let of = |file_system: &str, option: &str| {
        location_findings(|location| {
            location.mount.file_system = file_system.to_owned();
            location.mount.options.push(option.to_owned());
        })
    };
    assert_eq!(find(&of("ext4", "data=ordered"), id), None);
    assert_found(&of("ext4", "data=journal"), id, Level::Warning, "written twice", None);
    let fix = Some("mount -o remount,async /nvme");
    assert_found(&of("xfs", "sync"), id, Level::Warning, "waits for the drive", fix);
    assert_found(&of("ext4", "discard"), id, Level::Info, "fstrim", None);
    assert_found(&of("btrfs", "rw"), id, Level::Info, "6.15", Some("chattr +C /nvme"));
    assert_eq!(find(&of("btrfs", "nodatasum"), id), None);
    let findings = location_findings(|location| {
        location.mount.file_system = "btrfs".to_owned();
        location.mount.options = vec!["nodatasum".to_owned(), "compress=zstd:3".to_owned()];
    });
    assert_found(&findings, id, Level::Info, "compress=zstd:3", None);
}

#[test]
fn room_runs_out_by_steps() {
    let id = "directory.room";
    let of = |total_bytes, available_bytes| {
        directory_findings(|found| found.room = Some(RoomFacts { total_bytes, available_bytes }))
    };
    assert_found(&of(1 << 40, 1 << 30), id, Level::Ok, "1 GiB free of 1 TiB", None);
    assert_found(&of(1 << 40, 1 << 20), id, Level::Warning, "1 MiB free", None);
    assert_found(&of(1 << 40, 0), id, Level::Failure, "full", None);
    assert_found(&of(0, 0), id, Level::Info, "doesn't say", None);
}

#[test]
fn a_file_system_without_direct_io_says_why() {
    let id = "directory.direct";
    let words = "memory at multiples of 4, offsets";
    assert_found(&directory_findings(|_| {}), id, Level::Ok, words, None);
    let findings = directory_findings(|found| {
        let reason = Some("O_DIRECT is refused at open".to_owned());
        found.alignment =
            Some(Alignment { direct: false, reason, memory_bytes: 1, offset_bytes: 4096 });
    });
    assert_found(&findings, id, Level::Warning, "refused at open", None);
}

#[test]
fn a_trial_that_failed_or_fell_back_says_why() {
    let of = |change: fn(&mut TrialFacts)| directory_findings(|found| change(&mut found.trials[0]));
    let id = "directory.uring";
    assert_found(&of(|_| {}), id, Level::Ok, "every byte; direct, registered memory", None);
    let findings = of(|trial| trial.failure = Some("no space left".to_owned()));
    assert_found(&findings, id, Level::Failure, "no space left", None);
    let findings = of(|trial| trial.fallbacks.push("memory isn't locked".to_owned()));
    assert_found(&findings, id, Level::Warning, "; memory isn't locked", None);
    let findings = of(|trial| {
        trial.direct = false;
        trial.registered = false;
    });
    assert_found(&findings, id, Level::Ok, "through the page cache", None);
    assert_eq!(find(&findings, "directory.aio").unwrap().level, Level::Ok);
    assert_eq!(find(&findings, "directory.threads").unwrap().level, Level::Ok);
}

#[test]
fn layers_between_files_and_drives_are_named() {
    let id = "directory.layer";
    let of = |kind: DeviceKind| {
        location_findings(|location| {
            location.devices = vec![layer("x0", kind, vec![drive("nvme0n1"), drive("nvme1n1")])];
        })
    };
    let both = "nvme0n1, nvme1n1";
    assert_found(&of(DeviceKind::Partition), id, Level::Ok, both, None);
    let raid = DeviceKind::Raid { level: "raid0".to_owned(), chunk_bytes: 524_288 };
    let words = "raid0 over nvme0n1, nvme1n1, stripes of 512 KiB";
    assert_found(&of(raid), id, Level::Ok, words, None);
    let mapped =
        |maker: &str| DeviceKind::Mapper { name: "data".to_owned(), maker: Some(maker.to_owned()) };
    assert_found(&of(mapped("LVM")), id, Level::Ok, "data (LVM) on nvme0n1", None);
    assert_found(&of(mapped("CRYPT")), id, Level::Warning, "encrypted", None);
    let looped = |direct, memory| DeviceKind::Loop { file: "/a.img".into(), direct, memory };
    assert_found(&of(looped(true, false)), id, Level::Ok, "around the page cache", None);
    assert_found(&of(looped(false, true)), id, Level::Ok, "in memory", None);
    let fix = Some("losetup --direct-io=on /dev/x0");
    assert_found(&of(looped(false, false)), id, Level::Warning, "fills twice", fix);
    assert_found(&of(DeviceKind::Memory), id, Level::Info, "memory, not a drive", None);
}

#[test]
fn drives_are_told_apart() {
    let id = "directory.drive";
    let of = |transport: &str, rotational| {
        location_findings(|location| {
            let device = &mut location.devices[0];
            device.drive.as_mut().unwrap().transport = Some(transport.to_owned());
            device.queue.as_mut().unwrap().rotational = Some(rotational);
        })
    };
    assert_found(&of("nvme", false), id, Level::Ok, "PM9A3, nvme, 4 TiB", None);
    assert_found(&of("nvme-tcp", false), id, Level::Info, "not an NVMe drive of this", None);
    assert_found(&of("sata", true), id, Level::Warning, "it turns", None);
    assert_found(&of("virtio", true), id, Level::Info, "not an NVMe", None);
}

#[test]
fn a_link_that_carries_less_than_it_could_is_a_warning() {
    let id = "directory.link";
    let of = |change: fn(&mut PcieFunction)| {
        location_findings(|location| {
            change(&mut location.devices[0].drive.as_mut().unwrap().functions[0]);
        })
    };
    assert_found(&of(|_| {}), id, Level::Ok, "×4 at 16 GT/s, which carries 7.9 GB/s", None);
    let slow = of(|function| function.link = Some(Link { width: 2, gigatransfers: 8.0 }));
    let fix = Some("lspci -vv -s 0000:41:00.0");
    assert_found(&slow, id, Level::Warning, "2.0 GB/s of the 7.9", fix);
    let narrow = of(|function| {
        let link = Link { width: 1, gigatransfers: 8.0 };
        function.bottleneck = Some(("0000:00:01.0".to_owned(), link));
    });
    assert_found(&narrow, id, Level::Warning, "0000:00:01.0 on the way carries 1.0", None);
    assert_eq!(find(&of(|function| function.link = None), id), None);
}

#[test]
fn a_scheduler_before_an_nvme_drive_is_a_warning() {
    let id = "directory.queue";
    let of = |scheduler: &str, transport: &str| {
        location_findings(|location| {
            let device = &mut location.devices[0];
            device.queue.as_mut().unwrap().scheduler = Some(scheduler.to_owned());
            device.drive.as_mut().unwrap().transport = Some(transport.to_owned());
        })
    };
    let words = "scheduler none, 1023 requests of up to 128 KiB, blocks of 4096 bytes, polling on";
    assert_found(&of("none", "nvme"), id, Level::Ok, words, None);
    assert_found(&of("mq-deadline", "virtio"), id, Level::Ok, "mq-deadline", None);
    let fix = Some("echo none > /sys/block/nvme0n1/queue/scheduler");
    assert_found(&of("mq-deadline", "nvme"), id, Level::Warning, "without a scheduler", fix);
}

#[test]
fn the_numa_node_of_a_drive_is_said_where_there_are_several() {
    let id = "directory.numa";
    let fix = Some("numactl --cpunodebind=1 --membind=1 COMMAND");
    assert_found(&directory_findings(|_| {}), id, Level::Info, "1: processors", fix);
    let findings = location_findings(|location| {
        let mut other = drive("nvme1n1");
        other.drive.as_mut().unwrap().numa_node = Some(0);
        location.devices.push(other);
    });
    assert_found(&findings, id, Level::Info, "on several", None);
    let mut single = facts();
    single.system.numa_nodes = 1;
    assert_eq!(find(&super::directory::findings(&directory(), &single), id), None);
}

#[test]
fn what_a_gpu_lacks_is_one_line_each_and_no_warning() {
    let findings = super::gpu::findings(&GpuFacts::default(), None);
    assert!(findings.iter().all(|finding| finding.level == Level::Info), "{findings:?}");
    for id in ["gpu.driver", "gpu.libcuda", "gpu.libcufile", "gpu.nvidia_fs", "gpu.gds"] {
        assert!(!find(&findings, id).unwrap().detail.contains('\n'));
    }
}

#[test]
fn the_mode_of_gds_follows_from_what_is_there() {
    let base = GpuFacts {
        driver: Some("570.86.10".to_owned()),
        gpus: vec![Gpu { model: "H200".to_owned(), function: None }],
        libcuda: Some(PathBuf::from("/usr/lib64/libcuda.so.1")),
        ..GpuFacts::default()
    };
    let python = PythonFacts { torch_cuda: Some("13.0".to_owned()), ..PythonFacts::default() };
    let findings = super::gpu::findings(&base, Some(&python));
    assert_found(&findings, "gpu.driver", Level::Ok, "570.86.10", None);
    assert_found(&findings, "gpu.device", Level::Ok, "H200", None);
    let fix = Some("pip install nvidia-cufile");
    assert_found(&findings, "gpu.libcufile", Level::Info, "not found", fix);
    assert_found(&findings, "gpu.nvidia_fs", Level::Info, "isn't", Some("modprobe nvidia-fs"));
    assert_found(&findings, "gpu.gds", Level::Info, "host: ", None);
    let cufile = GpuFacts { libcufile: Some("/x/libcufile.so.0".into()), ..base.clone() };
    assert_found(&super::gpu::findings(&cufile, None), "gpu.gds", Level::Info, "compat: ", None);
    let p2pdma = GpuFacts { pci_p2pdma: true, ..cufile.clone() };
    assert_found(&super::gpu::findings(&p2pdma, None), "gpu.gds", Level::Ok, "gds: ", None);
    let module = GpuFacts { nvidia_fs: Some("2.22.3".to_owned()), ..cufile };
    let findings = super::gpu::findings(&module, None);
    assert_found(&findings, "gpu.gds", Level::Ok, "gds: nvidia-fs is loaded", None);
    assert_found(&findings, "gpu.nvidia_fs", Level::Ok, "2.22.3", None);
    let hidden = GpuFacts { gpus: Vec::new(), ..base };
    let findings = super::gpu::findings(&hidden, None);
    assert_found(&findings, "gpu.driver", Level::Warning, "sees no GPU", None);
    let fix = Some("pip install nvidia-cufile-cu12");
    assert_found(&findings, "gpu.libcufile", Level::Info, "not found", fix);
}

#[test]
fn what_python_has_is_said_and_what_it_lacks_is_no_warning() {
    let findings = super::python::findings(None);
    assert_found(&findings, "python.version", Level::Info, "runs without", None);
    let text = r#"{"version": "3.12.1", "executable": "/venv/bin/python", "packages":
        {"torch": "2.9.0+cu128", "deepspeed": "0.19.8"}, "torch_cuda": "12.8",
        "libraries": [], "deepspeed_hook": false}"#;
    let facts: PythonFacts = serde_json::from_str(text).unwrap();
    let findings = super::python::findings(Some(&facts));
    assert_found(&findings, "python.version", Level::Ok, "3.12.1 (/venv/bin/python)", None);
    assert_found(&findings, "python.torch", Level::Ok, "2.9.0+cu128, built for CUDA 12.8", None);
    assert_found(&findings, "python.numpy", Level::Info, "not installed", None);
    assert_found(&findings, "python.forebay", Level::Info, "not installed", None);
    assert_found(&findings, "python.deepspeed", Level::Ok, "0.19.8", None);
    let fix = Some("forebay deepspeed enable");
    assert_found(&findings, "python.hook", Level::Info, "off", fix);
    let on = PythonFacts { deepspeed_hook: Some(true), torch_cuda: None, ..facts.clone() };
    let findings = super::python::findings(Some(&on));
    assert_found(&findings, "python.hook", Level::Ok, "on", None);
    assert_found(&findings, "python.torch", Level::Ok, "built without CUDA", None);
    let bare = PythonFacts { packages: [].into(), ..on.clone() };
    let findings = super::python::findings(Some(&bare));
    assert_found(&findings, "python.hook", Level::Info, "isn't installed", None);
    let without = PythonFacts { deepspeed_hook: None, ..on };
    assert_found(&super::python::findings(Some(&without)), "python.hook", Level::Info, "not", None);
}

#[test]
fn limits_and_the_machine_are_read_from_proc_and_sys() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n\
         Max open files            1024                 524288               files     \n\
         Max locked memory         65536                unlimited            bytes     \n",
    );
    write("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\n");
    write("proc/sys/fs/aio-max-nr", "65536\n");
    write("proc/sys/fs/aio-nr", "12\n");
    write("proc/sys/kernel/io_uring_disabled", "1\n");
    write("proc/sys/kernel/osrelease", "6.8.0\n");
    write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    for node in ["node0", "node1", "online"] {
        write(&format!("sys/devices/system/node/{node}/cpulist"), "0\n");
    }
    assert_eq!(
        LimitFacts::gather(root.path()),
        LimitFacts {
            memlock: Some(Limit { soft: Some(65536), hard: None }),
            cap_ipc_lock: true,
            nofile: Some(Limit { soft: Some(1024), hard: Some(524_288) }),
            aio_max: Some(65536),
            aio_taken: Some(12),
            io_uring_disabled: Some(1),
            seccomp: Some(2),
        }
    );
    let system = SystemFacts::gather(root.path());
    assert_eq!(system.kernel.as_deref(), Some("6.8.0"));
    assert_eq!((system.numa_nodes, system.huge_pages.as_deref()), (2, Some("never")));
    let nothing = Path::new("/no/such/directory");
    assert_eq!(LimitFacts::gather(nothing), LimitFacts::default());
}

#[test]
fn a_real_directory_and_a_missing_one_are_gathered_side_by_side() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("none");
    let file = directory.path().join("file");
    fs::write(&file, "x").unwrap();
    let directories = [directory.path().to_owned(), missing, file];
    let sources = Sources { root: Path::new("/"), directories: &directories, python: None };
    let report = Report::of(Facts::gather(sources));
    let of = |index: usize| &report.sections[3 + index].findings;
    assert_found(of(1), "directory.path", Level::Failure, "No such file", None);
    assert_found(of(2), "directory.path", Level::Failure, "not a directory", None);
    assert_found(of(0), "directory.threads", Level::Ok, "every byte", None);
    assert_eq!(report.counts.failure, 2, "{report:#?}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}
