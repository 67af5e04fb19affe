//! What is installed for Python, as the package says it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Finding, Level};

/// What Python says of itself and of what is installed. Nothing was imported to find it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PythonFacts {
    /// Version of the interpreter.
    pub version: String,
    /// The interpreter.
    pub executable: String,
    /// Versions of packages that are installed, by name.
    pub packages: BTreeMap<String, String>,
    /// The CUDA that torch was built for; `None` for a torch without, or none.
    pub torch_cuda: Option<String>,
    /// Libraries that packages of NVIDIA's have brought.
    pub libraries: Vec<PathBuf>,
    /// Whether DeepSpeed uses Forebay; `None` if Forebay has no hook here.
    pub deepspeed_hook: Option<bool>,
    /// Why nothing of this is known, if nothing is: something in the environment is broken.
    pub problem: Option<String>,
}

pub(super) fn findings(facts: Option<&PythonFacts>) -> Vec<Finding> {
    let Some(facts) = facts else {
        let detail = "this command runs without: pip install forebay has one that knows its Python";
        return vec![Finding::new("python.version", Level::Info, "Python", detail)];
    };
    if let Some(problem) = &facts.problem {
        return vec![Finding::new("python.version", Level::Failure, "Python", problem)];
    }
    let detail = format!("{} ({})", facts.version, facts.executable);
    vec![
        Finding::new("python.version", Level::Ok, "Python", detail),
        package(facts, "python.forebay", "forebay"),
        package(facts, "python.numpy", "numpy"),
        torch(facts),
        package(facts, "python.deepspeed", "deepspeed"),
        hook(facts),
    ]
}

fn package(facts: &PythonFacts, id: &'static str, name: &str) -> Finding {
    match facts.packages.get(name) {
        Some(version) => Finding::new(id, Level::Ok, name, version),
        None => Finding::new(id, Level::Info, name, "not installed"),
    }
}

fn torch(facts: &PythonFacts) -> Finding {
    let mut finding = package(facts, "python.torch", "torch");
    if finding.level == Level::Ok {
        let cuda = facts.torch_cuda.as_deref();
        finding.detail += ", built ";
        finding.detail +=
            &cuda.map_or("without CUDA".to_owned(), |cuda| format!("for CUDA {cuda}"));
    }
    finding
}

fn hook(facts: &PythonFacts) -> Finding {
    let title = "DeepSpeed hook";
    let say = |level, detail: &str| Finding::new("python.hook", level, title, detail);
    let installed = facts.packages.contains_key("deepspeed");
    match (facts.deepspeed_hook, installed) {
        (Some(true), true) => say(Level::Ok, "on: DeepSpeed's swapping uses Forebay"),
        (Some(true), false) => say(Level::Info, "on, but DeepSpeed isn't installed"),
        (Some(false), true) => {
            say(Level::Info, "off: DeepSpeed uses its own code").fix("forebay deepspeed enable")
        }
        _ => say(Level::Info, "not on"),
    }
}
