//! Rules about Rust sources.

use super::scan::{self, has_word};
use super::{Finding, Source};

/// Folders in which unsafe code belongs.
const UNSAFE_FOLDERS: &[&str] = &[
    "crates/forebay-io/src/engine",
    "crates/forebay-io/src/memory",
    "crates/forebay-io/src/device",
    "crates/forebay-python/src/buffer",
    "crates/forebay-standin/",
    "crates/forebay-testkit/",
];

/// Other files that may have unsafe code, and why.
const UNSAFE_FILES: &[(&str, &str)] = &[
    ("crates/forebay-io/src/borrowed.rs", "requests name memory by address"),
    ("crates/forebay-io/src/handle.rs", "requests name memory by address"),
    ("crates/forebay-io/src/owned.rs", "requests name memory by address"),
    ("crates/forebay-io/src/routes.rs", "registers the device memory of requests"),
    ("crates/forebay-io/src/syscalls.rs", "system calls that rustix doesn't wrap"),
    ("crates/forebay-io/src/lent.rs", "copies from device memory"),
    ("crates/forebay-io/src/worker/bindings.rs", "registers memory with an engine"),
    ("crates/forebay-io/src/worker/copies.rs", "copies between staging blocks and device memory"),
    ("crates/forebay-io/src/worker/sums.rs", "reads the bytes of blocks"),
    ("crates/forebay-io/src/worker/mod.rs", "hands transfers to an engine, copies staged blocks"),
    ("crates/forebay-python/src/interpreter.rs", "asks Python which interpreter this is"),
    ("crates/forebay-bench/src/subject.rs", "requests name memory by address"),
    ("crates/forebay-bench/src/loop_device.rs", "a mount namespace of its own"),
];

/// Who may read the environment, besides files named `config.rs` and tests.
const ENVIRONMENT_READERS: &[&str] =
    &["crates/forebay-standin/", "crates/forebay-testkit/", "crates/forebay-bench/", "xtask/"];

/// Checks one Rust source.
pub(super) fn check(source: &Source) -> Vec<Finding> {
    let parts = scan::rust(&source.text);
    let mut findings = Vec::new();
    if !source.text.trim_start().starts_with("//!") {
        findings.push(source.finding(1, "open the file with `//!`: what it owns and keeps true"));
    }
    for (index, line) in parts.code.lines().enumerate() {
        findings.extend(check_code(source, line).map(|text| source.finding(index + 1, text)));
    }
    for (index, line) in parts.comments.lines().enumerate() {
        if is_code(line) {
            findings.push(source.finding(index + 1, "commented-out code: delete it, git keeps it"));
        }
    }
    findings
}

/// What is wrong with a line of code, if anything.
fn check_code(source: &Source, line: &str) -> Option<String> {
    if has_word(line, "dbg") && line.contains("dbg!") {
        return Some("a debugging macro: take it out".to_owned());
    }
    if has_unsafe(line) && !may_be_unsafe(&source.path) {
        return Some(
            "unsafe outside engine, memory, device and buffer: move it there, or list the file \
             with its reason in xtask's UNSAFE_FILES"
                .to_owned(),
        );
    }
    if reads_environment(line) && !may_read_environment(&source.path) {
        return Some("the environment is read in config.rs only".to_owned());
    }
    let module = line.trim().trim_start_matches("pub ").strip_prefix("mod ")?;
    let name = module.trim_end_matches(|char: char| !char.is_alphanumeric());
    super::text::is_vague(name).then(|| format!("`{name}` says nothing: name what it is about"))
}

fn has_unsafe(line: &str) -> bool {
    has_word(line, "unsafe")
        || (has_word(line, "unsafe_code") && (line.contains("expect(") || line.contains("allow(")))
}

fn may_be_unsafe(path: &str) -> bool {
    in_tests(path)
        || UNSAFE_FOLDERS.iter().any(|folder| path.starts_with(folder))
        || UNSAFE_FILES.iter().any(|(file, _)| *file == path)
}

fn reads_environment(line: &str) -> bool {
    ["env::var", "env::var_os", "env::vars", "env::vars_os", "getenv", "secure_getenv"]
        .iter()
        .any(|name| has_word(line, name))
}

fn may_read_environment(path: &str) -> bool {
    in_tests(path)
        || path.ends_with("/config.rs")
        || ENVIRONMENT_READERS.iter().any(|folder| path.starts_with(folder))
}

fn in_tests(path: &str) -> bool {
    path.split('/').any(|part| part == "tests") || path.starts_with("fuzz/")
}

