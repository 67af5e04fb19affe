//! The result of `forebay tune` as text.

use anstyle::{AnsiColor, Style};
use forebay::ByteSize;
use forebay::tune::{Candidate, Summary};

use super::report::{Report, Target, Winner};
use crate::output::Output;

/// Columns of the warnings.
const WIDTH: usize = 100;

/// Columns of what a line is about: the longest is `both write`.
pub(super) const NAME_WIDTH: usize = 11;

/// Titles over [`options_columns`], with that of staging memory where it has a column.
pub(super) fn header(is_staged: bool) -> String {
    let staging = if is_staged { "   staging" } else { "" };
    format!("engine      block  depth  workers  submit{staging}")
}

/// Options in columns under [`header`].
pub(super) fn options_columns(options: &Candidate) -> String {
    let block = ByteSize(options.block_size as u64).to_string();
    let submit = if options.single_submit { "single" } else { "batch" };
    let staging =
        options.device_staging_bytes.map(|bytes| format!(" {:>9}", ByteSize(bytes as u64)));
    format!(
        "{:8}{block:>9} {:6} {:8}  {submit:6}{}",
        options.engine.name(),
        options.queue_depth,
        options.parallelism,
        staging.unwrap_or_default()
    )
}

pub(super) fn render(report: &Report, verbose: bool, output: &Output) -> String {
    let mut lines = Vec::new();
    for target in &report.targets {
        lines.extend(target_lines(target, verbose, output));
        lines.push(String::new());
    }
    lines.extend(report.page.iter().map(|page| format!("heat maps: {page}")));
    lines.join("\n") + "\n"
}

fn target_lines(target: &Target, verbose: bool, output: &Output) -> Vec<String> {
    let names: Vec<String> = target
        .directories
        .iter()
        .map(|directory| format!("{} ({})", directory.path, directory.name))
        .collect();
    let title = format!("{}{}", if target.striped { "striped: " } else { "" }, names.join(" + "));
    let mut lines = vec![output.styled(Style::new().bold(), &title)];
    lines.extend(target.memory.in_words().map(|words| format!("  {words}")));
    let staged = target.candidates.iter().any(|one| one.options.device_staging_bytes.is_some());
    let header = header(staged);
    lines.push(format!("  {:NAME_WIDTH$}{header}   GB/s  half of the samples  CPU s/GiB", ""));
    lines.extend(target.read.as_ref().map(|winner| winner_line("read", winner, winner.read)));
    lines.extend(target.write.as_ref().map(|winner| winner_line("write", winner, winner.write)));
    if let Some(both) = &target.both {
        lines.push(winner_line("both read", both, both.read));
        lines.push(winner_line("both write", both, both.write));
    }
    if verbose {
        lines.extend(candidate_lines(target));
    }
    lines.push(format!(
        "  {} candidates; {} moved",
        target.candidates.len(),
        ByteSize(target.moved_bytes >> 20 << 20)
    ));
    for warning in &target.warnings {
        let mark = output.styled(AnsiColor::Yellow.on_default().bold(), "!");
        let options = textwrap::Options::new(WIDTH - 4).break_words(false);
        for (index, part) in textwrap::wrap(warning, options).iter().enumerate() {
            lines.push(if index == 0 { format!("  {mark} {part}") } else { format!("    {part}") });
        }
    }
    lines.push(String::new());
    let block = serde_json::to_string_pretty(&target.block).unwrap_or_default();
    lines.extend(block.lines().map(str::to_owned));
    if let Some(profile) = &target.profile {
        lines.push(String::new());
        lines.push(format!("stored for handles: {profile}"));
    }
    lines
}

fn winner_line(name: &str, winner: &Winner, summary: Option<Summary>) -> String {
    let columns = options_columns(&winner.options);
    let rates = summary.map(|found| rate_columns(&found)).unwrap_or_default();
    let verdict = match winner.verdict {
        Some(verdict) if !verdict.conclusive => "  inconclusive".to_owned(),
        Some(verdict) => {
            let share = verdict.uncertainty.unwrap_or(0.0) * 100.0;
            format!("  within {share:.1} % of the best")
        }
        None => String::new(),
    };
    format!("  {name:NAME_WIDTH$}{columns} {rates}{verdict}")
}

fn rate_columns(found: &Summary) -> String {
    let spread = format!("{:.2} to {:.2}", found.low / 1e9, found.high / 1e9);
    format!("{:6.2}  {spread:>19}  {:9.2}", found.bytes_per_second / 1e9, found.cpu_seconds_per_gib)
}

/// Every candidate, the fastest first.
fn candidate_lines(target: &Target) -> Vec<String> {
    let mut lines = Vec::new();
    for read in [true, false] {
        let rates = target.candidates.iter().filter_map(|candidate| {
            let rate = if read { &candidate.read } else { &candidate.write };
            Some((candidate.options, rate.as_ref()?.summary?))
        });
        let mut rates: Vec<_> = rates.collect();
        rates.sort_by(|one, other| other.1.bytes_per_second.total_cmp(&one.1.bytes_per_second));
        lines.extend(rates.into_iter().map(|(options, summary)| {
            let columns = options_columns(&options);
            let name = if read { "read" } else { "write" };
            let samples = summary.samples;
            format!("  {name:NAME_WIDTH$}{columns} {}  {samples} samples", rate_columns(&summary))
        }));
    }
    lines
}
