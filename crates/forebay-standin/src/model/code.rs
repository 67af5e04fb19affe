//! The status codes that the stand-in gives, by their names in `cuda.h` and `cufile.h`.

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const DEINITIALIZED: i32 = 4;
pub(crate) const NO_DEVICE: i32 = 100;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
pub(crate) const CONTEXT_IS_DESTROYED: i32 = 709;
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: i32 = 712;
pub(crate) const HOST_MEMORY_NOT_REGISTERED: i32 = 713;
pub(crate) const NOT_PERMITTED: i32 = 800;

/// The names of the codes above, as `cuGetErrorName` gives them, and a sentence each.
pub(crate) const NAMES: &[(i32, &str, &str)] = &[
    (SUCCESS, "CUDA_SUCCESS\0", "no error\0"),
    (INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE\0", "invalid argument\0"),
    (OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY\0", "out of memory\0"),
    (NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED\0", "initialization error\0"),
    (DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED\0", "driver shutting down\0"),
    (NO_DEVICE, "CUDA_ERROR_NO_DEVICE\0", "no CUDA-capable device is detected\0"),
    (INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE\0", "invalid device ordinal\0"),
    (INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT\0", "invalid device context\0"),
    (INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE\0", "invalid resource handle\0"),
    (NOT_READY, "CUDA_ERROR_NOT_READY\0", "device not ready\0"),
    (ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS\0", "an illegal memory access\0"),
    (CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED\0", "context is destroyed\0"),
    (
        HOST_MEMORY_ALREADY_REGISTERED,
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED\0",
        "part or all of the memory is registered already\0",
    ),
    (
        HOST_MEMORY_NOT_REGISTERED,
        "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED\0",
        "the memory is not registered\0",
    ),
    (NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED\0", "operation not permitted\0"),
];

pub(crate) const FILE_DRIVER_NOT_INITIALIZED: i32 = 5001;
pub(crate) const FILE_IO_NOT_SUPPORTED: i32 = 5008;
pub(crate) const FILE_CUDA_DRIVER_ERROR: i32 = 5011;
pub(crate) const FILE_CUDA_POINTER_INVALID: i32 = 5012;
pub(crate) const FILE_CUDA_MEMORY_TYPE_INVALID: i32 = 5013;
pub(crate) const FILE_CUDA_POINTER_RANGE_ERROR: i32 = 5014;
pub(crate) const FILE_INVALID_FILE_TYPE: i32 = 5018;
pub(crate) const FILE_INVALID_FILE_OPEN_FLAG: i32 = 5019;
pub(crate) const FILE_DIO_NOT_SET: i32 = 5020;
pub(crate) const FILE_INVALID_VALUE: i32 = 5022;
pub(crate) const FILE_MEMORY_ALREADY_REGISTERED: i32 = 5023;
pub(crate) const FILE_MEMORY_NOT_REGISTERED: i32 = 5024;
pub(crate) const FILE_DRIVER_ALREADY_OPEN: i32 = 5026;
pub(crate) const FILE_HANDLE_NOT_REGISTERED: i32 = 5027;
pub(crate) const FILE_HANDLE_ALREADY_REGISTERED: i32 = 5028;
pub(crate) const FILE_GETNEWFD_FAILED: i32 = 5031;
pub(crate) const FILE_NVFS_SETUP_ERROR: i32 = 5033;
