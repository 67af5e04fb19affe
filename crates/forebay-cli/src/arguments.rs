//! The definition of the command: subcommands, options, help.
//!
//! Options of a subcommand are defined in the module that carries it out; here are those without
//! one, and what holds for all.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ColorChoice, CommandFactory, FromArgMatches, Parser};
use clap_complete::Shell;
use forebay::ByteSize;
use serde::Serialize;

use crate::{deepspeed, report, tune};

/// What holds for all subcommands.
const AFTER_HELP: &str = "\
Examples:
  forebay report /nvme
  forebay quickstart --dir /nvme
  forebay report --json | jq .counts

Exit codes: 0 all is well, 1 something that was checked or tried failed, 2 the arguments can't be \
used, 3 the machine or the directory can't take it, 130 interrupted.";

/// Moves tensors between NVMe drives and memory.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, after_help = AFTER_HELP, max_term_width = 100)]
pub(crate) struct Arguments {
    /// Print the result as one JSON object
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print no colours, also on a terminal
    #[arg(long, global = true)]
    pub(crate) no_color: bool,

    #[command(subcommand)]
    pub(crate) subcommand: Subcommand,
}

/// The command, for completions, man pages and tests.
pub fn definition() -> clap::Command {
    Arguments::command()
}

impl Arguments {
    /// Reads the command's name and arguments.
    pub(crate) fn read(arguments: &[OsString]) -> Result<Self, clap::Error> {
        let mut command = definition();
        if names(arguments, "--no-color") {
            command = command.color(ColorChoice::Never);
        }
        let matches = command.try_get_matches_from_mut(arguments)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }
}

/// Whether a flag is among arguments that may not make sense otherwise.
pub(crate) fn names(arguments: &[OsString], flag: &str) -> bool {
    let options = arguments.iter().take_while(|argument| argument.as_os_str() != "--");
    options.into_iter().any(|argument| argument.as_os_str() == flag)
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Subcommand {
    /// Try out what this machine and its drives can do, and say how to get what is missing
    Report(report::Options),

    /// Store and load real tensors, check every byte, and compare with other ways
    Quickstart(Quickstart),

    /// Find the options that drives do best with, and store them for handles
    Tune(Box<tune::Options>),

    /// Have DeepSpeed's swapping use Forebay, or see whether it does
    Deepspeed(deepspeed::Options),

    /// Compare Forebay with what else is installed: storing and loading tensors, in turns
    Bench(crate::bench::Bench),

    /// Measure one workload: bandwidth over time, latencies, processor time
    Io(Box<crate::io::Io>),

    /// List the tensors of a file or a directory: dtypes, shapes, sizes, offsets
    Ls(crate::files::Ls),

    /// Hold tensors against the checksums in their files
    Verify(crate::files::Verify),

    /// Write tensors in another format, or into other files
    Convert(crate::files::Convert),

    /// Print a tensor as a .npy file
    Cat(crate::files::Cat),

    /// Print the completions of a shell
    #[command(after_help = "Examples:\n  \
        mkdir -p ~/.local/share/bash-completion/completions ~/.zfunc\n  \
        forebay completions bash > ~/.local/share/bash-completion/completions/forebay\n  \
        forebay completions zsh > ~/.zfunc/_forebay")]
    Completions {
        /// The shell
        shell: Shell,
    },

    /// Print the man page
    #[command(after_help = "Examples:\n  forebay man | man -l -\n  \
        forebay man --dir ~/.local/share/man/man1")]
    Man {
        /// Write the pages of all subcommands into this directory instead
        #[arg(long)]
        dir: Option<PathBuf>,
    },
}

/// Options of `forebay quickstart`.
#[derive(Debug, Serialize, clap::Args)]
#[command(after_help = "Examples:\n  forebay quickstart\n  \
    forebay quickstart model.safetensors --dir /nvme")]
pub(crate) struct Quickstart {
    /// Tensors to move; without any, a real model where installed and a made-up GPT-2
    #[arg(value_name = "FILE.safetensors")]
    files: Vec<PathBuf>,

    /// Where to store them
    #[arg(long, default_value = ".")]
    dir: PathBuf,

    /// Most bytes without FILE
    #[arg(long, default_value = "1G")]
    size: ByteSize,

    /// Runs of each way, of which the median counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_holds_together() {
        definition().debug_assert();
    }

    #[test]
    fn the_help_of_every_subcommand_has_examples() {
        for command in definition().get_subcommands_mut() {
            let help = command.render_long_help().to_string();
            let (_, examples) = help.split_once("Examples:\n").unwrap_or_default();
            let call = format!("  forebay {}", command.get_name());
            assert!(examples.contains(&call), "{}: {help}", command.get_name());
        }
    }

    #[test]
    fn a_flag_is_found_before_the_end_of_options_only() {
        let arguments = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(names(&arguments("forebay nonsense --json"), "--json"));
        assert!(!names(&arguments("forebay report -- --json"), "--json"));
        assert!(!names(&arguments("forebay report"), "--json"));
    }
}
