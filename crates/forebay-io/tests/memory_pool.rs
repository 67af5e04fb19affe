//! The pool within one process: exactness, budget, waiting, contents, listeners, many threads.
//! What a test counts is its own pool's; figures of the whole process are in `memory_process.rs`.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use forebay_io::error::ErrorKind;
use forebay_io::memory::{
    ALIGNMENT_DEFAULT, Pool, PoolBuffer, PoolOptions, RegionListener, listen, piece_of,
};
use proptest::prelude::*;

const MIB: usize = 1 << 20;

fn pool(budget_bytes: Option<usize>) -> Arc<Pool> {
    Pool::new(PoolOptions { budget_bytes, ..PoolOptions::default() })
}

fn assert_empty(pool: &Pool) {
    let stats = pool.stats();
    assert_eq!(
        (stats.used_bytes, stats.mapped_bytes, stats.locked_bytes, stats.buffers, stats.regions),
        (0, 0, 0, 0, 0),
        "{stats:?}"
    );
}

#[test]
fn a_large_buffer_costs_its_length_and_nothing_more() {
    let pool = pool(Some(160 * MIB));
    let buffer = pool.allocate(160 * MIB, ALIGNMENT_DEFAULT).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.used_bytes, stats.mapped_bytes, stats.regions), (160 * MIB, 160 * MIB, 1));
    assert!(buffer.as_ptr().addr().is_multiple_of(2 * MIB));
    drop(buffer);
    assert_empty(&pool);
    assert_eq!(pool.stats().peak_bytes, 160 * MIB);
    let odd = pool.allocate(5 * MIB + 1, 64).unwrap();
    assert_eq!((odd.len(), pool.stats().mapped_bytes), (5 * MIB + 1, 5 * MIB + 4096));
}

#[test]
fn small_buffers_share_a_region_that_goes_with_the_last() {
    let pool = pool(None);
    let buffers: Vec<_> = (0..100).map(|_| pool.allocate(1000, 64).unwrap()).collect();
    assert_eq!((pool.stats().regions, pool.stats().mapped_bytes), (1, 2 * MIB));
    assert_eq!((pool.stats().used_bytes, pool.stats().buffers), (100_000, 100));
    drop(buffers);
    assert_empty(&pool);
}

#[test]
fn recycled_memory_is_zero_again() {
    let pool = pool(None);
    let keep = pool.allocate(64, 64).unwrap();
    for length in [5000, 100, 70_000, 64, MIB] {
        let mut buffer = pool.allocate(length, 64).unwrap();
        assert!(buffer.as_slice().iter().all(|&byte| byte == 0), "{length}");
        buffer.as_mut_slice().fill(0xa5);
    }
    assert!(keep.as_slice().iter().all(|&byte| byte == 0));
    assert_eq!(pool.stats().regions, 1);
}

#[test]
fn every_power_of_two_from_a_cache_line_up_is_an_alignment() {
    let pool = pool(None);
    for power in 6..=30 {
        let alignment = 1 << power;
        let buffers: Vec<_> =
            [0, 1, 4097, 3 * MIB].map(|length| pool.allocate(length, alignment).unwrap()).into();
        for buffer in buffers {
            assert!(buffer.as_ptr().addr().is_multiple_of(alignment), "{alignment}");
            assert!(!buffer.as_ptr().is_null());
        }
    }
    for alignment in [0, 1, 32, 96, usize::MAX] {
        let error = pool.allocate(1, alignment).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(&alignment.to_string()), "{error}");
    }
}

#[test]
fn no_bytes_are_a_buffer_without_a_region() {
    let pool = pool(Some(0));
    let buffer = pool.allocate(0, 4096).unwrap();
    assert!(buffer.is_empty() && buffer.as_slice().is_empty());
    assert_eq!((pool.stats().buffers, pool.stats().regions), (1, 0));
    assert_eq!(piece_of(buffer.as_ptr(), 0), None);
    drop(buffer);
    assert_empty(&pool);
}

