//! `forebay deepspeed`: the hook that has DeepSpeed use Forebay. It is written in Python.

use clap::ValueEnum;
use serde::Serialize;

use crate::host::Host;
use crate::output::Output;

/// Options of `forebay deepspeed`.
#[derive(Debug, Serialize, clap::Args)]
#[command(after_help = "Examples:\n  forebay deepspeed status\n  \
    forebay deepspeed enable\n  forebay deepspeed disable")]
pub(crate) struct Options {
    /// What to do
    action: Action,
}

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Action {
    /// Have DeepSpeed use Forebay in every program of this Python environment
    Enable,
    /// Have DeepSpeed use its own code again
    Disable,
    /// Say which of both it is
    Status,
}

pub(crate) fn run(options: &Options, host: &dyn Host, output: &Output) -> anyhow::Result<u8> {
    host.call("deepspeed", &output.with_form(options)?)
}
