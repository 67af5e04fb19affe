//! `libcuda`: streams, events, host functions.

use std::ffi::{c_int, c_uint, c_void};

use super::put;
use crate::model::clock::Clock;
use crate::model::queue::Task;
use crate::model::stream::Event;
use crate::model::{
    Model, Needs, Outcome, call, code, current, exchange_capture_mode, model, status,
};

/// `CUhostFn`.
type HostFunction = unsafe extern "C" fn(*mut c_void);

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> c_int {
    status(call("cuStreamCreate", Needs::Context, |model| {
        put(stream, model.make_stream(current()?)?)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    status(call("cuStreamDestroy_v2", Needs::Driver, |model| model.destroy_stream(stream)))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: usize) -> c_int {
    status(call("cuStreamQuery", Needs::Context, |model| {
        let handle = model.stream(stream, current()?)?;
        let stream = model.streams.get(&handle).ok_or(code::INVALID_HANDLE)?;
        if !stream.queue.is_idle() {
            return Err(code::NOT_READY);
        }
        let clock = stream.clock.clone();
        model.order.seen(&clock);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(stream: usize, capturing: *mut c_int) -> c_int {
    status(call("cuStreamIsCapturing", Needs::Context, |model| {
        let handle = model.stream(stream, current()?)?;
        put(capturing, c_int::from(model.streams[&handle].is_capturing))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    status(call("cuThreadExchangeStreamCaptureMode", Needs::Driver, |_| {
        if mode.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller gives a valid mode.
        let wanted = unsafe { mode.read() };
        put(mode, exchange_capture_mode(wanted))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    let marked = call("cuStreamSynchronize", Needs::Context, |model| {
        let handle = model.stream(stream, current()?)?;
        let signal = model.marker(handle)?;
        let clock = model.streams.get(&handle).map(|stream| stream.clock.clone());
        Ok((signal, clock.unwrap_or_default()))
    });
    status(marked.and_then(|(signal, clock)| {
        signal.wait();
        seen(&mut model(), &clock)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) -> c_int {
    status(call("cuStreamWaitEvent", Needs::Context, |model| {
        let handle = model.stream(stream, current()?)?;
        model.wait_event(handle, event)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> c_int {
    status(call("cuEventCreate", Needs::Context, |model| {
        let device = current()?;
        let handle = model.new_handle();
        model.events.insert(handle, Event { device, recorded: None });
        put(event, handle)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: usize) -> c_int {
    status(call("cuEventDestroy_v2", Needs::Driver, |model| {
        model.events.remove(&event).map(drop).ok_or(code::INVALID_HANDLE)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: usize, stream: usize) -> c_int {
    status(call("cuEventRecord", Needs::Context, |model| {
        let device = current()?;
        let handle = model.stream(stream, device)?;
        if model.streams[&handle].is_capturing {
            let text = "an event is recorded into a graph that is being captured".to_owned();
            model.journal.violation(text);
        }
        model.record(event, handle, device)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: usize) -> c_int {
    status(call("cuEventQuery", Needs::Context, |model| {
        let known = model.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        match known.recorded.clone() {
            Some((signal, _)) if !signal.is_done() => Err(code::NOT_READY),
            Some((_, clock)) => seen(model, &clock),
            None => Ok(()),
        }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: usize) -> c_int {
    let recorded = call("cuEventSynchronize", Needs::Context, |model| {
        let known = model.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        Ok(known.recorded.clone())
    });
    status(recorded.and_then(|recorded| match recorded {
        Some((signal, clock)) => {
            signal.wait();
            seen(&mut model(), &clock)
        }
        None => Ok(()),
    }))
}

/// The host has waited: it hears of an error that sticks to the context, too.
fn seen(model: &mut Model, clock: &Clock) -> Outcome {
    model.order.seen(clock);
    if model.settings.deinitialised {
        return Err(code::DEINITIALIZED);
    }
    model.breakage_of(current()?).map_or(Ok(()), Err)
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(
    stream: usize,
    function: Option<HostFunction>,
    data: *mut c_void,
) -> c_int {
    status(call("cuLaunchHostFunc", Needs::Context, |model| {
        let function = function.ok_or(code::INVALID_VALUE)?;
        let handle = model.stream(stream, current()?)?;
        let data = data.expose_provenance();
        model.enqueue(handle, |clock| {
            let run = Box::new(move || {
                // SAFETY: whoever launched it promised that it can be called with its data once
                // the stream gets there.
                unsafe { function(std::ptr::with_exposed_provenance_mut(data)) }
            });
            Task::HostFunction { run, clock: Clock::clone(clock) }
        })
    }))
}
