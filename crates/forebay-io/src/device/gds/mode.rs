//! Which way cuFile would move a file's bytes, judged from facts. Pure.

use super::storage::Storage;
use crate::device::DriverFacts;

/// Which way the bytes of a file go to and from a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileMode {
    /// Between drive and device, by GPUDirect Storage.
    Gds,
    /// cuFile would take them through the host's memory (its compatibility mode). Forebay does that
    /// itself.
    Compat,
    /// Through the host's memory, and cuFile isn't there or wasn't asked.
    Host,
}

impl FileMode {
    /// What statistics call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gds => "gds",
            Self::Compat => "compat",
            Self::Host => "host",
        }
    }
}

/// A mode, and what led to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The mode.
    pub mode: FileMode,
    /// Why, in words.
    pub reason: String,
}

/// The mode of a file on a kind of storage (or why it is on none that counts), which is open for
/// direct I/O (or why it isn't), with a driver that reaches some kinds.
pub fn judge(
    storage: &Result<Storage, String>,
    direct_refusal: Option<&str>,
    driver: DriverFacts,
) -> Judgement {
    let compat = |reason: String| Judgement { mode: FileMode::Compat, reason };
    let gds = |reason: String| Judgement { mode: FileMode::Gds, reason };
    let storage = match storage {
        Ok(storage) => *storage,
        Err(reason) => return compat(reason.clone()),
    };
    if let Some(refusal) = direct_refusal {
        return compat(format!("it isn't open for direct I/O: {refusal}"));
    }
    let name = storage.name();
    if driver.nvidia_fs && driver.status_flags & storage.status_flag() != 0 {
        return gds(format!("{name}, through nvidia-fs"));
    }
    if driver.nvme_p2pdma && storage == Storage::Nvme {
        return gds(format!("{name}, by the kernel's peer-to-peer transfers"));
    }
    compat(if driver.nvidia_fs {
        format!("nvidia-fs doesn't reach {name} here: see `gdscheck -p`")
    } else {
        "nvidia-fs isn't loaded: see `lsmod` and `gdscheck -p`".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(storage: Storage, refusal: Option<&str>, driver: DriverFacts) -> FileMode {
        judge(&Ok(storage), refusal, driver).mode
    }

    #[test]
    fn only_what_the_driver_reaches_is_direct() {
        let nothing = DriverFacts::default();
        let nvidia_fs = DriverFacts { nvidia_fs: true, status_flags: 1 << 4, ..nothing };
        let p2pdma = DriverFacts { nvme_p2pdma: true, ..nothing };
        assert_eq!(mode(Storage::Nvme, None, nvidia_fs), FileMode::Gds);
        assert_eq!(mode(Storage::Nvme, None, p2pdma), FileMode::Gds);
        for (storage, refusal, driver) in [
            (Storage::Nvme, None, nothing),
            (Storage::Lustre, None, nvidia_fs),
            (Storage::Scsi, None, p2pdma),
            (Storage::Nvme, Some("refused"), nvidia_fs),
            // Flags are of no use without the module that they are about.
            (Storage::Nvme, None, DriverFacts { nvidia_fs: false, ..nvidia_fs }),
        ] {
            assert_eq!(mode(storage, refusal, driver), FileMode::Compat, "{storage:?} {driver:?}");
        }
        let overlay = judge(&Err("overlay".to_owned()), None, nvidia_fs);
        assert_eq!((overlay.mode, overlay.reason.as_str()), (FileMode::Compat, "overlay"));
    }

    #[test]
    fn every_kind_has_its_bit() {
        let flags = [
            Storage::Lustre,
            Storage::WekaFs,
            Storage::Nfs,
            Storage::Gpfs,
            Storage::Nvme,
            Storage::NvmeOverFabrics,
            Storage::Scsi,
            Storage::BeeGfs,
            Storage::ScateFs,
            Storage::VirtioFs,
        ]
        .map(Storage::status_flag);
        assert_eq!(flags.iter().fold(0, |sum, flag| sum | flag), 0b11_0010_0111_1111);
        assert_eq!(flags.iter().map(|flag| flag.count_ones()).sum::<u32>(), 10);
    }
}
