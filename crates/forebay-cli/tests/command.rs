//! The command as people run it: exit codes, streams, what comes out of a broken or a full one.
#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn forebay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments).env_remove("NO_COLOR").env("LC_ALL", "C.UTF-8");
    command
}

fn run(arguments: &[&str]) -> Output {
    forebay(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn subcommands() -> Vec<String> {
    let definition = forebay_cli::definition();
    definition.get_subcommands().map(|command| command.get_name().to_owned()).collect()
}

#[test]
fn a_report_tries_a_directory_and_leaves_nothing_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let done = run(&["report", path]);
    let shown = text(&done.stdout);
    assert_eq!(text(&done.stderr), "");
    for words in ["kernel", "locked memory", path, "try threads", "libcuda.so.1", "Python"] {
        assert!(shown.contains(words), "{words} in {shown}");
    }
    assert!(!shown.contains('\u{1b}'), "no colours into a pipe");
    let lines = shown.lines().filter(|line| !line.contains("as root: "));
    let longest = lines.map(|line| line.chars().count()).max().unwrap();
    assert!(longest <= 100, "{longest} columns: {shown}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_that_fails_is_told_and_the_others_are_tried() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let done = run(&["report", "/no/such/directory", path, "--json"]);
    assert_eq!((done.status.code(), text(&done.stderr)), (Some(1), String::new()));
    let report = object(&done);
    let sections = report["sections"].as_array().unwrap();
    let about = |title: &str| sections.iter().find(|section| section["title"] == title).unwrap();
    let missing = &about("/no/such/directory")["findings"][0];
    assert_eq!(missing["level"], "failure");
    assert!(missing["detail"].as_str().unwrap().contains("No such file"), "{missing}");
    let whole = directory.path().canonicalize().unwrap();
    let findings = about(whole.to_str().unwrap())["findings"].as_array().unwrap();
    assert!(findings.iter().any(|found| found["id"] == "directory.threads"), "{findings:?}");
}

#[test]
fn json_comes_with_its_schema_first() {
    for (arguments, schema) in [
        (&["report"][..], "report"),
        (&["completions", "bash"][..], "completions"),
        (&["man"][..], "man"),
    ] {
        let done = forebay(arguments).arg("--json").output().unwrap();
        let start = format!("{{\n  \"schema\": \"forebay.{schema}/1\",\n");
        assert!(text(&done.stdout).starts_with(&start), "{arguments:?}");
        object(&done);
    }
}

#[test]
fn a_failure_with_json_is_an_object_and_a_line() {
    for (arguments, code) in [
        (&["--json", "report", "--nonsense"][..], 2),
        (&["quickstart", "--size", "much", "--json"][..], 2),
        (&["quickstart", "--json"][..], 3),
        (&["deepspeed", "status", "--json"][..], 3),
        (&["man", "--dir", "/proc/no/such/directory", "--json"][..], 3),
    ] {
        let done = run(arguments);
        assert_eq!(done.status.code(), Some(code), "{arguments:?}");
        let failure = object(&done);
        assert_eq!(failure["schema"], "forebay.error/1");
        assert_eq!(failure["exit"], code);
        let message = failure["message"].as_str().unwrap();
        assert!(text(&done.stderr).contains(message), "{message}");
        assert!(!message.starts_with("error"), "{message}");
    }
}

#[test]
fn wrong_use_is_told_on_standard_error() {
    let done = run(&["report", "--nonsense"]);
    assert_eq!((done.status.code(), text(&done.stdout)), (Some(2), String::new()));
    assert!(text(&done.stderr).contains("--nonsense"));
}

#[test]
fn what_is_written_in_python_says_how_to_get_it() {
    let done = run(&["quickstart"]);
    assert_eq!(done.status.code(), Some(3));
    assert!(text(&done.stderr).contains("pip install forebay"));
}

#[test]
fn a_reader_that_goes_away_is_taken_in_silence() {
    for arguments in [&["report"][..], &["report", "--json"][..], &["man"][..], &["--help"][..]] {
        let mut child =
            forebay(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let done = child.wait_with_output().unwrap();
        assert_eq!((done.status.code(), text(&done.stderr)), (Some(0), String::new()));
    }
}

#[test]
fn a_full_output_is_a_failure_with_its_reason() {
    for arguments in [&["report"][..], &["report", "--json"][..], &["man"][..], &["--help"][..]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let done = forebay(arguments).stdout(full).output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{arguments:?}");
        let complaint = text(&done.stderr);
        assert!(complaint.contains("cannot write to standard output"), "{complaint}");
        assert!(complaint.contains("No space left"), "{complaint}");
        assert_eq!(complaint.lines().count(), 1);
    }
}

#[test]
fn a_terminal_without_unicode_gets_ascii() {
    let done = forebay(&["report"]).env("LC_ALL", "C").output().unwrap();
    let shown = text(&done.stdout);
    assert!(shown.contains("  + kernel") && shown.is_ascii(), "{shown}");
}

#[test]
fn completions_and_the_man_page_know_every_subcommand() {
    let page = text(&run(&["man"]).stdout);
    let mut scripts = vec![page];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        scripts.push(text(&run(&["completions", shell]).stdout));
    }
    for script in &scripts {
        for subcommand in subcommands() {
            assert!(script.contains(&subcommand), "{subcommand} in {script}");
        }
    }
}

#[test]
fn every_subcommand_has_a_page_of_its_own() {
    let parent = tempfile::tempdir().unwrap();
    // Who has just installed it hasn't the directory of man pages yet.
    let directory = parent.path().join("share/man/man1");
    let done = run(&["man", "--dir", directory.to_str().unwrap()]);
    assert_eq!((done.status.code(), text(&done.stdout)), (Some(0), String::new()));
    for subcommand in subcommands() {
        let mut page = String::new();
        let path = directory.join(format!("forebay-{subcommand}.1"));
        File::open(path).unwrap().read_to_string(&mut page).unwrap();
        assert!(page.contains("Examples:"), "{page}");
    }
}

/// Every key of an object and of what is in it.
fn keys(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                found.push(key.clone());
                keys(field, found);
            }
        }
        Value::Array(elements) => elements.iter().for_each(|element| keys(element, found)),
        _ => {}
    }
}

