//! Files of tensors by the command: what is listed, what is noticed, what is left behind.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use forebay::checkpoint::{self, CheckpointOptions, Checkpointer, Meanwhile, State};
use forebay::io::{Handle, Lent, Options};
use forebay::npy;
use forebay::safetensors::{Draft, Dtype, Header, SaveOptions, TensorData, TensorSpec, save};
use serde_json::Value;
use tempfile::TempDir;

fn forebay(arguments: &[&str], directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments).current_dir(directory).env("LC_ALL", "C.UTF-8");
    command
}

/// Runs the command in a directory: its exit code, and what it said.
fn run(arguments: &[&str], directory: &TempDir) -> (i32, String, String) {
    let Output { status, stdout, stderr } = forebay(arguments, directory.path()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// Runs it, and it has to be well.
fn well(arguments: &[&str], directory: &TempDir) -> String {
    let (code, stdout, stderr) = run(arguments, directory);
    assert_eq!(code, 0, "{arguments:?}: {stdout}{stderr}");
    stdout
}

fn object(arguments: &[&str], directory: &TempDir) -> Value {
    serde_json::from_str(&well(&[arguments, &["--json"]].concat(), directory)).unwrap()
}

struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> Tensor {
    let length = usize::try_from(dtype.bytes_of(shape).unwrap()).unwrap();
    // A prime, so that pages differ.
    let seed = name.len();
    let bytes = (0..length).map(|index| u8::try_from((index + seed) % 251).unwrap()).collect();
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

/// Every dtype, odd shapes, names that no file can have.
fn zoo() -> Vec<Tensor> {
    let dtypes = Dtype::ALL.iter().filter(|dtype| dtype.bits() >= 8);
    let mut zoo: Vec<Tensor> =
        dtypes.map(|dtype| tensor(&format!("dtype.{dtype}"), *dtype, &[3, 5])).collect();
    zoo.push(tensor("scalar", Dtype::F32, &[]));
    zoo.push(tensor("empty", Dtype::Bf16, &[0, 5]));
    zoo.push(tensor("large", Dtype::F32, &[1000, 517]));
    for name in
        ["", "..", "../../etc/passwd", "/abs", ".hidden", "a/b", "größe", "a\nb\t", "100%2F"]
    {
        zoo.push(tensor(name, Dtype::U8, &[7]));
    }
    zoo
}

fn store(path: &Path, tensors: &[Tensor], checksums: bool) {
    let handle = Handle::new(Options::default()).unwrap();
    let data = tensors.iter().map(|Tensor { name, dtype, shape, bytes }| TensorData {
        name,
        dtype: *dtype,
        shape,
        bytes: Lent::Host(bytes),
    });
    let data: Vec<TensorData<'_>> = data.collect();
    let metadata = BTreeMap::from([("author".to_owned(), "somebody".to_owned())]);
    let options = SaveOptions { checksums, ..SaveOptions::default() };
    save(&handle, path, &data, Some(&metadata), &options).unwrap();
}

/// The bytes of every tensor of a file, by name, with dtype and shape.
fn contents(path: &Path) -> BTreeMap<String, (Dtype, Vec<u64>, Vec<u8>)> {
    let (header, all) = (Header::read(path).unwrap(), fs::read(path).unwrap());
    let data = &all[usize::try_from(header.data_start()).unwrap()..];
    let tensors = header.tensors().iter().map(|tensor| {
        let range = usize::try_from(tensor.start).unwrap()..usize::try_from(tensor.end).unwrap();
        (tensor.name.clone(), (tensor.dtype, tensor.shape.clone(), data[range].to_vec()))
    });
    tensors.collect()
}

/// A directory with the zoo in `model.safetensors`.
fn with_zoo() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    store(&directory.path().join("model.safetensors"), &zoo(), true);
    directory
}

/// Changes one bit of a tensor.
fn flip(path: &Path, tensor: &str) {
    let header = Header::read(path).unwrap();
    let offset = header.data_start() + header.get(tensor).unwrap().start;
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

/// What is in a directory, hidden files included.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_tensor_is_listed_with_its_place() {
    let directory = with_zoo();
    let listed = object(&["ls", "model.safetensors"], &directory);
    let path = directory.path().join("model.safetensors");
    let (header, all) = (Header::read(&path).unwrap(), fs::read(&path).unwrap());
    let tensors = listed["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), zoo().len());
    for found in tensors {
        let wanted =
            zoo().into_iter().find(|tensor| found["name"] == tensor.name.as_str()).unwrap();
        assert_eq!(found["dtype"], wanted.dtype.name());
        assert_eq!(found["shape"], serde_json::json!(wanted.shape));
        let offset = usize::try_from(found["offset"].as_u64().unwrap()).unwrap();
        let length = usize::try_from(found["bytes"].as_u64().unwrap()).unwrap();
        assert_eq!(all[offset..offset + length], wanted.bytes);
    }
    assert_eq!(listed["totals"]["bytes"], header.file_bytes() - header.data_start());
    assert_eq!(listed["metadata"], serde_json::json!({"author": "somebody"}));
    let shown = well(&["ls", "model.safetensors"], &directory);
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines.iter().any(|line| line.starts_with("a\\nb\\t ")), "{shown}");
    assert!(lines.iter().any(|line| line.starts_with("empty  ") && line.contains("[0, 5]")));
    assert!(lines.contains(&"1 file with checksums"), "{shown}");
}

#[test]
fn tensors_go_through_numpys_format_and_come_back_bit_for_bit() {
    let directory = with_zoo();
    well(&["convert", "model.safetensors", "arrays"], &directory);
    let files = names(&directory.path().join("arrays"));
    assert_eq!(files.len(), zoo().len());
    assert!(files.contains(&"%2E.%2F..%2Fetc%2Fpasswd.npy".to_owned()), "{files:?}");
    assert_eq!(names(directory.path()), ["arrays", "model.safetensors"]);
    for Tensor { name, dtype, shape, bytes } in zoo() {
        let path = directory.path().join("arrays").join(npy::file_name(&name).unwrap());
        let header = npy::Header::read(&path).unwrap();
        assert_eq!((header.element.dtype, &header.shape), (dtype, &shape), "{name:?}");
        assert!(fs::read(&path).unwrap().ends_with(&bytes), "{name:?}");
    }
    well(&["convert", "arrays", "back.safetensors"], &directory);
    let back = contents(&directory.path().join("back.safetensors"));
    assert_eq!(back, contents(&directory.path().join("model.safetensors")));
}

#[test]
fn shards_have_their_index_and_come_together_again() {
    let directory = with_zoo();
    well(&["convert", "model.safetensors", "sharded", "--shards", "3"], &directory);
    let sharded = directory.path().join("sharded");
    assert_eq!(names(&sharded).len(), 4);
    let index = fs::read(sharded.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    for (name, shard) in index["weight_map"].as_object().unwrap() {
        let header = Header::read(sharded.join(shard.as_str().unwrap())).unwrap();
        assert!(header.checksum(name).is_some(), "{name:?}");
    }
    assert_eq!(index["weight_map"].as_object().unwrap().len(), zoo().len());
    let shown = well(&["ls", "sharded"], &directory);
    assert!(shown.contains("3 files with checksums"), "{shown}");
    let converted = object(&["convert", "sharded", "whole.safetensors"], &directory);
    assert_eq!(converted["verified"], zoo().len());
    let whole = directory.path().join("whole.safetensors");
    assert_eq!(contents(&whole), contents(&directory.path().join("model.safetensors")));
    well(&["convert", "whole.safetensors", "small", "--shard-size", "100K"], &directory);
    for name in names(&directory.path().join("small")).iter().filter(|name| !name.ends_with("json"))
    {
        let shard = contents(&directory.path().join("small").join(name));
        let bytes: usize = shard.values().map(|(_, _, bytes)| bytes.len()).sum();
        assert!(bytes <= 100 << 10 || shard.len() == 1, "{name}");
    }
}

#[test]
fn a_flipped_bit_is_found_by_file_and_tensor_and_not_copied_on() {
    let directory = with_zoo();
    well(&["convert", "model.safetensors", "sharded", "--shards", "3"], &directory);
    let shard = names(&directory.path().join("sharded")).into_iter().find(|name| {
        name.ends_with(".safetensors")
            && contents(&directory.path().join("sharded").join(name)).contains_key("large")
    });
    let shard = shard.unwrap();
    flip(&directory.path().join("sharded").join(&shard), "large");
    let (code, stdout, stderr) = run(&["verify", "sharded"], &directory);
    assert_eq!((code, stderr.as_str()), (1, ""));
    let line = stdout.lines().find(|line| line.starts_with('✗')).unwrap();
    assert!(line.contains(&shard) && line.contains("\"large\""), "{stdout}");
    let output = forebay(&["verify", "sharded", "--json"], directory.path()).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["mismatched"], &found["verified"]), (&1.into(), &(zoo().len() - 1).into()));
    let (code, _, stderr) = run(&["convert", "sharded", "copy.safetensors"], &directory);
    assert_eq!(code, 1);
    assert!(stderr.contains("\"large\"") && stderr.contains(&shard), "{stderr}");
    assert_eq!(names(directory.path()), ["model.safetensors", "sharded"]);
    let output = forebay(&["cat", "sharded", "--tensor", "large"], directory.path()).output();
    let Output { status, stderr, .. } = output.unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("\"large\"") && stderr.contains(&shard), "{stderr}");
}

