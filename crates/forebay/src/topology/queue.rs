//! A block device's queue: how the kernel hands requests to it (`Documentation/block/queue-sysfs`).

use std::path::Path;

use serde::Serialize;

use crate::kernel_files::{flag, number, text};

/// Settings of a queue; `None` is what this kernel doesn't say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Queue {
    /// The scheduler in use, `none` where requests go to the device as they come.
    pub scheduler: Option<String>,
    /// Requests that the queue holds.
    pub nr_requests: Option<u32>,
    /// Largest request in KiB, as set.
    pub max_sectors_kb: Option<u32>,
    /// Largest request in KiB that the device takes.
    pub max_hw_sectors_kb: Option<u32>,
    /// Completions can be polled for.
    pub io_poll: Option<bool>,
    /// `write back` (the drive holds writes in a cache of its own) or `write through`.
    pub write_cache: Option<String>,
    /// Bytes of the smallest request.
    pub logical_block_bytes: Option<u32>,
    /// Bytes that the device writes at once.
    pub physical_block_bytes: Option<u32>,
    /// Memory is aligned to this plus one.
    pub dma_alignment: Option<u32>,
    /// What is read ahead of buffered reads, in KiB.
    pub read_ahead_kb: Option<u32>,
    /// It turns.
    pub rotational: Option<bool>,
}

impl Queue {
    /// Reads the `queue` directory of a device; `None` if there is none.
    pub(super) fn read(directory: &Path) -> Option<Self> {
        if !directory.is_dir() {
            return None;
        }
        let at = |name: &str| directory.join(name);
        Some(Self {
            scheduler: text(at("scheduler")).map(|names| chosen(&names)),
            nr_requests: number(at("nr_requests")),
            max_sectors_kb: number(at("max_sectors_kb")),
            max_hw_sectors_kb: number(at("max_hw_sectors_kb")),
            io_poll: flag(at("io_poll")),
            write_cache: text(at("write_cache")),
            logical_block_bytes: number(at("logical_block_size")),
            physical_block_bytes: number(at("physical_block_size")),
            dma_alignment: number(at("dma_alignment")),
            read_ahead_kb: number(at("read_ahead_kb")),
            rotational: flag(at("rotational")),
        })
    }
}

/// The one in brackets of several, or the only one.
fn chosen(names: &str) -> String {
    let inner = names.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inner.map_or(names, |(inner, _)| inner).to_owned()
}

#[cfg(test)]
mod tests {
    use super::chosen;

    #[test]
    fn the_scheduler_in_brackets_is_in_use() {
        assert_eq!(chosen("[none] mq-deadline kyber"), "none");
        assert_eq!(chosen("none [mq-deadline]"), "mq-deadline");
        assert_eq!(chosen("none"), "none");
    }
}
