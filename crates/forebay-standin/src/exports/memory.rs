//! `libcuda`: device memory, registered host memory, whose an address is, copies.

use std::ffi::{c_int, c_uint, c_void};

use super::put;
use crate::model::queue::Way;
use crate::model::{Model, Needs, Outcome, call, code, current, model, status};

/// `CUpointer_attribute`, as far as it is known here.
const CONTEXT: c_uint = 1;
const MEMORY_TYPE: c_uint = 2;
const BUFFER_ID: c_uint = 7;
const IS_MANAGED: c_uint = 8;
const DEVICE_ORDINAL: c_uint = 9;
const RANGE_START_ADDR: c_uint = 11;
const RANGE_SIZE: c_uint = 12;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: *mut usize, length: usize) -> c_int {
    status(call("cuMemAlloc_v2", Needs::Context, |model| {
        put(address, model.memory.allocate(current()?, length, false)?)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    status(call("cuMemFree_v2", Needs::Context, |model| {
        let (allocation, _) = model.memory.at(address).ok_or(code::INVALID_VALUE)?;
        let bytes = address..address + allocation.length;
        model.check_freed(&bytes);
        model.memory.free(address)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(address: usize, length: usize, _flags: c_uint) -> c_int {
    status(call("cuMemHostRegister_v2", Needs::Context, |model| {
        model.memory.register(address, length)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(address: usize) -> c_int {
    status(call("cuMemHostUnregister", Needs::Context, |model| {
        let (bytes, mapped) = model.memory.unregister(address)?;
        if !mapped {
            let text = "host memory was unmapped while it was registered".to_owned();
            model.journal.violation(text);
        }
        if let Some(conflict) = model.order.host_conflict(&bytes, true) {
            model.journal.violation(format!("host memory is unregistered in use: {conflict}"));
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *const c_uint,
    results: *mut *mut c_void,
    address: usize,
) -> c_int {
    status(call("cuPointerGetAttributes", Needs::Driver, |model| {
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: the caller gives `count` attributes.
        let attributes = unsafe { std::slice::from_raw_parts(attributes, count) };
        // SAFETY: the caller gives a pointer for the result of each of them.
        let results = unsafe { std::slice::from_raw_parts(results, count) };
        for (attribute, result) in attributes.iter().zip(results) {
            attribute_of(model, *attribute, *result, address)?;
        }
        Ok(())
    }))
}

/// What isn't known of an address is zero, as with the driver, but the device's number.
fn attribute_of(model: &Model, attribute: c_uint, result: *mut c_void, address: usize) -> Outcome {
    let device = model.memory.at(address).map(|(allocation, _)| allocation);
    let registered = model.memory.is_registered(&(address..address + 1));
    match attribute {
        CONTEXT => put(result.cast(), device.map_or(0, |it| model.context_handle(it.device))),
        MEMORY_TYPE => put(
            result.cast(),
            match device {
                Some(_) => DEVICE,
                None if registered => HOST,
                None => 0,
            },
        ),
        BUFFER_ID => put(result.cast(), device.map_or(0, |it| it.number)),
        IS_MANAGED => put(result.cast(), c_uint::from(device.is_some_and(|it| it.managed))),
        DEVICE_ORDINAL => {
            put(result.cast(), device.map_or(if registered { 0 } else { -2 }, |it| it.device))
        }
        RANGE_START_ADDR => put(result.cast(), device.map_or(0, |it| it.start)),
        RANGE_SIZE => put(result.cast(), device.map_or(0, |it| it.length)),
        _ => Err(code::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(
    device: usize,
    host: usize,
    length: usize,
    stream: usize,
) -> c_int {
    copy("cuMemcpyHtoDAsync_v2", Way::In, device, host, length, stream)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(
    host: usize,
    device: usize,
    length: usize,
    stream: usize,
) -> c_int {
    copy("cuMemcpyDtoHAsync_v2", Way::Out, device, host, length, stream)
}

/// A copy of the default stream that the host waits for.
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(device: usize, host: usize, length: usize) -> c_int {
    copy_now("cuMemcpyHtoD_v2", Way::In, device, host, length)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(host: usize, device: usize, length: usize) -> c_int {
    copy_now("cuMemcpyDtoH_v2", Way::Out, device, host, length)
}

fn copy_now(symbol: &'static str, way: Way, device: usize, host: usize, length: usize) -> c_int {
    let copied = call(symbol, Needs::Context, |model| {
        let stream = model.stream(0, current()?)?;
        model.copy_now(stream, way, device..device + length, host)
    });
    status(copied.map(|(signal, clock)| {
        signal.wait();
        model().order.seen(&clock);
    }))
}

fn copy(
    symbol: &'static str,
    way: Way,
    device: usize,
    host: usize,
    length: usize,
    stream: usize,
) -> c_int {
    let copied = call(symbol, Needs::Context, |model| {
        let stream = model.stream(stream, current()?)?;
        model.copy(stream, way, device..device + length, host)
    });
    status(copied.map(|waits| {
        if let Some(signal) = waits {
            signal.wait();
        }
    }))
}
