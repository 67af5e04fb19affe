//! Shell completions and man pages, generated from the definition of the command.

use std::path::Path;

use clap_complete::Shell;
use serde::Serialize;

use crate::arguments::definition;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// A generated page.
#[derive(Serialize)]
struct Page {
    text: String,
}

/// Files that were written.
#[derive(Serialize)]
struct Files<'a> {
    directory: &'a Path,
}

/// Writes the completions of a shell to standard output.
pub(crate) fn completions(shell: Shell, output: &Output) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition(), "forebay", &mut script);
    print("completions", &script, output)
}

/// Writes the man page to standard output, or the pages of all subcommands into a directory.
pub(crate) fn man(directory: Option<&Path>, output: &Output) -> anyhow::Result<u8> {
    let Some(directory) = directory else {
        let mut page = Vec::new();
        clap_mangen::Man::new(definition()).render(&mut page)?;
        return print("man", &page, output);
    };
    let written = std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(definition(), directory));
    written.map_err(|error| {
        let directory = directory.display();
        Failure::environment(format!("cannot write man pages to {directory}: {error}"))
    })?;
    if output.is_json() {
        output.object("man", &Files { directory })?;
    }
    Ok(Exit::Done as u8)
}

fn print(schema: &str, page: &[u8], output: &Output) -> anyhow::Result<u8> {
    let text = String::from_utf8_lossy(page).into_owned();
    if output.is_json() {
        output.object(schema, &Page { text })?;
    } else {
        output.text(&text)?;
    }
    Ok(Exit::Done as u8)
}
