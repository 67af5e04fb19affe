//! `libcufile`.

use std::ffi::{c_int, c_uint, c_void};

use super::put;
use crate::model::file::Wanted;
use crate::model::queue::Task;
use crate::model::settings::Gds;
use crate::model::{Model, Needs, Outcome, call, code, current, model};

/// The version it says it is: 1.11.
const VERSION: c_int = 1110;
/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const OPAQUE_FD: c_uint = 1;
/// Bits of `CUfileDriverStatusFlags_t` in the status flags: Lustre, NVMe.
const SUPPORTED: c_uint = 1 | 1 << 4;
/// `CU_FILE_NVME_SUPPORTED`, and the bit of `CUFILE_P2PDMA` among the ways to it.
const NVME: c_uint = 4;
const P2PDMA: c_uint = 1;
/// Bit of `CU_FILE_ALLOW_COMPAT_MODE` in the control flags.
const ALLOW_COMPAT_MODE: c_uint = 1 << 1;

/// `CUfileError_t`.
#[repr(C)]
struct Status {
    file: c_int,
    driver: c_int,
}

/// `CUfileDescr_t`.
#[repr(C)]
struct Description {
    kind: c_uint,
    handle: Handle,
    operations: *const c_void,
}

/// The union in it, which is as long as its longest member and aligned like that.
#[repr(C)]
union Handle {
    descriptor: c_int,
    _pointer: *const c_void,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Default)]
struct Properties {
    major_version: c_uint,
    minor_version: c_uint,
    poll_threshold: usize,
    max_direct_io: usize,
    status_flags: c_uint,
    control_flags: c_uint,
    features: c_uint,
    max_device_cache: c_uint,
    per_buffer_cache: c_uint,
    max_device_pinned: c_uint,
    max_batch_count: c_uint,
    max_batch_timeout_ms: c_uint,
}

