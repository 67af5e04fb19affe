//! Shows what a run came to: text, or one JSON object (`forebay.io/1`).

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use forebay::ByteSize;
use forebay::workload::{
    Difference, LoopReport, Percentiles, ProcessReport, Summary, Way, sparkline,
};
use serde::Serialize;

use super::arguments::{Direct, Durability, Io};
use super::code_of;
use super::place::Place;
use super::plan::Plan;
use crate::gpu::Gpu;
use crate::output::Output;

/// The name of what `--json` prints.
const SCHEMA: &str = "io";
/// Bars of the line that shows bandwidth over time.
const BARS: usize = 60;

/// What all loops and processes came to.
#[derive(Debug, Default)]
pub(super) struct Result {
    pub(super) runs: Vec<Summary>,
    pub(super) processes: Vec<ProcessReport>,
    pub(super) differences: Vec<Found>,
}

/// A byte that isn't what it should be, and where it was found.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    way: Way,
    /// The number of the loop, warm-up included.
    #[serde(rename = "loop")]
    index: u64,
    process: usize,
    file: String,
    #[serde(flatten)]
    difference: Difference,
}

impl Result {
    /// Keeps what differed in a loop.
    pub(super) fn add_differences(&mut self, way: Way, index: u64, reports: &[LoopReport]) {
        for (process, report) in reports.iter().enumerate() {
            if let Some((file, difference)) = report.difference.clone() {
                self.differences.push(Found { way, index, process, file, difference });
            }
        }
    }

    /// Fallbacks of all processes, added up.
    fn fallbacks(&self) -> Vec<Fallback> {
        let mut sums: Vec<Fallback> = Vec::new();
        for (text, count) in self.processes.iter().flat_map(|process| &process.fallbacks) {
            match sums.iter_mut().find(|sum| sum.text == *text) {
                Some(sum) => sum.count += count,
                None => sums.push(Fallback { text: text.clone(), count: *count }),
            }
        }
        sums
    }
}

#[derive(Debug, Serialize)]
struct Fallback {
    text: String,
    count: u64,
}

/// What `--json` prints; documented in `docs/bench.md`.
#[derive(Debug, Serialize)]
struct Document<'a> {
    version: &'static str,
    options: &'a Io,
    directories: Vec<Place>,
    processes: usize,
    engine: String,
    /// The GPUs whose memory was moved.
    gpus: &'a [Gpu],
    runs: &'a [Summary],
    /// Whether every byte was right; `null` where none was checked.
    valid: Option<bool>,
    differences: &'a [Found],
    payload_bytes: u64,
    peak_resident_bytes: Option<u64>,
    fallbacks: Vec<Fallback>,
    notes: Vec<String>,
}

/// Shows a run; returns the exit code.
pub(super) fn show(
    options: &Io,
    plan: &Plan,
    directories: Vec<Place>,
    result: &Result,
    output: &Output,
) -> anyhow::Result<u8> {
    let mut engines: Vec<&str> = result.processes.iter().map(|each| each.engine.as_str()).collect();
    engines.dedup();
    let document = Document {
        version: env!("CARGO_PKG_VERSION"),
        options,
        notes: notes(options, &directories, result),
        directories,
        processes: plan.processes.len(),
        engine: engines.join(", "),
        gpus: &plan.gpus,
        runs: &result.runs,
        valid: options.validate.then_some(result.differences.is_empty()),
        differences: &result.differences,
        payload_bytes: result.processes.iter().map(|each| each.payload_bytes).sum(),
        peak_resident_bytes: result.processes.iter().map(|each| each.peak_resident_bytes).sum(),
        fallbacks: result.fallbacks(),
    };
    if output.is_json() {
        output.object(SCHEMA, &document)?;
    } else {
        output.text(&text_of(&document))?;
    }
    Ok(code_of(result))
}

/// What a reader of the figures should know.
fn notes(options: &Io, directories: &[Place], result: &Result) -> Vec<String> {
    let mut notes = Vec::new();
    let wrote = result.runs.iter().any(|run| run.way == Way::Write);
    let buffered = result.runs.iter().any(|run| run.moved.buffered_bytes > run.bytes / 2);
    if wrote && buffered && options.durability == Durability::None {
        let text = "written to the page cache, which is memory: pass --durability data";
        notes.push(text.to_owned());
    }
    let cached = result.runs.iter().filter_map(|run| run.cached_before_bytes).max().unwrap_or(0);
    if cached > 0 && !options.keep_cache {
        let bytes = ByteSize(cached);
        notes.push(format!("{bytes} stayed in the page cache: reading them measures memory"));
    }
    let indirect = directories.iter().find(|place| !place.direct);
    if let (Some(place), true) = (indirect, options.direct == Direct::Auto) {
        let reason = place.reason.as_deref().unwrap_or("it isn't offered");
        notes.push(format!("no direct I/O in {}: {reason}", place.path));
    }
    notes
}

