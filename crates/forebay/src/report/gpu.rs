//! GPUs, their driver, and what direct transfers between them and drives would take.
//!
//! The kernel's files and the names of libraries tell; of this machine, the CUDA driver is asked as
//! well. cuFile isn't loaded: it would open a log.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use forebay_io::device::gds::{MODULES_HIDDEN, uses_p2pdma};
use forebay_io::device::{Cuda, Search};
use serde::Serialize;

use super::{Finding, Level, PythonFacts, SystemFacts};
use crate::ByteSize;
use crate::kernel_files::{entries, text};
use crate::lossy;
use crate::topology::PcieFunction;

/// Where distributions and container runtimes put libraries.
const LIBRARY_FOLDERS: &[&str] = &[
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "usr/local/nvidia/lib64",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
];

/// What the CUDA driver's library is called.
const CUDA: &str = "libcuda.so.1";
/// What cuFile's library is called.
const CUFILE: &str = "libcufile.so.0";

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Its model.
    pub model: String,
    /// Its PCI Express link.
    pub function: Option<PcieFunction>,
}

/// What the CUDA driver says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CudaFacts {
    /// The newest CUDA that it can do.
    pub version: Option<String>,
    /// The devices that this process may use, by their numbers.
    pub devices: Vec<String>,
    /// Why it can't be used.
    pub refusal: Option<String>,
}

/// GPUs, their driver and libraries.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GpuFacts {
    /// Version of NVIDIA's kernel driver; `None` if it isn't loaded.
    pub driver: Option<String>,
    /// The GPUs that it drives.
    pub gpus: Vec<Gpu>,
    /// The CUDA driver's library.
    #[serde(serialize_with = "lossy::optional_path")]
    pub libcuda: Option<PathBuf>,
    /// What the CUDA driver says of itself; `None` if it wasn't asked.
    pub cuda: Option<CudaFacts>,
    /// cuFile's library.
    #[serde(serialize_with = "lossy::optional_path")]
    pub libcufile: Option<PathBuf>,
    /// Version of the kernel module nvidia-fs; `None` if it isn't loaded.
    pub nvidia_fs: Option<String>,
    /// cuFile's settings have it use the kernel's own peer-to-peer transfers (`use_pci_p2pdma`).
    pub pci_p2pdma: bool,
    /// `/proc/modules` can't be read: see [`MODULES_HIDDEN`].
    pub modules_hidden: bool,
}

impl GpuFacts {
    /// Whether there is a driver that GPUs work with. Under WSL and in some sandboxes, only CUDA
    /// knows of it.
    pub fn is_driven(&self) -> bool {
        self.driver.is_some() || self.cuda.as_ref().is_some_and(|cuda| !cuda.devices.is_empty())
    }
}

/// Where facts about GPUs come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places<'a> {
    /// What has `proc`, `sys` and the folders of libraries.
    pub(super) root: &'a Path,
    /// Folders of libraries to look in first.
    pub(super) first: &'a [PathBuf],
    /// Libraries that packages brought.
    pub(super) packaged: &'a [PathBuf],
    /// cuFile's settings, if they aren't in their usual place.
    pub(super) settings: Option<&'a Path>,
}

/// Looks, and asks nobody.
pub(super) fn gather(places: Places<'_>) -> GpuFacts {
    let Places { root, first, packaged, settings } = places;
    let driver = root.join("proc/driver/nvidia");
    let version = text(driver.join("version"));
    let find = |name: &str| library(root, first, packaged, name);
    let nvidia_fs = root.join("proc/driver/nvidia-fs");
    GpuFacts {
        driver: version
            .as_deref()
            .and_then(driver_version)
            .or_else(|| text(root.join("sys/module/nvidia/version"))),
        gpus: gpus(root, &driver),
        libcuda: find(CUDA),
        cuda: None,
        libcufile: find(CUFILE),
        nvidia_fs: text(root.join("sys/module/nvidia_fs/version"))
            .or_else(|| text(nvidia_fs.join("version")))
            .or_else(|| nvidia_fs.is_dir().then(|| "of unknown version".to_owned())),
        pci_p2pdma: settings
            .map_or_else(|| text(root.join("etc/cufile.json")), text)
            .as_deref()
            .is_some_and(uses_p2pdma),
        modules_hidden: std::fs::File::open(root.join("proc/modules")).is_err(),
    }
}