#[test]
fn what_is_broken_is_named_and_ends_with_one() {
    let directory = with_zoo();
    well(&["convert", "model.safetensors", "sharded", "--shards", "3"], &directory);
    let sharded = directory.path().join("sharded");
    let second = sharded.join("model-00002-of-00003.safetensors");
    let whole = fs::read(&second).unwrap();
    fs::write(&second, &whole[..whole.len() - 1]).unwrap();
    let (code, _, stderr) = run(&["verify", "sharded"], &directory);
    assert_eq!(code, 1);
    assert!(stderr.contains("model-00002-of-00003.safetensors"), "{stderr}");
    fs::remove_file(&second).unwrap();
    let (code, _, stderr) = run(&["verify", "sharded"], &directory);
    assert_eq!(code, 1);
    assert!(stderr.contains("model-00002-of-00003.safetensors"), "{stderr}");
    fs::write(directory.path().join("junk.safetensors"), vec![b'x'; 100]).unwrap();
    let (code, _, stderr) = run(&["verify", "junk.safetensors"], &directory);
    assert_eq!(code, 1, "{stderr}");
    assert_eq!(run(&["verify", "missing"], &directory).0, 2);
    assert_eq!(run(&["verify", "/dev"], &directory).0, 2);
    assert_eq!(run(&["ls", "missing"], &directory).0, 2);
}

