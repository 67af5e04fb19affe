//! The functions of the CUDA driver that are used, with the signatures of `cuda.h` (12.4).
//!
//! Handles (`CUcontext`, `CUstream`, `CUevent`) and device addresses (`CUdeviceptr`) are numbers
//! here: nothing follows them.
#![expect(unsafe_code, reason = "names the signatures of foreign functions")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::library::symbol;
use crate::error::Result;

/// Declares a struct of function pointers, and how it is filled from a library.
macro_rules! table {
    ($(#[$meta:meta])* $visible:vis struct $table:ident {
        $($field:ident: [$($name:literal),+] ($($argument:ty),*) -> $result:ty,)+
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        $visible struct $table {
            $($visible $field: unsafe extern "C" fn($($argument),*) -> $result,)+
        }

        impl $table {
            /// Looks every function up.
            $visible fn of(library: &libloading::Library) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is the one of the library's header.
                        unsafe { symbol(library, &[$($name),+]) }?
                    },)+
                })
            }
        }
    };
}
pub(super) use table;

table! {
    /// See the [module documentation](self).
    pub(super) struct Driver {
        init: ["cuInit"] (c_uint) -> c_int,
        version: ["cuDriverGetVersion"] (*mut c_int) -> c_int,
        error_name: ["cuGetErrorName"] (c_int, *mut *const c_char) -> c_int,
        device_count: ["cuDeviceGetCount"] (*mut c_int) -> c_int,
        device: ["cuDeviceGet"] (*mut c_int, c_int) -> c_int,
        device_name: ["cuDeviceGetName"] (*mut c_char, c_int, c_int) -> c_int,
        retain: ["cuDevicePrimaryCtxRetain"] (*mut usize, c_int) -> c_int,
        release: ["cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease"] (c_int) -> c_int,
        state: ["cuDevicePrimaryCtxGetState"] (c_int, *mut c_uint, *mut c_int) -> c_int,
        push: ["cuCtxPushCurrent_v2"] (usize) -> c_int,
        pop: ["cuCtxPopCurrent_v2"] (*mut usize) -> c_int,
        stream_create: ["cuStreamCreate"] (*mut usize, c_uint) -> c_int,
        stream_destroy: ["cuStreamDestroy_v2"] (usize) -> c_int,
        stream_synchronize: ["cuStreamSynchronize"] (usize) -> c_int,
        is_capturing: ["cuStreamIsCapturing"] (usize, *mut c_int) -> c_int,
        exchange_capture_mode: ["cuThreadExchangeStreamCaptureMode"] (*mut c_int) -> c_int,
        stream_wait: ["cuStreamWaitEvent"] (usize, usize, c_uint) -> c_int,
        event_create: ["cuEventCreate"] (*mut usize, c_uint) -> c_int,
        event_destroy: ["cuEventDestroy_v2"] (usize) -> c_int,
        event_record: ["cuEventRecord"] (usize, usize) -> c_int,
        event_query: ["cuEventQuery"] (usize) -> c_int,
        event_synchronize: ["cuEventSynchronize"] (usize) -> c_int,
        allocate: ["cuMemAlloc_v2"] (*mut usize, usize) -> c_int,
        free: ["cuMemFree_v2"] (usize) -> c_int,
        copy_in_now: ["cuMemcpyHtoD_v2"] (usize, *const c_void, usize) -> c_int,
        copy_out_now: ["cuMemcpyDtoH_v2"] (*mut c_void, usize, usize) -> c_int,
        copy_in: ["cuMemcpyHtoDAsync_v2"] (usize, *const c_void, usize, usize) -> c_int,
        copy_out: ["cuMemcpyDtoHAsync_v2"] (*mut c_void, usize, usize, usize) -> c_int,
        host_register: ["cuMemHostRegister_v2"] (*mut c_void, usize, c_uint) -> c_int,
        host_unregister: ["cuMemHostUnregister"] (*mut c_void) -> c_int,
        pointer_attributes: ["cuPointerGetAttributes"]
            (c_uint, *const c_uint, *mut *mut c_void, usize) -> c_int,
    }
}
