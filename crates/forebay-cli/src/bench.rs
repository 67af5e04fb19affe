//! Options of `forebay bench`, which is written in Python: what it compares with is found there.

use std::path::PathBuf;

use clap::builder::ArgPredicate;
use forebay::ByteSize;
use serde::Serialize;

use crate::host::Host;
use crate::output::Output;

const EXAMPLES: &str = "Examples:\n  \
    forebay bench --dir /nvme --size 4G --output bench.html\n  \
    forebay bench --only forebay,torch,safetensors --tensor-size 64M,16M,100K --rounds 7\n  \
    forebay bench --what files --dir /nvme --output files.html     files of 40 and of 5,000 tensors\n  \
    forebay bench --gpu --dir /nvme                         between drives and the memory of a GPU\n  \
    forebay bench --list                                    what is here, and why others aren't";

/// What is compared.
#[derive(Clone, Copy, Debug, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum What {
    /// Storing and loading the bytes of tensors
    Tensors,
    /// Saving and loading files of tensors: safetensors files and others, cold and warm
    Files,
    /// Between drives and the memory of a GPU, beside what both can do: as --gpu
    Gpu,
}

/// Options of `forebay bench`.
#[derive(Debug, Serialize, clap::Args)]
#[command(after_help = EXAMPLES)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches, named by their fields")]
pub(crate) struct Bench {
    /// Where to store
    #[arg(long, default_value = ".")]
    dir: PathBuf,

    /// What is compared
    #[arg(
        long,
        value_enum,
        default_value_t = What::Tensors,
        default_value_if("gpu", ArgPredicate::IsPresent, "gpu")
    )]
    what: What,

    /// Compare loads into and stores from the memory of a GPU: this one, the first if not given
    #[arg(
        long,
        value_name = "NUMBER",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "0",
        default_value_if("what", "gpu", "0"),
        conflicts_with = "what"
    )]
    gpu: Option<u32>,

    /// Bytes of all tensors; with --what files and --gpu, 2G by default
    #[arg(
        long,
        default_value = "1G",
        default_value_ifs([
            ("what", ArgPredicate::from("files"), Some("2G")),
            ("what", ArgPredicate::from("gpu"), Some("2G")),
            ("gpu", ArgPredicate::IsPresent, Some("2G")),
        ])
    )]
    size: ByteSize,

    /// Bytes of the tensors, taken in turn until all have --size
    #[arg(
        long,
        alias = "tensors",
        value_name = "BYTES,…",
        value_delimiter = ',',
        default_value = "64M,16M,16M,4M,16K",
        default_value_ifs([
            ("what", ArgPredicate::from("files"), None::<&str>),
            ("what", ArgPredicate::from("gpu"), None),
            ("gpu", ArgPredicate::IsPresent, None),
        ])
    )]
    tensor_size: Vec<ByteSize>,

    /// Tensors in a file, for one file after the other [with --what files: 40,5000; with
    /// --gpu: 40]
    #[arg(
        long,
        value_name = "COUNT,…",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..),
        default_value_ifs([
            ("what", ArgPredicate::from("files"), Some("40,5000")),
            ("what", ArgPredicate::from("gpu"), Some("40")),
            ("gpu", ArgPredicate::IsPresent, Some("40")),
        ])
    )]
    tensor_count: Vec<u32>,

    /// Rounds, in each of which everyone has a turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Compare these only
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,

    /// Compare all but these
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', conflicts_with = "only")]
    skip: Vec<String>,

    /// Measure no loading
    #[arg(long, conflicts_with = "no_write")]
    no_read: bool,

    /// Measure no storing
    #[arg(long)]
    no_write: bool,

    /// Write a chart to this HTML file
    #[arg(long, value_name = "FILE.html")]
    output: Option<PathBuf>,

    /// How fio moves the bytes, as ENGINE:BLOCK:DEPTH[:JOBS] [default: the best of four]
    #[arg(long, value_name = "SETTING")]
    fio: Option<String>,

    /// Let DeepNVMe compile its operators where they aren't there yet, which takes minutes
    #[arg(long)]
    compile: bool,

    /// Say what can be compared here, and why others can't
    #[arg(long)]
    list: bool,
}

/// Hands the options over to Python.
pub(crate) fn run(options: &Bench, host: &dyn Host, output: &Output) -> anyhow::Result<u8> {
    host.call("bench", &output.with_form(options)?)
}
