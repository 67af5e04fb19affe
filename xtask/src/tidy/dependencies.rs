//! Rules about crates, from `cargo metadata`: which may use which, and what from outside.

use anyhow::{Context, Result};
use serde_json::Value;

use super::Finding;

/// What each crate of the workspace may have as a normal or build dependency, of the workspace's
/// own. A crate that isn't here is a finding: say where it belongs.
const DIRECTIONS: &[(&str, &[&str])] = &[
    ("forebay-io", &[]),
    ("forebay", &["forebay-io"]),
    ("forebay-cli", &["forebay", "forebay-io"]),
    // The wheel carries the command: one copy of the core for both.
    ("forebay-python", &["forebay", "forebay-io", "forebay-cli"]),
    ("forebay-standin", &[]),
    ("forebay-testkit", &["forebay", "forebay-io", "forebay-standin"]),
    ("forebay-bench", &["forebay", "forebay-io", "forebay-testkit"]),
    ("xtask", &[]),
];

/// What any crate may have besides as a dependency of its tests.
const FOR_TESTS: &[&str] = &["forebay-testkit", "forebay-standin"];

/// Crates from outside and the only ones that may depend on them, in any way.
const CONFINED: &[(&str, &[&str])] = &[
    ("pyo3", &["forebay-python"]),
    ("pyo3-ffi", &["forebay-python"]),
    ("libc", SYSTEM),
    ("io-uring", SYSTEM),
    ("rustix", SYSTEM),
    ("nix", SYSTEM),
    ("libloading", SYSTEM),
    ("anyhow", &["forebay-cli", "forebay-python", "forebay-bench", "xtask"]),
];

/// Who talks to the operating system.
const SYSTEM: &[&str] = &["forebay-io", "forebay-standin", "forebay-testkit", "forebay-bench"];

/// Checks the output of `cargo metadata --no-deps`.
pub(super) fn check(metadata: &Value) -> Result<Vec<Finding>> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let members: Vec<&str> =
        packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        let mut say = |text: String| {
            findings.push(Finding { path: format!("{name}/Cargo.toml"), line: 0, text });
        };
        if package["license"].as_str() != Some("Apache-2.0") {
            say("the licence is Apache-2.0: `license.workspace = true`".to_owned());
        }
        let Some((_, allowed)) = DIRECTIONS.iter().find(|(crate_name, _)| *crate_name == name)
        else {
            say("unknown crate: say in xtask's DIRECTIONS what it may depend on".to_owned());
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            let for_tests = dependency["kind"].as_str() == Some("dev");
            if members.contains(&target) {
                let fine = allowed.contains(&target) || (for_tests && FOR_TESTS.contains(&target));
                if !fine {
                    say(format!("may not depend on {target}: arrows point one way"));
                }
            }
            if let Some((_, users)) = CONFINED.iter().find(|(confined, _)| *confined == target)
                && !users.contains(&name)
            {
                say(format!("may not depend on {target}: only {} may", users.join(", ")));
            }
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn findings_of(packages: &Value) -> Vec<String> {
        let findings = check(&json!({ "packages": packages })).unwrap();
        findings.iter().map(ToString::to_string).collect()
    }

    fn package(name: &str, dependencies: &[(&str, Option<&str>)]) -> Value {
        let dependencies: Vec<Value> =
            dependencies.iter().map(|(name, kind)| json!({ "name": name, "kind": kind })).collect();
        json!({ "name": name, "license": "Apache-2.0", "dependencies": dependencies })
    }

    #[test]
    fn arrows_the_right_way_pass() {
        let packages = json!([
            package("forebay-io", &[("libc", None), ("forebay-testkit", Some("dev"))]),
            package("forebay-testkit", &[("forebay-io", None), ("rustix", None)]),
            package("forebay-python", &[("forebay-io", None), ("pyo3", None)]),
        ]);
        assert_eq!(findings_of(&packages), Vec::<String>::new());
    }

    #[test]
    fn an_arrow_the_wrong_way_is_found() {
        let packages =
            json!([package("forebay-io", &[("forebay", None)]), package("forebay", &[]),]);
        let found = findings_of(&packages);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].contains("forebay-io/Cargo.toml: may not depend on forebay:"),
            "{found:?}"
        );
    }

    #[test]
    fn a_shipped_crate_on_a_dev_only_leaf_is_found() {
        for kind in [None, Some("build")] {
            let packages = json!([
                package("forebay", &[("forebay-testkit", kind)]),
                package("forebay-testkit", &[]),
            ]);
            assert_eq!(findings_of(&packages).len(), 1);
        }
        let packages = json!([
            package("forebay", &[("forebay-bench", Some("dev"))]),
            package("forebay-bench", &[]),
        ]);
        assert_eq!(findings_of(&packages).len(), 1);
    }

    #[test]
    fn a_face_that_knows_another_face_is_found() {
        let packages = json!([
            package("forebay-cli", &[("forebay-python", Some("dev"))]),
            package("forebay-python", &[]),
        ]);
        assert_eq!(findings_of(&packages).len(), 1);
    }

    #[test]
    fn crates_that_are_confined_are_found_elsewhere() {
        for (name, target) in [
            ("forebay", "pyo3"),
            ("forebay", "libc"),
            ("forebay-python", "rustix"),
            ("xtask", "io-uring"),
            ("forebay-io", "anyhow"),
        ] {
            let found = findings_of(&json!([package(name, &[(target, Some("dev"))])]));
            assert_eq!(found.len(), 1, "{name} -> {target}");
        }
    }

    #[test]
    fn another_licence_or_an_unknown_crate_is_found() {
        let mut strange = package("forebay-io", &[]);
        strange["license"] = json!("MIT");
        let found = findings_of(&json!([strange, package("forebay-net", &[])]));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("licence") && found[1].contains("unknown crate"), "{found:?}");
    }
}
