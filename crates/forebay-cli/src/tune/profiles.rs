//! `forebay tune --show` and `--forget`: the stored profiles.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use forebay::tune::Candidate;
use forebay::{Best, Profile, Profiles};
use serde::Serialize;

use super::place::Place;
use super::text::{NAME_WIDTH, header, options_columns};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What is stored, with the schema `forebay.profiles/1`.
#[derive(Serialize)]
struct Shown<'a> {
    path: Option<String>,
    profiles: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    identity: &'a str,
    memory: &'static str,
    #[serde(flatten)]
    profile: &'a Profile,
}

/// What was forgotten, with the schema `forebay.forgotten/1`.
#[derive(Serialize)]
struct Forgotten {
    identities: Vec<String>,
}

pub(super) fn show(output: &Output) -> anyhow::Result<u8> {
    let profiles = Profiles::load()?;
    let path = forebay::config::profiles_path().map(|path| path.display().to_string());
    let entries: Vec<Entry> = profiles
        .iter()
        .map(|(identity, memory, profile)| Entry { identity, memory: memory.name(), profile })
        .collect();
    if output.is_json() {
        output.object("profiles", &Shown { path, profiles: entries })?;
        return Ok(Exit::Done as u8);
    }
    if entries.is_empty() {
        output.text("nothing is stored; forebay tune --nvme-dir DIR finds it out\n")?;
        return Ok(Exit::Done as u8);
    }
    let mut lines = Vec::new();
    for Entry { identity, memory, profile } in entries {
        let age = age(profile.measured_at);
        lines.push(format!("{} ({identity}), {memory} memory, {age}", profile.name));
        let best = [("read", profile.read), ("write", profile.write), ("both", profile.both)];
        let best = best.map(|(name, best)| best.map(|best| (name, best)));
        let mut found = best.iter().flatten();
        let header = header(found.any(|(_, best)| best.device_staging_bytes.is_some()));
        lines.push(format!("  {:NAME_WIDTH$}{header}   GB/s", ""));
        lines.extend(best.iter().flatten().map(|(name, best)| line(name, best)));
        lines.push(String::new());
    }
    lines.extend(path.map(|path| format!("stored in {path}")));
    output.text(&format!("{}\n", lines.join("\n")))?;
    Ok(Exit::Done as u8)
}

fn line(name: &str, best: &Best) -> String {
    let columns = options_columns(&Candidate::from(*best));
    let verdict = if best.conclusive { "" } else { "  inconclusive" };
    format!("  {name:NAME_WIDTH$}{columns} {:6.2}{verdict}", best.bytes_per_second / 1e9)
}

fn age(measured_at: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match now.saturating_sub(measured_at) / 86400 {
        0 => "measured today".to_owned(),
        1 => "measured a day ago".to_owned(),
        days => format!("measured {days} days ago"),
    }
}

pub(super) fn forget(directories: &[PathBuf], output: &Output) -> anyhow::Result<u8> {
    let wanted: Vec<String> = if directories.is_empty() {
        Profiles::load()?.iter().map(|(identity, ..)| identity.to_owned()).collect()
    } else {
        let places: Result<Vec<Place>, Failure> =
            directories.iter().map(|directory| Place::find(directory)).collect();
        places?.iter().map(|place| place.location.identity()).collect()
    };
    let mut identities = Vec::new();
    for identity in wanted {
        if Profiles::forget(&identity)? {
            identities.push(identity);
        }
    }
    if output.is_json() {
        output.object("forgotten", &Forgotten { identities })?;
    } else if identities.is_empty() {
        output.text("nothing was stored of that\n")?;
    } else {
        output.text(&format!("forgotten: {}\n", identities.join(", ")))?;
    }
    Ok(Exit::Done as u8)
}
