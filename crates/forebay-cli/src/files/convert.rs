//! `forebay convert`: tensors from one format to another, or into other files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;
use forebay::ByteSize;
use forebay::convert::{self, Room, Sharding, Written};
use forebay::io::{Error, ErrorKind};
use serde::Serialize;

use super::progress::Progress;
use super::torch::{self, Notes, Wanted};
use super::{Format, Opened, counted, failure, line};
use crate::exit::{Exit, Failure};
use crate::host::Host;
use crate::output::{Output, complain};
use crate::scratch::Scratch;
use crate::signals::Signals;

/// Whose scratch directories these are.
const SUBCOMMAND: &str = "convert";
/// Endings of files that torch writes.
const TORCH_ENDINGS: [&str; 4] = ["pt", "pth", "bin", "ckpt"];

/// Options of `forebay convert`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    forebay convert pytorch_model.bin model.safetensors\n  \
    forebay convert models/gpt2 gpt2-sharded --shard-size 2G\n  \
    forebay convert model.safetensors arrays --to npy\n  \
    forebay convert arrays model.pt --budget 64M\n\n\
    OUT appears when all of it is written; whatever ends the command earlier leaves what was there \
    before. Python objects are never unpickled.")]
pub(crate) struct Convert {
    /// A .safetensors, .npy or torch file; a directory of a model, a checkpoint's step, .npy files
    #[arg(value_name = "IN")]
    input: PathBuf,

    /// A file, or a directory for shards and .npy files
    #[arg(value_name = "OUT")]
    output: PathBuf,

    /// The format of OUT [default: by its ending; without one, npy, or safetensors in shards]
    #[arg(long, value_name = "FORMAT")]
    to: Option<Format>,

    /// Write this many .safetensors files of about the same size, and their index
    #[arg(long, value_name = "COUNT", conflicts_with = "shard_size",
        value_parser = clap::value_parser!(u32).range(1..=99999))]
    shards: Option<u32>,

    /// Write .safetensors files with at most this many bytes of tensors, and their index
    #[arg(long, value_name = "BYTES")]
    shard_size: Option<ByteSize>,

    /// Most memory for the bytes on their way
    #[arg(long, value_name = "BYTES", default_value = "256M")]
    budget: ByteSize,

    /// Replace OUT; a directory only if there is nothing but tensors in it
    #[arg(long)]
    force: bool,
}

/// Where a conversion leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Safetensors,
    Shards(Sharding),
    Npy,
    Torch,
}

/// What is printed with `--json`.
#[derive(Serialize)]
struct Converted<'a> {
    input: String,
    output: String,
    from: Format,
    to: Format,
    tensors: usize,
    bytes: u64,
    verified: usize,
    files: Vec<ConvertedFile>,
    #[serde(flatten)]
    notes: &'a Notes,
}

#[derive(Serialize)]
struct ConvertedFile {
    path: String,
    bytes: u64,
}

impl Convert {
    fn target(&self) -> Result<Target> {
        let ending = self.output.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        let sharding = match (self.shards, self.shard_size) {
            (Some(count), _) => Some(Sharding::Count(usize::try_from(count)?)),
            (None, size) => size.map(|ByteSize(bytes)| Sharding::Bytes(bytes)),
        };
        let format = match (self.to, ending) {
            (Some(format), _) => format,
            (None, "safetensors") => Format::Safetensors,
            (None, ending) if TORCH_ENDINGS.contains(&ending) => Format::Torch,
            (None, "npy" | "npz") => {
                let text = "--to npy writes a directory of .npy files: leave the ending out";
                return Err(Failure::usage(format!("{}: {text}", self.output.display())).into());
            }
            (None, _) if sharding.is_some() => Format::Safetensors,
            (None, _) => Format::Npy,
        };
        match (format, sharding) {
            (Format::Safetensors, None) => Ok(Target::Safetensors),
            (Format::Safetensors, Some(_)) if ending == "safetensors" => {
                let text = "shards and their index take a directory, and OUT names a file";
                Err(Failure::usage(text).into())
            }
            (Format::Safetensors, Some(sharding)) => Ok(Target::Shards(sharding)),
            (_, Some(_)) => Err(Failure::usage("only .safetensors files are sharded").into()),
            (Format::Npy, None) => Ok(Target::Npy),
            (Format::Torch, None) => Ok(Target::Torch),
        }
    }
}

impl Target {
    fn is_directory(self) -> bool {
        matches!(self, Self::Shards(_) | Self::Npy)
    }

    fn format(self) -> Format {
        match self {
            Self::Safetensors | Self::Shards(_) => Format::Safetensors,
            Self::Npy => Format::Npy,
            Self::Torch => Format::Torch,
        }
    }
}

