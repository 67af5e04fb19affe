//! `forebay report`: what this machine and the drives under directories can do.
//!
//! What is found, and how it is judged, is in [`forebay::report`]; here it becomes text.

use std::path::{Path, PathBuf};

use anstyle::{AnsiColor, Style};
use forebay::report::{Counts, Facts, Finding, Level, PythonFacts, Report, Section, Sources};

use crate::exit::Exit;
use crate::host::Host;
use crate::output::{Output, printable};

/// Columns of the text.
const WIDTH: usize = 100;
/// Columns of titles: a longer one pushes its line.
const TITLE_WIDTH: usize = 18;
/// Columns before a title: two blanks, the mark, a blank.
const MARK_WIDTH: usize = 4;

/// Options of `forebay report`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  forebay report\n  forebay report /nvme0 /nvme1\n  \
    forebay report /nvme --json | jq '.sections[].findings[] | select(.fix)'\n\n\
    Nothing needs root; commands that do say so. What is written to try a directory is removed.")]
pub(crate) struct Options {
    /// Directories to try, each on its own
    #[arg(value_name = "DIR", default_value = ".")]
    directories: Vec<PathBuf>,
}

pub(crate) fn run(options: &Options, host: &dyn Host, output: &Output) -> anyhow::Result<u8> {
    let python = python(host).unwrap_or_else(|error| {
        let problem = format!("cannot say what is installed: {error:#}");
        Some(PythonFacts { problem: Some(problem), ..PythonFacts::default() })
    });
    let root = Path::new("/");
    let facts = Facts::gather(Sources { root, directories: &options.directories, python });
    let report = Report::of(facts);
    if output.is_json() {
        output.object("report", &report)?;
    } else {
        output.text(&text(&report, output))?;
    }
    Ok(if report.counts.failure == 0 { Exit::Done } else { Exit::Failed } as u8)
}

/// What Python says of itself. A broken package is something to report, not to end the report.
fn python(host: &dyn Host) -> anyhow::Result<Option<PythonFacts>> {
    host.facts()?.map(|facts| serde_json::from_value(facts).map_err(Into::into)).transpose()
}

fn text(report: &Report, output: &Output) -> String {
    let mut lines = vec![format!("forebay {}", report.version)];
    for section in &report.sections {
        lines.push(String::new());
        lines.extend(section_lines(section, output));
    }
    lines.push(String::new());
    lines.push(summary(report.counts));
    lines.join("\n") + "\n"
}

fn section_lines(section: &Section, output: &Output) -> Vec<String> {
    let mut lines = vec![output.styled(Style::new().bold(), &line(&section.title))];
    lines.extend(section.findings.iter().flat_map(|finding| finding_lines(finding, output)));
    lines
}

fn finding_lines(finding: &Finding, output: &Output) -> Vec<String> {
    let (mark, color) = match finding.level {
        Level::Ok => ("✓", AnsiColor::Green),
        Level::Info => ("·", AnsiColor::Cyan),
        Level::Warning => ("!", AnsiColor::Yellow),
        Level::Failure => ("✗", AnsiColor::Red),
    };
    let mark = output.styled(color.on_default().bold(), mark);
    let indent = " ".repeat(MARK_WIDTH + TITLE_WIDTH + 1);
    let columns = WIDTH - indent.len();
    let detail = line(&finding.detail);
    let detail = textwrap::wrap(&detail, textwrap::Options::new(columns).break_words(false));
    let mut lines = Vec::new();
    for (index, part) in detail.iter().enumerate() {
        lines.push(match index {
            0 => format!("  {mark} {:TITLE_WIDTH$} {part}", line(&finding.title)),
            _ => format!("{indent}{part}"),
        });
    }
    if let Some(fix) = &finding.fix {
        let who = if fix.root { "as root: " } else { "try: " };
        let command = output.styled(Style::new().bold(), &line(&fix.command));
        lines.push(format!("{indent}{who}{command}"));
    }
    lines
}

/// Text of the report's on one line, whatever the names in it hold.
fn line(text: &str) -> String {
    printable(text).replace('\n', "\\n")
}

fn summary(counts: Counts) -> String {
    let Counts { ok, info, warning, failure } = counts;
    let plural = |count: usize, word: &str| match count {
        1 => format!("1 {word}"),
        count => format!("{count} {word}s"),
    };
    let (warnings, failures) = (plural(warning, "warning"), plural(failure, "failure"));
    format!("{ok} as they should be, {info} to know, {warnings}, {failures}")
}
