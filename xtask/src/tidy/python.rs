//! Rules about Python sources.

use super::scan;
use super::{Finding, Source};

/// Frameworks: `import forebay` must bring none of them in.
const FRAMEWORKS: &[&str] =
    &["torch", "jax", "cupy", "deepspeed", "tensorflow", "safetensors", "transformers"];

/// Libraries that functions may import, but no module while it is being imported.
const INSIDE_FUNCTIONS: &[&str] = &["numpy", "ml_dtypes"];

/// Integration packages, which nobody imports for the user.
const INTEGRATIONS: &[&str] = &[
    "python/forebay/torch/",
    "python/forebay/jax/",
    "python/forebay/cupy/",
    "python/forebay/deepspeed/",
    "python/forebay/numpy/",
    "python/forebay/transformers/",
];

/// Packages whose functions may import frameworks, and why.
const COMPARISONS: &[(&str, &str)] = &[
    ("python/forebay/bench/", "measures frameworks where they are installed"),
    ("python/forebay/quickstart/", "measures frameworks where they are installed"),
];

/// Checks one Python source.
pub(super) fn check(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !has_docstring(&source.text) {
        findings.push(source.finding(1, "open the module with a docstring: what it owns"));
    }
    let shipped = source.path.starts_with("python/forebay/");
    if shipped && !INTEGRATIONS.iter().any(|folder| source.path.starts_with(folder)) {
        findings.extend(check_imports(source));
    }
    findings
}

fn has_docstring(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty() && !line.starts_with('#'));
    first.is_none_or(|line| {
        let line = line.trim_start_matches(['r', 'R']);
        line.starts_with("\"\"\"") || line.starts_with("'''")
    })
}

/// Where a line stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Function,
    TypeChecking,
    Other,
}

fn check_imports(source: &Source) -> Vec<Finding> {
    let code = scan::python(&source.text);
    let mut blocks: Vec<(usize, Block)> = Vec::new();
    let mut open_brackets_count = 0_usize;
    let mut findings = Vec::new();
    for (index, line) in code.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        // The indentation of a line that goes on inside brackets means nothing.
        let goes_on = open_brackets_count > 0;
        open_brackets_count += line.matches(['(', '[', '{']).count();
        open_brackets_count =
            open_brackets_count.saturating_sub(line.matches([')', ']', '}']).count());
        if goes_on {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        while blocks.last().is_some_and(|(outer, _)| *outer >= indent) {
            blocks.pop();
        }
        for module in imported(line.trim()) {
            if let Some(text) = check_import(&source.path, module, &blocks) {
                findings.push(source.finding(index + 1, text));
            }
        }
        blocks.push((indent, block_of(line.trim())));
    }
    findings
}

fn block_of(line: &str) -> Block {
    if line.starts_with("def ") || line.starts_with("async def ") {
        Block::Function
    } else if line.starts_with("if ") && line.contains("TYPE_CHECKING") && !line.contains("not ") {
        Block::TypeChecking
    } else {
        Block::Other
    }
}

/// The top-level names that a line imports.
fn imported(line: &str) -> Vec<&str> {
    let modules = if let Some(rest) = line.strip_prefix("from ") {
        vec![rest]
    } else if let Some(rest) = line.strip_prefix("import ") {
        rest.split(',').collect()
    } else {
        Vec::new()
    };
    let end = |char: char| char == '.' || char.is_whitespace();
    modules.iter().map(|module| module.trim().split(end).next().unwrap_or_default()).collect()
}

fn check_import(path: &str, module: &str, blocks: &[(usize, Block)]) -> Option<String> {
    let within = |wanted: Block| blocks.iter().any(|(_, block)| *block == wanted);
    if within(Block::TypeChecking) {
        return None;
    }
    if INSIDE_FUNCTIONS.contains(&module) && !within(Block::Function) {
        return Some(format!("import {module} inside the functions that need it"));
    }
    let compares = COMPARISONS.iter().any(|(folder, _)| path.starts_with(folder));
    if FRAMEWORKS.contains(&module) && !(compares && within(Block::Function)) {
        return Some(format!("{module} is imported by its integration package only"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.to_owned(), text: format!("\"\"\"Doc.\"\"\"\n{text}") };
        check(&source).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_tidy_module_passes() {
        let text = "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n\
                    def f(\n    a: A,\n) -> B:\n    \"\"\"Say.\n\n    import jax\n    \"\"\"\n    import numpy as np\n";
        assert_eq!(findings_of("python/forebay/a.py", text), Vec::<String>::new());
    }

    #[test]
    fn a_module_without_a_docstring_is_found() {
        let source = |text: &str| Source { path: "a.py".to_owned(), text: text.to_owned() };
        assert_eq!(check(&source("# x\nimport os\n")).len(), 1);
        assert_eq!(check(&source("#!/usr/bin/env python3\n\"\"\"Doc.\"\"\"\n")).len(), 0);
    }

    #[test]
    fn a_framework_is_found_wherever_it_is_imported() {
        for text in
            ["import torch\n", "import os, jax.numpy\n", "def f():\n    from cupy import x\n"]
        {
            assert_eq!(findings_of("python/forebay/handle.py", text).len(), 1, "{text}");
            assert_eq!(findings_of("python/forebay/torch/__init__.py", text).len(), 0);
            assert_eq!(findings_of("tests/python/test_a.py", text).len(), 0);
        }
    }

    #[test]
    fn comparisons_import_frameworks_inside_functions_only() {
        let path = "python/forebay/quickstart/ways.py";
        assert_eq!(findings_of(path, "def f():\n    import torch\n").len(), 0);
        assert_eq!(findings_of(path, "def f():\n    pass\nimport torch\n").len(), 1);
    }

    #[test]
    fn numpy_at_the_top_of_a_module_is_found() {
        for text in
            ["import numpy as np\n", "try:\n    from numpy import array\nexcept E:\n    pass\n"]
        {
            let found = findings_of("python/forebay/memory.py", text);
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].contains("inside the functions"), "{found:?}");
        }
    }
}
