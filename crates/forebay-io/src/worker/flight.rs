//! One transfer under way, and what the kernel's answer to it means.

use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use rustix::io::Errno;

use crate::device::gds::DeviceRange;
use crate::engine::gds::error_of;
use crate::engine::{Command, EngineKind, Transfer};
use crate::error::{Error, ErrorKind};
use crate::files::TensorFile;
use crate::operation::{Unit, Work};
use crate::plan::{Block, Direction, Route, Span};

/// Attempts at one transfer before `EINTR`, `EAGAIN` or no progress count as a failure: ten
/// seconds with the pauses that the worker makes.
const ATTEMPTS_MAX: u32 = 1000;

/// Writes of zero bytes before that counts as a failure: no kernel has a reason for even one.
const ATTEMPTS_WITHOUT_PROGRESS_MAX: u32 = 10;

/// A unit that the engine is busy with.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) unit: Unit,
    pub(super) transfer: Transfer,
    /// Index and address of the staging block.
    pub(super) staging: Option<(usize, *mut u8)>,
    /// The file registered for it, to be released.
    pub(super) bound_file: Option<(RawFd, Option<u32>)>,
    /// Taken from the page cache because it was there.
    pub(super) cached: bool,
    /// Direct I/O was refused for it, with this `errno`; it goes through the page cache now.
    pub(super) refused: Option<Errno>,
    /// Bytes of the block's window that have moved.
    pub(super) moved: usize,
    /// What is left of a block that is longer than a staging block, behind the piece under way.
    pub(super) rest: Option<Block>,
    /// Bytes of earlier pieces, or of all.
    pub(super) delivered: usize,
    pub(super) attempts: u32,
    pub(super) started: Instant,
}

/// What to do about a completion.
#[derive(Debug)]
pub(super) enum Verdict {
    /// All wanted bytes have moved, or the call was all there was.
    Done,
    /// The same again.
    Retry,
    /// It moved something; go on behind that.
    Continue,
    /// Through the page cache instead.
    Buffered(Option<Errno>),
    /// Through staging blocks instead: cuFile refuses it, with this.
    Host(Error),
    /// Without `RWF_DONTCACHE`.
    NotUncached,
    /// The operation fails.
    Failed(Error),
}

impl Flight {
    /// The block and its span, for a flight that moves bytes.
    pub(super) fn block(&self) -> Option<(&TensorFile, Span, Block)> {
        match &self.unit.work {
            Work::Move { file, span, block, .. } => Some((file, *span, *block)),
            _ => None,
        }
    }

    /// Whether the block is copied between a staging block and a device, whatever its route.
    pub(super) fn is_copied(&self) -> bool {
        self.unit.device().is_some() && self.route() != Some(Route::Gds)
    }

    fn route(&self) -> Option<Route> {
        self.block().map(|(_, _, block)| block.route)
    }