/// Saves a checkpoint with a shard for each tensor.
fn checkpoint(directory: &Path, step: u64, tensors: &[Tensor]) {
    let options = CheckpointOptions { shard_bytes: 1, ..CheckpointOptions::default() };
    let checkpointer = Checkpointer::open(directory, options).unwrap();
    let specs: Vec<checkpoint::TensorSpec> = tensors
        .iter()
        .map(|tensor| checkpoint::TensorSpec {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
        })
        .collect();
    let bytes: Vec<Lent<'_>> = tensors.iter().map(|tensor| Lent::Host(&tensor.bytes)).collect();
    let state = State { tensors: &specs, bytes: &bytes, rest: b"{}" };
    let ticket = checkpointer.save(step, state, Meanwhile::Waits, &mut || Ok(())).unwrap();
    ticket.unwrap().wait().unwrap();
}

#[test]
fn a_checkpoint_is_verified_by_its_manifest() {
    let directory = tempfile::tempdir().unwrap();
    let step = directory.path().join("step-00000042");
    let shards = ["shard-00001.safetensors", "shard-00002.safetensors"];
    let (first, second) = (tensor("a", Dtype::F32, &[999]), tensor("b", Dtype::U8, &[5000]));
    checkpoint(directory.path(), 42, &[first, second]);
    assert!(well(&["ls", "step-00000042"], &directory).contains("2 files with checksums"));
    assert!(well(&["verify", "step-00000042"], &directory).contains("2 as written"));
    let (code, _, stderr) = run(&["ls", "."], &directory);
    assert!(code == 2 && stderr.contains("such as step-00000042"), "{stderr}");
    let fails = |named: &str| {
        let (code, stdout, stderr) = run(&["verify", "step-00000042"], &directory);
        assert!(code == 1 && (stdout + &stderr).contains(named), "{named}: {stderr}");
    };
    let whole = fs::read(step.join(shards[1])).unwrap();
    flip(&step.join(shards[1]), "b");
    fails("the tensor \"b\"");
    fs::write(step.join(shards[1]), &whole[..whole.len() - 1]).unwrap();
    fails(shards[1]);
    // Another valid file in its place: its own checksums agree with it.
    let mut other = tensor("b", Dtype::U8, &[5000]);
    other.bytes[7] ^= 1;
    store(&step.join(shards[1]), &[other], true);
    fails("the tensor \"b\"");
    fs::remove_file(step.join(shards[1])).unwrap();
    fails(shards[1]);
    fs::write(step.join(shards[1]), &whole).unwrap();
    fs::write(step.join("state.json"), "[]").unwrap();
    fails("state.json");
    fs::remove_file(step.join("state.json")).unwrap();
    fails("state.json");
    fs::write(step.join("state.json"), "{}").unwrap();
    well(&["verify", "step-00000042"], &directory);
    let text = fs::read_to_string(step.join("manifest.json")).unwrap();
    fs::write(step.join("manifest.json"), text.replace(": 42,", ": 43,")).unwrap();
    fails("manifest.json");
}

