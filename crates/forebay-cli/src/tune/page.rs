//! The result of `forebay tune` as a page: heat maps, tables, the block for DeepSpeed.
//!
//! It is one file that loads nothing, readable in light and dark. Rates are shades of one hue, so
//! it takes no colour vision, and each is also there as a number.

use std::fmt::Write as _;

use forebay::ByteSize;
use forebay::tune::{Candidate, Summary};

use super::report::{CandidateReport, Rate, Report, Target, Winner};

const STYLE: &str = include_str!("page.css");
/// Shades run from this opacity to one less than solid.
const SHADE_MIN: f64 = 0.06;
/// How much more opacity the fastest gets.
const SHADE_RANGE: f64 = 0.89;
/// From this opacity on, text on a shade is that of the background.
const STRONG_MIN: f64 = 0.68;

/// One way: its name, and where its rate is.
#[derive(Clone, Copy)]
struct Way {
    title: &'static str,
    rate: fn(&CandidateReport) -> Option<&Rate>,
    summary: fn(&Winner) -> Option<Summary>,
    winner: fn(&Target) -> Option<&Winner>,
}

const WAYS: [Way; 2] = [
    Way {
        title: "Reading",
        rate: |candidate| candidate.read.as_ref(),
        summary: |winner| winner.read,
        winner: |target| target.read.as_ref(),
    },
    Way {
        title: "Writing",
        rate: |candidate| candidate.write.as_ref(),
        summary: |winner| winner.write,
        winner: |target| target.write.as_ref(),
    },
];

pub(super) fn render(report: &Report) -> String {
    let mut body = String::from("<h1>forebay tune</h1>\n");
    let size = ByteSize(report.io_bytes);
    let _ = writeln!(
        body,
        "<p class=soft>forebay {}, files of {size}, rates in GB/s</p>",
        escape(report.version)
    );
    for target in &report.targets {
        body.push_str(&section(target));
    }
    format!(
        "<!DOCTYPE html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n\
         <meta name=viewport content=\"width=device-width, initial-scale=1\">\n\
         <title>forebay tune</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{body}</body>\n\
         </html>\n"
    )
}

fn section(target: &Target) -> String {
    let mut html = String::new();
    let paths: Vec<String> =
        target.directories.iter().map(|directory| escape(&directory.path)).collect();
    let striped = if target.striped { "Striped: " } else { "" };
    let _ = writeln!(html, "<h2>{striped}{}</h2>", paths.join(" + "));
    for directory in &target.directories {
        let (name, identity) = (escape(&directory.name), escape(&directory.identity));
        let _ = writeln!(html, "<p class=soft>{name}, {identity}</p>");
    }
    if let Some(words) = target.memory.in_words() {
        let _ = writeln!(html, "<p class=soft>{}</p>", escape(&words));
    }
    for warning in &target.warnings {
        let _ = writeln!(html, "<p class=warning>{}</p>", escape(warning));
    }
    html.push_str(&winners(target));
    for way in WAYS {
        html.push_str(&maps(target, way));
    }
    let block = serde_json::to_string_pretty(&target.block).unwrap_or_default();
    let _ = writeln!(html, "<h3>For DeepSpeed’s configuration</h3>\n<pre>{}</pre>", escape(&block));
    html.push_str(&all_candidates(target));
    html
}

fn winners(target: &Target) -> String {
    let mut rows = String::new();
    for way in WAYS {
        if let Some(winner) = (way.winner)(target) {
            rows.push_str(&winner_row(way.title, winner, (way.summary)(winner)));
        }
    }
    if let Some(both) = &target.both {
        rows.push_str(&winner_row("Both, reading", both, both.read));
        rows.push_str(&winner_row("Both, writing", both, both.write));
    }
    format!(
        "<div class=scroll><table class=list><thead><tr><th class=name>Best for<th \
         class=name>Engine<th>Block<th>Depth<th>Workers<th class=name>Submission<th>Staging<th>GB/s<th>Half \
         of the samples<th>CPU s/GiB<th class=name>Verdict</thead><tbody>\n{rows}</tbody></table>\
         </div>\n"
    )
}

