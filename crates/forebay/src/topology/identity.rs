//! Names of what files are on, for what was measured there once.
//!
//! A name is made of what the drives say of themselves (names in the world, serial numbers), not
//! of how they are called here: those names change with the order in which a machine finds its
//! drives. Where a drive says nothing, size and place have to do.

use super::{Device, DeviceKind, Location};

pub(super) fn of(location: &Location) -> String {
    let mount = &location.mount;
    if location.devices.is_empty() {
        let place = if mount.is_remote() { mount.source.clone() } else { at(location) };
        return format!("{}:{place}", mount.file_system);
    }
    list(&location.devices)
}

fn at(location: &Location) -> String {
    location.mount.point.display().to_string()
}

fn list(devices: &[Device]) -> String {
    let mut names: Vec<String> = devices.iter().map(name).collect();
    names.sort();
    names.join("+")
}

fn name(device: &Device) -> String {
    match &device.kind {
        // The whole drive's speed is that of its parts.
        DeviceKind::Partition if !device.members.is_empty() => list(&device.members),
        DeviceKind::Raid { level, chunk_bytes } => {
            format!("{level}-{chunk_bytes}({})", list(&device.members))
        }
        DeviceKind::Mapper { maker, .. } if !device.members.is_empty() => {
            format!("{}({})", maker.as_deref().unwrap_or("mapper"), list(&device.members))
        }
        DeviceKind::Loop { memory: true, .. } => "loop(memory)".to_owned(),
        DeviceKind::Loop { .. } if !device.members.is_empty() => {
            format!("loop({})", list(&device.members))
        }
        DeviceKind::Memory => "memory".to_owned(),
        _ => own_name(device),
    }
}

fn own_name(device: &Device) -> String {
    let drive = device.drive.clone().unwrap_or_default();
    let transport = drive.transport.as_deref().unwrap_or("drive");
    let rest = match (drive.wwid, drive.serial, drive.model) {
        (Some(wwid), _, _) => wwid,
        (None, Some(serial), Some(model)) => format!("{model}:{serial}"),
        (None, Some(serial), None) => serial,
        (None, None, model) => {
            let place = drive.functions.first().map(|function| function.address.clone());
            let known = [model, Some(device.size_bytes.to_string())];
            // Two drives of a kind are told apart by where they are.
            let parts =
                known.into_iter().flatten().chain(Some(place.unwrap_or(device.name.clone())));
            parts.collect::<Vec<_>>().join(":")
        }
    };
    format!("{transport}:{rest}")
}
