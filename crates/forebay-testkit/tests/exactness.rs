//! Right bytes: every length, offset and address, on every engine, direct and buffered.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "tests panic, and say what they skip"
)]

use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forebay_io::{
    DirectMode, Direction, Durability, EngineChoice, EngineKind, ErrorKind, Handle, Options, Part,
    Pool, Priority, Request, Target, probe_engines,
};
use forebay_testkit::memory::{Placed, pattern};

const LENGTHS: [usize; 14] = [
    0,
    1,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    8191,
    65_537,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    (3 << 20) + 100,
];

fn engines() -> Vec<EngineKind> {
    probe_engines()
        .into_iter()
        .filter(|probe| {
            if !probe.available {
                eprintln!("skipped: engine {}: {}", probe.engine, probe.detail);
            }
            probe.available
        })
        .map(|probe| probe.engine)
        .collect()
}

/// A directory on the file system of the build, which takes direct I/O where `/tmp` may not.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn small_blocks(engine: EngineKind, parallelism: usize, direct: DirectMode) -> Options {
    Options {
        engine: EngineChoice::Named(engine),
        block_size: 64 << 10,
        queue_depth: 8,
        parallelism,
        direct,
        staging_bytes: parallelism << 20,
        ..Options::default()
    }
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn every_length_comes_back_exactly_and_the_file_is_exactly_that_long() {
    let directory = directory();
    for engine in engines() {
        for direct in [DirectMode::Auto, DirectMode::Never] {
            for parallelism in [1, 2, 3, 7, 8] {
                let handle = Handle::new(small_blocks(engine, parallelism, direct)).unwrap();
                for (seed, length) in LENGTHS.into_iter().enumerate() {
                    let path = directory.path().join("w.bin");
                    let content = pattern(seed as u64, length);
                    handle.store(&path, &content).unwrap();
                    assert!(read(&path) == content, "{engine} {direct:?} {parallelism} {length}");
                    let mut back = vec![0xEE; length];
                    handle.load(&path, 0, &mut back).unwrap();
                    assert!(back == content, "{engine} {direct:?} {parallelism} {length}");
                }
            }
        }
    }
}

#[test]
fn every_block_size_and_offset_leaves_the_neighbours_alone() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    for engine in engines() {
        for block_size in [4096, 5000, 8192, 1 << 20] {
            let options = Options { block_size, ..small_blocks(engine, 2, DirectMode::Auto) };
            let handle = Handle::new(options).unwrap();
            for offset in [0u64, 1, 100, 511, 4096, 4097, 12_287] {
                for length in [1usize, 100, 4096, 4097, 20_000, 70_001] {
                    std::fs::write(&path, vec![0xAA; 100_000]).unwrap();
                    let content = pattern(offset, length);
                    handle.store_at(&path, offset, &content).unwrap();
                    let mut expected = vec![0xAA; 100_000];
                    let start = usize::try_from(offset).unwrap();
                    expected[start..start + length].copy_from_slice(&content);
                    assert!(read(&path) == expected, "{engine} {block_size} {offset} {length}");
                    let mut back = vec![0; length];
                    handle.load(&path, offset, &mut back).unwrap();
                    assert!(back == content, "{engine} {block_size} {offset} {length}");
                }
            }
        }
    }
}

#[test]
fn memory_at_any_address_is_served_and_only_misplaced_memory_is_staged() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    for engine in engines() {
        let handle = Handle::new(small_blocks(engine, 2, DirectMode::Auto)).unwrap();
        let facts_direct = forebay_io::facts(directory.path()).unwrap();
        for shift in [0usize, 1, 64, 511, 512] {
            let before = handle.stats();
            let mut placed = Placed::new(shift, 300_000);
            placed.bytes_mut().copy_from_slice(&pattern(7, 300_000));
            handle.store(&path, placed.bytes()).unwrap();
            assert!(read(&path) == placed.bytes(), "{engine} shift {shift}");
            let mut back = Placed::new(shift, 300_000);
            std::fs::File::open(&path).unwrap().sync_all().unwrap();
            handle.load(&path, 0, back.bytes_mut()).unwrap();
            assert!(back.bytes() == placed.bytes(), "{engine} shift {shift}");
            let after = handle.stats();
            if facts_direct.direct && shift.is_multiple_of(facts_direct.memory_alignment) {
                let staged = after.bytes_staged - before.bytes_staged;
                assert!(staged < 8192, "{engine} shift {shift}: {staged} bytes staged");
            }
        }
    }
}

#[test]
fn overwriting_a_longer_file_leaves_no_tail_and_keeps_its_mode() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = Handle::new(Options::default()).unwrap();
    handle.store(&path, &pattern(1, 3_000_000)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    for length in [2_000_001, 4097, 5, 0] {
        let content = pattern(2, length);
        handle.store(&path, &content).unwrap();
        assert!(read(&path) == content, "{length}");
    }
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
}

