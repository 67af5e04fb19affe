//! Findings about the machine, its limits, GPUs and Python, and how facts are gathered.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

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
        crate::report::system::findings(&SystemFacts {
            kernel: kernel.map(str::to_owned),
            ..system()
        })
    };
    assert_found(&of(Some("6.8.0")), "system.kernel", Level::Ok, "96 processors", None);
    assert_found(&of(Some("5.11.0-27")), "system.kernel", Level::Ok, "5.11", None);
    assert_found(&of(Some("5.10.0-30-amd64")), "system.kernel", Level::Warning, "5.11 or", None);
    assert_found(&of(None), "system.kernel", Level::Warning, "/proc isn't mounted", None);
}

#[test]
fn memory_and_huge_pages_are_said() {
    let findings = crate::report::system::findings(&system());
    assert_found(&findings, "system.memory", Level::Ok, "1 TiB available by Mem", None);
    assert_found(&findings, "system.huge_pages", Level::Ok, "given", None);
    let unknown = SystemFacts { memory_source: None, huge_pages: None, ..system() };
    let findings = crate::report::system::findings(&unknown);
    assert_found(&findings, "system.memory", Level::Info, "isn't known", None);
    assert_found(&findings, "system.huge_pages", Level::Info, "doesn't say", None);
    let never = SystemFacts { huge_pages: Some("never".to_owned()), ..system() };
    let findings = crate::report::system::findings(&never);
    let fix = find(&findings, "system.huge_pages").unwrap().fix.clone().unwrap();
    assert!(fix.root && fix.command.contains("transparent_hugepage"), "{fix:?}");
}

#[test]
fn an_engine_that_cannot_be_set_up_says_why_and_what_is_used_instead() {
    let findings = crate::report::system::engine_findings(&engines(true, true));
    assert_found(&findings, "engines.uring", Level::Ok, "is what auto takes: deferred", None);
    assert_found(&findings, "engines.threads", Level::Ok, "can be set up", None);
    let findings = crate::report::system::engine_findings(&engines(false, true));
    let words = "io_uring is refused; aio is used instead";
    assert_found(&findings, "engines.uring", Level::Failure, words, None);
    assert_found(&findings, "engines.aio", Level::Ok, "is what auto takes", None);
    let findings = crate::report::system::engine_findings(&engines(true, false));
    assert_found(&findings, "engines.aio", Level::Failure, "exhausted; uring is used", None);
    let none: Vec<EngineFacts> = engines(false, false)
        .into_iter()
        .map(|engine| EngineFacts { available: false, ..engine })
        .collect();
    let findings = crate::report::system::engine_findings(&none);
    assert!(findings.iter().all(|finding| finding.level == Level::Failure));
    assert!(!findings[0].detail.contains("instead"), "{findings:?}");
}

