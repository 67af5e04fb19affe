//! Gathers facts: from files under a root, by asking the kernel, and by trying.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::config::{cufile_settings, library_folders};
use super::{
    DirectoryFacts, EngineFacts, GpuFacts, LimitFacts, PythonFacts, SystemFacts, directory, gpu,
};

/// All that the findings are made from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Facts {
    /// The machine and its kernel.
    pub system: SystemFacts,
    /// What this process may have.
    pub limits: LimitFacts,
    /// Which engines can be set up.
    pub engines: Vec<EngineFacts>,
    /// What was found in each directory.
    pub directories: Vec<DirectoryFacts>,
    /// GPUs, their driver and libraries.
    pub gpu: GpuFacts,
    /// What is installed for Python; `None` if the command runs without.
    pub python: Option<PythonFacts>,
}

/// Where facts come from.
#[derive(Clone, Debug)]
pub struct Sources<'a> {
    /// The directory that has `proc`, `sys` and the folders of libraries.
    pub root: &'a Path,
    /// The directories to try.
    pub directories: &'a [PathBuf],
    /// What Python says of itself.
    pub python: Option<PythonFacts>,
}

impl Facts {
    /// Looks, and tries. Writes a few hundred kilobytes in each directory, and leaves nothing.
    pub fn gather(sources: Sources<'_>) -> Self {
        let Sources { root, directories, python } = sources;
        let engines: Vec<EngineFacts> =
            forebay_io::probe_engines().into_iter().map(EngineFacts::from).collect();
        let available: Vec<forebay_io::EngineKind> = forebay_io::EngineKind::ALL
            .into_iter()
            .zip(&engines)
            .filter_map(|(kind, found)| found.available.then_some(kind))
            .collect();
        let settings = cufile_settings();
        let packaged = python.as_ref().map(|python| python.libraries.clone()).unwrap_or_default();
        let mut gpu = gpu::gather(gpu::Places {
            root,
            first: &library_folders(),
            packaged: &packaged,
            settings: settings.as_deref(),
        });
        // Elsewhere, it isn't the driver of what the kernel's files tell of.
        if root == Path::new("/") {
            gpu.cuda = gpu.libcuda.as_deref().map(gpu::ask);
        }
        Self {
            system: SystemFacts::gather(root),
            limits: LimitFacts::gather(root),
            engines,
            directories: directories
                .iter()
                .map(|path| directory::gather(path, &available))
                .collect(),
            gpu,
            python,
        }
    }
}
