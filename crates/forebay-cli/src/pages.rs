//! Shell completions and man pages, generated from the definition of the command.

use std::path::Path;

use anyhow::Context;
use clap_complete::Shell;

use crate::arguments::definition;
use crate::exit::Exit;
use crate::output::Output;

/// Writes the completions of a shell to standard output.
pub(crate) fn completions(shell: Shell, output: &mut Output) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition(), "forebay", &mut script);
    output.text(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Done as u8)
}

/// Writes the man page to standard output, or the pages of all subcommands into a directory.
pub(crate) fn man(directory: Option<&Path>, output: &mut Output) -> anyhow::Result<u8> {
    if let Some(directory) = directory {
        clap_mangen::generate_to(definition(), directory)
            .with_context(|| format!("cannot write man pages to {}", directory.display()))?;
    } else {
        let mut page = Vec::new();
        clap_mangen::Man::new(definition()).render(&mut page)?;
        output.text(&String::from_utf8_lossy(&page))?;
    }
    Ok(Exit::Done as u8)
}
