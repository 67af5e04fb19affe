//! The pool as the kernel sees it: locked and resident bytes, limits, control groups, forks.
//!
//! These are facts of a whole process, so each test starts this binary again for itself: the test
//! named in the environment runs its body there, under the limits that it needs.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]
#![expect(unsafe_code, reason = "fork and waitpid have no safe form")]

use std::io::Write as _;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use forebay_io::error::ErrorKind;
use forebay_io::memory::{Pool, PoolOptions, RegionListener, TOUCH_BYTES_MIN, listen, piece_of};

const MIB: usize = 1 << 20;
const CHILD: &str = "FOREBAY_TEST_CHILD";

fn is_child(test: &str) -> bool {
    env::var(CHILD).is_ok_and(|name| name == test)
}

/// Runs `test` in a process of its own, started by `launcher` if that isn't empty.
fn alone(launcher: &[&str], test: &str) {
    let binary = env::current_exe().unwrap();
    let mut words = launcher.iter().map(std::ffi::OsString::from).collect::<Vec<_>>();
    words.push(binary.into_os_string());
    let Output { status, stdout, stderr } = Command::new(&words[0])
        .args(&words[1..])
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, test)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&stdout);
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{status}\n{stdout}\n{stderr}");
    assert!(stdout.contains("1 passed"), "{stdout}\n{stderr}");
}