/// Converts.
pub(crate) fn run(options: &Convert, host: &dyn Host, output: &Output) -> Result<u8> {
    let target = options.target()?;
    let path = convert::resolve(&options.output).map_err(failure)?;
    may_replace(&path, target, options.force)?;
    let (parent, name) = parts_of(&path)?;
    let scratch = Scratch::new(&parent, SUBCOMMAND).map_err(|error| {
        Failure::environment(Error::from_io(error, "cannot write in").path(&parent).to_string())
    })?;
    let budget = options.budget.0;
    let wanted = Wanted { budget, scratch: Some(scratch.path()), name: None };
    let opened = Opened::at(&options.input, host, wanted)?;
    let made = scratch.path().join(name);
    let rooms = match target {
        Target::Torch => torch::create(&made, &opened.catalog, host)?,
        _ => Vec::new(),
    };
    // From here on nothing of Python's is at work, which has its own way with signals.
    let signals = Signals::take()?;
    let written = write(&opened, target, &made, rooms, budget, &signals);
    let written = match written.and_then(|written| {
        may_replace(&path, target, options.force)?;
        convert::publish(&made, &path, options.force).map_err(failure)?;
        Ok(written)
    }) {
        Ok(written) => written,
        Err(error) => return signals.exit_code().ok_or(error),
    };
    show(options, &opened, target, &path, &written, output)?;
    Ok(Exit::Done as u8)
}

/// Writes all of it under a name of the scratch directory.
fn write(
    opened: &Opened,
    target: Target,
    made: &Path,
    rooms: Vec<Room>,
    budget: u64,
    signals: &Signals,
) -> Result<Written> {
    let catalog = &opened.catalog;
    if target.is_directory() {
        std::fs::create_dir(made).map_err(|error| {
            Failure::environment(Error::from_io(error, "cannot make").path(made).to_string())
        })?;
    }
    let progress = Progress::new("converting", catalog.bytes());
    let mut watch = |done| {
        progress.show(done);
        signals.exit_code().is_none()
    };
    let written = match target {
        Target::Safetensors => convert::to_safetensors(catalog, made, budget, &mut watch),
        Target::Shards(sharding) => convert::to_shards(catalog, made, sharding, budget, &mut watch),
        Target::Npy => convert::to_npy(catalog, made, budget, &mut watch),
        Target::Torch => convert::into_room(catalog, made, rooms, budget, &mut watch),
    };
    written.map_err(failure)
}

/// The directory that a path is in, and its name there.
fn parts_of(path: &Path) -> Result<(PathBuf, OsString)> {
    let Some(name) = path.file_name() else {
        return Err(Failure::usage(format!("{} names nothing to write", path.display())).into());
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok((parent.unwrap_or(Path::new(".")).to_path_buf(), name.to_owned()))
}

fn may_replace(path: &Path, target: Target, force: bool) -> Result<()> {
    convert::refuse_replacing(path, target.is_directory(), force).map_err(|error| {
        let is_there = error.kind() == ErrorKind::InvalidInput && !force;
        failure(if is_there { error.hint("pass --force to replace it") } else { error })
    })
}

fn show(
    options: &Convert,
    opened: &Opened,
    target: Target,
    path: &Path,
    written: &Written,
    output: &Output,
) -> Result<()> {
    opened.notes.complain();
    let catalog = &opened.catalog;
    if target.format() != Format::Safetensors && !catalog.metadata.is_empty() {
        let keys: Vec<&str> = catalog.metadata.keys().map(String::as_str).collect();
        let keys = line(&keys.join(", "));
        complain(&format!("forebay: left out, since only safetensors has metadata: {keys}"));
    }
    let given = |path: &Path| path.to_string_lossy().into_owned();
    if !output.is_json() {
        let text = format!(
            "{} of {} from {} to {} in {}",
            counted(catalog.tensors.len(), "tensor"),
            ByteSize(catalog.bytes()),
            options.input.display(),
            options.output.display(),
            counted(written.files.len(), "file"),
        );
        let verified = match written.verified {
            0 => String::new(),
            count => format!(", {} held against a checksum", counted(count, "tensor")),
        };
        return output.text(&format!("{}\n", line(&(text + &verified))));
    }
    let files = written.files.iter().map(|(made, bytes)| {
        let path = match made.file_name() {
            Some(name) if target.is_directory() => path.join(name),
            _ => path.to_path_buf(),
        };
        ConvertedFile { path: given(&path), bytes: *bytes }
    });
    output.object(
        "convert",
        &Converted {
            input: given(&options.input),
            output: given(&options.output),
            from: opened.format,
            to: target.format(),
            tensors: catalog.tensors.len(),
            bytes: catalog.bytes(),
            verified: written.verified,
            files: files.collect(),
            notes: &opened.notes,
        },
    )
}
