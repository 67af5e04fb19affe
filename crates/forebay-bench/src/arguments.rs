//! The command line.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use forebay::ByteSize;
use forebay_io::{EngineChoice, Options};

use crate::subject::set_option;

/// Measures Forebay beside fio on the same files. Without a command: the bench.
///
/// fio's best setting is found first. Then fio with that setting and Forebay take turns, and what
/// counts is the median of the ratios of neighbouring runs. Both read with a cold cache, and write
/// in place into a file that is there, without a final sync.
#[derive(Debug, Parser)]
#[command(name = "forebay-bench", args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) bench: Bench,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Compares Forebay's options with each other, to choose defaults by.
    Sweep(Sweep),
    /// Compares a file striped over two drives with a plain one: two loop devices in memory, each
    /// throttled by the kernel (needs root and the blkio controller). Unthrottled, on one device:
    /// what striping costs.
    Stripe(StripeBench),
}

#[derive(Args, Debug)]
pub(crate) struct StripeBench {
    /// Directory below which the devices are mounted.
    #[arg(long, default_value = "target/bench")]
    pub(crate) dir: PathBuf,
    /// Bytes of the file.
    #[arg(long, default_value = "512M")]
    pub(crate) size: ByteSize,
    /// Rounds, in each of which every candidate runs once.
    #[arg(long, default_value = "7")]
    pub(crate) pairs: usize,
    /// Bytes of a stripe.
    #[arg(long, default_value = "1M")]
    pub(crate) stripe_size: ByteSize,
    /// Bytes per second of each device; half of what a device does unthrottled if not given.
    #[arg(long)]
    pub(crate) rate: Option<ByteSize>,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Where and what.
#[derive(Args, Debug)]
pub(crate) struct Scope {
    /// Directory on the drive to measure.
    #[arg(long, default_value = "target/bench")]
    pub(crate) dir: PathBuf,
    /// Bytes of the file.
    #[arg(long, default_value = "1G")]
    pub(crate) size: ByteSize,
    /// Rounds, in each of which every candidate runs once.
    #[arg(long, default_value = "7")]
    pub(crate) pairs: usize,
    /// Leave the loop device in memory out.
    #[arg(long)]
    pub(crate) skip_loop: bool,
    /// Leave the drive out.
    #[arg(long)]
    pub(crate) skip_drive: bool,
    /// Write every figure to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// An option of Forebay's, such as `block_size=4M`; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) scope: Scope,
    /// Forebay's engine.
    #[arg(long, default_value = "auto")]
    pub(crate) engine: String,
    /// Only these measurements.
    #[arg(long, value_delimiter = ',')]
    pub(crate) only: Vec<Section>,
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Section {
    /// Large reads.
    Read,
    /// Large writes.
    Write,
    /// Many small tensors in one call.
    Vectored,
    /// How long an asynchronous submission takes.
    Submit,
    /// CPU time of a handle with nothing to do.
    Idle,
}

#[derive(Args, Debug)]
pub(crate) struct Sweep {
    #[command(flatten)]
    pub(crate) scope: Scope,
    /// Engines to try.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    pub(crate) engine: Vec<String>,
    /// Block sizes to try.
    #[arg(long, value_delimiter = ',', default_value = "512K,1M,4M")]
    pub(crate) block_size: Vec<String>,
    /// Queue depths to try.
    #[arg(long, value_delimiter = ',', default_value = "8,32")]
    pub(crate) queue_depth: Vec<String>,
    /// Numbers of workers to try.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub(crate) parallelism: Vec<String>,
    /// Directions to try.
    #[arg(long, value_delimiter = ',', default_value = "read,write")]
    pub(crate) only: Vec<Section>,
}

impl Bench {
    pub(crate) fn has(&self, section: Section) -> bool {
        self.only.is_empty() || self.only.contains(&section)
    }

    pub(crate) fn options(&self) -> Result<Options> {
        let mut options = self.scope.options()?;
        options.engine = self.engine.parse::<EngineChoice>()?;
        Ok(options)
    }
}

impl Scope {
    pub(crate) fn options(&self) -> Result<Options> {
        let mut options = Options::default();
        for setting in &self.settings {
            let (key, value) = setting.split_once('=').context("--set takes KEY=VALUE")?;
            set_option(&mut options, key, value).with_context(|| format!("--set {setting}"))?;
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_holds_together() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
        let arguments = Arguments::parse_from(["forebay-bench", "--only", "read,idle"]);
        assert!(arguments.bench.has(Section::Idle) && !arguments.bench.has(Section::Write));
    }
}