fn winner_row(title: &str, winner: &Winner, summary: Option<Summary>) -> String {
    let verdict = match winner.verdict {
        Some(verdict) if verdict.conclusive => {
            format!("within {:.1} % of the best", verdict.uncertainty.unwrap_or(0.0) * 100.0)
        }
        Some(_) => "inconclusive".to_owned(),
        None => String::new(),
    };
    let options = options_cells(&winner.options);
    let rates = rate_cells(summary);
    format!("<tr><th class=name>{title}{options}{rates}<td class=name>{verdict}\n")
}

fn options_cells(options: &Candidate) -> String {
    let submit = if options.single_submit { "single" } else { "batch" };
    let staging = options.device_staging_bytes.map(|bytes| ByteSize(bytes as u64).to_string());
    format!(
        "<td class=name>{}<td>{}<td>{}<td>{}<td class=name>{submit}<td>{}",
        options.engine.name(),
        ByteSize(options.block_size as u64),
        options.queue_depth,
        options.parallelism,
        staging.as_deref().unwrap_or("–")
    )
}

fn rate_cells(summary: Option<Summary>) -> String {
    summary.map_or("<td><td><td>".to_owned(), |found| {
        format!(
            "<td>{}<td>{} to {}<td>{:.2}",
            gigabytes(found.bytes_per_second),
            gigabytes(found.low),
            gigabytes(found.high),
            found.cpu_seconds_per_gib
        )
    })
}

/// The heat maps of one way: block size × depth, one for each engine, submission, parallelism and
/// staging memory.
fn maps(target: &Target, way: Way) -> String {
    let rates: Vec<f64> = target
        .candidates
        .iter()
        .filter_map(|candidate| Some((way.rate)(candidate)?.summary?.bytes_per_second))
        .collect();
    if rates.is_empty() {
        return String::new();
    }
    let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let most = rates.iter().copied().fold(0.0, f64::max);
    let winner = (way.winner)(target).map(|winner| winner.candidate);
    let mut html = format!(
        "<h3>{}</h3>\n<p class=legend><span class=scale>{} <span class=ramp></span> {} GB/s</span> small: samples taken; \
         framed: measured to the end, others are what they came to before they were left out; \
         thick: the winner</p>\n<div class=maps>\n",
        way.title,
        gigabytes(least),
        gigabytes(most)
    );
    let group = |candidate: &CandidateReport| {
        let options = &candidate.options;
        let mode = (options.engine.name(), options.single_submit);
        (mode, options.parallelism, options.device_staging_bytes)
    };
    let groups = unique(target.candidates.iter().map(group));
    for ((engine, single), workers, staging) in groups {
        let members: Vec<(usize, &CandidateReport)> = target
            .candidates
            .iter()
            .enumerate()
            .filter(|(_, candidate)| group(candidate) == ((engine, single), workers, staging))
            .collect();
        let submit = if single { "single" } else { "batch" };
        let plural = if workers == 1 { "" } else { "s" };
        let staging = staging.map(|bytes| format!(", {} to stage in", ByteSize(bytes as u64)));
        let staging = staging.unwrap_or_default();
        let _ = writeln!(
            html,
            "<figure><figcaption>{workers} worker{plural}, {engine}, {submit} \
             submission{staging}</figcaption><table class=map>{}</table></figure>",
            map(&members, way, winner, (least, most))
        );
    }
    html + "</div>\n"
}

fn map(
    members: &[(usize, &CandidateReport)],
    way: Way,
    winner: Option<usize>,
    range: (f64, f64),
) -> String {
    let blocks = unique(members.iter().map(|(_, candidate)| candidate.options.block_size));
    let depths = unique(members.iter().map(|(_, candidate)| candidate.options.queue_depth));
    let mut html = String::from("<thead><tr><th scope=col>depth");
    for block in &blocks {
        let _ = write!(html, "<th scope=col>{}", ByteSize(*block as u64));
    }
    html.push_str("</thead><tbody>");
    for depth in depths {
        let _ = write!(html, "\n<tr><th scope=row>{depth}");
        for block in &blocks {
            let found = members.iter().find(|(_, candidate)| {
                let options = &candidate.options;
                (options.block_size, options.queue_depth) == (*block, depth)
            });
            let rate = found.and_then(|(_, candidate)| (way.rate)(candidate));
            let is_winner = found.is_some_and(|(index, _)| Some(*index) == winner);
            html.push_str(&cell(rate, is_winner, range));
        }
    }
    html + "</tbody>"
}