/// A `Vm…` line of `/proc/self/status`, in bytes.
fn status_bytes(key: &str) -> usize {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// Ends the calling process without running anything else.
fn exit_now(code: i32) -> ! {
    // SAFETY: it ends the process; nothing of it is used afterwards.
    unsafe { libc::_exit(code) }
}

/// Runs `body` in a forked child; what it returns is whether all was well.
fn in_forked_child(body: impl FnOnce() -> Result<(), String>) {
    // SAFETY: the child runs `body` on its one thread and exits without returning.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: it only sets a timer, so that a child that waits for a lost lock is killed.
        unsafe { libc::alarm(20) };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        match outcome {
            Ok(Ok(())) => exit_now(0),
            Ok(Err(text)) => drop(writeln!(std::io::stderr(), "in the child: {text}")),
            Err(_) => drop(writeln!(std::io::stderr(), "the child panicked")),
        }
        exit_now(1);
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the call, and the child is this process's own.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
}

#[test]
fn locked_bytes_are_what_the_kernel_counts() {
    let name = "locked_bytes_are_what_the_kernel_counts";
    if !is_child(name) {
        return alone(&[], name);
    }
    let before = status_bytes("VmLck:");
    let pool = Pool::new(PoolOptions::default());
    let lengths = [100, 5000, MIB, MIB + 1, 3 * MIB, 9 * MIB + 7, 2 * MIB];
    let mut buffers: Vec<_> =
        lengths.iter().map(|&length| pool.allocate(length, 4096).unwrap()).collect();
    if buffers.iter().any(|buffer| !buffer.is_locked()) {
        println!("some of it can't be locked here: {:?}", pool.stats().lock_refused);
    }
    loop {
        assert_eq!(status_bytes("VmLck:") - before, pool.stats().locked_bytes);
        if buffers.pop().is_none() {
            break;
        }
    }
    let plain = Pool::new(PoolOptions { lock: false, ..PoolOptions::default() });
    let buffer = plain.allocate(3 * MIB, 64).unwrap();
    assert!(!buffer.is_locked());
    assert_eq!((plain.stats().locked_bytes, plain.stats().lock_refused), (0, None));
    assert_eq!(status_bytes("VmLck:"), before);
}

#[test]
fn memory_goes_back_to_the_kernel_on_drop() {
    let name = "memory_goes_back_to_the_kernel_on_drop";
    if !is_child(name) {
        return alone(&[], name);
    }
    let pool = Pool::new(PoolOptions { touch: false, ..PoolOptions::default() });
    let before = status_bytes("VmRSS:");
    let mut large = pool.allocate(96 * MIB, 4096).unwrap();
    assert!(status_bytes("VmRSS:") < before + 16 * MIB, "nothing is touched yet");
    large.as_mut_slice().fill(1);
    let small: Vec<_> = (0..64)
        .map(|_| {
            let mut buffer = pool.allocate(MIB / 2, 64).unwrap();
            buffer.as_mut_slice().fill(1);
            buffer
        })
        .collect();
    assert!(status_bytes("VmRSS:") >= before + 120 * MIB);
    drop((large, small));
    assert!(status_bytes("VmRSS:") < before + 16 * MIB);
}

#[test]
fn a_small_lock_limit_leaves_memory_unlocked_with_the_reason() {
    let name = "a_small_lock_limit_leaves_memory_unlocked_with_the_reason";
    if is_child(name) {
        let pool = Pool::new(PoolOptions::default());
        let mut buffer = pool.allocate(4 * MIB, 4096).unwrap();
        assert!(!buffer.is_locked());
        buffer.as_mut_slice().fill(7);
        assert!(buffer.as_slice().iter().all(|&byte| byte == 7));
        let stats = pool.stats();
        let reason = stats.lock_refused.unwrap();
        assert!(reason.contains("RLIMIT_MEMLOCK is 65536 bytes"), "{reason}");
        assert!(reason.contains("4194304") && reason.contains("ulimit -l"), "{reason}");
        assert_eq!((stats.locked_bytes, status_bytes("VmLck:")), (0, 0));
        return;
    }
    let launcher = [
        "setpriv",
        "--bounding-set=-ipc_lock",
        "--inh-caps=-ipc_lock",
        "prlimit",
        "--memlock=65536:65536",
    ];
    let works = Command::new(launcher[0]).args(&launcher[1..]).arg("true").output();
    if !works.is_ok_and(|output| output.status.success()) {
        println!("skipped: setpriv and prlimit aren't here, or may not drop CAP_IPC_LOCK");
        return;
    }
    alone(&launcher, name);
}

#[test]
fn an_address_space_limit_is_an_error_with_the_cause() {
    let name = "an_address_space_limit_is_an_error_with_the_cause";
    if is_child(name) {
        let pool = Pool::new(PoolOptions::default());
        let error = pool.allocate(1 << 30, 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        let text = error.to_string();
        assert!(text.contains("1073741824") && text.contains("Cannot allocate"), "{text}");
        assert_eq!((pool.stats().mapped_bytes, pool.stats().regions), (0, 0));
        drop(pool.allocate(4 * MIB, 4096).unwrap());
        return;
    }
    if Command::new("prlimit").arg("--version").output().is_err() {
        println!("skipped: prlimit isn't here");
        return;
    }
    alone(&["prlimit", "--as=536870912:536870912"], name);
}

#[test]
fn what_a_control_group_cannot_give_is_refused() {
    let name = "what_a_control_group_cannot_give_is_refused";
    if is_child(name) {
        let pool = Pool::new(PoolOptions { touch: false, ..PoolOptions::default() });
        let error = pool.allocate(256 * MIB, 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        let text = error.to_string();
        assert!(text.contains("of 134217728 bytes") && text.contains("268435456"), "{text}");
        // Two that fit only one at a time: the first isn't touched, but it is promised.
        let first = pool.allocate(80 * MIB, 4096).unwrap();
        let error = pool.allocate(80 * MIB, 4096).unwrap_err();
        assert!(error.to_string().contains("isn't touched yet"), "{error}");
        drop(first);
        drop(pool.allocate(80 * MIB, 4096).unwrap());
        return;
    }
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
    let path = groups.lines().find_map(|line| line.split_once(":memory:")).map(|(_, path)| path);
    let folder = format!(
        "/sys/fs/cgroup/memory{}/forebay-test-{}",
        path.unwrap_or("").trim_end_matches('/'),
        std::process::id()
    );
    let limited = fs::create_dir(&folder)
        .and_then(|()| fs::write(format!("{folder}/memory.limit_in_bytes"), "134217728"));
    if let Err(error) = limited {
        println!("skipped: no memory control group can be made: {error}");
        let _ = fs::remove_dir(&folder);
        return;
    }
    let enter = format!("echo $$ > {folder}/cgroup.procs && exec \"$0\" \"$@\"");
    let outcome = std::panic::catch_unwind(|| alone(&["sh", "-c", &enter], name));
    let _ = fs::remove_dir(&folder);
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

#[derive(Debug, Default)]
struct Heard(AtomicBool);

impl RegionListener for Heard {
    fn region_gone(&self, _: u64) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_forked_child_neither_hurts_its_parent_nor_waits_for_it() {
    let name = "a_forked_child_neither_hurts_its_parent_nor_waits_for_it";
    if !is_child(name) {
        return alone(&[], name);
    }
    let stop = Arc::new(AtomicBool::new(false));
    // Threads that hold the pools' locks at the moment of most forks.
    let pool = Pool::new(PoolOptions::default());
    let threads: Vec<_> = [Arc::clone(&pool), Pool::global(), Pool::global()]
        .into_iter()
        .map(|pool| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    drop(pool.allocate(100, 64).unwrap());
                }
            })
        })
        .collect();
    for length in [5000, 3 * MIB] {
        for _ in 0..25 {
            let mut buffer = pool.allocate(length, 4096).unwrap();
            buffer.as_mut_slice().fill(9);
            let address = buffer.as_ptr();
            let heard = Arc::new(Heard::default());
            let region = piece_of(address, length).unwrap().region;
            let weak = Arc::<Heard>::downgrade(&heard);
            assert!(listen(region, weak));
            let mut inherited = Some(buffer);
            in_forked_child(|| child_of_a_fork(&mut inherited, &pool, length, region, &heard));
            let buffer = inherited.unwrap();
            assert!(buffer.as_slice().iter().all(|&byte| byte == 9));
            assert!(!heard.0.load(Ordering::SeqCst));
            drop(buffer);
            assert!(length < MIB || heard.0.load(Ordering::SeqCst));
        }
    }
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(pool.stats().mapped_bytes, 0);
}

fn child_of_a_fork(
    inherited: &mut Option<forebay_io::memory::PoolBuffer>,
    pool: &Arc<Pool>,
    length: usize,
    region: u64,
    heard: &Arc<Heard>,
) -> Result<(), String> {
    let check = |right: bool, what: &str| if right { Ok(()) } else { Err(what.to_owned()) };
    let address = inherited.as_ref().unwrap().as_ptr();
    check(piece_of(address, length).is_none(), "the parent's memory is still listed")?;
    let weak = Arc::<Heard>::downgrade(heard);
    check(!listen(region, weak), "the parent's region can be listened to")?;
    check(pool.allocate(64, 64).unwrap_err().kind() == ErrorKind::Closed, "not closed")?;
    check(pool.stats().mapped_bytes == 0, "the parent's memory is counted")?;
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().any(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let parse = |text| usize::from_str_radix(text, 16).unwrap();
        (parse(start)..parse(end)).contains(&address.addr())
    });
    check(!mapped, "the parent's memory is mapped")?;
    let global = Pool::global();
    check(global.stats().mapped_bytes == 0, "the global pool isn't fresh")?;
    // Very likely at the addresses that the parent's regions had.
    let mut own: Vec<_> = (0..4).map(|_| global.allocate(length, 4096).unwrap()).collect();
    for buffer in &mut own {
        buffer.as_mut_slice().fill(5);
    }
    drop(inherited.take());
    for buffer in &own {
        check(buffer.as_slice().iter().all(|&byte| byte == 5), "own memory went")?;
        check(piece_of(buffer.as_ptr(), length).is_some(), "own memory isn't listed")?;
    }
    check(!heard.0.load(Ordering::SeqCst), "a listener was called")?;
    drop(own);
    check(global.stats().regions == 0, "own memory isn't given back")
}

