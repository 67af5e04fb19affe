//! Setting a ring up: by trying, the best flags first, and saying why when none will do.

use std::io;

use io_uring::{IoUring, Probe, opcode};

use super::{EngineKind, EngineOptions};
use crate::error::{Error, ErrorKind, Result};

/// How long the kernel's submission thread polls an empty queue before it sleeps: longer than the
/// gaps between the blocks of an operation, short enough to free its core between operations.
const SQPOLL_IDLE_MS: u32 = 50;

/// Room in the submission queue beside the transfers: for the wake event's poll and its removal.
pub(super) const ENTRIES_EXTRA: usize = 2;

/// The largest submission queue (`IORING_MAX_ENTRIES`, `io_uring/io_uring.h`).
const ENTRIES_MAX: usize = 32768;

/// How completions are delivered: the setup flags that are tried, one after the other.
#[derive(Clone, Copy, Debug)]
enum Delivery {
    /// Linux 6.1: at the waits of the one thread that uses the ring; the cheapest.
    Deferred,
    /// Linux 5.19: whenever the thread enters the kernel anyway.
    Cooperative,
    /// By interrupting the thread.
    Plain,
    /// A kernel thread takes submissions.
    SubmissionThread,
}

/// A ring, and the names of the features that it was set up with.
pub(super) fn build(options: &EngineOptions) -> Result<(IoUring, Vec<&'static str>)> {
    let entries = options.queue_depth.clamp(1, ENTRIES_MAX - ENTRIES_EXTRA) + ENTRIES_EXTRA;
    let entries = u32::try_from(entries.next_power_of_two()).unwrap_or(u32::MAX);
    let plain = [Delivery::Deferred, Delivery::Cooperative, Delivery::Plain];
    let polled = options.sqpoll.then_some(Delivery::SubmissionThread);
    let mut refusal = None;
    for delivery in polled.into_iter().chain(plain) {
        match build_with(delivery, options.iopoll, entries) {
            Ok(ring) => {
                check(&ring)?;
                return Ok((ring, features(delivery, options.iopoll)));
            }
            Err(error) => {
                // EINVAL is a flag that this kernel doesn't know: the next has fewer. Any other
                // refusal of the submission thread isn't about the ring as such.
                let next = error.raw_os_error() == Some(libc::EINVAL)
                    || matches!(delivery, Delivery::SubmissionThread);
                refusal = Some(error);
                if !next {
                    break;
                }
            }
        }
    }
    Err(setup_refusal(refusal.unwrap_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))))
}

fn build_with(delivery: Delivery, iopoll: bool, entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_clamp();
    if iopoll {
        builder.setup_iopoll();
    }
    match delivery {
        Delivery::Deferred => {
            builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
        }
        Delivery::Cooperative => {
            builder.setup_coop_taskrun().setup_submit_all();
        }
        Delivery::SubmissionThread => {
            builder.setup_sqpoll(SQPOLL_IDLE_MS);
        }
        Delivery::Plain => {}
    }
    builder.build(entries)
}

fn features(delivery: Delivery, iopoll: bool) -> Vec<&'static str> {
    let mut features = match delivery {
        Delivery::Deferred => vec!["single-issuer", "deferred-taskrun"],
        Delivery::Cooperative => vec!["cooperative-taskrun"],
        Delivery::SubmissionThread => vec!["sqpoll"],
        Delivery::Plain => Vec::new(),
    };
    if iopoll {
        features.push("iopoll");
    }
    features
}

/// Makes sure that the kernel has what the engine uses, and that `io_uring_register` and
/// `io_uring_enter` aren't refused where `io_uring_setup` wasn't.
fn check(ring: &IoUring) -> Result<()> {
    let engine = EngineKind::Uring.name();
    let too_old = |what: &str| {
        Error::new(ErrorKind::Unsupported, format!("io_uring of this kernel has no {what}"))
            .engine(engine)
            .hint("Linux 5.11 or later has it")
    };
    if !ring.params().is_feature_ext_arg() {
        return Err(too_old("wait with a timeout"));
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(setup_refusal)?;
    let needed = [
        (opcode::Read::CODE, "READ"),
        (opcode::Write::CODE, "WRITE"),
        (opcode::ReadFixed::CODE, "READ_FIXED"),
        (opcode::WriteFixed::CODE, "WRITE_FIXED"),
        (opcode::Fsync::CODE, "FSYNC"),
        (opcode::PollAdd::CODE, "POLL_ADD"),
        (opcode::PollRemove::CODE, "POLL_REMOVE"),
        (opcode::Fallocate::CODE, "FALLOCATE"),
    ];
    if let Some((_, name)) = needed.iter().find(|(code, _)| !probe.is_supported(*code)) {
        return Err(too_old(name));
    }
    match ring.submit() {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(setup_refusal(error)),
        _ => Ok(()),
    }
}

/// Why there is no ring, and what to do about it.
fn setup_refusal(source: io::Error) -> Error {
    let code = source.raw_os_error().unwrap_or(libc::EIO);
    let error = match code {
        libc::EPERM | libc::EACCES => return refused_by_policy(code),
        libc::ENOSYS => Error::from_os(code, "this kernel, or a seccomp filter, has no io_uring")
            .hint("it takes Linux 5.11 or later and a filter that allows io_uring_setup"),
        libc::ENOMEM => Error::from_os(code, "no memory for an io_uring")
            .hint("raise the limit on locked memory (ulimit -l) or lower the queue depth"),
        libc::EMFILE | libc::ENFILE => Error::from_os(code, "no descriptor left for an io_uring")
            .hint("raise the limit on open files (ulimit -n)"),
        _ => Error::from_io(source, "cannot set up an io_uring"),
    };
    error.engine(EngineKind::Uring.name())
}

/// The sysctl of Linux 6.6 (`Documentation/admin-guide/sysctl/kernel.rst`): 1 refuses processes
/// outside `kernel.io_uring_group` that lack `CAP_SYS_ADMIN`, 2 refuses all. Where it doesn't, what
/// refuses is a seccomp filter or a security module.
fn refused_by_policy(code: i32) -> Error {
    let setting = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let error = match setting.as_deref().map(str::trim) {
        Ok("1") => {
            Error::from_os(code, "io_uring is refused: sysctl kernel.io_uring_disabled is 1")
                .hint("set it to 0, or add the process to the group kernel.io_uring_group")
        }
        Ok("2") => {
            Error::from_os(code, "io_uring is refused: sysctl kernel.io_uring_disabled is 2")
                .hint("set it to 0")
        }
        Ok(value) => Error::from_os(
            code,
            format!(
                "io_uring is refused by a seccomp filter, such as a container's, or a security \
                 module (sysctl kernel.io_uring_disabled is {value})"
            ),
        )
        .hint("allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile"),
        Err(_) => Error::from_os(
            code,
            "io_uring is refused by a seccomp filter, such as a container's, or a security module",
        )
        .hint("allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile"),
    };
    error.engine(EngineKind::Uring.name())
}
