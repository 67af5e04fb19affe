//! Rules about every text file: length, names, leftovers, paths, licences.

use super::{Finding, Source};

/// Longest source file, in lines. Look for a split at 500.
const LINES_MAX: usize = 800;

/// Data tables that may be longer, and why.
const TABLES: &[(&str, &str)] = &[];

/// Names of files, folders and modules that say nothing about what is in them.
const VAGUE: &[&str] = &["util", "utils", "helper", "helpers", "common", "misc", "manager"];

/// Marks of work put off, taken apart so that this file has none.
const MARKS: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

/// Paths that exist on one machine only, or outside the repository; taken apart likewise.
const MACHINE_PATHS: &[&str] =
    &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("../sha", "red")];

/// Written by tools, or quoted from elsewhere word for word.
const FOREIGN: &[&str] = &["Cargo.lock", "LICENSE", "fuzz/Cargo.lock"];

/// Checks one text file.
pub(super) fn check(source: &Source) -> Vec<Finding> {
    if FOREIGN.contains(&source.path.as_str()) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    let is_source = matches!(source.extension(), "rs" | "py" | "pyi" | "sh");
    let lines_count = source.text.lines().count();
    let is_table = TABLES.iter().any(|(path, _)| *path == source.path);
    if is_source && !is_table && lines_count > LINES_MAX {
        let text = format!("{lines_count} lines: split it, {LINES_MAX} is the most");
        findings.push(source.finding(0, text));
    }
    for part in source.path.split('/') {
        let name = part.split('.').next().unwrap_or_default().trim_matches('_');
        if is_vague(name) {
            let text = format!("`{name}` says nothing: name what it is about");
            findings.push(source.finding(0, text));
        }
    }
    if !says_licence(source) {
        findings.push(source.finding(0, "say the licence: Apache-2.0"));
    }
    for (index, line) in source.text.lines().enumerate() {
        findings.extend(check_line(line).map(|text| source.finding(index + 1, text)));
    }
    findings
}

/// Whether a name says nothing about what it names.
pub(super) fn is_vague(name: &str) -> bool {
    VAGUE.contains(&name)
}

fn check_line(line: &str) -> Option<String> {
    if let Some(mark) = MARKS.iter().find(|mark| super::scan::has_word(line, mark)) {
        return Some(format!("{mark}: do it now, or file an issue"));
    }
    let path = MACHINE_PATHS.iter().find(|path| line.contains(*path))?;
    Some(format!("`{path}` is a path of one machine: say it relative to the repository"))
}

/// Whether a manifest of a package names the licence; other files needn't.
fn says_licence(source: &Source) -> bool {
    let name = source.path.rsplit('/').next().unwrap_or_default();
    let has = |line: &str| source.text.lines().any(|candidate| candidate.trim() == line);
    match name {
        "Cargo.toml" if has("[package]") => {
            has("license.workspace = true") || has("license = \"Apache-2.0\"")
        }
        "pyproject.toml" => has("license = \"Apache-2.0\""),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        check(&source).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_long_source_is_found_and_a_long_list_is_not() {
        let text = "x\n".repeat(LINES_MAX + 1);
        assert_eq!(findings_of("a/b.rs", &text).len(), 1);
        assert_eq!(findings_of("a/b.rs", &"x\n".repeat(LINES_MAX)).len(), 0);
        assert_eq!(findings_of("a/b.json", &text).len(), 0);
    }

    #[test]
    fn a_name_that_says_nothing_is_found() {
        for path in ["a/utils.rs", "a/helper.py", "a/_common.py", "tests/common/mod.rs"] {
            assert_eq!(findings_of(path, "").len(), 1, "{path}");
        }
        assert_eq!(findings_of("a/commonly.rs", "").len(), 0);
    }

    #[test]
    fn marks_of_work_put_off_are_found() {
        for mark in MARKS {
            assert_eq!(findings_of("a.md", &format!("x\n{mark}: later\n")).len(), 1, "{mark}");
        }
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        for path in MACHINE_PATHS {
            let found = findings_of("Makefile", &format!("cp {path}x .\n"));
            assert_eq!(found.len(), 1);
            assert!(found[0].starts_with("Makefile:1: "), "{found:?}");
        }
    }

    #[test]
    fn a_manifest_without_the_licence_is_found() {
        assert_eq!(findings_of("fuzz/Cargo.toml", "[package]\nlicense = \"MIT\"\n").len(), 1);
        assert_eq!(
            findings_of("fuzz/Cargo.toml", "[package]\nlicense = \"Apache-2.0\"\n").len(),
            0
        );
        assert_eq!(findings_of("a/Cargo.toml", "[package]\nlicense.workspace = true\n").len(), 0);
        assert_eq!(findings_of("pyproject.toml", "[project]\n").len(), 1);
    }
}