fn text_of(document: &Document<'_>) -> String {
    let mut text = String::new();
    let Document { options, processes, engine, .. } = document;
    let size = options.io_size;
    let request = options.request_size.unwrap_or(size).min(size);
    let many = if *processes == 1 { "process" } else { "processes" };
    let places: Vec<String> = document
        .directories
        .iter()
        .map(|place| format!("{} ({})", place.path, place.file_system))
        .collect();
    let _ = writeln!(text, "{processes} {many} × {size}, requests of {request}, engine {engine}");
    let _ = writeln!(text, "in {}", places.join(", "));
    for Gpu { ordinal, name } in document.gpus {
        let _ = writeln!(text, "memory of GPU {ordinal}, {name}");
    }
    for run in document.runs {
        text.push_str(&run_text(run));
    }
    let payload = ByteSize(document.payload_bytes);
    if let Some(peak) = document.peak_resident_bytes {
        let _ =
            writeln!(text, "memory     {} at the most, of which {payload} moved", ByteSize(peak));
    }
    for fallback in &document.fallbacks {
        let _ = writeln!(text, "note: {} ({} times)", fallback.text, fallback.count);
    }
    for note in &document.notes {
        let _ = writeln!(text, "note: {note}");
    }
    for Found { way, index, process, file, difference } in document.differences {
        let Difference { offset, wanted, found } = difference;
        let where_to = format!("{}, loop {index}, process {process}: {file}", way.name());
        let _ = writeln!(
            text,
            "DIFFERS: {where_to} at offset {offset}: {found:#04x} instead of {wanted:#04x}"
        );
    }
    if document.valid == Some(true) {
        text.push_str("every byte checked: all right\n");
    }
    text
}

fn run_text(run: &Summary) -> String {
    let mut text = String::new();
    let gb = |rate: f64| rate / 1e9;
    let rate = run.bytes_per_second;
    let _ = writeln!(
        text,
        "\n{:<10} {:.2} GB/s ({:.2} to {:.2} in {} loops), CPU {:.2} s/GiB",
        run.way.name(),
        gb(rate.median),
        gb(rate.min),
        gb(rate.max),
        run.loops.len(),
        run.cpu_seconds_per_gib,
    );
    let rates = &run.bandwidth.bytes_per_second;
    let highest = rates.iter().copied().fold(0.0, f64::max);
    let _ = writeln!(text, "over time  {} 0 to {:.2} GB/s", sparkline(rates, BARS), gb(highest));
    let _ = writeln!(text, "latency         p50      p90      p99    p99.9      max");
    for (name, percentiles) in
        [("request", run.latency_us.request), ("transfer", run.latency_us.transfer)]
    {
        if let Some(percentiles) = percentiles {
            let _ = writeln!(text, "{name:<10} {}", latency_text(&percentiles));
        }
    }
    let moved = run.moved;
    let parts = [
        (moved.direct_bytes, "straight"),
        (moved.staged_bytes, "staged"),
        (moved.gds_bytes, "by GPUDirect Storage"),
        (moved.buffered_bytes, "through the page cache"),
        (moved.cached_bytes, "from the page cache"),
    ];
    let total = moved.total_bytes().max(1);
    let shares: Vec<String> = parts
        .iter()
        .filter(|(bytes, _)| *bytes > 0)
        .map(|(bytes, how)| format!("{} % {how}", (bytes * 100 + total / 2) / total))
        .collect();
    let _ = writeln!(text, "moved      {}, {} transfers", shares.join(", "), moved.transfers);
    text
}

fn latency_text(latency: &Percentiles) -> String {
    let Percentiles { p50, p90, p99, p99_9, max, count, .. } = *latency;
    let cells: Vec<String> = [p50, p90, p99, p99_9, max].iter().map(|us| time_text(*us)).collect();
    format!("{} (of {count})", cells.join(" "))
}

/// A time in the unit that fits, in eight columns.
fn time_text(us: f64) -> String {
    let (amount, unit) = match us {
        us if us < 1e3 => (us, "µs"),
        us if us < 1e6 => (us / 1e3, "ms"),
        us => (us / 1e6, "s "),
    };
    let decimals = if amount < 10.0 { 2 } else { usize::from(amount < 100.0) };
    format!("{amount:>5.decimals$} {unit}")
}

/// Where the run is, on a terminal.
#[derive(Debug)]
pub(super) struct Progress {
    done: u64,
    steps: u64,
    shown: bool,
}

impl Progress {
    pub(super) fn new(plan: &Plan) -> Self {
        let steps = (plan.warmup_loops + plan.loops) * plan.ways.len() as u64;
        Self { done: 0, steps, shown: io::stderr().is_terminal() }
    }

    /// Says what is done next.
    pub(super) fn step(&mut self, what: &str) {
        if self.shown {
            // A terminal that is gone takes no progress.
            let _ = write!(io::stderr(), "\r\x1b[K{}/{} {what}", self.done, self.steps);
            self.done += 1;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_the_unit_that_fits() {
        let shown: Vec<String> = [0.5, 12.34, 999.0, 1500.0, 2.5e6].map(time_text).to_vec();
        assert_eq!(shown, [" 0.50 µs", " 12.3 µs", "  999 µs", " 1.50 ms", " 2.50 s "]);
    }
}
