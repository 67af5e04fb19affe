//! The definition of the command: subcommands, options, help.

use std::path::PathBuf;

use clap::{CommandFactory, Parser};
use clap_complete::Shell;
use forebay::ByteSize;
use serde::Serialize;

/// What holds for all subcommands.
const EXIT_CODES: &str = "Exit codes: 0 all is well, 1 something that was checked or tried failed, \
    2 the arguments can't be used, 3 the machine or the directory can't take it, 130 interrupted.";

/// Moves tensors between NVMe drives and memory.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, after_help = EXIT_CODES, max_term_width = 100)]
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

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Subcommand {
    /// Store and load real tensors, check every byte, and compare with other ways
    Quickstart(Quickstart),

    /// Print the completions of a shell
    #[command(after_help = "Example: forebay completions bash > \
        ~/.local/share/bash-completion/completions/forebay")]
    Completions {
        /// The shell
        shell: Shell,
    },

    /// Print the man page
    #[command(after_help = "Example: forebay man | man -l -")]
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
}