fn cell(rate: Option<&Rate>, is_winner: bool, (least, most): (f64, f64)) -> String {
    let Some((rate, found)) = rate.and_then(|rate| Some((rate, rate.summary?))) else {
        return "<td class=none>–".to_owned();
    };
    let place = (found.bytes_per_second - least) / (most - least).max(1.0);
    let shade = SHADE_MIN + SHADE_RANGE * place;
    let mut classes = Vec::new();
    let marks =
        [(shade >= STRONG_MIN, "strong"), (rate.dropped.is_none(), "last"), (is_winner, "best")];
    classes.extend(marks.into_iter().filter(|(holds, _)| *holds).map(|(_, name)| name));
    let above = if rate.above_device { " ↑" } else { "" };
    format!(
        "<td class=\"{}\" style=\"--a:{shade:.2}\" title=\"half of the samples: {} to {} GB/s\">\
         {}{above}<small>{}×</small>",
        classes.join(" "),
        gigabytes(found.low),
        gigabytes(found.high),
        gigabytes(found.bytes_per_second),
        found.samples
    )
}

fn all_candidates(target: &Target) -> String {
    let mut html = String::from("<details><summary>All candidates</summary>\n");
    for way in WAYS {
        let mut rows: Vec<(&CandidateReport, Option<Summary>, String)> = target
            .candidates
            .iter()
            .filter_map(|candidate| {
                let rate = (way.rate)(candidate)?;
                Some((candidate, rate.summary, fate(rate)))
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        let speed = |summary: &Option<Summary>| summary.map_or(0.0, |found| found.bytes_per_second);
        rows.sort_by(|one, other| speed(&other.1).total_cmp(&speed(&one.1)));
        let _ = writeln!(
            html,
            "<h3>{}</h3><div class=scroll><table class=list><thead><tr><th class=name>Engine<th>\
             Block<th>Depth<th>Workers<th class=name>Submission<th>Staging<th>GB/s<th>Half of the samples<th>\
             CPU s/GiB<th>Samples<th class=name>What became of it</thead><tbody>",
            way.title
        );
        for (candidate, summary, fate) in rows {
            let samples = summary.map_or(0, |found| found.samples);
            let _ = writeln!(
                html,
                "<tr>{}{}<td>{samples}<td class=name>{}",
                options_cells(&candidate.options),
                rate_cells(summary),
                escape(&fate)
            );
        }
        html.push_str("</tbody></table></div>\n");
    }
    html + "</details>\n"
}

fn fate(rate: &Rate) -> String {
    use forebay::tune::Dropped;
    let above = if rate.above_device { ", above what the device can do" } else { "" };
    let fate = match &rate.dropped {
        None => "measured to the end",
        Some(Dropped::Slower) => "slower",
        Some(Dropped::Rank) => "others were ahead",
        Some(Dropped::Unavailable(reason)) => return reason.clone(),
    };
    format!("{fate}{above}")
}

fn gigabytes(rate: f64) -> String {
    format!("{:.2}", rate / 1e9)
}

fn unique<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

/// Text as HTML, in elements and in quoted attributes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            char => escaped.push(char),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_are_text_and_not_markup() {
        assert_eq!(escape("<b a='\"'>&"), "&lt;b a=&#39;&quot;&#39;&gt;&amp;");
    }

    #[test]
    fn a_candidate_without_a_sample_has_an_empty_cell() {
        assert!(cell(None, false, (0.0, 1.0)).contains("none"));
    }

    #[test]
    fn the_fastest_is_the_strongest_shade() {
        let summary = Summary {
            bytes_per_second: 2e9,
            low: 1e9,
            high: 3e9,
            cpu_seconds_per_gib: 0.1,
            samples: 4,
            sample_bytes: 1 << 20,
            buffered: false,
        };
        let rate = Rate { summary: Some(summary), dropped: None, above_device: false };
        let best = cell(Some(&rate), true, (1e9, 2e9));
        assert!(best.contains("strong last best") && best.contains("--a:0.95"), "{best}");
        let least = cell(Some(&rate), false, (2e9, 4e9));
        assert!(least.contains("--a:0.06") && !least.contains("strong"), "{least}");
    }
}
