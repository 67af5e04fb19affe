//! Streams of tensors: right bytes that stay, within a budget, with back-pressure.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay::io::{ErrorKind, Handle, Lent, Options};
use forebay::safetensors::{
    Dtype, Header, Opened, SaveOptions, Source, Stop, Stream, StreamOptions, Streamed, TensorData,
    save,
};
use forebay_testkit::memory::pattern;

/// Staging memory of the tests' handles.
const STAGING: u64 = 1 << 20;
const COUNT: u64 = 60;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn handle() -> Handle {
    Handle::new(Options { staging_bytes: 1 << 20, ..Options::default() }).unwrap()
}

fn name(index: u64) -> String {
    format!("t{index:02}")
}

/// The bytes of a test's tensor: each of another odd length.
fn bytes(index: u64) -> Vec<u8> {
    pattern(index, usize::try_from(200_001 + index * 1000).unwrap())
}

fn save_all(handle: &Handle, path: &Path) {
    let all: Vec<_> = (0..COUNT).map(|index| (name(index), bytes(index))).collect();
    let shapes: Vec<_> = all.iter().map(|(_, bytes)| [bytes.len() as u64]).collect();
    let data: Vec<_> = all
        .iter()
        .zip(&shapes)
        .map(|((name, bytes), shape)| TensorData {
            name,
            dtype: Dtype::U8,
            shape,
            bytes: Lent::Host(bytes),
        })
        .collect();
    save(handle, path, &data, None, &SaveOptions::default()).unwrap();
}

fn open(path: &Path) -> Arc<Opened> {
    Arc::new(Source::of(path).open().unwrap())
}

fn options(budget_bytes: u64) -> StreamOptions {
    StreamOptions { names: None, budget_bytes, verify: true, timeout: Duration::from_millis(100) }
}

fn index_of(tensor: &Streamed) -> u64 {
    tensor.info().name[1..].parse().unwrap()
}

#[test]
fn all_tensors_come_once_in_order_and_within_the_budget() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path);
    for budget in [STAGING + 300_000, STAGING + 2_000_000, 1 << 30] {
        let mut stream = Stream::new(&handle, open(&path), options(budget)).unwrap();
        let mut count = 0;
        while let Some(tensor) = stream.next(&handle, &Stop::default()).unwrap() {
            assert_eq!(index_of(&tensor), count);
            assert!(tensor.bytes() == bytes(count));
            count += 1;
        }
        assert_eq!(count, COUNT);
        let peak = stream.pool().stats().peak_bytes as u64;
        assert!(peak > 0 && peak + STAGING <= budget, "{peak} of {budget}");
    }
}

#[test]
fn tensors_that_are_held_stay_as_they_are_and_stop_the_stream_until_they_go() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path);
    let mut stream = Stream::new(&handle, open(&path), options(STAGING + 2_000_000)).unwrap();
    let mut held = Vec::new();
    let error = loop {
        match stream.next(&handle, &Stop::default()) {
            Ok(tensor) => held.push(tensor.unwrap()),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let used = stream.pool().stats().used_bytes;
    assert!(error.to_string().contains(&format!(" {used} of the budget")), "{error}");
    let wanted = format!("{:?}", name(held.len() as u64));
    assert!(error.to_string().contains(&wanted), "{error}");
    for tensor in &held {
        assert!(tensor.bytes() == bytes(index_of(tensor)));
    }

    let last = held.pop().unwrap();
    drop(held);
    let mut count = index_of(&last) + 1;
    while let Some(tensor) = stream.next(&handle, &Stop::default()).unwrap() {
        assert!(tensor.bytes() == bytes(count));
        count += 1;
    }
    assert_eq!(count, COUNT);
    drop(stream);
    drop(handle);
    assert!(last.bytes() == bytes(index_of(&last)));
}

#[test]
fn a_stream_waits_for_what_another_thread_drops() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path);
    let options = StreamOptions { timeout: Duration::from_secs(60), ..options(STAGING + 700_000) };
    let mut stream = Stream::new(&handle, open(&path), options).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel::<Streamed>();
    let consumer = std::thread::spawn(move || {
        let mut count = 0;
        for tensor in receiver {
            assert!(tensor.bytes() == bytes(count));
            count += 1;
        }
        count
    });
    while let Some(tensor) = stream.next(&handle, &Stop::default()).unwrap() {
        sender.send(tensor).unwrap();
    }
    drop(sender);
    assert_eq!(consumer.join().unwrap(), COUNT);
}

#[test]
fn a_tensor_that_alone_exceeds_the_budget_is_refused_at_once_with_the_numbers() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path);
    let error = Stream::new(&handle, open(&path), options(STAGING + 200_000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    for number in [(STAGING + 200_000).to_string(), bytes(0).len().to_string()] {
        assert!(error.to_string().contains(&number), "{error}");
    }
}

#[test]
fn a_subset_is_streamed_in_the_order_of_the_file() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path);
    let names = Some(vec![name(40), name(3), name(4), name(3)]);
    let options = StreamOptions { names, ..options(STAGING + 10_000_000) };
    let mut stream = Stream::new(&handle, open(&path), options).unwrap();
    for index in [3, 4, 40] {
        let tensor = stream.next(&handle, &Stop::default()).unwrap().unwrap();
        assert!(index_of(&tensor) == index && tensor.bytes() == bytes(index));
    }
    assert!(stream.next(&handle, &Stop::default()).unwrap().is_none());
}

#[test]
fn a_changed_byte_ends_the_stream_with_the_same_error_each_time() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path);
    let header = Header::read(&path).unwrap();
    let place = header.data_start() + header.get(&name(30)).unwrap().start;
    let mut content = fs::read(&path).unwrap();
    content[usize::try_from(place).unwrap()] ^= 0x80;
    fs::write(&path, content).unwrap();
    let mut stream = Stream::new(&handle, open(&path), options(STAGING + 700_000)).unwrap();
    let mut count = 0;
    let error = loop {
        match stream.next(&handle, &Stop::default()) {
            Ok(tensor) => assert!(tensor.unwrap().bytes() == bytes(count)),
            Err(error) => break error,
        }
        count += 1;
    };
    assert!(error.kind() == ErrorKind::Mismatch && error.to_string().contains("\"t30\""));
    assert!(count <= 30);
    let again = stream.next(&handle, &Stop::default()).unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
}

#[test]
fn a_stop_ends_a_call_and_the_stream_can_go_on() {
    let directory = directory();
    let path = directory.path().join("m.safetensors");
    let handle = handle();
    save_all(&handle, &path);
    let mut stream = Stream::new(&handle, open(&path), options(STAGING + 700_000)).unwrap();
    let stop = Stop::default();
    stop.request();
    let error = stream.next(&handle, &stop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    for index in 0..COUNT {
        let tensor = stream.next(&handle, &Stop::default()).unwrap().unwrap();
        assert!(index_of(&tensor) == index && tensor.bytes() == bytes(index));
    }
}
