//! `forebay report`: what this machine and the drives under directories can do.

use std::path::PathBuf;

use anstyle::Style;

use crate::exit::Exit;
use crate::host::Host;
use crate::output::Output;

/// Options of `forebay report`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  forebay report\n  forebay report /nvme0 /nvme1\n  \
    forebay report /nvme --json | jq '.sections[].findings[] | select(.fix)'")]
pub(crate) struct Options {
    /// Directories to try, each on its own
    #[arg(value_name = "DIR", default_value = ".")]
    directories: Vec<PathBuf>,
}

pub(crate) fn run(options: &Options, host: &dyn Host, output: &Output) -> anyhow::Result<u8> {
    let _ = host.facts()?;
    for directory in &options.directories {
        output.text(&format!(
            "{}\n",
            output.styled(Style::new().bold(), &directory.display().to_string())
        ))?;
    }
    Ok(Exit::Done as u8)
}
