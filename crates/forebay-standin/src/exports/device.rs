//! `libcuda`: the driver, devices and contexts.

use std::ffi::{c_char, c_int, c_uint};

use super::put;
use crate::model::{Needs, Outcome, call, code, current, pop_current, push_current, status};

/// The version it says it is: 12.4.
const VERSION: c_int = 12_040;

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    status(call("cuInit", Needs::Nothing, |model| {
        if model.settings.devices == 0 {
            return Err(code::NO_DEVICE);
        }
        match model.process {
            Some(process) if process != std::process::id() => Err(code::NOT_INITIALIZED),
            _ => {
                model.process = Some(std::process::id());
                Ok(())
            }
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    status(call("cuDriverGetVersion", Needs::Nothing, |_| put(version, VERSION)))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: c_int, name: *mut *const c_char) -> c_int {
    status(text_of(error, name, |(_, name, _)| name))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int {
    status(text_of(error, text, |(_, _, text)| text))
}

type Entry = (i32, &'static str, &'static str);

fn text_of(
    error: c_int,
    to: *mut *const c_char,
    choose: impl Fn(&Entry) -> &'static str,
) -> Outcome {
    match code::NAMES.iter().find(|(code, ..)| *code == error) {
        Some(entry) => put(to, choose(entry).as_ptr().cast()),
        None => put(to, std::ptr::null()).and(Err(code::INVALID_VALUE)),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    status(call("cuDeviceGetCount", Needs::Driver, |model| put(count, model.settings.devices)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    status(call("cuDeviceGet", Needs::Driver, |model| {
        model.check_device(ordinal)?;
        put(device, ordinal)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, capacity: c_int, device: c_int) -> c_int {
    status(call("cuDeviceGetName", Needs::Driver, |model| {
        model.check_device(device)?;
        let text = format!("Stand-in {device}\0");
        let room = usize::try_from(capacity).unwrap_or(0);
        if name.is_null() || room < text.len() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller has room for `capacity` bytes, and the text isn't longer.
        unsafe { name.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> c_int {
    status(call("cuDevicePrimaryCtxRetain", Needs::Driver, |model| {
        put(context, model.retain(device)?)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    status(call("cuDevicePrimaryCtxRelease_v2", Needs::Driver, |model| model.release(device)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: *mut c_uint,
    active: *mut c_int,
) -> c_int {
    status(call("cuDevicePrimaryCtxGetState", Needs::Driver, |model| {
        model.check_device(device)?;
        put(flags, 0)?;
        put(active, c_int::from(model.device_of(model.context_handle(device)).is_ok()))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    status(call("cuCtxPushCurrent_v2", Needs::Driver, |model| {
        push_current(model.device_of(context)?);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> c_int {
    status(call("cuCtxPopCurrent_v2", Needs::Driver, |model| {
        let device = pop_current()?;
        if context.is_null() { Ok(()) } else { put(context, model.context_handle(device)) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: *mut usize) -> c_int {
    status(call("cuCtxGetCurrent", Needs::Driver, |model| {
        put(context, current().map_or(0, |device| model.context_handle(device)))
    }))
}