#[test]
fn impossible_lengths_are_refused_with_the_numbers() {
    for pool in [pool(None), pool(Some(usize::MAX)), pool(Some(MIB))] {
        for length in [usize::MAX, usize::MAX - 4096, usize::MAX / 2, 1 << 50] {
            for alignment in [64, 1 << 40, 1 << 63] {
                let error = pool.allocate(length, alignment).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::OutOfMemory);
                assert!(error.to_string().contains(&length.to_string()), "{error}");
                let waited = pool.allocate_wait(length, alignment, None).unwrap_err();
                assert_eq!(waited.kind(), ErrorKind::OutOfMemory);
            }
        }
        assert_empty(&pool);
    }
}

#[test]
fn more_than_the_machine_has_is_refused_before_it_is_mapped() {
    let available = forebay_io::memory::limits::available_bytes().unwrap();
    let length = usize::try_from(available.bytes).unwrap() + (1 << 30);
    for pool in [pool(None), pool(Some(usize::MAX))] {
        let error = pool.allocate(length, 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        let text = error.to_string();
        assert!(text.contains(&length.to_string()) && text.contains("available by"), "{text}");
        assert_empty(&pool);
    }
}

#[test]
fn over_budget_is_refused_at_once_with_wanted_used_and_budget() {
    let pool = pool(Some(10 * MIB));
    let held = pool.allocate(6 * MIB, 4096).unwrap();
    let error = pool.allocate(5 * MIB, 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    for number in [5 * MIB, 6 * MIB, 10 * MIB] {
        assert!(error.to_string().contains(&number.to_string()), "{error}");
    }
    // What is left is all there: one shared region, then exact pages.
    let small = pool.allocate(1, 64).unwrap();
    let rest = pool.allocate(2 * MIB, 64).unwrap();
    assert_eq!(pool.stats().mapped_bytes, 10 * MIB);
    drop((held, small, rest));
    let held = pool.allocate(9 * MIB, 4096).unwrap();
    let exact = pool.allocate(5000, 64).unwrap();
    assert_eq!(pool.stats().mapped_bytes, 9 * MIB + 8192);
    drop((held, exact));
    assert_empty(&pool);
}

#[test]
fn a_request_waits_until_there_is_room() {
    let pool = pool(Some(8 * MIB));
    let held = pool.allocate(6 * MIB, 4096).unwrap();
    let released = Arc::new(AtomicBool::new(false));
    let waiter = {
        let (pool, released) = (Arc::clone(&pool), Arc::clone(&released));
        thread::spawn(move || {
            let buffer = pool.allocate_wait(4 * MIB, 4096, None).unwrap();
            assert!(released.load(Ordering::SeqCst), "it did not wait");
            buffer.len()
        })
    };
    wait_for_waiters(&pool);
    released.store(true, Ordering::SeqCst);
    drop(held);
    assert_eq!(waiter.join().unwrap(), 4 * MIB);
    assert_empty(&pool);
}

#[test]
fn room_within_a_shared_region_wakes_who_waits_for_it() {
    let pool = pool(Some(2 * MIB));
    let first = pool.allocate(MIB, 64).unwrap();
    let second = pool.allocate(MIB, 64).unwrap();
    let waiter = {
        let pool = Arc::clone(&pool);
        thread::spawn(move || {
            let buffer = pool.allocate_wait(MIB, 64, Some(Duration::from_secs(20)));
            buffer.unwrap().as_ptr().addr()
        })
    };
    while !pool.allocate(MIB, 64).unwrap_err().to_string().contains("1 other requests") {
        thread::yield_now();
    }
    let address = first.as_ptr().addr();
    drop(first);
    assert_eq!(waiter.join().unwrap(), address);
    drop(second);
    assert_empty(&pool);
}

/// Returns when a request for which there would be room is refused because others wait.
fn wait_for_waiters(pool: &Arc<Pool>) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while pool.allocate(MIB + 1, 4096).is_ok() {
        assert!(Instant::now() < deadline, "nobody waits");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn who_watches_while_waiting_can_make_room_and_keeps_its_place() {
    let pool = pool(Some(4 * MIB));
    let mut held = Some(pool.allocate(3 * MIB, 4096).unwrap());
    let mut looks = 0;
    let mut watch = || {
        looks += 1;
        // Smaller ones that would fit are behind this one, also while it looks.
        assert!(pool.allocate(MIB, 4096).is_err());
        if looks == 3 {
            held = None;
        }
        ControlFlow::Continue(())
    };
    let interval = Duration::from_millis(1);
    let buffer = pool.allocate_watched(2 * MIB, 4096, None, interval, &mut watch).unwrap();
    assert_eq!((looks, buffer.len()), (3, 2 * MIB));
    drop(buffer);
    assert_empty(&pool);
}

#[test]
fn who_gives_up_watching_leaves_its_place_to_others() {
    let pool = pool(Some(4 * MIB));
    let held = pool.allocate(3 * MIB, 4096).unwrap();
    let interval = Duration::from_millis(1);
    let mut watch = || ControlFlow::Break(());
    let error = pool.allocate_watched(2 * MIB, 4096, None, interval, &mut watch).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    drop(pool.allocate(MIB, 4096).unwrap());
    drop(held);
    assert_empty(&pool);
}

#[test]
fn a_wait_ends_at_its_timeout_with_the_numbers() {
    let pool = pool(Some(4 * MIB));
    let held = pool.allocate(3 * MIB, 4096).unwrap();
    let timeout = Duration::from_millis(30);
    let start = Instant::now();
    let error = pool.allocate_wait(2 * MIB, 4096, Some(timeout)).unwrap_err();
    assert!(start.elapsed() >= timeout);
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    for number in [2 * MIB, 3 * MIB, 4 * MIB] {
        assert!(error.to_string().contains(&number.to_string()), "{error}");
    }
    assert!(error.to_string().contains("30ms"), "{error}");
    // It left the queue: the next request isn't behind it.
    drop(pool.allocate(MIB, 4096).unwrap());
    let over = pool.allocate_wait(5 * MIB, 4096, None).unwrap_err();
    assert_eq!(over.kind(), ErrorKind::OutOfMemory);
    drop(held);
    assert_empty(&pool);
}

#[test]
fn a_large_request_is_served_before_smaller_ones_that_came_later() {
    let pool = pool(Some(8 * MIB));
    let mut held: Vec<_> = (0..4).map(|_| pool.allocate(2 * MIB, 4096).unwrap()).collect();
    let (sender, order) = mpsc::channel();
    let ask = |length: usize| {
        let (pool, sender) = (Arc::clone(&pool), sender.clone());
        thread::spawn(move || {
            let buffer = pool.allocate_wait(length, 4096, None).unwrap();
            sender.send(length).unwrap();
            drop(buffer);
        })
    };
    let large = ask(8 * MIB);
    while !pool.allocate(8 * MIB, 64).unwrap_err().to_string().contains("1 other requests") {
        thread::yield_now();
    }
    let small = ask(2 * MIB);
    while !pool.allocate(8 * MIB, 64).unwrap_err().to_string().contains("2 other requests") {
        thread::yield_now();
    }
    while let Some(buffer) = held.pop() {
        assert!(order.try_recv().is_err(), "served before the large request could be");
        drop(buffer);
    }
    assert_eq!(order.recv().unwrap(), 8 * MIB);
    assert_eq!(order.recv().unwrap(), 2 * MIB);
    large.join().unwrap();
    small.join().unwrap();
    assert_empty(&pool);
}

#[derive(Debug, Default)]
struct Gone(Mutex<Vec<u64>>, Mutex<Option<Arc<Pool>>>);

impl RegionListener for Gone {
    fn region_gone(&self, region: u64) {
        // No pool lock is held: the pool can be used from here.
        if let Some(pool) = &*self.1.lock().unwrap() {
            drop(pool.allocate(64, 64).unwrap());
            assert!(pool.stats().mapped_bytes > 0, "it is counted until it is unmapped");
        }
        self.0.lock().unwrap().push(region);
    }
}

#[test]
fn a_listener_hears_of_the_end_of_its_region_once_and_outside_the_lock() {
    let pool = pool(None);
    let gone = Arc::new(Gone(Mutex::default(), Mutex::new(Some(Arc::clone(&pool)))));
    for length in [1000, 3 * MIB] {
        let buffer = pool.allocate(length, 64).unwrap();
        let piece = piece_of(buffer.as_ptr(), length).unwrap();
        let weak: Weak<dyn RegionListener> = Arc::<Gone>::downgrade(&gone);
        assert!(listen(piece.region, weak));
        drop(buffer);
        assert_eq!(std::mem::take(&mut *gone.0.lock().unwrap()), [piece.region]);
        assert_eq!(piece_of(piece.address, 1), None);
    }
    assert_empty(&pool);
}

#[test]
fn pieces_cover_pool_memory_and_nothing_else() {
    let pool = pool(None);
    let length = forebay_io::memory::PIECE_BYTES + 5 * MIB;
    let buffer = pool.allocate(length, 4096).unwrap();
    let second = buffer.as_ptr().wrapping_add(forebay_io::memory::PIECE_BYTES);
    let piece = piece_of(second.wrapping_add(7), 100).unwrap();
    assert_eq!((piece.index, piece.address, piece.length), (1, second, 5 * MIB));
    assert_eq!(piece_of(second.wrapping_sub(1), 2), None);
    assert_eq!(piece_of(second, 5 * MIB + 1), None);
    let ordinary = [0u8; 64];
    assert_eq!(piece_of(ordinary.as_ptr(), 64), None);
}

/// Marks a buffer in a way that an overlap with any other would show.
fn mark(buffer: &mut PoolBuffer, seed: u8) {
    assert!(buffer.as_slice().iter().all(|&byte| byte == 0), "not zero when handed out");
    buffer.as_mut_slice().fill(seed);
}

#[test]
fn many_threads_share_a_budget_and_never_a_byte() {
    let budget = 24 * MIB;
    let pool = pool(Some(budget));
    let waited = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (1..=8u8)
        .map(|seed| {
            let (pool, waited) = (Arc::clone(&pool), Arc::clone(&waited));
            thread::spawn(move || {
                let mut random = usize::from(seed);
                let mut held = Vec::new();
                for _ in 0..150 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let length = if random >> 60 == 0 { 3 * MIB } else { random >> 48 };
                    let alignment = 64 << (random % 7);
                    let Ok(mut buffer) = pool.allocate(length, alignment) else {
                        held.clear();
                        waited.fetch_add(1, Ordering::Relaxed);
                        drop(pool.allocate_wait(length, alignment, None).unwrap());
                        continue;
                    };
                    assert!(buffer.as_ptr().addr().is_multiple_of(alignment));
                    mark(&mut buffer, seed);
                    held.push(buffer);
                    assert!(pool.stats().mapped_bytes <= budget);
                    if held.len() > 40 {
                        let index = (random >> 32) % held.len();
                        let buffer = held.swap_remove(index);
                        assert!(buffer.as_slice().iter().all(|&byte| byte == seed));
                    }
                }
                for buffer in &held {
                    assert!(buffer.as_slice().iter().all(|&byte| byte == seed));
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(pool.stats().peak_bytes <= budget);
    assert_empty(&pool);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_counts_are_exact_after_every_step(
        budget in prop::option::of(4 * MIB..16 * MIB),
        steps in prop::collection::vec((0usize..3 * MIB, 6u32..14, any::<prop::sample::Index>()), 1..60),
    ) {
        let pool = pool(budget);
        let mut held: Vec<PoolBuffer> = Vec::new();
        for (length, power, index) in steps {
            match pool.allocate(length, 1 << power) {
                Ok(buffer) => held.push(buffer),
                Err(error) => {
                    prop_assert_eq!(error.kind(), ErrorKind::OutOfMemory);
                    prop_assert!(budget.is_some());
                    if !held.is_empty() {
                        held.swap_remove(index.index(held.len()));
                    }
                }
            }
            let stats = pool.stats();
            prop_assert_eq!(stats.used_bytes, held.iter().map(PoolBuffer::len).sum::<usize>());
            prop_assert_eq!(stats.buffers, held.len());
            prop_assert!(stats.mapped_bytes >= stats.used_bytes);
            prop_assert!(budget.is_none_or(|budget| stats.mapped_bytes <= budget));
            let mut ranges: Vec<_> = held
                .iter()
                .filter(|buffer| !buffer.is_empty())
                .map(|buffer| (buffer.as_ptr().addr(), buffer.len()))
                .collect();
            ranges.sort_unstable();
            for pair in ranges.windows(2) {
                prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0);
            }
            for buffer in held.iter().filter(|buffer| !buffer.is_empty()) {
                prop_assert!(piece_of(buffer.as_ptr(), buffer.len()).is_some());
            }
        }
        held.clear();
        assert_empty(&pool);
    }
}