#[test]
fn little_locked_memory_has_the_command_that_this_user_can_use() {
    let of = |soft, hard, cap_ipc_lock| {
        let memlock = Some(Limit { soft, hard });
        let facts = LimitFacts { memlock, cap_ipc_lock, ..limits() };
        crate::report::limits::findings(&facts, &engines(true, true))
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
    let findings = crate::report::limits::findings(&hidden, &engines(true, true));
    assert_found(&findings, id, Level::Info, "isn't shown", None);
}

#[test]
fn few_open_files_have_the_command_that_this_user_can_use() {
    let of = |limit: Option<Limit>| {
        let facts = LimitFacts { nofile: limit, ..limits() };
        crate::report::limits::findings(&facts, &engines(true, true))
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
        crate::report::limits::findings(&facts, &engines(true, true))
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
        crate::report::limits::findings(&facts, &engines(works, true))
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
fn what_a_gpu_lacks_is_one_line_each_and_no_warning() {
    let findings = crate::report::gpu::findings(&GpuFacts::default(), &system(), None);
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
    let findings = crate::report::gpu::findings(&base, &system(), Some(&python));
    assert_found(&findings, "gpu.driver", Level::Ok, "570.86.10", None);
    assert_found(&findings, "gpu.device", Level::Ok, "H200", None);
    assert_found(&findings, "gpu.pinned", Level::Ok, "at most 1 TiB by Mem", None);
    let fix = Some("pip install nvidia-cufile");
    assert_found(&findings, "gpu.libcufile", Level::Info, "not found", fix);
    assert_found(&findings, "gpu.nvidia_fs", Level::Info, "isn't", Some("modprobe nvidia-fs"));
    assert_found(&findings, "gpu.gds", Level::Info, "host: ", None);
    let cufile = GpuFacts { libcufile: Some("/x/libcufile.so.0".into()), ..base.clone() };
    assert_found(
        &crate::report::gpu::findings(&cufile, &system(), None),
        "gpu.gds",
        Level::Info,
        "compat: ",
        None,
    );
    let p2pdma = GpuFacts { pci_p2pdma: true, ..cufile.clone() };
    assert_found(
        &crate::report::gpu::findings(&p2pdma, &system(), None),
        "gpu.gds",
        Level::Ok,
        "gds: ",
        None,
    );
    let module = GpuFacts { nvidia_fs: Some("2.22.3".to_owned()), ..cufile };
    let hidden = GpuFacts { modules_hidden: true, ..module.clone() };
    let findings = crate::report::gpu::findings(&hidden, &system(), None);
    assert_found(&findings, "gpu.gds", Level::Info, "host: /proc/modules", None);
    let findings = crate::report::gpu::findings(&module, &system(), None);
    assert_found(&findings, "gpu.gds", Level::Ok, "gds: nvidia-fs is loaded", None);
    assert_found(&findings, "gpu.nvidia_fs", Level::Ok, "2.22.3", None);
    let hidden = GpuFacts { gpus: Vec::new(), ..base };
    let unknown = SystemFacts { memory_source: None, ..system() };
    let findings = crate::report::gpu::findings(&hidden, &unknown, None);
    assert_found(&findings, "gpu.pinned", Level::Info, "isn't known", None);
    assert_found(&findings, "gpu.driver", Level::Warning, "sees no GPU", None);
    let fix = Some("pip install nvidia-cufile-cu12");
    assert_found(&findings, "gpu.libcufile", Level::Info, "not found", fix);
}

#[test]
fn what_python_has_is_said_and_what_it_lacks_is_no_warning() {
    let findings = crate::report::python::findings(None);
    assert_found(&findings, "python.version", Level::Info, "runs without", None);
    let text = r#"{"version": "3.12.1", "executable": "/venv/bin/python", "packages":
        {"torch": "2.9.0+cu128", "deepspeed": "0.19.8"}, "torch_cuda": "12.8",
        "libraries": [], "deepspeed_hook": false}"#;
    let facts: PythonFacts = serde_json::from_str(text).unwrap();
    let findings = crate::report::python::findings(Some(&facts));
    assert_found(&findings, "python.version", Level::Ok, "3.12.1 (/venv/bin/python)", None);
    assert_found(&findings, "python.torch", Level::Ok, "2.9.0+cu128, built for CUDA 12.8", None);
    assert_found(&findings, "python.numpy", Level::Info, "not installed", None);
    assert_found(&findings, "python.forebay", Level::Info, "not installed", None);
    assert_found(&findings, "python.deepspeed", Level::Ok, "0.19.8", None);
    let fix = Some("forebay deepspeed enable");
    assert_found(&findings, "python.hook", Level::Info, "off", fix);
    let on = PythonFacts { deepspeed_hook: Some(true), torch_cuda: None, ..facts.clone() };
    let findings = crate::report::python::findings(Some(&on));
    assert_found(&findings, "python.hook", Level::Ok, "on", None);
    assert_found(&findings, "python.torch", Level::Ok, "built without CUDA", None);
    let bare = PythonFacts { packages: [].into(), ..on.clone() };
    let findings = crate::report::python::findings(Some(&bare));
    assert_found(&findings, "python.hook", Level::Info, "isn't installed", None);
    let without = PythonFacts { deepspeed_hook: None, ..on };
    assert_found(
        &crate::report::python::findings(Some(&without)),
        "python.hook",
        Level::Info,
        "not",
        None,
    );
}

#[test]
fn a_python_that_cannot_be_asked_is_a_failure_of_the_report_not_its_end() {
    let facts = PythonFacts { problem: Some("broken".to_owned()), ..PythonFacts::default() };
    let findings = crate::report::python::findings(Some(&facts));
    assert_found(&findings, "python.version", Level::Failure, "broken", None);
    assert_eq!(findings.len(), 1, "nothing else is known");
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
