//! A reap sleeps, and ends when it should.

#![expect(clippy::unwrap_used, reason = "a check fails by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_io::engine::Command;

use super::Case;
use super::rig::{ALIGNMENT, Job, Memory, PATIENCE, Rig};

pub(super) const CASES: &[Case] = &[
    Case { name: "a signal from another thread ends a reap", check: signal_ends_a_reap },
    Case { name: "a signal given before a reap ends it at once", check: signal_before },
    Case { name: "every signal of many ends a reap", check: many_signals },
    Case { name: "a timeout ends a reap", check: timeout_ends_a_reap },
    Case { name: "a timeout of zero polls", check: zero_polls },
    Case { name: "an idle reap uses no processor time", check: idle_is_idle },
];

/// More processor time than a few system calls take, far less than spinning would.
const IDLE_CPU_MAX: Duration = Duration::from_millis(20);

fn signal_ends_a_reap(rig: &mut Rig<'_>) {
    // Once with nothing done before, and once when the engine has worked.
    for round in 0..2 {
        let wake = Arc::clone(&rig.wake);
        let begin = Instant::now();
        let waker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            wake.signal();
        });
        let mut completions = Vec::new();
        while begin.elapsed() < Duration::from_millis(30) {
            rig.engine.reap(Some(PATIENCE), &mut completions).unwrap();
        }
        assert!(begin.elapsed() < PATIENCE / 2, "not woken in round {round}");
        assert!(completions.is_empty());
        waker.join().unwrap();
        assert!(!rig.wake.consume(), "the signal is consumed");
        let file = rig.file(&[0; ALIGNMENT], round == 0);
        rig.drive_fully(&[Job::new(Command::Read, &file, 0, &Memory::filled(ALIGNMENT, 0))]);
    }
}

fn signal_before(rig: &mut Rig<'_>) {
    rig.wake.signal();
    rig.wake.signal();
    let begin = Instant::now();
    rig.engine.reap(Some(PATIENCE), &mut Vec::new()).unwrap();
    assert!(begin.elapsed() < PATIENCE / 2);
    assert!(!rig.wake.consume(), "the signal is consumed");
}

fn many_signals(rig: &mut Rig<'_>) {
    const SIGNALS: usize = 200;
    let wake = Arc::clone(&rig.wake);
    let (consumed, next) = std::sync::mpsc::channel();
    let waker = std::thread::spawn(move || {
        for _ in 0..SIGNALS {
            wake.signal();
            next.recv().unwrap();
        }
    });
    let begin = Instant::now();
    for _ in 0..SIGNALS {
        // Were a signal lost, this would sleep until the timeout.
        rig.engine.reap(Some(PATIENCE), &mut Vec::new()).unwrap();
        consumed.send(()).unwrap();
    }
    assert!(begin.elapsed() < PATIENCE, "a signal was lost");
    waker.join().unwrap();
}

fn timeout_ends_a_reap(rig: &mut Rig<'_>) {
    let timeout = Duration::from_millis(50);
    let begin = Instant::now();
    let mut reap_count = 0;
    while begin.elapsed() < timeout {
        rig.engine.reap(Some(timeout.saturating_sub(begin.elapsed())), &mut Vec::new()).unwrap();
        reap_count += 1;
    }
    assert!(begin.elapsed() < PATIENCE / 2);
    // An early end is allowed, spinning through early ends isn't.
    assert!(reap_count < 20, "{reap_count} reaps in {timeout:?}");
}

fn zero_polls(rig: &mut Rig<'_>) {
    let begin = Instant::now();
    for _ in 0..100 {
        rig.engine.reap(Some(Duration::ZERO), &mut Vec::new()).unwrap();
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "a poll sleeps");
    for direct in [true, false] {
        let file = rig.file(&[3; ALIGNMENT], direct);
        let memory = Memory::filled(ALIGNMENT, 0);
        assert!(rig.submit_raw(&Job::new(Command::Read, &file, 0, &memory), 1));
        let begin = Instant::now();
        let mut completions = Vec::new();
        while completions.is_empty() {
            assert!(begin.elapsed() < PATIENCE, "polling finds no completion");
            rig.engine.reap(Some(Duration::ZERO), &mut completions).unwrap();
            std::thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(completions.len(), 1);
    }
}

fn idle_is_idle(rig: &mut Rig<'_>) {
    // After work of each kind, so that everything that could spin has been started.
    for direct in [true, false] {
        let file = rig.file(&[0; ALIGNMENT], direct);
        // Enough for some to complete while nobody sleeps.
        let job = Job::new(Command::Read, &file, 0, &Memory::filled(ALIGNMENT, 0));
        rig.drive_fully(&vec![job; 200]);
    }
    let idle = Duration::from_millis(500);
    let begin = Instant::now();
    let cpu_begin = thread_cpu_time();
    while begin.elapsed() < idle {
        rig.engine.reap(Some(idle.saturating_sub(begin.elapsed())), &mut Vec::new()).unwrap();
    }
    let used = thread_cpu_time().saturating_sub(cpu_begin);
    assert!(used < IDLE_CPU_MAX, "{used:?} of processor time in {idle:?} of idling");
}

/// Processor time of this thread so far.
fn thread_cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(now).unwrap()
}
