//! Regions that a pool keeps: which requests get them, what they cost, when they go.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::sync::{Arc, Mutex, Weak};
use std::thread;

use forebay_io::error::ErrorKind;
use forebay_io::memory::{Pool, PoolBuffer, PoolOptions, RegionListener, listen, piece_of};
use proptest::prelude::*;

const MIB: usize = 1 << 20;

fn pool(budget_bytes: Option<usize>, retain_bytes: usize) -> Arc<Pool> {
    Pool::new(PoolOptions { budget_bytes, retain_bytes, ..PoolOptions::default() })
}

fn region(buffer: &PoolBuffer) -> u64 {
    piece_of(buffer.as_ptr(), 1).unwrap().region
}

/// Used, kept and mapped bytes.
fn bytes(pool: &Pool) -> (usize, usize, usize) {
    let stats = pool.stats();
    (stats.used_bytes, stats.kept_bytes, stats.mapped_bytes)
}

#[derive(Debug, Default)]
struct Gone(Mutex<Vec<u64>>);

impl RegionListener for Gone {
    fn region_gone(&self, region: u64) {
        self.0.lock().unwrap().push(region);
    }
}

#[test]
fn nothing_is_kept_unless_that_is_asked_for() {
    let pool = Pool::new(PoolOptions::default());
    drop((pool.allocate(5 * MIB, 64).unwrap(), pool.allocate(100, 64).unwrap()));
    assert_eq!((bytes(&pool), pool.trim()), ((0, 0, 0), 0));
}

#[test]
fn a_kept_region_serves_what_it_fits_with_its_contents_and_exact_lengths() {
    let pool = pool(None, 64 * MIB);
    let mut first = pool.allocate(9 * MIB, 4096).unwrap();
    first.as_mut_slice().fill(7);
    let (id, address) = (region(&first), first.as_ptr());
    drop(first);
    assert_eq!(bytes(&pool), (0, 9 * MIB, 9 * MIB));
    // A ninth and more left over, too long, not aligned for it: others are mapped.
    let others = [(8 * MIB - 4096, 4096), (9 * MIB + 1, 4096), (9 * MIB, 1 << 46)];
    let others = others.map(|(length, alignment)| pool.allocate(length, alignment));
    assert!(others.iter().flatten().all(|other| region(other) != id));
    let again = pool.allocate(8 * MIB + 5, 2 * MIB).unwrap();
    assert_eq!((region(&again), again.as_ptr(), again.len()), (id, address, 8 * MIB + 5));
    assert!(again.as_slice().iter().all(|&byte| byte == 7));
    drop((again, others));
    pool.trim();
    assert_eq!((bytes(&pool), pool.stats().regions), ((0, 0, 0), 0));
}

#[test]
fn small_buffers_are_zero_whatever_region_they_come_from() {
    let pool = pool(None, 64 * MIB);
    let mut small = pool.allocate(MIB, 64).unwrap();
    small.as_mut_slice().fill(1);
    let shared = region(&small);
    drop(small);
    assert_eq!(bytes(&pool), (0, 2 * MIB, 2 * MIB));
    let mut large = pool.allocate(2 * MIB, 64).unwrap();
    assert_eq!(region(&large), shared);
    large.as_mut_slice().fill(2);
    drop(large);
    // Back to being shared; with an alignment that no shared region has, small ones own theirs.
    let small = pool.allocate(1000, 64).unwrap();
    assert_eq!(region(&small), shared);
    assert!(small.as_slice().iter().all(|&byte| byte == 0));
    for _ in 0..2 {
        let mut own = pool.allocate(MIB, 4 * MIB).unwrap();
        assert!(own.as_slice().iter().all(|&byte| byte == 0));
        own.as_mut_slice().fill(3);
    }
    drop(small);
    assert_eq!(pool.stats().regions, 2);
}

#[test]
fn what_exceeds_the_limit_goes_and_the_first_kept_goes_first() {
    let pool = pool(None, 10 * MIB);
    let gone = Arc::new(Gone::default());
    let weak: Weak<dyn RegionListener> = Arc::<Gone>::downgrade(&gone);
    let buffers = [4, 6, 3, 11].map(|mib| pool.allocate(mib * MIB, 4096).unwrap());
    let ids: Vec<_> = buffers.iter().map(region).collect();
    for &id in &ids {
        assert!(listen(id, Weak::clone(&weak)));
    }
    let heard = || std::mem::take(&mut *gone.0.lock().unwrap());
    let [a, b, c, d] = buffers;
    drop((a, b));
    assert_eq!((heard(), bytes(&pool).1), (vec![], 10 * MIB));
    drop(c);
    assert_eq!((heard(), bytes(&pool).1), (vec![ids[0]], 9 * MIB));
    drop(d);
    assert_eq!((heard(), bytes(&pool)), (vec![ids[3]], (0, 9 * MIB, 9 * MIB)));
    assert_eq!(pool.trim(), 9 * MIB);
    assert_eq!((heard(), bytes(&pool)), (vec![ids[1], ids[2]], (0, 0, 0)));
    // With the pool, what it keeps goes as well.
    let last = pool.allocate(5 * MIB, 4096).unwrap();
    assert!(listen(region(&last), weak));
    let id = region(&last);
    drop((last, pool));
    assert_eq!(heard(), [id]);
}