/// Starts a CUDA driver, and asks it.
pub(super) fn ask(libcuda: &Path) -> CudaFacts {
    let folders = libcuda.parent().map(Path::to_owned).into_iter().collect();
    match Cuda::load(&Search { folders, system: true }) {
        Err(error) => CudaFacts { refusal: Some(error.to_string()), ..CudaFacts::default() },
        Ok(cuda) => CudaFacts {
            // 1000 times the major number, 10 times the minor.
            version: Some(format!("{}.{}", cuda.version() / 1000, cuda.version() % 1000 / 10)),
            devices: (0..cuda.device_count()).filter_map(|n| cuda.device_name(n).ok()).collect(),
            refusal: None,
        },
    }
}

/// The version in `/proc/driver/nvidia/version`: the first word of it that looks like one.
fn driver_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    text.split_whitespace().find(is_version).map(str::to_owned)
}

fn gpus(root: &Path, driver: &Path) -> Vec<Gpu> {
    let read = |folder: PathBuf| {
        let information = text(folder.join("information"))?;
        let model = information.lines().find_map(|line| line.strip_prefix("Model:"))?;
        let address = folder.file_name()?.to_owned();
        let device = root.join("sys/bus/pci/devices").join(address).canonicalize().ok();
        let function = device.as_deref().and_then(PcieFunction::above);
        Some(Gpu { model: model.trim().to_owned(), function })
    };
    entries(driver.join("gpus")).into_iter().filter_map(read).collect()
}

/// Finds a library where the dynamic linker would, or where packages put it.
fn library(root: &Path, first: &[PathBuf], packaged: &[PathBuf], name: &str) -> Option<PathBuf> {
    let usual = LIBRARY_FOLDERS.iter().map(|folder| root.join(folder));
    let folders = first.iter().cloned().chain(usual).chain(cuda_folders(root));
    let found = folders.map(|folder| folder.join(name)).find(|path| path.exists());
    found.or_else(|| cached(root, name)).or_else(|| {
        packaged.iter().find(|path| path.file_name().is_some_and(|file| file == name)).cloned()
    })
}

/// The folders of libraries of each CUDA toolkit: `usr/local/cuda`, or `usr/local/cuda-13.0`, …
fn cuda_folders(root: &Path) -> Vec<PathBuf> {
    let is_toolkit = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda"))
    };
    let toolkits = entries(root.join("usr/local")).into_iter().filter(is_toolkit);
    toolkits
        .flat_map(|toolkit| {
            let targets = entries(toolkit.join("targets")).into_iter();
            let libraries = targets.map(|target| target.join("lib"));
            std::iter::once(toolkit.join("lib64")).chain(libraries).collect::<Vec<_>>()
        })
        .collect()
}

/// Finds a library in the linker's cache, whose names end in a zero byte each.
fn cached(root: &Path, name: &str) -> Option<PathBuf> {
    let cache = std::fs::read(root.join("etc/ld.so.cache")).ok()?;
    let names = cache.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
    let paths = names.filter(|text| text.starts_with('/')).map(Path::new);
    let mut found = paths.filter(|path| path.file_name().is_some_and(|file| file == name));
    found
        .find(|path| root.join(path.strip_prefix("/").unwrap_or(path)).exists())
        .map(Path::to_owned)
}