#[test]
fn a_file_without_checksums_is_said_to_have_none() {
    let directory = tempfile::tempdir().unwrap();
    store(&directory.path().join("plain.safetensors"), &zoo(), false);
    let shown = well(&["verify", "plain.safetensors"], &directory);
    assert!(shown.contains("no checksums: the header is valid"), "{shown}");
    let found = object(&["verify", "plain.safetensors"], &directory);
    assert_eq!(found["unverified"], zoo().len());
    assert_eq!(found["files"][0]["checksums"], "absent");
    assert!(well(&["ls", "plain.safetensors"], &directory).contains("1 file without checksums"));
}

#[test]
fn ten_thousand_tensors_are_converted() {
    let directory = tempfile::tempdir().unwrap();
    let many: Vec<Tensor> =
        (0..10_000).map(|index| tensor(&format!("t/{index}"), Dtype::U16, &[index % 7])).collect();
    let path = directory.path().join("many.safetensors");
    store(&path, &many, true);
    well(&["convert", "many.safetensors", "arrays"], &directory);
    assert_eq!(names(&directory.path().join("arrays")).len(), 10_000);
    well(&["convert", "arrays", "back.safetensors"], &directory);
    assert_eq!(contents(&directory.path().join("back.safetensors")), contents(&path));
    let shown = well(&["verify", "back.safetensors"], &directory);
    assert!(shown.contains("10000 as written"), "{shown}");
}

#[test]
fn nothing_is_a_file_too() {
    let directory = tempfile::tempdir().unwrap();
    store(&directory.path().join("none.safetensors"), &[], true);
    well(&["convert", "none.safetensors", "copy.safetensors"], &directory);
    assert!(well(&["ls", "copy.safetensors"], &directory).starts_with("0 tensors"));
    well(&["verify", "copy.safetensors"], &directory);
}

#[test]
fn a_new_file_has_the_mode_of_any_new_file() {
    let directory = with_zoo();
    well(&["convert", "model.safetensors", "copy.safetensors"], &directory);
    well(&["convert", "model.safetensors", "arrays"], &directory);
    fs::write(directory.path().join("file"), "").unwrap();
    fs::create_dir(directory.path().join("folder")).unwrap();
    let mode = |name: &str| fs::metadata(directory.path().join(name)).unwrap().permissions().mode();
    assert_eq!(mode("copy.safetensors"), mode("file"));
    assert_eq!(mode("arrays/large.npy"), mode("file"));
    assert_eq!(mode("arrays"), mode("folder"));
}