#[test]
fn a_store_of_the_same_size_keeps_the_inode_and_the_blocks_of_the_file() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = Handle::new(Options::default()).unwrap();
    handle.store(&path, &pattern(1, 4 << 20)).unwrap();
    let before = std::fs::metadata(&path).unwrap();
    handle.store(&path, &pattern(2, 4 << 20)).unwrap();
    let after = std::fs::metadata(&path).unwrap();
    assert_eq!((before.ino(), before.blocks()), (after.ino(), after.blocks()));
    assert!(read(&path) == pattern(2, 4 << 20));
}

#[test]
fn a_store_behind_the_end_leaves_zeros_between() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let handle = Handle::new(Options::default()).unwrap();
    handle.store_at(&path, 10_000, &pattern(3, 5000)).unwrap();
    let mut expected = vec![0; 15_000];
    expected[10_000..].copy_from_slice(&pattern(3, 5000));
    assert!(read(&path) == expected);
}

#[test]
fn many_tensors_and_ranges_move_as_one_operation() {
    let directory = directory();
    let paths: Vec<PathBuf> = (0..3).map(|n| directory.path().join(format!("{n}.bin"))).collect();
    let lengths: Vec<usize> = (0..300).map(|n| (n * 977) % 20_000).collect();
    for engine in engines() {
        let handle = Handle::new(small_blocks(engine, 2, DirectMode::Auto)).unwrap();
        let mut memory: Vec<Vec<u8>> =
            lengths.iter().enumerate().map(|(n, length)| pattern(n as u64, *length)).collect();
        let mut offsets = vec![0u64; paths.len()];
        let mut place = Vec::new();
        for (n, length) in lengths.iter().enumerate() {
            place.push((n % paths.len(), offsets[n % paths.len()]));
            offsets[n % paths.len()] += *length as u64;
        }
        run_parts(&handle, Direction::Store, &paths, &place, &mut memory);
        for (n, path) in paths.iter().enumerate() {
            let parts = memory.iter().enumerate().filter(|(part, _)| part % paths.len() == n);
            let expected: Vec<u8> = parts.flat_map(|(_, bytes)| bytes.clone()).collect();
            assert!(read(path) == expected, "{engine}: file {n}");
        }
        let expected = memory.clone();
        for bytes in &mut memory {
            bytes.fill(0);
        }
        run_parts(&handle, Direction::Load, &paths, &place, &mut memory);
        assert!(memory == expected, "{engine}");
        assert_eq!(handle.stats().operations, 2);
    }
}

#[test]
fn a_file_reaches_as_far_as_its_last_tensor_even_if_that_is_empty() {
    let directory = directory();
    let paths = [directory.path().join("w.bin")];
    let handle = Handle::new(Options::default()).unwrap();
    for old_length in [0, 100, 1000, 6000] {
        std::fs::write(&paths[0], pattern(2, old_length)).unwrap();
        let mut memory = [pattern(1, 1000), Vec::new()];
        run_parts(&handle, Direction::Store, &paths, &[(0, 0), (0, 5000)], &mut memory);
        let stored = read(&paths[0]);
        assert_eq!(stored.len(), 5000, "over {old_length} bytes");
        assert!(stored[..1000] == memory[0]);
    }
}

#[expect(unsafe_code, reason = "vectored requests name memory by address")]
fn run_parts(
    handle: &Handle,
    direction: Direction,
    paths: &[PathBuf],
    place: &[(usize, u64)],
    memory: &mut [Vec<u8>],
) {
    let parts = memory.iter_mut().zip(place).map(|(bytes, (file, offset))| Part {
        file: *file,
        offset: *offset,
        address: bytes.as_mut_ptr(),
        length: bytes.len(),
        device: None,
    });
    let request = Request {
        direction,
        files: paths.iter().cloned().map(Target::Path).collect(),
        parts: parts.collect(),
        devices: Vec::new(),
        whole_file: direction == Direction::Store,
        checksums: false,
        priority: Priority::Demand,
        durability: None,
        commit: None,
        keep: None,
    };
    // SAFETY: `memory` is borrowed until `run` returns.
    unsafe { handle.run(request) }.unwrap();
}

#[test]
fn writers_of_neighbouring_ragged_ranges_lose_nothing() {
    const WRITERS: usize = 4;
    const EACH: usize = 10_007;
    let directory = directory();
    let path = directory.path().join("w.bin");
    for engine in engines() {
        for round in 0..20 {
            let content = pattern(round, WRITERS * 8 * EACH);
            std::thread::scope(|scope| {
                for writer in 0..WRITERS {
                    let (content, path) = (&content, &path);
                    scope.spawn(move || {
                        let options = small_blocks(engine, 1, DirectMode::Auto);
                        let handle = Handle::new(options).unwrap();
                        for part in 0..8 {
                            let start = (part * WRITERS + writer) * EACH;
                            let bytes = &content[start..start + EACH];
                            handle.store_at(path, start as u64, bytes).unwrap();
                        }
                    });
                }
            });
            assert!(read(&path) == content, "{engine} round {round}");
        }
    }
}