pub(super) fn findings(
    facts: &GpuFacts,
    system: &SystemFacts,
    python: Option<&PythonFacts>,
) -> Vec<Finding> {
    let mut findings = vec![driver(facts)];
    findings.extend(facts.gpus.iter().map(gpu));
    findings.push(match &facts.libcuda {
        Some(path) => ok("gpu.libcuda", CUDA, path.display().to_string()),
        None => info("gpu.libcuda", CUDA, "not found; the driver brings it"),
    });
    findings.extend(facts.cuda.as_ref().map(|cuda| asked(cuda, facts.driver.is_some())));
    findings.push(libcufile(facts, python));
    findings.push(nvidia_fs(facts));
    findings.push(gds(facts));
    findings.extend(facts.is_driven().then(|| pinned(system)));
    findings
}

/// How much memory pools and staging blocks can have registered with CUDA.
fn pinned(system: &SystemFacts) -> Finding {
    let id = "gpu.pinned";
    let title = "pinned memory";
    match (system.memory_available_bytes, &system.memory_source) {
        (Some(bytes), Some(source)) => {
            let bytes = ByteSize(bytes);
            ok(id, title, format!("registered with CUDA as it comes; at most {bytes} by {source}"))
        }
        _ => info(id, title, "registered with CUDA as it comes; how much there is isn't known"),
    }
}

fn ok(id: &'static str, title: &str, detail: impl Into<String>) -> Finding {
    Finding::new(id, Level::Ok, title, detail)
}

fn info(id: &'static str, title: &str, detail: impl Into<String>) -> Finding {
    Finding::new(id, Level::Info, title, detail)
}

fn driver(facts: &GpuFacts) -> Finding {
    let title = "NVIDIA driver";
    match (&facts.driver, facts.gpus.len()) {
        (None, _) if facts.is_driven() => {
            info("gpu.driver", title, "the kernel shows none; CUDA works all the same")
        }
        (None, _) => {
            info("gpu.driver", title, "not loaded: tensors stay in the processor's memory")
        }
        (Some(version), 0) => {
            let detail = format!("{version}, but this process sees no GPU");
            Finding::new("gpu.driver", Level::Warning, title, detail)
        }
        (Some(version), _) => ok("gpu.driver", title, version),
    }
}

/// What came of asking the CUDA driver. Without the kernel's, a refusal is no news.
fn asked(cuda: &CudaFacts, is_driven: bool) -> Finding {
    let level = if is_driven { Level::Warning } else { Level::Info };
    let CudaFacts { version, devices, refusal } = cuda;
    match (refusal, version) {
        (Some(refusal), _) => Finding::new("gpu.cuda", level, "CUDA", refusal),
        (None, version) => {
            let named =
                devices.iter().enumerate().map(|(number, name)| format!("{number}: {name}"));
            let named: Vec<String> = named.collect();
            let version = version.as_deref().unwrap_or("of unknown version");
            let detail = format!("{version}; this process sees {}", named.join(", "));
            ok("gpu.cuda", "CUDA", detail)
        }
    }
}

fn gpu(gpu: &Gpu) -> Finding {
    let Some(function) = &gpu.function else { return ok("gpu.device", "GPU", &gpu.model) };
    let mut detail = format!("{} at {}", gpu.model, function.address);
    // GPUs slow an idle link down, so what it could be is what counts.
    if let Some(link) = function.link_max {
        let _ = write!(
            detail,
            ", PCIe ×{} at {} GT/s: up to {:.1} GB/s",
            link.width,
            link.gigatransfers,
            link.carries()
        );
    }
    if let Some(node) = function.numa_node {
        let _ = write!(detail, ", NUMA node {node}");
    }
    ok("gpu.device", "GPU", detail)
}

fn libcufile(facts: &GpuFacts, python: Option<&PythonFacts>) -> Finding {
    if let Some(path) = &facts.libcufile {
        return ok("gpu.libcufile", CUFILE, path.display().to_string());
    }
    let finding = info("gpu.libcufile", CUFILE, "not found; GPUDirect Storage takes it");
    if !facts.is_driven() {
        return finding;
    }
    let cuda = python.and_then(|python| python.torch_cuda.as_deref()).unwrap_or_default();
    let package = if cuda.starts_with("13") { "nvidia-cufile" } else { "nvidia-cufile-cu12" };
    finding.fix(format!("pip install {package}"))
}

