//! `forebay ls`: which tensors are in a file or a directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anstyle::Style;
use anyhow::Result;
use forebay::ByteSize;
use forebay::catalog::{Catalog, Entry};
use forebay::safetensors::ChecksumState;
use serde::Serialize;

use super::torch::{Notes, Wanted};
use super::{Format, Opened, counted, line};
use crate::exit::Exit;
use crate::host::Host;
use crate::output::Output;

/// Columns of a name; a longer one pushes its line.
const NAME_WIDTH_MAX: usize = 60;

/// Options of `forebay ls`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  forebay ls model.safetensors\n  \
    forebay ls models/gpt2                                  all files that its index names\n  \
    forebay ls run/step-00000042\n  \
    forebay ls weights.pt --json | jq '.tensors[] | select(.dtype == \"F32\") | .name'")]
pub(crate) struct Ls {
    /// A .safetensors, .npy or torch file; a directory of a model, a checkpoint's step, .npy files
    #[arg(value_name = "FILE|DIR")]
    path: PathBuf,
}

/// What is printed with `--json`.
#[derive(Serialize)]
struct Listing<'a> {
    path: String,
    format: Format,
    totals: Totals,
    files: Vec<ListedFile<'a>>,
    tensors: Vec<ListedTensor<'a>>,
    metadata: &'a BTreeMap<String, String>,
    #[serde(flatten)]
    notes: &'a Notes,
}

#[derive(Serialize)]
struct Totals {
    tensors: usize,
    elements: u64,
    bytes: u64,
    dtypes: BTreeMap<&'static str, Share>,
}

#[derive(Default, Serialize)]
struct Share {
    tensors: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct ListedFile<'a> {
    path: std::borrow::Cow<'a, str>,
    bytes: u64,
    checksums: &'static str,
}

#[derive(Serialize)]
struct ListedTensor<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [u64],
    bytes: u64,
    file: usize,
    offset: Option<u64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    big_endian: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    fortran_order: bool,
}

/// Lists what is there.
pub(crate) fn run(options: &Ls, host: &dyn Host, output: &Output) -> Result<u8> {
    let wanted = Wanted { budget: u64::MAX, scratch: None, name: None };
    let opened = Opened::at(&options.path, host, wanted)?;
    if output.is_json() {
        output.object("ls", &listing(&options.path, &opened))?;
    } else {
        output.text(&text(&options.path, &opened, output))?;
    }
    Ok(Exit::Done as u8)
}

fn listing<'a>(path: &Path, opened: &'a Opened) -> Listing<'a> {
    let Opened { format, catalog, notes } = opened;
    let files = catalog.files.iter().map(|file| ListedFile {
        path: file.path.to_string_lossy(),
        bytes: file.bytes,
        checksums: state_name(file.checksums),
    });
    let tensors = catalog.tensors.iter().map(|tensor| ListedTensor {
        name: &tensor.name,
        dtype: tensor.dtype.name(),
        shape: &tensor.shape,
        bytes: tensor.bytes,
        file: tensor.file,
        offset: tensor.offset,
        big_endian: tensor.swapped_bytes > 1,
        fortran_order: tensor.fortran_order,
    });
    Listing {
        path: path.to_string_lossy().into_owned(),
        format: *format,
        totals: totals(catalog),
        files: files.collect(),
        tensors: tensors.collect(),
        metadata: &catalog.metadata,
        notes,
    }
}

fn totals(catalog: &Catalog) -> Totals {
    let mut totals = Totals {
        tensors: catalog.tensors.len(),
        elements: 0,
        bytes: catalog.bytes(),
        dtypes: BTreeMap::new(),
    };
    for Entry { dtype, shape, bytes, .. } in &catalog.tensors {
        totals.elements += shape.iter().product::<u64>();
        let share: &mut Share = totals.dtypes.entry(dtype.name()).or_default();
        share.tensors += 1;
        share.bytes += bytes;
    }
    totals
}

/// How `--json` calls what is known of checksums.
pub(super) fn state_name(state: ChecksumState) -> &'static str {
    match state {
        ChecksumState::Ours => "present",
        ChecksumState::Absent => "absent",
        ChecksumState::Stale => "stale",
    }
}

fn text(path: &Path, opened: &Opened, output: &Output) -> String {
    let Opened { catalog, notes, .. } = opened;
    let many = catalog.files.len() > 1;
    let mut rows = vec![
        ["NAME", "DTYPE", "SHAPE", "BYTES", "OFFSET", if many { "FILE" } else { "" }]
            .map(str::to_owned),
    ];
    for tensor in &catalog.tensors {
        let file = &catalog.files[tensor.file].path;
        let file = file.strip_prefix(path).unwrap_or(file).to_string_lossy();
        rows.push([
            line(&tensor.name),
            tensor.dtype.name().to_owned(),
            shape_text(tensor),
            tensor.bytes.to_string(),
            tensor.offset.map_or("-".to_owned(), |offset| offset.to_string()),
            if many { line(&file) } else { String::new() },
        ]);
    }
    let mut lines = Vec::new();
    if !catalog.tensors.is_empty() {
        lines = table(&rows);
        lines[0] = output.styled(Style::new().bold(), &lines[0]);
        lines.push(String::new());
    }
    lines.extend(summary(catalog));
    for (key, value) in &catalog.metadata {
        lines.push(line(&format!("metadata {key}: {value}")));
    }
    if !notes.left_out.is_empty() {
        lines.push(format!("beside tensors: {}", counted(notes.left_out.len(), "other value")));
    }
    for names in &notes.tied {
        lines.push(line(&format!("one tensor: {}", names.join(", "))));
    }
    lines.join("\n") + "\n"
}

fn shape_text(tensor: &Entry) -> String {
    let extents: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
    let order = if tensor.fortran_order { " (Fortran order)" } else { "" };
    let endian = if tensor.swapped_bytes > 1 { " (big endian)" } else { "" };
    format!("[{}]{order}{endian}", extents.join(", "))
}

/// Rows in columns; bytes and offsets, the fourth and fifth, to the right.
fn table(rows: &[[String; 6]]) -> Vec<String> {
    let width = |text: &str| textwrap::core::display_width(text);
    let mut widths = [0; 6];
    for row in rows {
        for (most, cell) in widths.iter_mut().zip(row) {
            *most = width(cell).max(*most);
        }
    }
    widths[0] = widths[0].min(NAME_WIDTH_MAX);
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, most))| {
            let blank = " ".repeat(most.saturating_sub(width(cell)));
            if column == 3 || column == 4 { blank + cell } else { format!("{cell}{blank}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    });
    lines.collect()
}

fn summary(catalog: &Catalog) -> Vec<String> {
    let totals = totals(catalog);
    let mut lines = vec![format!(
        "{} of {} elements, {} in {}",
        counted(totals.tensors, "tensor"),
        totals.elements,
        ByteSize(totals.bytes),
        counted(catalog.files.len(), "file"),
    )];
    if totals.dtypes.len() > 1 {
        let shares = totals.dtypes.iter().map(|(dtype, share)| {
            format!("{dtype} {} in {}", ByteSize(share.bytes), counted(share.tensors, "tensor"))
        });
        lines.push(shares.collect::<Vec<_>>().join(", "));
    }
    for (state, text) in [
        (ChecksumState::Ours, "with checksums"),
        (ChecksumState::Absent, "without checksums"),
        (ChecksumState::Stale, "with checksums of before another library wrote it"),
    ] {
        let count = catalog.files.iter().filter(|file| file.checksums == state).count();
        if count > 0 {
            lines.push(format!("{} {text}", counted(count, "file")));
        }
    }
    lines
}