/// Waits for what happens in the background, with time enough for a slow host.
fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !happened() {
        assert!(Instant::now() < deadline, "{what}: not in two minutes");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether the kernel touches ahead: `MADV_POPULATE_WRITE` came with Linux 5.14.
fn can_touch() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(5), Some(14))
}

/// The threads of this process that touch pages.
fn touching_threads() -> usize {
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // A thread can end between being listed and being read.
        fs::read_to_string(task.ok()?.path().join("comm")).ok()
    });
    names.filter(|name| name.trim_end() == "forebay-touch").count()
}

#[test]
fn long_buffers_are_touched_while_nobody_uses_them() {
    let name = "long_buffers_are_touched_while_nobody_uses_them";
    if !is_child(name) {
        return alone(&[], name);
    }
    if !can_touch() {
        println!("skipped: this kernel can't touch pages ahead");
        return;
    }
    let pool = Pool::new(PoolOptions::default());
    let before = status_bytes("VmRSS:");
    let short = pool.allocate(TOUCH_BYTES_MIN - 1 - (64 << 10), 4096).unwrap();
    assert_eq!(touching_threads(), 0);
    let length = TOUCH_BYTES_MIN + 5 * MIB + 4096;
    let long: Vec<_> = (0..3).map(|_| pool.allocate(length, 4096).unwrap()).collect();
    eventually("all is touched", || status_bytes("VmRSS:") >= before + 3 * length);
    eventually("the thread ends", || touching_threads() == 0);
    assert!(status_bytes("VmRSS:") < before + 3 * length + 16 * MIB, "the short one isn't touched");
    for buffer in &long {
        assert!(buffer.as_slice().iter().all(|&byte| byte == 0));
    }
    let again = pool.allocate(length, 4096).unwrap();
    eventually("a thread starts again", || status_bytes("VmRSS:") >= before + 4 * length);
    drop((short, long, again));
    eventually("that thread ends", || touching_threads() == 0);
    assert!(status_bytes("VmRSS:") < before + 16 * MIB);
    let plain = Pool::new(PoolOptions { touch: false, ..PoolOptions::default() });
    let untouched = plain.allocate(2 * length, 4096).unwrap();
    assert_eq!(touching_threads(), 0);
    assert!(status_bytes("VmRSS:") < before + 16 * MIB);
    drop(untouched);
}

