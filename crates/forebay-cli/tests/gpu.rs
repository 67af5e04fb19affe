//! `forebay tune` and `forebay io` with memory of GPUs, on the stand-in for CUDA.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use forebay_standin::Standin;
use serde_json::{Value, json};

/// The command, the folder of its libraries, and one for all that it writes.
struct Rig {
    // Fields are dropped in order: the stand-in, which other tests wait for, is the last to go.
    folder: tempfile::TempDir,
    standin: Standin,
}

impl Rig {
    fn new() -> Self {
        let standin = Standin::new().unwrap();
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::create_dir(folder.path().join("drive")).unwrap();
        Self { folder, standin }
    }

    fn drive(&self) -> String {
        self.folder.path().join("drive").display().to_string()
    }

    /// Runs the command on a machine with these GPUs.
    fn run(&self, gpus: &str, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.standin.folder())
            .env("FOREBAY_STANDIN", gpus)
            .env("FOREBAY_PROFILES", self.folder.path().join("profiles.json"))
            .env("XDG_STATE_HOME", self.folder.path().join("state"))
            .output()
            .unwrap()
    }

    fn json(&self, gpus: &str, arguments: &[&str]) -> Value {
        let done = self.run(gpus, &[arguments, &["--json"]].concat());
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        serde_json::from_slice(&done.stdout).unwrap()
    }

    /// What a run says that ends with the code of a machine that can't take it.
    fn refusal(&self, gpus: &str, arguments: &[&str]) -> String {
        let done = self.run(gpus, arguments);
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(3), "{text}");
        assert_eq!(fs::read_dir(Path::new(&self.drive())).unwrap().count(), 0, "left behind");
        text
    }
}

#[test]
fn odd_sizes_of_gpu_memory_come_back_right_and_processes_have_a_gpu_each() {
    let rig = Rig::new();
    let words = "io --gpu --read --write --validate --io-size 3000007 --request-size 1000001 \
        --processes 3 --in-flight 2 --loops 1 --warmup-loops 0 --dir";
    let mut words: Vec<&str> = words.split_whitespace().collect();
    let drive = rig.drive();
    words.push(&drive);
    let found = rig.json("devices=2", &words);
    assert_eq!(found["valid"], json!(true));
    let gpu = |ordinal| json!({"ordinal": ordinal, "name": format!("Stand-in {ordinal}")});
    assert_eq!(found["gpus"], json!([gpu(0), gpu(1)]));
    for run in found["runs"].as_array().unwrap() {
        assert_eq!(run["moved"]["device_bytes"], json!(3 * 3_000_007), "{run}");
    }
    let text = rig.run("devices=2", &words);
    assert!(String::from_utf8_lossy(&text.stdout).contains("memory of GPU 1, Stand-in 1"));
}

