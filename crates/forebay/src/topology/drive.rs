//! What a drive says of itself: model, serial number, how it is attached.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::pcie::PcieFunction;
use crate::kernel_files::{entries, link_name, name_of, number, text};

/// A drive, or what a virtual machine sees of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Drive {
    /// How it is attached: `nvme` over PCI Express, `nvme-tcp` and the like over a fabric,
    /// `virtio`, `sata`, `sas`, `usb`, `scsi`, `mmc`.
    pub transport: Option<String>,
    /// Its model.
    pub model: Option<String>,
    /// Its serial number, where this isn't hidden from users.
    pub serial: Option<String>,
    /// Its name in the world.
    pub wwid: Option<String>,
    /// Version of its firmware.
    pub firmware: Option<String>,
    /// The PCI Express functions that lead to it: several for a drive with several paths.
    pub functions: Vec<PcieFunction>,
    /// The NUMA node it is attached to.
    pub numa_node: Option<u32>,
}

impl Drive {
    /// Whether it is an NVMe drive in this machine.
    pub fn is_nvme(&self) -> bool {
        self.transport.as_deref() == Some("nvme")
    }

    /// GB/s that its links carry together, at the most.
    pub fn carries(&self) -> Option<f64> {
        let each: Option<Vec<f64>> = self.functions.iter().map(PcieFunction::carries).collect();
        each.filter(|each| !each.is_empty()).map(|each| each.iter().sum())
    }

    /// Reads the drive behind a block device, by its directory in `sys/devices`.
    pub(super) fn read(block: &Path) -> Self {
        let device = block.join("device");
        let controllers = controllers(&device);
        let first = |name: &str| {
            let places =
                [block.to_path_buf(), device.clone()].into_iter().chain(controllers.clone());
            places.map(|place| place.join(name)).find_map(text)
        };
        let chains: Vec<PathBuf> = match controllers.as_slice() {
            [] => vec![block.to_path_buf()],
            some => some.to_vec(),
        };
        let functions: Vec<PcieFunction> =
            chains.iter().filter_map(|chain| PcieFunction::above(chain)).collect();
        let own_node = controllers.iter().find_map(|place| number(place.join("numa_node")));
        Self {
            transport: transport(block, &controllers),
            model: model(&device, &first),
            serial: first("serial"),
            wwid: first("wwid"),
            firmware: first("firmware_rev").or_else(|| text(device.join("rev"))),
            numa_node: own_node
                .or_else(|| functions.iter().find_map(|function| function.numa_node)),
            functions,
        }
    }
}

/// The NVMe controllers of a namespace: one, or with multipathing all those of its subsystem.
fn controllers(device: &Path) -> Vec<PathBuf> {
    let Ok(device) = device.canonicalize() else { return Vec::new() };
    if is_controller(&name_of(&device)) {
        return vec![device];
    }
    if !name_of(&device).starts_with("nvme-subsys") {
        return Vec::new();
    }
    let members = entries(&device).into_iter().filter(|path| is_controller(&name_of(path)));
    members.filter_map(|path| path.canonicalize().ok()).collect()
}

fn is_controller(name: &str) -> bool {
    let number = name.strip_prefix("nvme").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

fn transport(block: &Path, controllers: &[PathBuf]) -> Option<String> {
    if let Some(controller) = controllers.first() {
        let fabric = text(controller.join("transport"));
        return Some(match fabric.as_deref() {
            None | Some("pcie" | "apple-nvme") => "nvme".to_owned(),
            Some(fabric) => format!("nvme-{fabric}"),
        });
    }
    let whole = block.to_string_lossy();
    let by_path = [
        ("/virtio", "virtio"),
        ("/usb", "usb"),
        ("/ata", "sata"),
        ("/end_device-", "sas"),
        ("/mmc", "mmc"),
    ];
    let found = by_path.iter().find(|(part, _)| whole.contains(part)).map(|(_, name)| *name);
    let subsystem = || link_name(block.join("device/subsystem"));
    found.map(str::to_owned).or_else(subsystem)
}

fn model(device: &Path, first: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let model = first("model")?;
    // SCSI has the maker in a field of its own; for SATA drives that is "ATA".
    let maker = text(device.join("vendor")).filter(|maker| maker != "ATA");
    Some(match maker.filter(|maker| !maker.starts_with("0x") && !model.starts_with(maker)) {
        Some(maker) => format!("{maker} {model}"),
        None => model,
    })
}