/// A code below 5000 is the CUDA driver's.
fn answer(outcome: Outcome) -> Status {
    match outcome {
        Ok(()) => Status { file: code::SUCCESS, driver: code::SUCCESS },
        Err(driver) if driver < 5000 => Status { file: code::FILE_CUDA_DRIVER_ERROR, driver },
        Err(file) => Status { file, driver: code::SUCCESS },
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverOpen() -> Status {
    answer(call("cuFileDriverOpen", Needs::Nothing, Model::open_file_driver))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverClose_v2() -> Status {
    answer(call("cuFileDriverClose_v2", Needs::Nothing, Model::close_file_driver))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileUseCount() -> std::ffi::c_long {
    model().files.use_count().into()
}

#[unsafe(no_mangle)]
extern "C" fn cuFileGetVersion(version: *mut c_int) -> Status {
    answer(call("cuFileGetVersion", Needs::Nothing, |_| put(version, VERSION)))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileDriverGetProperties(properties: *mut c_void) -> Status {
    answer(call("cuFileDriverGetProperties", Needs::Nothing, |model| {
        model.need_file_driver()?;
        let nvidia_fs = !matches!(model.settings.gds, Gds::Compat | Gds::P2pdma);
        put(
            properties.cast(),
            Properties {
                major_version: if nvidia_fs { 2 } else { 0 },
                max_direct_io: 16_384,
                status_flags: if nvidia_fs { SUPPORTED } else { 0 },
                control_flags: ALLOW_COMPAT_MODE,
                ..Properties::default()
            },
        )
    }))
}

/// The ways to a kind of storage.
#[unsafe(no_mangle)]
extern "C" fn cuFileDriverGetP2PFlags(kind: c_uint, flags: *mut c_uint) -> Status {
    answer(call("cuFileDriverGetP2PFlags", Needs::Nothing, |model| {
        model.need_file_driver()?;
        let p2pdma = model.settings.gds == Gds::P2pdma && kind == NVME;
        put(flags, if p2pdma { P2PDMA } else { 0 })
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleRegister(handle: *mut usize, description: *mut c_void) -> Status {
    answer(call("cuFileHandleRegister", Needs::Nothing, |model| {
        if description.is_null() {
            return Err(code::FILE_INVALID_VALUE);
        }
        let description = description.cast::<Description>().cast_const();
        // SAFETY: the caller gives a valid description.
        let Description { kind, handle: file, .. } = unsafe { description.read() };
        // SAFETY: any bytes are a number.
        let descriptor = unsafe { file.descriptor };
        if kind != OPAQUE_FD {
            return Err(code::FILE_INVALID_FILE_TYPE);
        }
        put(handle, model.register_file(descriptor)?)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileHandleDeregister(handle: usize) {
    let _ = call("cuFileHandleDeregister", Needs::Nothing, |model| {
        model.deregister_file(handle);
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufRegister(base: usize, length: usize, _flags: c_int) -> Status {
    answer(call("cuFileBufRegister", Needs::Nothing, |model| model.register_buffer(base, length)))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileBufDeregister(base: usize) -> Status {
    answer(call("cuFileBufDeregister", Needs::Nothing, |model| model.deregister_buffer(base)))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileRead(
    handle: usize,
    base: usize,
    length: usize,
    file_offset: i64,
    base_offset: i64,
) -> isize {
    let wanted = Wanted { handle, base, length, file_offset, base_offset, load: true };
    now("cuFileRead", &wanted)
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWrite(
    handle: usize,
    base: usize,
    length: usize,
    file_offset: i64,
    base_offset: i64,
) -> isize {
    let wanted = Wanted { handle, base, length, file_offset, base_offset, load: false };
    now("cuFileWrite", &wanted)
}

/// Bytes moved, or -1 with `errno`: a code of cuFile, or 1 whatever the system said (cuFile 1.17). Its
/// documentation has negated codes, and the system's `errno`.
fn now(symbol: &'static str, wanted: &Wanted) -> isize {
    let documented = model().settings.documented;
    let planned = call(symbol, Needs::Nothing, |model| {
        let (planned, bytes) = model.plan_move(wanted)?;
        if let Some(conflict) = model.order.host_conflict(&bytes, wanted.load) {
            model.journal.violation(format!("cuFile uses memory of which {conflict}"));
        }
        Ok(planned)
    });
    let moved = match planned {
        Ok(planned) => planned.run(),
        Err(code) if documented => return -isize::try_from(code).unwrap_or(isize::MAX),
        Err(code) => return fail_with(code),
    };
    if moved >= 0 {
        return moved;
    }
    fail_with(if documented { i32::try_from(-moved).unwrap_or(libc::EIO) } else { libc::EPERM })
}

fn fail_with(code: c_int) -> isize {
    // SAFETY: a call without arguments.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the address of this thread's `errno` is always valid.
    unsafe { errno.write(code) };
    -1
}

#[unsafe(no_mangle)]
extern "C" fn cuFileReadAsync(
    handle: usize,
    base: usize,
    length: *mut usize,
    file_offset: *mut i64,
    base_offset: *mut i64,
    moved: *mut isize,
    stream: usize,
) -> Status {
    let wanted = Later { handle, base, length, file_offset, base_offset, moved, load: true };
    answer(later("cuFileReadAsync", &wanted, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuFileWriteAsync(
    handle: usize,
    base: usize,
    length: *mut usize,
    file_offset: *mut i64,
    base_offset: *mut i64,
    moved: *mut isize,
    stream: usize,
) -> Status {
    let wanted = Later { handle, base, length, file_offset, base_offset, moved, load: false };
    answer(later("cuFileWriteAsync", &wanted, stream))
}

/// A move in stream order. Its numbers are looked up when the stream gets there.
struct Later {
    handle: usize,
    base: usize,
    length: *mut usize,
    file_offset: *mut i64,
    base_offset: *mut i64,
    moved: *mut isize,
    load: bool,
}

fn later(symbol: &'static str, wanted: &Later, stream: usize) -> Outcome {
    let Later { handle, base, load, .. } = *wanted;
    let [length, file_offset, base_offset, moved] = [
        wanted.length.expose_provenance(),
        wanted.file_offset.expose_provenance(),
        wanted.base_offset.expose_provenance(),
        wanted.moved.expose_provenance(),
    ];
    call(symbol, Needs::Context, |model| {
        let stream = model.stream(stream, current()?)?;
        let run = move || {
            let wanted = Wanted {
                handle,
                base,
                length: number_at(length),
                file_offset: number_at(file_offset),
                base_offset: number_at(base_offset),
                load,
            };
            let planned = model_now(&wanted);
            let result = planned.map_or_else(|code| -code, |planned| planned.run());
            let _ = put(std::ptr::with_exposed_provenance_mut(moved), result);
        };
        model.enqueue(stream, |_| Task::File(Box::new(run)))?;
        let start = number_at::<i64>(base_offset);
        let start = base.saturating_add_signed(isize::try_from(start).unwrap_or(0));
        model.note(stream, start..start + number_at::<usize>(length), load, "cuFile");
        Ok(())
    })
}

fn model_now(wanted: &Wanted) -> Result<crate::model::file::Move, isize> {
    let planned = model().plan_move(wanted);
    planned.map(|(planned, _)| planned).map_err(|code| isize::try_from(code).unwrap_or(isize::MAX))
}

fn number_at<T: Copy>(address: usize) -> T {
    // SAFETY: the caller keeps its numbers valid until the stream has got there.
    unsafe { std::ptr::with_exposed_provenance::<T>(address).read() }
}
