//! Submission entries.

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

use super::{Command, Transfer};
use crate::engine::TRANSFER_BYTES_MAX;
use crate::engine::threads::RWF_DONTCACHE;

/// The submission entry for a transfer, without its `user_data`.
pub(super) fn of(transfer: &Transfer) -> squeue::Entry {
    let &Transfer { descriptor, address, length, buffer_slot, .. } = transfer;
    // A registered file is named by its slot in the same field, with a flag.
    let fd = Fd(transfer.file_slot.map_or(descriptor, u32::cast_signed));
    let bytes = u32::try_from(length.min(TRANSFER_BYTES_MAX)).unwrap_or(u32::MAX);
    // -1 would be the file's own position; any other negative offset is EINVAL.
    let offset = transfer.offset.min(1 << 63);
    let flags = if transfer.uncached && transfer.buffered { RWF_DONTCACHE } else { 0 };
    let entry = match (transfer.command, buffer_slot) {
        (Command::Read, None) => {
            opcode::Read::new(fd, address, bytes).offset(offset).rw_flags(flags).build()
        }
        (Command::Read, Some(slot)) => {
            opcode::ReadFixed::new(fd, address, bytes, slot).offset(offset).rw_flags(flags).build()
        }
        (Command::Write, None) => {
            opcode::Write::new(fd, address, bytes).offset(offset).rw_flags(flags).build()
        }
        (Command::Write, Some(slot)) => {
            opcode::WriteFixed::new(fd, address, bytes, slot).offset(offset).rw_flags(flags).build()
        }
        (Command::Sync { data_only }, _) => {
            let flags = if data_only { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
            opcode::Fsync::new(fd).flags(flags).build()
        }
        (Command::Allocate { keep_size }, _) => {
            let mode = if keep_size { libc::FALLOC_FL_KEEP_SIZE } else { 0 };
            opcode::Fallocate::new(fd, length as u64).offset(offset).mode(mode).build()
        }
    };
    if transfer.file_slot.is_some() { entry.flags(squeue::Flags::FIXED_FILE) } else { entry }
}