#[test]
fn kept_regions_make_room_in_the_budget_before_anything_is_refused() {
    let pool = pool(Some(16 * MIB), usize::MAX);
    let held = pool.allocate(4 * MIB, 4096).unwrap();
    let buffers = [3, 4, 5].map(|mib| pool.allocate(mib * MIB, 4096).unwrap());
    drop(Vec::from(buffers));
    assert_eq!(bytes(&pool), (4 * MIB, 12 * MIB, 16 * MIB));
    // No more than must goes: the one of 3 MiB.
    let two = pool.allocate(2 * MIB, 4096).unwrap();
    assert_eq!(bytes(&pool), (6 * MIB, 9 * MIB, 15 * MIB));
    // The one of 4 MiB goes for a small request, so that the next has a region to share.
    let small = [(); 2].map(|()| pool.allocate(100, 64).unwrap());
    assert_eq!(bytes(&pool), (6 * MIB + 200, 5 * MIB, 13 * MIB + 4096));
    let error = pool.allocate(11 * MIB, 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(bytes(&pool).1, 5 * MIB, "what can't help isn't let go");
    drop((two, small));
    let rest = pool.allocate(12 * MIB, 4096).unwrap();
    assert_eq!(bytes(&pool), (16 * MIB, 0, 16 * MIB));
    assert_eq!(pool.stats().peak_bytes, 16 * MIB);
    drop((held, rest));
    pool.trim();
    assert_eq!(bytes(&pool), (0, 0, 0));
}

#[test]
fn who_waits_for_room_gets_what_is_kept_meanwhile() {
    let pool = pool(Some(8 * MIB), usize::MAX);
    for wanted in [8 * MIB, 3 * MIB] {
        let held = pool.allocate(8 * MIB, 4096).unwrap();
        let waiter = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.allocate_wait(wanted, 4096, None).unwrap().len())
        };
        while !pool.allocate(7 * MIB, 64).unwrap_err().to_string().contains("1 other requests") {
            thread::yield_now();
        }
        drop(held);
        assert_eq!(waiter.join().unwrap(), wanted);
    }
    assert!(pool.stats().peak_bytes <= 8 * MIB);
}

#[test]
fn many_threads_recycle_within_a_budget_and_share_no_byte() {
    let budget = 48 * MIB;
    let pool = pool(Some(budget), 24 * MIB);
    let threads: Vec<_> = (1..=6u8)
        .map(|seed| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                let mut random = usize::from(seed);
                for round in 0..200 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let length = (random >> 32) % (6 * MIB) + 1;
                    let mut buffer = pool.allocate_wait(length, 4096, None).unwrap();
                    let (last, middle) = (length - 1, length / 2);
                    for at in [0, middle, last] {
                        buffer.as_mut_slice()[at] = seed;
                    }
                    let stats = pool.stats();
                    assert!(stats.mapped_bytes <= budget && stats.kept_bytes <= 24 * MIB);
                    if round % 50 == 0 {
                        pool.trim();
                    }
                    for at in [0, middle, last] {
                        assert_eq!(buffer.as_slice()[at], seed);
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(pool.stats().peak_bytes <= budget);
    pool.trim();
    let stats = pool.stats();
    assert_eq!((bytes(&pool), stats.locked_bytes, stats.regions), ((0, 0, 0), 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_request_is_refused_only_if_the_live_buffers_leave_no_room(
        budget in 4 * MIB..16 * MIB,
        retain in 0..16 * MIB,
        steps in prop::collection::vec((MIB + 1..5 * MIB, any::<prop::sample::Index>()), 1..60),
    ) {
        let pool = pool(Some(budget), retain);
        let mut held: Vec<PoolBuffer> = Vec::new();
        for (length, index) in steps {
            let before = pool.stats();
            if let Ok(buffer) = pool.allocate(length, 4096) {
                held.push(buffer);
            } else {
                let live = before.mapped_bytes - before.kept_bytes;
                prop_assert!(live + length.next_multiple_of(4096) > budget);
                if !held.is_empty() {
                    held.swap_remove(index.index(held.len()));
                }
            }
            let stats = pool.stats();
            let used: usize = held.iter().map(PoolBuffer::len).sum();
            // An eighth more than was asked for, and the rest of a page.
            let live_max: usize = held.iter().map(|b| b.len() + b.len() / 8 + 8192).sum();
            prop_assert_eq!((stats.used_bytes, stats.buffers), (used, held.len()));
            prop_assert!(stats.mapped_bytes <= budget && stats.kept_bytes <= retain);
            let live = stats.mapped_bytes - stats.kept_bytes;
            prop_assert!((used..=live_max).contains(&live), "{live} for {used}");
        }
        held.clear();
        pool.trim();
        prop_assert_eq!(bytes(&pool), (0, 0, 0));
    }
}
