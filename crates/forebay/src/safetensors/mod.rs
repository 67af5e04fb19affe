//! Files of tensors in the safetensors format: read, verified, written.
//!
//! A file is a header, which is JSON with each tensor's name, dtype, shape and place, and the
//! tensors' bytes one behind the other. Ours are valid for every reader of the format, and have more:
//!
//! ```text
//! 0            8 bytes, little endian: bytes of the JSON and its padding
//! 8            {"__metadata__":{"forebay.crc32c":"HHHHHHHH AAAAAAAA BBBBBBBB …", the user's …},
//!               "name":{"data_offsets":[0,16],"dtype":"F32","shape":[2,2]}, …}
//!              spaces, at least 8, up to a multiple of 4096
//! n × 4096     the tensors, widest dtype first, then by name
//! ```
//!
//! `AAAAAAAA …` are the CRC32C of the tensors in the order of their bytes, as eight hexadecimal
//! digits each. `HHHHHHHH` is that of everything before the data, taken with these eight digits as
//! zeros. A header with our key that lacks our padding was written by another library that copied
//! the metadata: its checksums say nothing.
//!
//! - [`dtype`]: the types of elements. [`checksum`]: CRC32C.
//! - [`header`], over `json`: what files say, read and checked; [`draft`]: what they are to say.
//! - [`source`], [`index`]: where tensors come from. [`plan`]: what is read, and where it goes.
//! - [`mod@load`], over `pieces` and `sums`: carries a plan out. [`mod@verify`]: reads without keeping.
//! - [`stream`]: tensors one after the other, within a budget.
//! - [`mod@save`]: writes files, streaming, whole or not at all, over `replaced`.
//!
//! # Invariants
//!
//! - Nothing is allocated from a number in a file before it was compared with the file's size.
//! - A file that is replaced keeps its old content until the new one is whole and durable.

pub mod checksum;
pub mod draft;
pub mod dtype;
pub mod header;
pub mod index;
mod json;
pub mod load;
mod outgoing;
mod pieces;
pub mod plan;
mod replaced;
pub mod save;
pub mod source;
mod stop;
pub mod stream;
mod sums;
pub mod verify;

pub use draft::{Draft, TensorSpec};
pub use dtype::Dtype;
pub use forebay_io::{crc32c, crc32c_combine};
pub(crate) use header::open as open_file;
pub use header::{CHECKSUM_KEY, ChecksumState, HEADER_BYTES_MAX, Header, TensorInfo};
pub use index::Index;
pub use load::{LoadOptions, load, note_unverified};
pub use plan::{LoadPlan, Placed, PlanOptions};
pub(crate) use replaced::{followed, take_after};
pub use save::{SaveOptions, TensorData, TensorWriter, save};
pub use source::{Opened, OpenedFile, Place, Source};
pub use stop::Stop;
pub use stream::{Stream, StreamOptions, Streamed};
pub use verify::{Finding, Verdict, verify};

/// Values of `errno` that errors of this module carry, from `errno(3)`.
mod code {
    /// No such file or directory.
    pub(super) const ENOENT: i32 = 2;
    /// Is a directory.
    pub(super) const EISDIR: i32 = 21;
    /// Too many levels of symbolic links.
    pub(super) const ELOOP: i32 = 40;
}