fn nvidia_fs(facts: &GpuFacts) -> Finding {
    match (&facts.nvidia_fs, &facts.driver) {
        (Some(version), _) => ok("gpu.nvidia_fs", "nvidia-fs", version),
        (None, None) => info("gpu.nvidia_fs", "nvidia-fs", "not loaded"),
        (None, Some(_)) => info("gpu.nvidia_fs", "nvidia-fs", "the kernel module isn't loaded")
            .fix_as_root("modprobe nvidia-fs"),
    }
}

fn gds(facts: &GpuFacts) -> Finding {
    let (mode, why) = match (facts.is_driven(), &facts.libcufile) {
        (false, _) => ("host", "there is no GPU driver"),
        (true, None) => ("host", "without cuFile, tensors of GPUs go through pinned memory"),
        (true, Some(_)) if facts.driver.is_none() => {
            ("host", "the kernel shows no NVIDIA driver, which GPUDirect Storage takes")
        }
        (true, Some(_)) if facts.modules_hidden => ("host", MODULES_HIDDEN),
        (true, Some(_)) if facts.nvidia_fs.is_some() => {
            ("gds", "nvidia-fs is loaded; each file's system and drive still decide")
        }
        (true, Some(_)) if facts.pci_p2pdma => (
            "gds",
            "cuFile may use the kernel's own peer-to-peer transfers, where drives have them",
        ),
        _ => ("compat", "without nvidia-fs, cuFile itself copies through the processor's memory"),
    };
    let level = if mode == "gds" { Level::Ok } else { Level::Info };
    Finding::new("gpu.gds", level, "GDS mode", format!("{mode}: {why}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use forebay_standin::Standin;

    use super::*;

    fn write(root: &Path, path: &str, text: &[u8]) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn places(root: &Path) -> Places<'_> {
        Places { root, first: &[], packaged: &[], settings: None }
    }

    #[test]
    fn settings_elsewhere_are_read_in_place_of_the_usual_ones() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "etc/cufile.json", br#"{"use_pci_p2pdma": false}"#);
        write(root.path(), "mine.json", br#"{"use_pci_p2pdma": true}"#);
        let mine = root.path().join("mine.json");
        assert!(!gather(places(root.path())).pci_p2pdma);
        assert!(gather(Places { settings: Some(&mine), ..places(root.path()) }).pci_p2pdma);
    }

    #[test]
    fn a_driver_is_asked_and_one_that_cannot_start_says_why() {
        let standin = Standin::new().unwrap();
        let library = standin.folder().join(CUDA);
        let facts = ask(&library);
        assert_eq!((facts.version.as_deref(), facts.devices.len()), (Some("12.4"), 2));
        let finding = asked(&facts, true);
        assert_eq!(finding.detail, "12.4; this process sees 0: Stand-in 0, 1: Stand-in 1");
        standin.configure("devices=0");
        let facts = ask(&library);
        assert_eq!(asked(&facts, true).level, Level::Warning);
        let finding = asked(&facts, false);
        assert_eq!(finding.level, Level::Info);
        assert!(finding.detail.contains("CUDA_ERROR_NO_DEVICE"), "{finding:?}");
    }

    #[test]
    fn a_gpu_that_only_cuda_knows_of_is_there() {
        let cuda = CudaFacts { devices: vec!["RTX".to_owned()], ..CudaFacts::default() };
        let mut facts = GpuFacts {
            libcufile: Some("/site/libcufile.so.0".into()),
            cuda: Some(cuda),
            ..GpuFacts::default()
        };
        let told = |facts: &GpuFacts| -> String {
            let findings = findings(facts, &SystemFacts::default(), None);
            let lines: Vec<String> = findings
                .iter()
                .map(|finding| format!("{}: {}", finding.id, finding.detail))
                .collect();
            lines.join("\n")
        };
        let text = told(&facts);
        assert!(text.contains("CUDA works all the same"), "{text}");
        assert!(text.contains("gpu.gds: host: the kernel shows no NVIDIA driver"), "{text}");
        assert!(text.contains("gpu.pinned"), "{text}");
        facts.cuda = Some(CudaFacts::default());
        let text = told(&facts);
        assert!(text.contains("tensors stay in the processor's memory"), "{text}");
        assert!(text.contains("there is no GPU driver"), "{text}");
        assert!(!text.contains("gpu.pinned"), "{text}");
    }

    #[test]
    fn versions_of_both_drivers_are_read() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release";
        assert_eq!(driver_version(closed).as_deref(), Some("550.54.15"));
        assert_eq!(driver_version(open).as_deref(), Some("570.86.10"));
        assert_eq!(driver_version("nothing here"), None);
    }

    #[test]
    fn a_machine_with_all_of_it_is_read() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let version = b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n";
        write(root, "proc/driver/nvidia/version", version);
        let gpu = "proc/driver/nvidia/gpus/0000:19:00.0/information";
        write(root, gpu, b"Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n");
        let device = "sys/bus/pci/devices/0000:19:00.0";
        for (name, text) in [
            ("vendor", "0x10de"),
            ("current_link_width", "16"),
            ("current_link_speed", "2.5 GT/s PCIe"),
            ("max_link_width", "16"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("numa_node", "0"),
        ] {
            write(root, &format!("{device}/{name}"), text.as_bytes());
        }
        write(root, "sys/module/nvidia_fs/version", b"2.22.3\n");
        write(root, "proc/modules", b"nvidia_fs 1 0 - Live 0x0\n");
        write(root, "opt/odd/libcuda.so.1", b"");
        write(
            root,
            "etc/ld.so.cache",
            b"glibc\0libcuda.so.1\0/opt/odd/libcuda.so.1\0/gone/libcufile.so.0\0",
        );
        let packaged = PathBuf::from("/site/nvidia/cufile/lib/libcufile.so.0");
        let facts = gather(Places { packaged: std::slice::from_ref(&packaged), ..places(root) });
        assert_eq!(facts.driver.as_deref(), Some("550.54.15"));
        assert_eq!(facts.libcuda, Some("/opt/odd/libcuda.so.1".into()));
        assert_eq!(facts.libcufile, Some(packaged));
        assert_eq!(facts.nvidia_fs.as_deref(), Some("2.22.3"));
        let details: Vec<String> = findings(&facts, &SystemFacts::gather(root), None)
            .into_iter()
            .map(|finding| finding.detail)
            .collect();
        assert_eq!(
            details[1],
            "NVIDIA H200 at 0000:19:00.0, PCIe ×16 at 32 GT/s: up to 63.0 GB/s, NUMA node 0"
        );
        let gds = details.iter().rev().nth(1).unwrap();
        assert!(gds.starts_with("gds: "), "{details:?}");
    }

    #[test]
    fn folders_that_the_linker_looks_into_first_come_first() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "usr/lib64/libcuda.so.1", b"");
        write(root.path(), "mine/libcuda.so.1", b"");
        let mine = root.path().join("mine");
        let facts = gather(Places { first: std::slice::from_ref(&mine), ..places(root.path()) });
        assert_eq!(facts.libcuda, Some(mine.join(CUDA)));
    }

    #[test]
    fn a_toolkit_of_any_version_has_its_libraries_found() {
        let root = tempfile::tempdir().unwrap();
        let library = "usr/local/cuda-13.0/targets/x86_64-linux/lib/libcufile.so.0";
        write(root.path(), library, b"");
        let facts = gather(places(root.path()));
        assert_eq!(facts.libcufile, Some(root.path().join(library)));
    }
}