#[test]
#[expect(unsafe_code, reason = "requests name memory by address")]
fn a_descriptor_of_the_caller_keeps_its_position_and_may_be_closed_at_once() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    std::fs::write(&path, vec![1; 50_000]).unwrap();
    for engine in engines() {
        let handle = Handle::new(small_blocks(engine, 2, DirectMode::Auto)).unwrap();
        let mut content = pattern(5, 40_001);
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        file.read_exact_at(&mut [0; 10], 5).unwrap();
        let target = Target::Descriptor(file.as_raw_fd());
        let (address, length) = (content.as_mut_ptr(), content.len());
        let request = Request {
            whole_file: true,
            ..Request::new(Direction::Store, target, 0, address, length)
        };
        // SAFETY: `content` outlives the wait below.
        let operation = unsafe { handle.submit(request) }.unwrap();
        drop(file);
        operation.wait().unwrap();
        assert!(read(&path) == content, "{engine}");
        let read_only = std::fs::File::open(&path).unwrap();
        let target = Target::Descriptor(read_only.as_raw_fd());
        let request = Request::new(Direction::Store, target, 0, address, length);
        // SAFETY: `content` outlives the call.
        let error = unsafe { handle.run(request) }.unwrap_err();
        assert_eq!(error.os_code(), Some(rustix::io::Errno::BADF.raw_os_error()), "{error}");
    }
}

#[test]
fn a_file_in_the_page_cache_is_read_from_there_and_dirty_bytes_are_seen() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    let content = pattern(9, 5_000_003);
    std::fs::write(&path, &content).unwrap();
    for engine in engines() {
        let handle = Handle::new(small_blocks(engine, 2, DirectMode::Auto)).unwrap();
        let mut back = vec![0; content.len()];
        handle.load(&path, 0, &mut back).unwrap();
        assert!(back == content, "{engine}");
    }
    let off = Options { page_cache: false, ..Options::default() };
    let mut back = vec![0; content.len()];
    let handle = Handle::new(off).unwrap();
    handle.load(&path, 0, &mut back).unwrap();
    assert!(back == content);
    assert_eq!(handle.stats().bytes_cached, 0);
}

#[test]
fn every_durability_leaves_the_same_bytes() {
    let directory = directory();
    for engine in engines() {
        for durability in [Durability::None, Durability::Data, Durability::Full] {
            let path = directory.path().join(format!("{durability:?}"));
            let options = Options { durability, ..small_blocks(engine, 2, DirectMode::Auto) };
            let content = pattern(4, 200_001);
            Handle::new(options).unwrap().store(&path, &content).unwrap();
            assert!(read(&path) == content, "{engine} {durability:?}");
            std::fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn a_file_shorter_than_the_tensor_is_refused_with_both_sizes() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    std::fs::write(&path, vec![1; 4000]).unwrap();
    let handle = Handle::new(Options::default()).unwrap();
    let error = handle.load(&path, 0, &mut vec![0; 8000]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShortFile);
    let text = error.to_string();
    assert!(text.contains("8000") && text.contains("4000"), "{text}");
    let mut back = vec![0; 4000];
    handle.load(&path, 0, &mut back).unwrap();
    assert_eq!(back, vec![1; 4000]);
}

#[test]
fn an_offset_that_no_file_has_is_refused_whether_the_file_is_cached_or_not() {
    let directory = directory();
    let path = directory.path().join("w.bin");
    std::fs::write(&path, pattern(1, 100)).unwrap();
    let handle = Handle::new(Options::default()).unwrap();
    for offset in [u64::MAX, u64::MAX - 1, 1 << 63, (1 << 63) - 1] {
        for length in [1, 100] {
            let error = handle.load(&path, offset, &mut vec![0; length]).unwrap_err();
            let kind = error.kind();
            assert!(matches!(kind, ErrorKind::InvalidInput | ErrorKind::ShortFile), "{error}");
        }
    }
}

#[test]
fn one_operation_may_be_longer_than_the_kernel_moves_in_a_call() {
    const LENGTH: usize = (2 << 30) + (1 << 20) + 100;
    const STEP: usize = 4093;
    let directory = directory();
    let path = directory.path().join("w.bin");
    let mut memory = match Pool::global().allocate(LENGTH, 4096) {
        Ok(memory) => memory,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let options = Options { block_size: 1 << 30, ..Options::default() };
    let handle = Handle::new(options).unwrap();
    let marks = pattern(1, LENGTH.div_ceil(STEP));
    for (mark, byte) in marks.iter().zip(memory.as_mut_slice().iter_mut().step_by(STEP)) {
        *byte = *mark;
    }
    match handle.store(&path, memory.as_slice()) {
        Err(error) if error.os_code() == Some(28) => return eprintln!("skipped: {error}"),
        result => result.unwrap(),
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), LENGTH as u64);
    memory.as_mut_slice().fill(0xEE);
    handle.load(&path, 0, memory.as_mut_slice()).unwrap();
    for (chunk, mark) in memory.as_slice().chunks(STEP).zip(&marks) {
        assert!(chunk[0] == *mark && chunk[1..].iter().all(|byte| *byte == 0));
    }
}