    /// Whose refusals its errors are.
    pub(super) fn engine_name(&self, engine: EngineKind) -> &'static str {
        if self.route() == Some(Route::Gds) { "gds" } else { engine.name() }
    }

    /// Whether cuFile knows the device memory of the block.
    pub(super) fn is_in_registered_device_memory(&self) -> bool {
        let Work::Move { span, block, device: Some(device), gds: Some(gds), .. } = &self.unit.work
        else {
            return false;
        };
        let start = span.address + block.position;
        gds.is_registered(*device, DeviceRange { start, length: block.length })
    }

    /// Leaves what doesn't fit in a staging block for later, whether it comes from the drive or the
    /// page cache: a block that was planned to go by GPUDirect Storage may be longer, and starts at
    /// its first wanted byte.
    pub(super) fn cut(&mut self) {
        let most = self.unit.operation.plan.device_block_bytes;
        let is_copied = self.is_copied();
        let Work::Move { block, .. } = &mut self.unit.work else { return };
        if !is_copied || block.window_length <= most {
            return;
        }
        let left = block.length - most;
        self.rest = Some(Block {
            position: block.position + most,
            length: left,
            window_offset: block.window_offset + most as u64,
            window_length: left,
            ..*block
        });
        (block.length, block.window_length) = (most, most);
    }

    /// Counts the piece that arrived and turns to the next one; `false` if that was the last.
    pub(super) fn go_on(&mut self) -> bool {
        let Work::Move { block, .. } = &mut self.unit.work else { return false };
        self.delivered += block.length;
        let Some(rest) = self.rest.take() else { return false };
        *block = rest;
        self.moved = 0;
        self.cut();
        true
    }

    /// Interprets the kernel's result: bytes moved or a negated `errno`.
    pub(super) fn judge(&mut self, result: i64) -> Verdict {
        if let Some((file, span, block)) = self.block() {
            let needed = block.skip(&span) + block.length;
            let granule = usize::try_from(file.offset_alignment).unwrap_or(usize::MAX);
            if let Ok(bytes) = usize::try_from(result) {
                return self.judge_bytes(bytes, needed, granule, block.route);
            }
            if let (Route::Gds, Some(device)) = (block.route, self.unit.device())
                && let Some(error) = error_of(result, &device.context, self.what())
            {
                return self.judge_device(error);
            }
        } else if result >= 0 {
            return Verdict::Done;
        }
        let code = i32::try_from(result.saturating_neg()).unwrap_or(i32::MAX);
        self.judge_errno(Errno::from_raw_os_error(code))
    }

    fn judge_bytes(
        &mut self,
        bytes: usize,
        needed: usize,
        granule: usize,
        route: Route,
    ) -> Verdict {
        let before = self.moved;
        self.moved += bytes;
        if self.moved >= needed {
            return Verdict::Done;
        }
        if bytes == 0 {
            if self.transfer.command == Command::Read {
                return Verdict::Failed(self.short_file());
            }
            self.attempts += ATTEMPTS_MAX / ATTEMPTS_WITHOUT_PROGRESS_MAX;
            return self.again(Verdict::Retry, Errno::IO);
        }
        if route == Route::Buffered {
            return Verdict::Continue;
        }
        // Direct I/O goes on at a granule only; what was moved beyond it is moved once more.
        self.moved -= self.moved % granule;
        match route {
            _ if self.moved > before => Verdict::Continue,
            Route::Gds if self.file_ends_before(needed) => Verdict::Failed(self.short_file()),
            Route::Gds => {
                let text = format!("cuFile moves {bytes} bytes, less than a granule, and stops");
                self.refused_by_cufile(Error::new(ErrorKind::Device, text))
            }
            _ => Verdict::Buffered(None),
        }
    }

    /// What a device's library said. What CUDA says is the end: the memory can't be reached.
    fn judge_device(&mut self, error: Error) -> Verdict {
        let error = self.placed(error);
        let of_cuda = error.device_code().is_some_and(|code| code.library == "cuda");
        if of_cuda { Verdict::Failed(error) } else { self.refused_by_cufile(error) }
    }

    /// Where there is another way, a refusal isn't the end.
    fn refused_by_cufile(&mut self, error: Error) -> Verdict {
        match &self.unit.work {
            Work::Move { gds: Some(gds), .. } if !gds.is_required() => Verdict::Host(error),
            _ => Verdict::Failed(error),
        }
    }

    fn judge_errno(&mut self, code: Errno) -> Verdict {
        let not_supported = matches!(code, Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS);
        match code {
            Errno::INTR | Errno::AGAIN => self.again(Verdict::Retry, code),
            _ if not_supported && matches!(self.transfer.command, Command::Allocate { .. }) => {
                Verdict::Done
            }
            // Some network file systems have no fsync for directories: names are durable at once.
            _ if not_supported && matches!(self.unit.work, Work::SyncDirectory { .. }) => {
                Verdict::Done
            }
            _ if not_supported && self.transfer.uncached => Verdict::NotUncached,
            // For memory that it takes for the host's, cuFile 1.17 says EIO whatever the system said.
            _ if (not_supported || code == Errno::IO) && self.route() == Some(Route::Gds) => {
                self.refused_by_cufile(self.os_error(code))
            }
            _ if not_supported
                && self.goes_direct()
                && !self.unit.operation.plan.require_direct =>
            {
                Verdict::Buffered(Some(code))
            }
            _ => Verdict::Failed(self.os_error(code)),
        }
    }

    fn goes_direct(&self) -> bool {
        self.block().is_some_and(|(_, _, block)| block.route != Route::Buffered)
    }

    fn again(&mut self, verdict: Verdict, code: Errno) -> Verdict {
        if self.unit.operation.is_stopped() {
            // Not the first error, so this is only heard after a cancel.
            let error = Error::new(ErrorKind::Cancelled, "the operation was cancelled");
            return Verdict::Failed(error);
        }
        self.attempts += 1;
        if self.attempts < ATTEMPTS_MAX { verdict } else { Verdict::Failed(self.os_error(code)) }
    }

    /// What was being done, for an error.
    fn what(&self) -> &'static str {
        match (&self.unit.work, self.transfer.command) {
            (Work::SyncDirectory { .. }, _) => "cannot make the directory durable of",
            (_, Command::Read) => "cannot read",
            (_, Command::Write) => "cannot write",
            (_, Command::Sync { .. }) => "cannot make durable",
            (_, Command::Allocate { .. }) => "cannot reserve space for",
        }
    }

    fn os_error(&self, code: Errno) -> Error {
        self.placed(Error::from_os(code.raw_os_error(), self.what()))
    }

    /// An error with the place at which it happened.
    fn placed(&self, mut error: Error) -> Error {
        if let Some(file) = self.file() {
            error = error.path(file.label());
        }
        if !matches!(self.transfer.command, Command::Sync { .. }) {
            error = error.offset(self.transfer.offset);
        }
        error
    }

    fn short_file(&self) -> Error {
        let error = Error::new(ErrorKind::ShortFile, "the file ended before its size said:")
            .offset(self.transfer.offset);
        match self.file() {
            Some(file) => error.path(file.label()),
            None => error,
        }
    }

    /// Whether a load's file no longer has the first `needed` bytes of the block.
    fn file_ends_before(&self, needed: usize) -> bool {
        self.transfer.command == Command::Read
            && self.block().is_some_and(|(file, _, block)| {
                file.current_size() < block.window_offset + needed as u64
            })
    }

    fn file(&self) -> Option<&TensorFile> {
        match &self.unit.work {
            Work::Allocate { file, .. }
            | Work::Move { file, .. }
            | Work::Sync { file, .. }
            | Work::Trim { file }
            | Work::SyncDirectory { file } => Some(file),
            Work::Begin(_) | Work::Commit(_) | Work::Settled => None,
        }
    }

    /// Fills in the transfer from the unit and from how far it got.
    pub(super) fn aim(&mut self, token: u64) {
        let transfer = match &self.unit.work {
            Work::Allocate { file, offset, length } => Transfer {
                command: Command::Allocate { keep_size: !file.is_replaced() },
                offset: *offset,
                length: usize::try_from(*length).unwrap_or(usize::MAX),
                ..call(token, file.descriptor(false))
            },
            Work::Sync { file, data_only } => Transfer {
                command: Command::Sync { data_only: *data_only },
                ..call(token, file.descriptor(false))
            },
            Work::SyncDirectory { file } => Transfer {
                command: Command::Sync { data_only: false },
                ..call(token, file.directory().map_or(-1, |directory| directory.as_raw_fd()))
            },
            Work::Trim { .. } | Work::Begin(_) | Work::Commit(_) | Work::Settled => return,
            Work::Move { file, span, block, device, gds, .. } => {
                let direct = block.route != Route::Buffered;
                let start = match self.staging {
                    Some((_, address)) => address,
                    None => std::ptr::with_exposed_provenance_mut::<u8>(span.address)
                        .wrapping_add(block.position),
                };
                let direction = self.unit.operation.plan.direction;
                Transfer {
                    command: match direction {
                        Direction::Load => Command::Read,
                        Direction::Store => Command::Write,
                    },
                    buffered: !direct,
                    channel: device.and_then(|device| gds.as_ref()?.number(device)),
                    offset: block.window_offset + self.moved as u64,
                    address: start.wrapping_add(self.moved),
                    length: block.window_length - self.moved,
                    ..call(token, file.descriptor(direct))
                }
            }
        };
        self.transfer = transfer;
    }
}

/// A transfer without memory, and with nothing registered.
pub(super) fn call(token: u64, descriptor: RawFd) -> Transfer {
    Transfer {
        token,
        command: Command::Sync { data_only: true },
        descriptor,
        file_slot: None,
        buffer_slot: None,
        channel: None,
        buffered: true,
        uncached: false,
        offset: 0,
        address: std::ptr::null_mut(),
        length: 0,
    }
}
