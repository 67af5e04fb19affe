//! `forebay tune`: finds the options that drives do best with, and stores them for handles.
//!
//! How it is searched is in [`forebay::tune`]; here are the options, one run for each directory and
//! one over all of them, and what is shown of it: text, JSON, a page.

mod page;
mod place;
mod profiles;
mod report;
mod target;
mod text;

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::ArgGroup;
use forebay::ByteSize;
use forebay::io::{EngineKind, ErrorKind, MemoryKind, probe_engines};
use forebay::tune::{SampleMemory, Space};

use self::place::Place;
use self::report::Report;
use crate::exit::{Exit, Failure};
use crate::gpu::{self, Gpu};
use crate::output::{Output, complain};
use crate::scratch;
use crate::signals::Signals;

/// Options of `forebay tune`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command line")]
#[command(
    group(ArgGroup::new("what").required(true).args(["nvme_dir", "show", "forget"])),
    after_help = "Examples:\n  forebay tune --nvme-dir /nvme\n  \
    forebay tune --nvme-dir /nvme0 /nvme1 --no-write\n  \
    forebay tune --nvme-dir /nvme --json | jq '.targets[0].block' > aio.json\n  \
    forebay tune --nvme-dir /nvme --gpu 1\n  \
    forebay tune --show\n  forebay tune --forget /nvme\n\n\
    The flags are those of ds_nvme_tune, with - or _. No root is needed."
)]
pub(crate) struct Options {
    /// Directories to tune: each alone, and several striped
    #[arg(long, alias = "nvme_dir", value_name = "DIR", num_args = 1..)]
    nvme_dir: Vec<PathBuf>,

    /// Search these values only: a JSON object of lists, as DeepSpeed's tuner takes it
    #[arg(long, alias = "sweep_config", value_name = "FILE")]
    sweep_config: Option<PathBuf>,

    /// Leave reading out
    #[arg(long, alias = "no_read", conflicts_with_all = ["no_write", "show", "forget"])]
    no_read: bool,

    /// Leave writing out; a file to read is written all the same
    #[arg(long, alias = "no_write", conflicts_with_all = ["show", "forget"])]
    no_write: bool,

    /// Bytes of the file, and of one pass over it [default: 1G, less where there is less room]
    #[arg(long, alias = "io_size", value_name = "SIZE")]
    io_size: Option<ByteSize>,

    /// Passes over the grid that the search has to beat by a factor of five
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    loops: u32,

    /// Tune for memory of a GPU, of this number [default: 0]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0",
        conflicts_with_all = ["show", "forget"])]
    gpu: Option<u32>,

    /// Tune for memory of a GPU by GPUDirect Storage
    #[arg(long, conflicts_with_all = ["show", "forget"])]
    gds: bool,

    /// Drop the file from the page cache before each sample; direct I/O goes around it anyway
    #[arg(long, alias = "flush_page_cache")]
    flush_page_cache: bool,

    /// Where journals and the page are kept [default: the user's directory for state]
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Throw away what an interrupted run has measured
    #[arg(long)]
    restart: bool,

    /// Show every candidate
    #[arg(long)]
    verbose: bool,

    /// Show what is stored
    #[arg(long)]
    show: bool,

    /// Forget what is stored of the drives under directories, or of all
    #[arg(long, value_name = "DIR", num_args = 0.., conflicts_with_all = ["nvme_dir", "show"])]
    forget: Option<Vec<PathBuf>>,
}

pub(crate) fn run(options: &Options, output: &Output) -> anyhow::Result<u8> {
    if options.show {
        return profiles::show(output);
    }
    if let Some(directories) = &options.forget {
        return profiles::forget(directories, output);
    }
    let (memory, gpu) = memory_of(options)?;
    let space = space_of(options, memory.kind())?;
    let log = log_directory(options)?;
    let places = places_of(options)?;
    let signals = Signals::take()?;
    for place in &places {
        scratch::remove_leftovers(&place.path, target::SUBCOMMAND);
    }
    let run = target::Run {
        options,
        space: &space,
        memory,
        gpu,
        io_bytes: place::io_bytes(options.io_size, &places)?,
        log: &log,
        signals: &signals,
        seed: seed(),
    };
    match tune_all(&run, &places) {
        Ok(report) => show(&report, options, output),
        Err(error) => stop(error, &signals),
    }
}