#[test]
fn what_is_there_is_replaced_only_if_asked_and_keeps_its_mode() {
    let directory = with_zoo();
    let copy = directory.path().join("copy.safetensors");
    fs::write(&copy, "mine").unwrap();
    fs::set_permissions(&copy, PermissionsExt::from_mode(0o640)).unwrap();
    let (code, _, stderr) = run(&["convert", "model.safetensors", "copy.safetensors"], &directory);
    assert_eq!(code, 2);
    assert!(stderr.contains("--force"), "{stderr}");
    assert_eq!(fs::read(&copy).unwrap(), b"mine");
    well(&["convert", "model.safetensors", "copy.safetensors", "--force"], &directory);
    assert_eq!(contents(&copy), contents(&directory.path().join("model.safetensors")));
    assert_eq!(fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o640);
    // In place, which is how a file gets checksums.
    well(&["convert", "copy.safetensors", "copy.safetensors", "--force"], &directory);
    assert_eq!(contents(&copy), contents(&directory.path().join("model.safetensors")));
    let link = directory.path().join("link.safetensors");
    std::os::unix::fs::symlink("copy.safetensors", &link).unwrap();
    well(&["convert", "model.safetensors", "link.safetensors", "--force"], &directory);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    // Also if there is nothing where it leads.
    fs::remove_file(&copy).unwrap();
    well(&["convert", "model.safetensors", "link.safetensors"], &directory);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(contents(&copy), contents(&directory.path().join("model.safetensors")));
}