#[test]
fn what_is_dropped_at_once_is_not_touched_and_its_thread_ends() {
    let name = "what_is_dropped_at_once_is_not_touched_and_its_thread_ends";
    if !is_child(name) {
        return alone(&[], name);
    }
    let pool = Pool::new(PoolOptions::default());
    let before = status_bytes("VmRSS:");
    let threads: Vec<_> = (0..4u8)
        .map(|seed| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                for round in 0..1000 {
                    let mut buffer = pool.allocate(2 * TOUCH_BYTES_MIN, 4096).unwrap();
                    // Some are dropped before their first step, some in it, some after it; what
                    // is mapped in their place must be left alone.
                    if round % 3 == 0 {
                        thread::yield_now();
                    }
                    if round % 100 == 0 {
                        buffer.as_mut_slice()[..MIB].fill(seed);
                        thread::yield_now();
                        assert!(buffer.as_slice()[..MIB].iter().all(|&byte| byte == seed));
                    }
                    drop(buffer);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!((pool.stats().mapped_bytes, pool.stats().regions), (0, 0));
    eventually("the thread ends", || touching_threads() == 0);
    assert!(status_bytes("VmRSS:") < before + 16 * MIB);
}

#[test]
fn a_process_out_of_threads_allocates_without_touching() {
    let name = "a_process_out_of_threads_allocates_without_touching";
    if is_child(name) {
        let pool = Pool::new(PoolOptions::default());
        let mut buffer = pool.allocate(2 * TOUCH_BYTES_MIN, 4096).unwrap();
        assert_eq!(touching_threads(), 0);
        let refused = thread::Builder::new().spawn(|| ());
        if refused.is_ok() {
            println!("skipped: the limit on threads doesn't bind here");
            return;
        }
        buffer.as_mut_slice()[..MIB].fill(3);
        assert!(buffer.as_slice()[..MIB].iter().all(|&byte| byte == 3));
        drop(buffer);
        assert_eq!(pool.stats().mapped_bytes, 0);
        return;
    }
    // A stack that no address space holds is as good as a limit on threads, which root doesn't have.
    alone(&["env", "RUST_MIN_STACK=70368744177664"], name);
}

#[test]
fn a_fork_while_pages_are_touched_hurts_neither_side() {
    let name = "a_fork_while_pages_are_touched_hurts_neither_side";
    if !is_child(name) {
        return alone(&[], name);
    }
    let options = PoolOptions { retain_bytes: 512 * MIB, ..PoolOptions::default() };
    let pool = Pool::new(options.clone());
    let length = TOUCH_BYTES_MIN + 4 * MIB;
    for round in 0..20 {
        drop(pool.allocate(TOUCH_BYTES_MIN, 4096).unwrap());
        let mut inherited = Some(pool.allocate(length, 4096).unwrap());
        let mut inherited_pool = Some(Arc::clone(&pool));
        if round % 2 == 0 {
            eventually("it is being touched", || !can_touch() || touching_threads() > 0);
        }
        in_forked_child(|| {
            drop(inherited.take());
            let pool = inherited_pool.take().unwrap();
            let check = |right, what: &str| if right { Ok(()) } else { Err(what.to_owned()) };
            check(pool.trim() == 0, "the parent's regions can be let go")?;
            check(pool.stats().kept_bytes == 0, "the parent's regions are counted")?;
            drop(pool);
            let own = Pool::new(options.clone());
            let mut buffer = own.allocate(length, 4096).unwrap();
            buffer.as_mut_slice()[length - MIB..].fill(5);
            check(buffer.as_slice()[length - 1] == 5, "own memory can't be written")?;
            drop(buffer);
            check(own.trim() == length, "own memory isn't kept")
        });
        let mut buffer = inherited.take().unwrap();
        buffer.as_mut_slice().fill(7);
        assert!(buffer.as_slice().iter().all(|&byte| byte == 7));
        drop(buffer);
        assert_eq!(pool.trim(), length + TOUCH_BYTES_MIN);
        assert_eq!(pool.stats().mapped_bytes, 0);
    }
}

#[test]
fn trimming_gives_kept_memory_back_to_the_kernel() {
    let name = "trimming_gives_kept_memory_back_to_the_kernel";
    if !is_child(name) {
        return alone(&[], name);
    }
    let pool = Pool::new(PoolOptions { retain_bytes: 64 * MIB, ..PoolOptions::default() });
    let (resident, locked) = (status_bytes("VmRSS:"), status_bytes("VmLck:"));
    let mut buffer = pool.allocate(48 * MIB, 4096).unwrap();
    buffer.as_mut_slice().fill(1);
    drop(buffer);
    assert!(status_bytes("VmRSS:") >= resident + 48 * MIB);
    assert_eq!(pool.stats().kept_bytes, 48 * MIB);
    assert_eq!(status_bytes("VmLck:") - locked, pool.stats().locked_bytes);
    assert_eq!(pool.trim(), 48 * MIB);
    assert!(status_bytes("VmRSS:") < resident + 16 * MIB);
    assert_eq!((pool.stats().mapped_bytes, pool.stats().locked_bytes), (0, 0));
    assert_eq!((status_bytes("VmLck:"), pool.trim()), (locked, 0));
}
