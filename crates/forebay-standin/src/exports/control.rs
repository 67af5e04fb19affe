//! `forebay_standin_*`: what tests ask of the stand-in, beside the driver's own functions.
//!
//! Each returns 0 or a code of the driver; texts are UTF-8.

use std::ffi::{c_char, c_int, c_uint};

use super::put;
use crate::model::queue::stop_moving;
use crate::model::settings::Settings;
use crate::model::{Outcome, code, current, model, pop_current, push_current, status};

/// Bytes that a caller lent for the time of the call.
fn lent<'a>(bytes: *const c_char, length: usize) -> &'a [u8] {
    // SAFETY: the caller gives that many bytes, and they stay as they are until it has its answer.
    unsafe { std::slice::from_raw_parts(bytes.cast(), length) }
}

#[unsafe(no_mangle)]
extern "C" fn forebay_standin_configure(text: *const c_char, length: usize) -> c_int {
    let text = String::from_utf8_lossy(lent(text, length));
    let _still = stop_moving();
    let read = model().configure(&text);
    status(read.map_err(|_| code::INVALID_VALUE))
}

/// Forgets settings, calls and violations.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_reset() {
    let mut model = model();
    model.settings = Settings::default();
    model.journal.clear();
    model.order.forget();
}

/// How often a function of the driver was called.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_count(symbol: *const c_char, length: usize) -> u64 {
    model().journal.calls_of(&String::from_utf8_lossy(lent(symbol, length)))
}

/// Leaves as much of a text as there is room for, and returns how long it is. `kind` is 0 for
/// violations, 1 for calls, 2 for what there is.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_text(kind: c_uint, to: *mut c_char, capacity: usize) -> usize {
    let model = model();
    let text = match kind {
        0 => model.journal.violations(),
        1 => model.journal.calls(),
        _ => model.census(),
    };
    let length = text.len().min(capacity);
    // SAFETY: the caller has room for `capacity` bytes.
    unsafe { to.copy_from_nonoverlapping(text.as_ptr().cast(), length) };
    text.len()
}

/// Destroys a device's context with all that is in it.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_reset_device(device: c_int) -> c_int {
    let _still = stop_moving();
    status(model().reset_device(device))
}

/// Makes the context of a device current on this thread, or, for -1, takes the last one away.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_make_current(device: c_int) -> c_int {
    if device < 0 {
        return status(pop_current().map(drop));
    }
    push_current(device);
    0
}

/// The device whose context is current on this thread; -1: none.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_current() -> c_int {
    current().unwrap_or(-1)
}

#[unsafe(no_mangle)]
extern "C" fn forebay_standin_retain(device: c_int) -> c_int {
    status(model().retain(device).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn forebay_standin_release(device: c_int) -> c_int {
    status(model().release(device))
}

/// Device memory, with access for the host too if it is `managed`.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_allocate(
    device: c_int,
    length: usize,
    managed: c_int,
    address: *mut usize,
) -> c_int {
    let mut model = model();
    let allocated = model
        .check_device(device)
        .and_then(|()| model.memory.allocate(device, length, managed != 0));
    status(allocated.and_then(|allocated| put(address, allocated)))
}

#[unsafe(no_mangle)]
extern "C" fn forebay_standin_free(address: usize) -> c_int {
    let mut model = model();
    let length = model.memory.at(address).map_or(0, |(allocation, _)| allocation.length);
    let bytes = address..address + length;
    model.check_freed(&bytes);
    if let Some(conflict) = model.order.host_conflict(&bytes, true) {
        model.journal.violation(format!("device memory is freed in use: {conflict}"));
    }
    status(model.memory.free(address))
}

#[unsafe(no_mangle)]
extern "C" fn forebay_standin_stream(device: c_int, stream: *mut usize) -> c_int {
    let mut model = model();
    let made = model.check_device(device).and_then(|()| model.make_stream(device));
    status(made.and_then(|made| put(stream, made)))
}

#[unsafe(no_mangle)]
extern "C" fn forebay_standin_destroy_stream(stream: usize) -> c_int {
    status(model().destroy_stream(stream))
}

/// Keeps a stream from starting anything, or lets it go on.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_hold(device: c_int, stream: usize, held: c_int) -> c_int {
    let mut model = model();
    let held = held != 0;
    status(model.stream(stream, device).map(|handle| model.streams[&handle].queue.hold(held)))
}

/// Begins to capture a graph on a stream, or ends that.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_capture(device: c_int, stream: usize, captures: c_int) -> c_int {
    let mut model = model();
    let handle = model.stream(stream, device);
    status(handle.map(|handle| {
        if let Some(stream) = model.streams.get_mut(&handle) {
            stream.is_capturing = captures != 0;
        }
    }))
}

/// A kernel on a stream that writes the given bytes, which are copied at once.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_kernel_write(
    device: c_int,
    stream: usize,
    address: usize,
    bytes: *const c_char,
    length: usize,
) -> c_int {
    let bytes = lent(bytes, length).to_vec();
    let mut model = model();
    let stream = model.stream(stream, device);
    status(stream.and_then(|stream| model.kernel_write(stream, address, bytes)))
}

/// A kernel on a stream that reads, and leaves what it read at `to`.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_kernel_read(
    device: c_int,
    stream: usize,
    address: usize,
    to: usize,
    length: usize,
) -> c_int {
    let mut model = model();
    let stream = model.stream(stream, device);
    status(stream.and_then(|stream| model.kernel_read(stream, address..address + length, to)))
}

/// Waits for all that a stream has to do.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_synchronize(device: c_int, stream: usize) -> c_int {
    let marked = {
        let mut model = model();
        let handle = model.stream(stream, device);
        handle.and_then(|handle| Ok((model.marker(handle)?, model.streams[&handle].clock.clone())))
    };
    status(marked.map(|(signal, clock)| {
        signal.wait();
        model().order.seen(&clock);
    }))
}

/// Device memory as it is now; what the host doesn't know to be over is a violation.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_peek(address: usize, to: usize, length: usize) -> c_int {
    status(touch(address, length, false, |allocation, offset| {
        allocation.copy_out(offset, to, length)
    }))
}

/// Changes device memory now, likewise.
#[unsafe(no_mangle)]
extern "C" fn forebay_standin_poke(address: usize, from: usize, length: usize) -> c_int {
    status(touch(address, length, true, |allocation, offset| {
        allocation.copy_in(offset, from, length)
    }))
}

fn touch(
    address: usize,
    length: usize,
    writes: bool,
    copy: impl FnOnce(&crate::model::memory::Allocation, usize) -> bool,
) -> Outcome {
    let bytes = address..address + length;
    let mut model = model();
    let (allocation, offset) = model.memory.device(&bytes).map_err(|(code, text)| {
        model.journal.violation(format!("a test looks at {text}"));
        code
    })?;
    if let Some(conflict) = model.order.host_conflict(&bytes, writes) {
        model.journal.violation(format!("a test touches memory of which {conflict}"));
    }
    if copy(&allocation, offset) { Ok(()) } else { Err(code::ILLEGAL_ADDRESS) }
}