#[test]
fn what_is_no_file_is_refused_rather_than_waited_for() {
    let directory = with_zoo();
    fs::create_dir(directory.path().join("arrays")).unwrap();
    for pipe in ["pipe", "arrays/a.npy"] {
        let made = Command::new("mkfifo").arg(pipe).current_dir(directory.path()).status();
        assert!(made.unwrap().success());
    }
    for arguments in [
        &["ls", "pipe"][..],
        &["verify", "pipe"],
        &["cat", "pipe", "--tensor", "a"],
        &["convert", "pipe", "out.safetensors"],
        &["ls", "arrays"],
    ] {
        let (code, _, stderr) = run(arguments, &directory);
        assert_eq!(code, 2, "{arguments:?}: {stderr}");
        assert!(stderr.contains("no regular file"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_source_that_changes_meanwhile_is_an_error_and_nothing_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("sparse.safetensors");
    let replace: fn(&Path) = |source| {
        let other = source.with_extension("other");
        // As long as the one before, and made at once: a copy could come too late.
        let length = fs::metadata(source).unwrap().len();
        File::create(&other).unwrap().set_len(length).unwrap();
        fs::rename(&other, source).unwrap();
    };
    let change: fn(&Path) = |source| {
        let file = File::options().write(true).open(source).unwrap();
        file.write_all_at(b"changed", file.metadata().unwrap().len() - 7).unwrap();
    };
    for (meddle, said) in [(replace, "another file"), (change, "was written to")] {
        sparse(&directory);
        let child = under_way(&directory, "copy.safetensors");
        meddle(&source);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
        assert_eq!(names(directory.path()), ["sparse.safetensors"]);
    }
}

#[test]
fn of_two_that_write_the_same_at_once_one_wins_with_all_of_it() {
    let directory = with_zoo();
    for output in ["copy.safetensors", "arrays"] {
        let start = || {
            let mut command = forebay(&["convert", "model.safetensors", output], directory.path());
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        let mut both = [start(), start()];
        let codes = both.each_mut().map(|child| child.wait().unwrap().code().unwrap());
        assert_eq!(codes.iter().filter(|code| **code == 0).count(), 1, "{codes:?}");
        well(&["convert", output, "back.safetensors", "--force"], &directory);
        let back = contents(&directory.path().join("back.safetensors"));
        assert_eq!(back, contents(&directory.path().join("model.safetensors")));
        assert!(scratches(&directory).is_empty());
    }
}

#[test]
fn a_directory_is_replaced_only_if_nothing_else_is_lost() {
    let directory = with_zoo();
    for output in ["arrays", "arrays", "v1.replaced", "v1.replaced"] {
        well(&["convert", "model.safetensors", output, "--to", "npy", "--force"], &directory);
    }
    assert_eq!(names(&directory.path().join("v1.replaced")).len(), zoo().len());
    fs::remove_dir_all(directory.path().join("v1.replaced")).unwrap();
    let other = directory.path().join("arrays/thesis.txt");
    fs::write(&other, "mine").unwrap();
    let (code, _, stderr) = run(&["convert", "model.safetensors", "arrays", "--force"], &directory);
    assert_eq!(code, 2);
    assert!(stderr.contains("thesis.txt"), "{stderr}");
    assert_eq!(fs::read(&other).unwrap(), b"mine");
    assert_eq!(names(directory.path()), ["arrays", "model.safetensors"]);
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    let directory = with_zoo();
    for arguments in [
        &["a.npy"][..],
        &["a.safetensors", "--shards", "2"],
        &["a.pt", "--shards", "2"],
        &["a", "--to", "npy", "--shard-size", "1M"],
        &["a", "--shards", "0"],
        &["a", "--shards", "1000"],
        &["a.safetensors", "--budget", "1M"],
        &["a", "--shards", "2", "--shard-size", "1M"],
        &["..", "--force"],
    ] {
        let all = [&["convert", "model.safetensors"], arguments].concat();
        let (code, _, stderr) = run(&all, &directory);
        assert_eq!(code, 2, "{arguments:?}: {stderr}");
    }
    assert_eq!(run(&["convert", "model.safetensors", "a.pt"], &directory).0, 3);
    assert_eq!(run(&["convert", "model.safetensors", "no/such/a.safetensors"], &directory).0, 3);
    assert_eq!(names(directory.path()), ["model.safetensors"]);
}

/// A file of two gigabytes that takes no room.
fn sparse(directory: &TempDir) {
    let specs = [TensorSpec { name: "zeros", dtype: Dtype::U8, shape: &[2 << 30] }];
    let draft = Draft::new(&specs, None, false).unwrap();
    let path = directory.path().join("sparse.safetensors");
    fs::write(&path, draft.to_bytes(&[])).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(draft.file_bytes()).unwrap();
}

/// Starts a conversion, and returns when it is writing.
fn under_way(directory: &TempDir, output: &str) -> Child {
    let arguments = ["convert", "sparse.safetensors", output, "--budget", "16M"];
    let child = forebay(&arguments, directory.path()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while scratches(directory).iter().all(|scratch| names(scratch).len() < 2) {
        assert!(Instant::now() < deadline, "it doesn't begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

fn scratches(directory: &TempDir) -> Vec<PathBuf> {
    let all =
        names(directory.path()).into_iter().filter(|name| name.starts_with("forebay-convert"));
    all.map(|name| directory.path().join(name)).collect()
}

#[test]
fn ctrl_c_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    sparse(&directory);
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let mut child = under_way(&directory, "copy.safetensors");
        let killed = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(killed.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert_eq!(names(directory.path()), ["sparse.safetensors"]);
    }
}

#[test]
fn a_killed_conversion_leaves_what_was_there_and_the_next_one_cleans_up() {
    let directory = tempfile::tempdir().unwrap();
    sparse(&directory);
    let mut child = under_way(&directory, "copy.safetensors");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!directory.path().join("copy.safetensors").exists());
    assert_eq!(scratches(&directory).len(), 1);
    store(&directory.path().join("small.safetensors"), &zoo(), true);
    well(&["convert", "small.safetensors", "copy.safetensors"], &directory);
    let left = names(directory.path());
    assert_eq!(left, ["copy.safetensors", "small.safetensors", "sparse.safetensors"]);
}

#[test]
fn a_tensor_is_printed_as_an_array() {
    let directory = with_zoo();
    well(&["convert", "model.safetensors", "arrays"], &directory);
    for name in ["large", "scalar", "empty", "a\nb\t", "dtype.BF16"] {
        let arguments = ["cat", "model.safetensors", "--tensor", name];
        let output = forebay(&arguments, directory.path()).output().unwrap();
        let file = directory.path().join("arrays").join(npy::file_name(name).unwrap());
        assert!(output.status.success() && output.stderr.is_empty(), "{name:?}");
        assert_eq!(output.stdout, fs::read(file).unwrap(), "{name:?}");
    }
    let (code, stdout, stderr) =
        run(&["cat", "model.safetensors", "--tensor", "nonsense"], &directory);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("nonsense") && stderr.contains("forebay ls"), "{stderr}");
    let (code, _, _) =
        run(&["cat", "model.safetensors", "--tensor", "large", "--json"], &directory);
    assert_eq!(code, 2);
}

#[test]
fn nothing_is_printed_of_a_tensor_that_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let mut array = npy::Header::to_bytes(Dtype::U8, &[2, 3]).unwrap();
    let at = array.windows(5).position(|text| text == b"False").unwrap();
    array[at..at + 5].copy_from_slice(b"True ");
    array.extend_from_slice(b"abcdef");
    fs::write(directory.path().join("turned.npy"), array).unwrap();
    let arguments = ["cat", "turned.npy", "--tensor", "turned"];
    let (code, stdout, stderr) = run(&arguments, &directory);
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    assert!(stderr.contains("turned.npy") && stderr.contains("convert"), "{stderr}");
}

#[test]
fn a_reader_of_a_tensor_that_goes_away_is_taken_in_silence() {
    let directory = with_zoo();
    let arguments = ["cat", "model.safetensors", "--tensor", "large"];
    let mut child = forebay(&arguments, directory.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first[..6], b"\x93NUMPY");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = forebay(&arguments, directory.path()).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_dtype_that_numpy_cannot_be_given_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    store(&directory.path().join("m.safetensors"), &[tensor("four", Dtype::F4, &[4])], true);
    let (code, _, stderr) = run(&["convert", "m.safetensors", "arrays"], &directory);
    assert_eq!(code, 2);
    assert!(stderr.contains("\"four\"") && stderr.contains("F4"), "{stderr}");
    assert_eq!(names(directory.path()), ["m.safetensors"]);
    assert_eq!(run(&["cat", "m.safetensors", "--tensor", "four"], &directory).0, 2);
}

/// Every key of an object and of what is in it; names of tensors, dtypes and metadata aren't keys.
fn keys(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                found.push(key.clone());
                if !["dtypes", "metadata"].contains(&key.as_str()) {
                    keys(field, found);
                }
            }
        }
        Value::Array(elements) => elements.iter().for_each(|element| keys(element, found)),
        _ => {}
    }
}

#[test]
fn the_docs_have_every_field() {
    let directory = with_zoo();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/command.md");
    let docs = fs::read_to_string(path).unwrap();
    flip(&directory.path().join("model.safetensors"), "large");
    let output =
        forebay(&["verify", "model.safetensors", "--json"], directory.path()).output().unwrap();
    store(&directory.path().join("plain.safetensors"), &zoo(), false);
    for (schema, found) in [
        ("ls", object(&["ls", "model.safetensors"], &directory)),
        ("verify", serde_json::from_slice(&output.stdout).unwrap()),
        ("convert", object(&["convert", "plain.safetensors", "copy.safetensors"], &directory)),
    ] {
        assert_eq!(found["schema"], format!("forebay.{schema}/1"));
        let section = docs.split_once(&format!("`forebay.{schema}/1`")).unwrap().1;
        let section = section.split("\n## ").next().unwrap();
        let mut all = Vec::new();
        keys(&found, &mut all);
        for key in all.iter().filter(|key| *key != "schema") {
            assert!(section.contains(&format!("`{key}`")), "`{key}` of {schema} isn't in the docs");
        }
    }
}
