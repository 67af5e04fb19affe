//! Results: one line for each comparison, one for each single value, all of it also as JSON.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::measure::{Figure, median, spread};
use crate::table::layout;

/// Two series of runs that took turns.
#[derive(Debug)]
pub(crate) struct Comparison {
    pub(crate) place: &'static str,
    /// What was moved, such as `read, pool`.
    pub(crate) what: String,
    /// What it is compared with.
    pub(crate) against: String,
    /// What the ratio of rates should come to, if that was ever said.
    pub(crate) goal: &'static str,
    /// The same for the ratio of CPU times.
    pub(crate) cpu_goal: &'static str,
    pub(crate) base: Vec<Figure>,
    pub(crate) subject: Vec<Figure>,
}

impl Comparison {
    fn ratios(&self) -> Vec<f64> {
        let pairs = self.base.iter().zip(&self.subject);
        pairs
            .map(|(base, subject)| subject.gigabytes_per_second() / base.gigabytes_per_second())
            .collect()
    }

    fn row(&self) -> Vec<String> {
        let ratios = self.ratios();
        let (low, high) = spread(ratios.iter().copied());
        let rate = |figures: &[Figure]| median(figures.iter().map(Figure::gigabytes_per_second));
        let cpu = |figures: &[Figure]| median(figures.iter().map(Figure::cpu_seconds_per_gib));
        vec![
            self.place.to_owned(),
            self.what.clone(),
            self.against.clone(),
            number(rate(&self.base), 2),
            number(rate(&self.subject), 2),
            number(median(ratios), 3),
            if low <= high { format!("{low:.2}–{high:.2}") } else { String::new() },
            self.goal.to_owned(),
            number(cpu(&self.base), 3),
            number(cpu(&self.subject), 3),
            number(cpu(&self.subject) / cpu(&self.base), 2),
            self.cpu_goal.to_owned(),
        ]
    }

    fn to_json(&self) -> Value {
        json!({
            "place": self.place,
            "what": self.what,
            "against": self.against,
            "goal": self.goal,
            "cpu_goal": self.cpu_goal,
            "ratio": median(self.ratios()),
            "base": figures_json(&self.base),
            "forebay": figures_json(&self.subject),
        })
    }
}

/// A number, or nothing where there was nothing to compare with.
fn number(value: f64, decimals: usize) -> String {
    if value.is_nan() { String::new() } else { format!("{value:.decimals$}") }
}

fn figures_json(figures: &[Figure]) -> Value {
    let one = |figure: &Figure| {
        json!({
            "bytes": figure.bytes,
            "seconds": figure.seconds,
            "cpu_seconds": figure.cpu_seconds,
        })
    };
    figures.iter().map(one).collect()
}

/// A value that stands for itself.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) place: &'static str,
    pub(crate) what: String,
    pub(crate) value: String,
    pub(crate) goal: &'static str,
}

/// Everything that was found out.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) comparisons: Vec<Comparison>,
    pub(crate) readings: Vec<Reading>,
    /// What was left out, and why; what was fallen back to.
    pub(crate) notes: Vec<String>,
}

impl Report {
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        if !self.comparisons.is_empty() {
            let header = [
                "place",
                "what",
                "against",
                "GB/s",
                "Forebay",
                "ratio",
                "min–max",
                "goal",
                "CPU s/GiB",
                "Forebay",
                "ratio",
            ];
            let rows: Vec<_> = self.comparisons.iter().map(Comparison::row).collect();
            text.push_str(&layout(&header, &rows));
        }
        if !self.readings.is_empty() {
            let row = |reading: &Reading| {
                let Reading { place, what, value, goal } = reading;
                vec![(*place).to_owned(), what.clone(), value.clone(), (*goal).to_owned()]
            };
            let rows: Vec<_> = self.readings.iter().map(row).collect();
            text.push('\n');
            text.push_str(&layout(&["place", "what", "value", "goal"], &rows));
        }
        for note in &self.notes {
            text.push_str("\nnote: ");
            text.push_str(note);
        }
        text
    }

    pub(crate) fn write_json(&self, path: &Path) -> Result<()> {
        let readings: Value = self
            .readings
            .iter()
            .map(|reading| {
                json!({
                    "place": reading.place,
                    "what": reading.what,
                    "value": reading.value,
                    "goal": reading.goal,
                })
            })
            .collect();
        let value = json!({
            "comparisons": self.comparisons.iter().map(Comparison::to_json).collect::<Vec<_>>(),
            "readings": readings,
            "notes": self.notes,
        });
        fs::write(path, format!("{value:#}\n"))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_the_pairs_and_not_of_the_sums() {
        let figure = |seconds| Figure { bytes: 1 << 30, seconds, cpu_seconds: 0.1 };
        let comparison = Comparison {
            place: "drive",
            what: "read, pool".to_owned(),
            against: "fio".to_owned(),
            goal: "≥ 0.97",
            cpu_goal: "≤ 1.3",
            base: vec![figure(1.0), figure(9.0), figure(2.0)],
            subject: vec![figure(1.0), figure(3.0), figure(1.0)],
        };
        assert!((median(comparison.ratios()) - 2.0).abs() < 1e-9);
        let report = Report { comparisons: vec![comparison], ..Report::default() };
        assert!(report.text().contains("read, pool"), "{}", report.text());
    }
}
