//! `forebay verify`: whether the bytes of tensors are those that were written.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use forebay::ByteSize;
use forebay::catalog::{Catalog, Kind};
use forebay::convert::{self, Mismatch};
use serde::Serialize;

use super::ls::state_name;
use super::progress::Progress;
use super::torch::Wanted;
use super::{Opened, counted, failure, line};
use crate::exit::Exit;
use crate::host::Host;
use crate::output::Output;
use crate::signals::Signals;

/// Memory for the bytes on their way.
const BUDGET_BYTES: u64 = 64 << 20;

/// Options of `forebay verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  forebay verify model.safetensors\n  \
    forebay verify run/step-00000042\n  \
    forebay verify models/gpt2 --json | jq '.files[].mismatches[]'\n\n\
    The exit code is 1 if a tensor doesn't match its checksum, or a header its file. A file without \
    checksums is said to have none: of it, the header alone is checked.")]
pub(crate) struct Verify {
    /// A .safetensors, .npy or torch file; a directory of a model, a checkpoint's step, .npy files
    #[arg(value_name = "FILE|DIR")]
    path: PathBuf,
}

/// What is printed with `--json`.
#[derive(Serialize)]
struct Findings<'a> {
    path: String,
    verified: usize,
    mismatched: usize,
    unverified: usize,
    bytes: u64,
    files: Vec<VerifiedFile<'a>>,
}

#[derive(Serialize)]
struct VerifiedFile<'a> {
    path: String,
    checksums: &'static str,
    tensors: usize,
    mismatches: Vec<Shown<'a>>,
}

/// A tensor that doesn't match; checksums are as in the file's header.
#[derive(Serialize)]
struct Shown<'a> {
    tensor: &'a str,
    wanted: String,
    found: String,
}

/// Verifies what is there.
pub(crate) fn run(options: &Verify, host: &dyn Host, output: &Output) -> Result<u8> {
    // What isn't tensors can't be verified; whatever is wrong with those that are is a result.
    Kind::of(&options.path).map_err(failure)?;
    let wanted = Wanted { budget: u64::MAX, scratch: None, name: None };
    let opened = Opened::at(&options.path, host, wanted);
    let catalog = opened.map_err(as_result)?.catalog;
    let signals = Signals::take()?;
    let progress = Progress::new("verifying", summed_bytes(&catalog));
    let mut watch = |done| {
        progress.show(done);
        signals.exit_code().is_none()
    };
    let mismatches = match convert::verify(&catalog, BUDGET_BYTES, &mut watch) {
        Ok(mismatches) => mismatches,
        Err(error) => return signals.exit_code().ok_or_else(|| anyhow!(error)),
    };
    drop(progress);
    let findings = findings(&options.path, &catalog, &mismatches);
    if output.is_json() {
        output.object("verify", &findings)?;
    } else {
        output.text(&text(&findings))?;
    }
    Ok(if mismatches.is_empty() { Exit::Done } else { Exit::Failed } as u8)
}

/// A broken file fails; it isn't wrong use, whatever reading it met. Torch may be missing.
fn as_result(error: anyhow::Error) -> anyhow::Error {
    let failure = error.downcast_ref::<crate::exit::Failure>();
    if failure.is_some_and(|failure| failure.exit() == Exit::Usage) {
        anyhow!("{error:#}")
    } else {
        error
    }
}

fn summed_bytes(catalog: &Catalog) -> u64 {
    let summed = catalog.tensors.iter().filter(|tensor| tensor.checksum.is_some());
    summed.map(|tensor| tensor.bytes).sum()
}

fn findings<'a>(path: &Path, catalog: &'a Catalog, mismatches: &[Mismatch]) -> Findings<'a> {
    let mut files: Vec<VerifiedFile<'a>> = Vec::new();
    for (index, file) in catalog.files.iter().enumerate() {
        let own = mismatches.iter().filter(|found| catalog.tensors[found.tensor].file == index);
        files.push(VerifiedFile {
            path: file.path.to_string_lossy().into_owned(),
            checksums: state_name(file.checksums),
            tensors: catalog.tensors.iter().filter(|tensor| tensor.file == index).count(),
            mismatches: own.map(|found| shown(catalog, found)).collect(),
        });
    }
    let summed = catalog.tensors.iter().filter(|tensor| tensor.checksum.is_some()).count();
    Findings {
        path: path.to_string_lossy().into_owned(),
        verified: summed - mismatches.len(),
        mismatched: mismatches.len(),
        unverified: catalog.tensors.len() - summed,
        bytes: summed_bytes(catalog),
        files,
    }
}

fn shown<'a>(catalog: &'a Catalog, mismatch: &Mismatch) -> Shown<'a> {
    Shown {
        tensor: &catalog.tensors[mismatch.tensor].name,
        wanted: format!("{:08x}", mismatch.wanted),
        found: format!("{:08x}", mismatch.found),
    }
}

fn text(findings: &Findings<'_>) -> String {
    let mut lines = Vec::new();
    for file in &findings.files {
        let path = line(&file.path);
        let tensors = counted(file.tensors, "tensor");
        match (file.checksums, file.mismatches.len()) {
            ("present", 0) => lines.push(format!("✓ {path}: {tensors}")),
            ("present", _) => {
                for Shown { tensor, wanted, found } in &file.mismatches {
                    let tensor = line(&format!("{tensor:?}"));
                    let text = format!(
                        "the tensor {tensor} has CRC32C {found}, and by the header {wanted}"
                    );
                    lines.push(format!("✗ {path}: {text}"));
                }
            }
            ("stale", _) => lines.push(format!(
                "· {path}: {tensors}; checksums of before another library wrote it, which say \
                 nothing: the header is valid"
            )),
            _ => lines.push(format!("· {path}: {tensors}, no checksums: the header is valid")),
        }
    }
    lines.push(summary(findings));
    lines.join("\n") + "\n"
}

fn summary(findings: &Findings<'_>) -> String {
    let Findings { verified, mismatched, unverified, bytes, .. } = findings;
    if verified + mismatched == 0 {
        return format!("{} without a checksum", counted(*unverified, "tensor"));
    }
    let tensors = counted(verified + mismatched, "tensor");
    let mut parts = vec![format!("{tensors} of {} read: {verified} as written", ByteSize(*bytes))];
    if *mismatched > 0 {
        parts.push(format!("{mismatched} not"));
    }
    if *unverified > 0 {
        parts.push(format!("{} without a checksum", counted(*unverified, "tensor")));
    }
    parts.join(", ")
}
