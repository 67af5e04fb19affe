//! PCI Express: the link of a device, and what it can carry.

use std::path::Path;

use serde::Serialize;

use crate::kernel_files::{link_name, name_of, number, text};

/// A link between two ends, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Lanes.
    pub width: u32,
    /// Giga-transfers per second of a lane.
    pub gigatransfers: f64,
}

impl Link {
    /// GB/s that it carries at the most: without its line code, but with what the protocol puts
    /// around data, so no drive reaches all of it.
    ///
    /// ```
    /// use forebay::topology::Link;
    ///
    /// let link = Link { width: 4, gigatransfers: 16.0 };
    /// assert_eq!(format!("{:.2}", link.carries()), "7.88");
    /// ```
    pub fn carries(self) -> f64 {
        // Line codes of the PCI Express Base Specification: 8b/10b in generations 1 and 2,
        // 128b/130b from 3 to 5, flits of 242 bytes of 256 from 6 on.
        let code = match self.gigatransfers {
            speed if speed < 8.0 => 8.0 / 10.0,
            speed if speed < 64.0 => 128.0 / 130.0,
            _ => 242.0 / 256.0,
        };
        f64::from(self.width) * self.gigatransfers * code / 8.0
    }

    fn read(function: &Path, which: &str) -> Option<Self> {
        let width = number(function.join(format!("{which}_link_width")))?;
        let speed = text(function.join(format!("{which}_link_speed")))?;
        let gigatransfers = speed.split_once(" GT/s")?.0.parse().ok()?;
        // 0 and 63 stand for a link that isn't up.
        (1..=32).contains(&width).then_some(Self { width, gigatransfers })
    }
}

/// A PCI Express function: a drive's controller, a GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PcieFunction {
    /// Its address, as `lspci -s` takes it.
    pub address: String,
    /// The link as it is; none for a device that a virtual machine is given.
    pub link: Option<Link>,
    /// The best link it could have.
    pub link_max: Option<Link>,
    /// The link with the least capacity on the way to the processor, and its device's address,
    /// where that is less than its own.
    pub bottleneck: Option<(String, Link)>,
    /// The NUMA node it is attached to.
    pub numa_node: Option<u32>,
    /// What is above it, the nearest first: the addresses of bridges, then the name of its root
    /// complex (`pci0000:40`).
    pub upstream: Vec<String>,
}

/// Where the ways of two functions to the processor meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// At a bridge: bytes between them need not reach the processor.
    Bridge(String),
    /// At a root complex, which is part of a processor.
    RootComplex(String),
    /// Nowhere that is shown: between root complexes.
    Apart,
}

impl PcieFunction {
    /// The function that a device is, or is part of, by its directory in `sys/devices`.
    pub(crate) fn above(device: &Path) -> Option<Self> {
        let mut functions = device.ancestors().filter(|directory| is_function(directory));
        let function = functions.next()?;
        let link = Link::read(function, "current");
        let upstream =
            functions.filter_map(|bridge| Some((name_of(bridge), Link::read(bridge, "current")?)));
        let names = function.ancestors().skip(1).map(name_of);
        let names = names.filter(|name| is_address(name) || is_root_complex(name)).collect();
        let least =
            upstream.min_by(|(_, left), (_, right)| left.carries().total_cmp(&right.carries()));
        let bottleneck =
            least.filter(|(_, least)| link.is_some_and(|own| least.carries() < own.carries()));
        Some(Self {
            address: name_of(function),
            link,
            link_max: Link::read(function, "max"),
            bottleneck,
            // -1 is none.
            numa_node: number(function.join("numa_node")),
            upstream: names,
        })
    }

    /// Where its way to the processor meets that of another function.
    pub fn meets(&self, other: &Self) -> Meeting {
        match self.upstream.iter().find(|name| other.upstream.contains(name)) {
            Some(name) if is_root_complex(name) => Meeting::RootComplex(name.clone()),
            Some(name) => Meeting::Bridge(name.clone()),
            None => Meeting::Apart,
        }
    }

    /// GB/s that can get from it to the processor, at the most.
    pub fn carries(&self) -> Option<f64> {
        let narrowest = self.bottleneck.as_ref().map(|(_, link)| *link).or(self.link)?;
        Some(narrowest.carries())
    }

    /// Whether the link is narrower or slower than the device could have it.
    pub fn is_degraded(&self) -> bool {
        match (self.link, self.link_max) {
            (Some(link), Some(max)) => link.carries() < max.carries(),
            _ => false,
        }
    }
}

/// Domain, bus, device and function: `0000:3b:00.0`.
fn is_address(name: &str) -> bool {
    name.matches(':').count() == 2
}

/// Domain and bus: `pci0000:3a`.
fn is_root_complex(name: &str) -> bool {
    name.starts_with("pci") && name.matches(':').count() == 1
}

fn is_function(directory: &Path) -> bool {
    is_address(&name_of(directory))
        && (link_name(directory.join("subsystem")).is_some_and(|name| name == "pci")
            || directory.join("vendor").exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_functions_meet_at_the_nearest_thing_above_both() {
        let root = tempfile::tempdir().unwrap();
        let function = |path: &str| {
            let directory = root.path().join("sys/devices").join(path);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("vendor"), "0x10de").unwrap();
            PcieFunction::above(&directory).unwrap()
        };
        let gpu = function("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/0000:3d:00.0");
        let upstream = ["0000:3c:00.0", "0000:3b:00.0", "0000:3a:00.0", "pci0000:3a"];
        assert_eq!(gpu.upstream, upstream);
        let switched = function("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3e:00.0");
        assert_eq!(gpu.meets(&switched), Meeting::Bridge("0000:3b:00.0".to_owned()));
        let near = function("pci0000:3a/0000:3a:02.0/0000:40:00.0");
        assert_eq!(gpu.meets(&near), Meeting::RootComplex("pci0000:3a".to_owned()));
        assert_eq!(gpu.meets(&function("pci0000:80/0000:81:00.0")), Meeting::Apart);
    }

    #[test]
    fn what_a_link_carries_follows_its_generation() {
        for (width, gigatransfers, carries) in [
            (1, 2.5, "0.250"),
            (4, 5.0, "2.000"),
            (4, 8.0, "3.938"),
            (4, 32.0, "15.754"),
            (16, 64.0, "121.000"),
        ] {
            let link = Link { width, gigatransfers };
            assert_eq!(format!("{:.3}", link.carries()), carries);
        }
    }
}
