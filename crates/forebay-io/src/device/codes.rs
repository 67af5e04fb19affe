//! What the codes of cuFile are called, and what to try where one has an answer.

use std::ffi::c_int;

/// `CUFILEOP_BASE_ERR`: codes of cuFile are larger, and those of the system smaller.
pub(crate) const CODE_BASE: c_int = 5000;
/// `CU_FILE_CUDA_DRIVER_ERROR`: the CUDA driver's code says more.
pub(super) const CUDA_DRIVER_ERROR: c_int = 5011;
/// `CU_FILE_DRIVER_ALREADY_OPEN`.
pub(super) const DRIVER_ALREADY_OPEN: c_int = 5026;

/// Hints that several codes share.
const MODULE: &str = "is nvidia-fs loaded? see `lsmod` and `gdscheck -p`";
const POINTER: &str = "it takes addresses of one allocation of device memory";
const AGAIN: &str = "it may pass: try again";

/// The codes of `cufile.h` (`CUfileOpError`), their names without `CU_FILE_`, and what to try.
pub(super) const CUFILE_CODES: &[(c_int, &str, &str)] = &[
    (5001, "DRIVER_NOT_INITIALIZED", MODULE),
    (5002, "DRIVER_INVALID_PROPS", "see the properties in cufile.json"),
    (5003, "DRIVER_UNSUPPORTED_LIMIT", "see the limits in cufile.json"),
    (5004, "DRIVER_VERSION_MISMATCH", "nvidia-fs and libcufile don't fit: update the older one"),
    (5005, "DRIVER_VERSION_READ_ERROR", MODULE),
    (5006, "DRIVER_CLOSING", "another part of the process closes it"),
    (5007, "PLATFORM_NOT_SUPPORTED", "see `gdscheck -p` for the IOMMU and the platform"),
    (5008, "IO_NOT_SUPPORTED", "the file system can't do it: see `gdscheck -p` for those that can"),
    (5009, "DEVICE_NOT_SUPPORTED", "the GPU can't do it: see `gdscheck -p`"),
    (5010, "NVFS_DRIVER_ERROR", "see dmesg for lines of nvidia-fs"),
    (CUDA_DRIVER_ERROR, "CUDA_DRIVER_ERROR", ""),
    (5012, "CUDA_POINTER_INVALID", POINTER),
    (5013, "CUDA_MEMORY_TYPE_INVALID", POINTER),
    (5014, "CUDA_POINTER_RANGE_ERROR", POINTER),
    (5015, "CUDA_CONTEXT_MISMATCH", POINTER),
    (
        5016,
        "INVALID_MAPPING_SIZE",
        "the memory is larger than what can be pinned: see the BAR1 size",
    ),
    (5017, "INVALID_MAPPING_RANGE", POINTER),
    (5018, "INVALID_FILE_TYPE", "it takes regular files and block devices"),
    (5019, "INVALID_FILE_OPEN_FLAG", "the file must be open for direct I/O, and not to append"),
    (5020, "DIO_NOT_SET", "the file must be open for direct I/O"),
    (5022, "INVALID_VALUE", ""),
    (5023, "MEMORY_ALREADY_REGISTERED", "another part of the process registered it"),
    (5024, "MEMORY_NOT_REGISTERED", ""),
    (5025, "PERMISSION_DENIED", "the process may not use /dev/nvidia-fs*"),
    (DRIVER_ALREADY_OPEN, "DRIVER_ALREADY_OPEN", ""),
    (
        5027,
        "HANDLE_NOT_REGISTERED",
        "cuFile looks in /run/udev for what a file is on: in a container, mount it",
    ),
    (5028, "HANDLE_ALREADY_REGISTERED", "another part of the process registered the descriptor"),
    (5029, "DEVICE_NOT_FOUND", "see `nvidia-smi`"),
    (5030, "INTERNAL_ERROR", "see cufile.log"),
    (
        5031,
        "GETNEWFD_FAILED",
        "cuFile opens a file once more by its name: is it deleted, or `ulimit -n` too low?",
    ),
    (5033, "NVFS_SETUP_ERROR", MODULE),
    (5034, "IO_DISABLED", "cufile.json turns it off for this file"),
    (5035, "BATCH_SUBMIT_FAILED", AGAIN),
    (5036, "GPU_MEMORY_PINNING_FAILED", "too much device memory is pinned: see the BAR1 size"),
    (5037, "BATCH_FULL", AGAIN),
    (5038, "ASYNC_NOT_SUPPORTED", "cuFile 1.7 and CUDA 12.2 are the first that can"),
    (5039, "INTERNAL_BATCH_SETUP_ERROR", AGAIN),
    (5040, "INTERNAL_BATCH_SUBMIT_ERROR", AGAIN),
    (5041, "INTERNAL_BATCH_GETSTATUS_ERROR", AGAIN),
    (5042, "INTERNAL_BATCH_CANCEL_ERROR", AGAIN),
    (5043, "NOMEM_ERROR", "free host or device memory"),
    (5044, "IO_ERROR", "see dmesg for the drive's errors"),
    (5045, "INTERNAL_BUF_REGISTER_ERROR", "too much device memory is pinned: see the BAR1 size"),
    (5046, "HASH_OPR_ERROR", "see cufile.log"),
    (5047, "INVALID_CONTEXT_ERROR", POINTER),
    (5048, "NVFS_INTERNAL_DRIVER_ERROR", "see dmesg for lines of nvidia-fs"),
    (5049, "BATCH_NOCOMPAT_ERROR", MODULE),
    (5050, "IO_MAX_ERROR", "see cufile.log"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_in_order_and_have_names() {
        assert!(CUFILE_CODES.is_sorted_by(|one, next| one.0 < next.0));
        assert!(CUFILE_CODES.iter().all(|(_, name, _)| !name.is_empty()));
    }
}
