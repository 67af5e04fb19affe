//! The decorators do what they are for, beside conforming.

#![expect(unsafe_code, clippy::unwrap_used, reason = "these are tests, and submit transfers")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_io::engine::record::{Event, RecordFactory};
use forebay_io::engine::throttle::ThrottleFactory;
use forebay_io::engine::{
    Command, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Transfer, WakeEvent,
};
use forebay_io::error::ErrorKind;

const BLOCK: usize = 1 << 20;

fn options() -> EngineOptions {
    EngineOptions {
        queue_depth: 4,
        wake: Arc::new(WakeEvent::new().unwrap()),
        single_submit: false,
        sqpoll: false,
        iopoll: false,
        channels: None,
    }
}

fn read(token: u64, file: &File, memory: &mut [u8]) -> Transfer {
    Transfer {
        token,
        command: Command::Read,
        descriptor: file.as_raw_fd(),
        file_slot: None,
        buffer_slot: None,
        channel: None,
        buffered: true,
        uncached: false,
        offset: token,
        address: memory.as_mut_ptr(),
        length: memory.len(),
    }
}

/// Reads `count` blocks, one in flight on each engine, and returns how many bytes came.
fn read_blocks(engines: &mut [Box<dyn Engine>], count: u64) -> usize {
    let mut file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::io::Write::write_all(&mut file, &vec![1; 2 * BLOCK]).unwrap();
    let mut memory = vec![vec![0; BLOCK]; engines.len()];
    let mut bytes = 0;
    for token in 0..count {
        for (engine, memory) in engines.iter_mut().zip(&mut memory) {
            let transfer = read(token, &file, memory);
            // SAFETY: its completion is reaped before `memory` is used again.
            assert_eq!(unsafe { engine.submit(&[transfer]) }.unwrap(), 1);
        }
        for engine in engines.iter_mut() {
            let mut completions: Vec<Completion> = Vec::new();
            while completions.is_empty() {
                engine.reap(None, &mut completions).unwrap();
            }
            assert_eq!(completions[0].token, token);
            bytes += usize::try_from(completions[0].result).unwrap();
        }
    }
    bytes
}

fn thread_cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(now).unwrap()
}

#[test]
fn throttled_engines_share_the_rate_and_sleep_meanwhile() {
    const RATE: u64 = 40 << 20;
    let factory = ThrottleFactory::new(Arc::new(EngineKind::Threads), RATE).unwrap();
    let mut engines = [factory.build(&options()).unwrap(), factory.build(&options()).unwrap()];
    let (begin, cpu_begin) = (Instant::now(), thread_cpu_time());
    // 20 MiB at 40 MiB/s.
    assert_eq!(read_blocks(&mut engines, 10), 20 * BLOCK);
    let (taken, cpu) = (begin.elapsed(), thread_cpu_time().saturating_sub(cpu_begin));
    assert!(taken >= Duration::from_millis(499), "{taken:?}");
    // The threads read: this one copies nothing, so it has next to nothing to do.
    assert!(cpu < Duration::from_millis(100), "{cpu:?} of processor time");
}

#[test]
fn throttled_transfers_in_flight_together_take_their_time_one_after_the_other() {
    let factory = ThrottleFactory::new(Arc::new(EngineKind::Threads), 40 << 20).unwrap();
    let mut engine = factory.build(&options()).unwrap();
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(2 * BLOCK as u64).unwrap();
    let mut memory = vec![vec![0; BLOCK]; 4];
    let transfers: Vec<_> =
        memory.iter_mut().zip(0..).map(|(memory, token)| read(token, &file, memory)).collect();
    let begin = Instant::now();
    // SAFETY: all completions are reaped before `memory` and `file` are dropped.
    assert_eq!(unsafe { engine.submit(&transfers) }.unwrap(), 4);
    let mut completions = Vec::new();
    while completions.len() < 4 {
        engine.reap(None, &mut completions).unwrap();
    }
    // 4 MiB at 40 MiB/s.
    assert!(begin.elapsed() >= Duration::from_millis(99), "{:?}", begin.elapsed());
}

#[test]
fn a_rate_of_zero_is_refused() {
    let refused = ThrottleFactory::new(Arc::new(EngineKind::Threads), 0);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_recording_has_every_transfer_and_completion_of_every_engine() {
    let factory = RecordFactory::new(Arc::new(EngineKind::Threads));
    let recording = factory.recording();
    let mut engines = [factory.build(&options()).unwrap(), factory.build(&options()).unwrap()];
    read_blocks(&mut engines, 3);
    drop(engines);
    let transfers = recording.transfers();
    assert_eq!(transfers.iter().map(|t| t.token).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2]);
    assert!(transfers.iter().all(|t| t.length == BLOCK && t.command == Command::Read));
    assert_eq!(recording.completions().len(), 6);
    let events = recording.events();
    let dropped: Vec<_> =
        events.iter().filter(|(_, event)| *event == Event::Dropped).map(|(n, _)| *n).collect();
    assert_eq!(dropped, [0, 1]);
    assert_eq!(events[0], (0, Event::Batch { offered: 1, accepted: 1 }));
    assert_eq!(recording.lost_count(), 0);
    recording.clear();
    assert!(recording.events().is_empty());
}
