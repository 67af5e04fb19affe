//! What Forebay's tests share: a conformance suite, faults and refused system calls.
//!
//! - [`conformance`] is the suite that every engine passes, decorators and the fault engine
//!   included. It is the definition of what [`forebay_io::engine::Engine`] promises.
//! - [`fault`] wraps any engine in one that fails as planned: error codes, real short transfers,
//!   late and reordered completions, full queues. A plan is seeded, and printed when a test fails.
//! - [`crash`] plays back what a power cut leaves of a directory of checkpoints.
//! - [`device`] has devices of the stand-in for CUDA, and requests for their memory.
//! - [`seccomp`] refuses system calls to the current thread, as a container's filter would. The
//!   program `deny-syscalls` does it to a command.
//! - [`memory`] makes contents that tell every position apart, at addresses that break rules;
//!   [`usage`] says what the test process has used.
//!
//! # Adding an engine
//!
//! One file and one line. The file, `crates/forebay-io/src/engine/NAME.rs`, implements
//! [`Engine`](forebay_io::engine::Engine) and gets its variant in
//! [`EngineKind`](forebay_io::engine::EngineKind). The line, in `tests/conformance.rs`, is a test
//! that runs the suite over it:
//!
//! ```ignore
//! conforms!(name, &EngineKind::Name);
//! ```
//!
//! An engine that this host lacks is skipped, and the reason is printed.

pub mod conformance;
pub mod crash;
pub mod device;
pub mod fault;
pub mod memory;
pub mod random;
pub mod seccomp;
pub mod usage;