/// Whether a comment looks like code that was put aside. Doc comments have examples, and aren't
/// looked at.
fn is_code(comment: &str) -> bool {
    let Some(text) = comment.trim().strip_prefix("//") else { return false };
    if text.starts_with(['/', '!']) {
        return false;
    }
    let text = text.trim();
    let starts =
        ["let ", "pub ", "fn ", "use ", "#[", "return ", "if ", "for ", "while ", "match "]
            .iter()
            .any(|start| text.starts_with(start));
    let ends = text.ends_with([';', '{', '}']) || (text.starts_with("#[") && text.ends_with(']'));
    let call = text.ends_with(");") || text.ends_with("?;");
    (starts && ends) || call || text == "}"
}

/// Finds entries of the list of files with unsafe code that have none any more.
pub(super) fn check_unsafe_list(sources: &[Source]) -> Vec<Finding> {
    stale_entries(UNSAFE_FILES, sources)
}

fn stale_entries(list: &[(&str, &str)], sources: &[Source]) -> Vec<Finding> {
    let is_live = |path: &str| {
        let source = sources.iter().find(|source| source.path == path);
        source.is_some_and(|source| scan::rust(&source.text).code.lines().any(has_unsafe))
    };
    list.iter()
        .filter(|(path, _)| !is_live(path))
        .map(|(path, _)| Finding {
            path: (*path).to_owned(),
            line: 0,
            text: "has no unsafe code: take it off xtask's UNSAFE_FILES".to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.to_owned(), text: format!("//! What it owns.\n{text}") };
        check(&source).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_tidy_file_passes() {
        let text = "/// Says `unsafe` and `dbg!` in a comment.\nfn f() -> &str { \"env::var\" }\n\
                    // A sentence; and what follows from it.\n";
        assert_eq!(findings_of("crates/forebay/src/a.rs", text), Vec::<String>::new());
    }

    #[test]
    fn a_file_without_a_module_comment_is_found() {
        let source = Source { path: "a.rs".to_owned(), text: "// x\nfn f() {}\n".to_owned() };
        assert_eq!(check(&source).len(), 1);
    }

    #[test]
    fn unsafe_out_of_place_is_found() {
        let samples = [
            "fn f() { unsafe { g() } }",
            "#![expect(unsafe_code, reason = \"x\")]",
            "unsafe fn f();",
        ];
        for sample in samples {
            let found = findings_of("crates/forebay-io/src/plan.rs", sample);
            assert_eq!(found.len(), 1, "{sample}");
            assert!(found[0].starts_with("crates/forebay-io/src/plan.rs:2: unsafe"), "{found:?}");
            for path in ["crates/forebay-io/src/engine/uring.rs", "crates/forebay-io/src/handle.rs"]
            {
                assert_eq!(findings_of(path, sample), Vec::<String>::new());
            }
        }
    }

    #[test]
    fn a_listed_file_without_unsafe_is_found() {
        let source = |text: &str| Source { path: "a.rs".to_owned(), text: text.to_owned() };
        let list = &[("a.rs", "because")];
        assert_eq!(stale_entries(list, &[source("unsafe {}")]).len(), 0);
        assert_eq!(stale_entries(list, &[source("// unsafe")]).len(), 1);
        assert_eq!(stale_entries(list, &[]).len(), 1);
    }

    #[test]
    fn reading_the_environment_out_of_place_is_found() {
        for sample in ["std::env::var(\"A\")", "env::vars()", "env::var_os(\"A\")"] {
            assert_eq!(findings_of("crates/forebay/src/tune.rs", sample).len(), 1, "{sample}");
            assert_eq!(findings_of("crates/forebay/src/config.rs", sample).len(), 0);
            assert_eq!(findings_of("crates/forebay/tests/tune.rs", sample).len(), 0);
        }
    }

    #[test]
    fn a_debugging_macro_is_found() {
        assert_eq!(findings_of("crates/forebay/src/a.rs", "dbg!(x);").len(), 1);
    }

    #[test]
    fn commented_out_code_is_found() {
        for sample in ["// let a = 1;", "// f(x);", "// if a {", "// }", "// #[test]", "// g()?;"] {
            assert_eq!(findings_of("crates/forebay/src/a.rs", sample).len(), 1, "{sample}");
        }
    }

    #[test]
    fn a_module_name_that_says_nothing_is_found() {
        for sample in ["mod utils;", "pub mod helpers {"] {
            assert_eq!(findings_of("crates/forebay/src/a.rs", sample).len(), 1, "{sample}");
        }
    }
}