/// Tunes each place, then all together.
fn tune_all(run: &target::Run<'_>, places: &[Place]) -> anyhow::Result<Report> {
    let mut targets = Vec::new();
    for place in places {
        targets.push(run.tune(std::slice::from_ref(place))?);
    }
    if places.len() > 1 {
        targets.push(run.tune(places)?);
    }
    let page = run.log.join("forebay-tune.html");
    let mut report = Report::new(run.io_bytes, run.options.loops, targets);
    match fs::write(&page, page::render(&report)) {
        Ok(()) => report.page = Some(page.display().to_string()),
        // What was found is worth more than how it looks.
        Err(error) => complain(&format!("forebay: cannot write {}: {error}", page.display())),
    }
    Ok(report)
}

fn show(report: &Report, options: &Options, output: &Output) -> anyhow::Result<u8> {
    if output.is_json() {
        output.object("tune", report)?;
    } else {
        output.text(&text::render(report, options.verbose, output))?;
    }
    Ok(if report.is_kept() { Exit::Done } else { Exit::Failed } as u8)
}

/// Says why it ended early, and how to go on.
fn stop(error: anyhow::Error, signals: &Signals) -> anyhow::Result<u8> {
    let cause = error.downcast_ref::<forebay::io::Error>();
    match (cause.map(forebay::io::Error::kind), signals.exit_code()) {
        (Some(ErrorKind::Cancelled), Some(code)) => {
            complain(
                "forebay: interrupted; the same command goes on from here, with --restart anew",
            );
            Ok(code)
        }
        (Some(ErrorKind::Unsupported | ErrorKind::OutOfMemory | ErrorKind::Closed), _) => {
            Err(Failure::environment(format!("{error:#}")).into())
        }
        _ if cause.is_some_and(gpu::is_out_of_memory) => {
            Err(Failure::environment(format!("{error:#}; try a smaller --io-size")).into())
        }
        _ if cause.and_then(forebay::io::Error::os_code).is_some_and(is_of_the_place) => {
            Err(Failure::environment(format!("{error:#}")).into())
        }
        _ => Err(error),
    }
}

/// Whether an error number is about what the directory can take: EACCES, EPERM, ENOSPC, EROFS,
/// EDQUOT, EFBIG.
fn is_of_the_place(code: i32) -> bool {
    [13, 1, 28, 30, 122, 27].contains(&code)
}

/// The memory to tune for, and the GPU that has it.
fn memory_of(options: &Options) -> Result<(SampleMemory, Option<Gpu>), Failure> {
    let option = if options.gds { "--gds" } else { "--gpu" };
    if !options.gds && options.gpu.is_none() {
        return Ok((SampleMemory::Host, None));
    }
    let (gpu, context) = gpu::take(option, options.gpu.unwrap_or(0))?;
    let memory = if options.gds { SampleMemory::Gds(context) } else { SampleMemory::Gpu(context) };
    Ok((memory, Some(gpu)))
}

fn space_of(options: &Options, memory: MemoryKind) -> anyhow::Result<Space> {
    let engines: Vec<EngineKind> = probe_engines()
        .into_iter()
        .filter(|probe| probe.available)
        .map(|probe| probe.engine)
        .collect();
    let Some(path) = &options.sweep_config else {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        return Ok(Space::of_device(engines, processors, memory));
    };
    let unusable = |text: String| Failure::usage(format!("{}: {text}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
    Ok(Space::from_sweep(&text, &engines).map_err(|error| unusable(error.to_string()))?)
}

fn log_directory(options: &Options) -> anyhow::Result<PathBuf> {
    let directory = match &options.log_dir {
        Some(directory) => directory.clone(),
        None => forebay::config::state_directory()
            .map(|state| state.join("tune"))
            .ok_or_else(|| Failure::usage("there is no home for journals: say --log-dir"))?,
    };
    fs::create_dir_all(&directory).map_err(|error| {
        Failure::environment(format!("cannot make {}: {error}", directory.display()))
    })?;
    Ok(directory)
}

fn places_of(options: &Options) -> anyhow::Result<Vec<Place>> {
    let places: Result<Vec<Place>, Failure> =
        options.nvme_dir.iter().map(|directory| Place::find(directory)).collect();
    let places = places?;
    for (index, place) in places.iter().enumerate() {
        if places[..index].iter().any(|other| other.path == place.path) {
            let text = format!("{} is given twice", place.path.display());
            return Err(Failure::usage(text).into());
        }
    }
    Ok(places)
}

/// What the order of samples is drawn by: the clock will do.
fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::from(now.subsec_nanos()) ^ now.as_secs()
}