#[test]
fn the_docs_have_every_subcommand_and_every_field() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/command.md");
    let docs = std::fs::read_to_string(path).unwrap();
    for subcommand in subcommands() {
        assert!(docs.contains(&format!("`forebay {subcommand}")), "{subcommand}");
    }
    let mut found = Vec::new();
    keys(&object(&run(&["report", ".", "/no/such/directory", "--json"])), &mut found);
    keys(&object(&run(&["man", "--json"])), &mut found);
    keys(&object(&run(&["quickstart", "--json"])), &mut found);
    keys(&every_kind(), &mut found);
    for key in found {
        assert!(docs.contains(&format!("`{key}`")), "`{key}` isn't in docs/command.md");
    }
}

/// What this machine may not have: all kinds of devices, a fix, a GPU with a link, Python.
fn every_kind() -> Value {
    use forebay::report::{CudaFacts, Fix, Gpu, PythonFacts};
    use forebay::topology::{DeviceKind, Link, PcieFunction};

    let link = Link { width: 16, gigatransfers: 32.0 };
    let function = PcieFunction {
        address: "0000:19:00.0".to_owned(),
        link: Some(link),
        link_max: Some(link),
        bottleneck: Some(("0000:00:01.0".to_owned(), link)),
        numa_node: Some(0),
        upstream: vec!["pci0000:40".to_owned()],
    };
    let kinds = [
        DeviceKind::Raid { level: "raid0".to_owned(), chunk_bytes: 1 },
        DeviceKind::Mapper { name: "data".to_owned(), maker: None },
        DeviceKind::Loop { file: "/a.img".into(), direct: true, memory: false },
    ];
    serde_json::json!({
        "kind": kinds,
        "fix": Fix { command: "true".to_owned(), root: false },
        "gpus": [Gpu { model: "H200".to_owned(), function: Some(function) }],
        "cuda": CudaFacts::default(),
        "python": PythonFacts::default(),
    })
}
