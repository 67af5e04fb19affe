//! `forebay cat`: one tensor to standard output, as a `.npy` file.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use anyhow::Result;
use forebay::catalog::Kind;
use forebay::convert::{npy_header, read_pieces};
use forebay::io::Error;

use super::torch::Wanted;
use super::{Opened, failure};
use crate::exit::{Exit, Failure};
use crate::host::Host;
use crate::output::{Output, write_bytes};
use crate::scratch::Scratch;

/// Whose scratch directories these are.
const SUBCOMMAND: &str = "cat";
/// The most memory that torch takes for a tensor that it has to put together.
const BUDGET_BYTES: u64 = 256 << 20;
/// How many names are listed where the one asked for isn't there.
const NAMES_SHOWN: usize = 5;

/// Options of `forebay cat`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    forebay cat model.safetensors --tensor wte.weight > wte.npy\n  \
    forebay cat models/gpt2 --tensor h.0.ln_1.bias | python -c \
    'import io, sys, numpy; print(numpy.load(io.BytesIO(sys.stdin.buffer.read())))'\n\n\
    NumPy has no bfloat16 and no floats of 8 bits: such a tensor is a structure of one field that \
    is named by its dtype, and array.view(ml_dtypes.bfloat16) makes it what it is.")]
pub(crate) struct Cat {
    /// A .safetensors, .npy or torch file; a directory of a model, a checkpoint's step, .npy files
    #[arg(value_name = "FILE|DIR")]
    path: PathBuf,

    /// The tensor's name, as `forebay ls` lists it
    #[arg(long, value_name = "NAME")]
    tensor: String,
}

/// Prints the tensor.
pub(crate) fn run(options: &Cat, host: &dyn Host, output: &Output) -> Result<u8> {
    if output.is_json() {
        let text = "a .npy file isn't JSON: leave --json out, or use forebay ls --json";
        return Err(Failure::usage(text).into());
    }
    if io::stdout().is_terminal() {
        let text = "a .npy file is nothing for a terminal: send it to a file or a program";
        return Err(Failure::usage(text).into());
    }
    let scratch = scratch_for(&options.path)?;
    let (budget, name) = (BUDGET_BYTES, Some(options.tensor.as_str()));
    let wanted = Wanted { budget, scratch: scratch.as_ref().map(Scratch::path), name };
    let opened = Opened::at(&options.path, host, wanted)?;
    let Some(tensor) = opened.catalog.get(&options.tensor) else {
        return Err(missing(options, &opened).into());
    };
    // With the first bytes, so that nothing is printed of a tensor that can't be read.
    let mut header = Some(npy_header(tensor).map_err(failure)?);
    let mut print = |piece: &[u8]| {
        header.take().map_or(Ok(()), |header| write_bytes(&header))?;
        write_bytes(piece)
    };
    read_pieces(&opened.catalog, tensor, &mut print).map_err(as_failure)?;
    print(&[])?;
    Ok(Exit::Done as u8)
}

/// What reading met with its exit code; what writing met as it is.
fn as_failure(error: anyhow::Error) -> anyhow::Error {
    error.downcast::<Error>().map_or_else(|other| other, failure)
}

/// Room for a tensor that torch has to put together.
fn scratch_for(path: &Path) -> Result<Option<Scratch>> {
    if Kind::of(path).map_err(failure)? != Kind::Torch {
        return Ok(None);
    }
    let made = Scratch::new(&std::env::temp_dir(), SUBCOMMAND);
    let made = made.map_err(|error| format!("cannot make a temporary directory: {error}"));
    Ok(Some(made.map_err(Failure::environment)?))
}

fn missing(options: &Cat, opened: &Opened) -> Failure {
    let names = opened.catalog.tensors.iter().map(|tensor| format!("{:?}", tensor.name));
    let names: Vec<String> = names.take(NAMES_SHOWN).collect();
    let (name, path) = (&options.tensor, options.path.display());
    let text = format!("there is no tensor {name:?} in {path}; forebay ls lists");
    Failure::usage(match opened.catalog.tensors.len() - names.len() {
        0 if names.is_empty() => format!("{text} none"),
        0 => format!("{text} {}", names.join(", ")),
        others => format!("{text} {} and {others} more", names.join(", ")),
    })
}
