//! A stand-in for the CUDA driver and cuFile, over host memory, for tests on machines without a GPU.
//!
//! The shared object has the symbols of `libcuda` and `libcufile` that Forebay uses; a test has it
//! found under both names ([`Standin::folder`]). Beside them it exports `forebay_standin_*`, by
//! which tests set it up, play the application (memory, streams, kernels) and ask what was done;
//! [`Standin`] is their face in Rust. A process that has no other way to them, such as Python,
//! can set it up through the variable `FOREBAY_STANDIN`, in the words of [`Standin::configure`].
//!
//! # What it models
//!
//! - Devices, as many as asked for, and their primary contexts, counted. Each thread has a stack of
//!   contexts; what needs one fails without, and handles of another context are refused.
//! - Device memory as address ranges of their own without any access: what touches them from the
//!   host, by the processor or through the kernel, fails. Their bytes are in files that only the
//!   stand-in's copies reach. Addresses are never given out twice.
//! - Streams as queues with a thread each, which runs every task late, by a random time that
//!   depends on the seed, so that streams overtake each other; a test can hold a stream still.
//!   Events, waiting for them across streams and contexts, host functions (from which no driver
//!   function may be called).
//! - Copies that return at once only for registered host memory: others end before the call does.
//! - Errors that stick to a context; a device that is reset under its users; a driver that is gone
//!   at the end of a process; functions whose n-th call fails; a process forked from the one
//!   that initialised the driver, which can't use it.
//! - cuFile: driver, handles, registered buffers, reads and writes, the same in stream order, compat
//!   mode, P2PDMA without `nvidia-fs`, absence, refusal of a file system, its codes, and that `errno`
//!   has them, or tells nothing of what the system said. As the real one, it leaves a `cufile.log` in
//!   the working directory when its driver opens, and opens a file once more by its name.
//!
//! # What it finds
//!
//! Violations are collected until a test asks for them:
//!
//! - a copy or kernel that uses memory that another stream may still be using, one of them writing,
//!   with neither an event nor the host between the two (by vector clocks, so it is found whether
//!   or not it went wrong this time; all threads of the host count as one, so races between those
//!   aren't found);
//! - freed device memory, or more than was allocated;
//! - host memory that isn't registered in an asynchronous copy, was unmapped while registered or
//!   before its copy ran, or is unregistered while a copy uses it;
//! - a driver function called from a host function; a context released before its streams; cuFile
//!   handles and buffers registered twice or let go twice, a descriptor that is closed while it is
//!   registered; cuFile's driver closed where no context is current, in which its own buffers stay
//!   registered, or opened with so few descriptors that it wouldn't return (cuFile 1.17);
//! - calls of the driver by threads that aren't relaxed while a graph is captured, and events
//!   recorded into that.
//!
//! # What it doesn't model
//!
//! Code for a GPU (a kernel is a write or a read of given bytes), time and bandwidth, priorities,
//! graphs but for the fact of their being captured, memory pools, peer access, contexts other than primary ones, that streams made without
//! `CU_STREAM_NON_BLOCKING` wait for the default stream (nothing waits without an event here), that
//! kernels and copies may be torn, cuFile's batches, and whether a file system can do GDS.
#![expect(unsafe_code, reason = "it is a C library, and memory is what it is about")]

mod control;
mod exports;
mod model;

pub use control::{Current, Held, KernelRead, Standin, Stream};