#[test]
fn what_has_no_gpu_to_move_is_refused_with_the_reason() {
    let rig = Rig::new();
    let drive = rig.drive();
    let io = ["io", "--dir", &drive, "--io-size", "1M", "--gpu"];
    let tune = ["tune", "--nvme-dir", &drive, "--io-size", "8M", "--gpu"];
    for words in [&io[..], &tune[..]] {
        let text = rig.refusal("devices=0", words);
        assert!(text.contains("--gpu takes a GPU: cannot start the CUDA driver"), "{text}");
        assert!(text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
        let text = rig.refusal("devices=1 fail=cuMemAlloc_v2:1+:2", words);
        assert!(text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
    }
    let text = rig.refusal("devices=2", &[&tune[..], &["9"]].concat());
    assert!(text.contains("there is no CUDA device 9"), "{text}");
    let mapping = format!("{drive}:2");
    let text =
        rig.refusal("devices=2", &["io", "--gpu", "--folder_to_device_mapping", mapping.as_str()]);
    assert!(text.contains("names GPU 2, and there are 2"), "{text}");
}

#[test]
fn gpudirect_storage_that_is_not_there_is_never_replaced_by_another_route() {
    let rig = Rig::new();
    let drive = rig.drive();
    let io = ["io", "--dir", &drive, "--io-size", "1M", "--use-gds"];
    let tune = ["tune", "--nvme-dir", &drive, "--io-size", "8M", "--gds"];
    for words in [&io[..], &tune[..]] {
        let text = rig.refusal("devices=1 gds=absent", words);
        assert!(text.contains("GPU"), "{text}");
    }
}

#[test]
fn what_is_found_for_a_gpu_is_kept_beside_what_is_found_for_the_host() {
    let rig = Rig::new();
    let sweep = rig.folder.path().join("sweep.json");
    let candidates = json!({"block_size": ["256K", "1M"], "device_staging_bytes": ["2M", "8M"]});
    fs::write(&sweep, candidates.to_string()).unwrap();
    let (drive, sweep) = (rig.drive(), sweep.display().to_string());
    let words =
        ["tune", "--nvme-dir", &drive, "--io-size", "8M", "--sweep-config", &sweep, "--gpu", "1"];
    let found = rig.json("devices=2", &words);
    let target = &found["targets"][0];
    assert_eq!(target["memory"], json!("gpu"));
    assert_eq!(target["gpu"], json!({"ordinal": 1, "name": "Stand-in 1"}));
    assert_eq!(target["candidates"].as_array().unwrap().len(), 4);
    assert!(target["profile"].is_string());
    let staging = &target["read"]["device_staging_bytes"];
    assert!([json!(2 << 20), json!(8 << 20)].contains(staging), "{target}");
    assert!(target["block"]["aio"].get("use_gds").is_none());
    let text = rig.run("devices=2", &words);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("memory of GPU 1, Stand-in 1, through the host's"), "{text}");

    let without = rig.json("devices=2", &words[..words.len() - 2]);
    assert_eq!(without["targets"][0]["memory"], json!("host"));
    assert_eq!(without["targets"][0]["gpu"], json!(null));
    let shown = rig.json("devices=0", &["tune", "--show"]);
    let kinds: Vec<&Value> =
        shown["profiles"].as_array().unwrap().iter().map(|entry| &entry["memory"]).collect();
    assert_eq!(kinds, ["host", "gpu"]);
    let text = rig.run("devices=0", &["tune", "--show"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("staging"));
    // What is stored is forgotten of all kinds of memory, so one of them can't be named.
    for words in [["tune", "--forget", "--gpu"], ["tune", "--forget", "--no-read"]] {
        let done = rig.run("devices=2", &words);
        assert_eq!(done.status.code(), Some(2), "{done:?}");
    }
    assert_eq!(rig.json("devices=0", &["tune", "--show"]), shown);
    let forgotten = rig.json("devices=0", &["tune", "--forget"]);
    assert!(!forgotten["identities"].as_array().unwrap().is_empty());
    let shown = rig.json("devices=0", &["tune", "--show"]);
    assert_eq!(shown["profiles"], json!([]));
}

#[test]
fn the_report_says_what_the_driver_says_and_a_refusal_keeps_nothing_else_from_being_told() {
    let rig = Rig::new();
    let drive = rig.drive();
    for (gpus, words) in [
        ("devices=2", "12.4; this process sees 0: Stand-in 0, 1: Stand-in 1"),
        ("devices=0", "CUDA_ERROR_NO_DEVICE"),
    ] {
        let report = rig.json(gpus, &["report", &drive]);
        let findings = report["sections"].as_array().unwrap().iter();
        let mut findings = findings.flat_map(|section| section["findings"].as_array().unwrap());
        let found = findings.find(|finding| finding["id"] == "gpu.cuda").unwrap();
        assert!(found["detail"].as_str().unwrap().contains(words), "{found}");
        let library = report["facts"]["gpu"]["libcufile"].as_str().unwrap();
        assert_eq!(Path::new(library), rig.standin.folder().join("libcufile.so.0"));
        let text = rig.run(gpus, &["report", &drive]);
        assert_eq!(String::from_utf8_lossy(&text.stderr), "");
    }
    assert_eq!(fs::read_dir(&drive).unwrap().count(), 0);
}
