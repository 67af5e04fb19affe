//! The journal of a tuning: every sample as it was taken, so that an interrupted run goes on.
//!
//! One line of JSON for what is tuned, then one for each sample. A search takes the same course
//! with the same samples, so the journal is played back in place of measuring until it ends. It
//! belongs to one run at a time, which holds its lock, and goes when the tuning is done.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::search::{Measure, Progress, Sample};
use super::space::Candidate;
use crate::io::{Direction, Error, ErrorKind, Result};

/// The layout of the file, and the course of a search: a journal of another isn't gone on with.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    seed: u64,
    about: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    write: bool,
    bytes: u64,
    candidate: Candidate,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<Sample>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable: Option<String>,
}

/// A journal that is being kept.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    seed: u64,
    earlier: VecDeque<Entry>,
    played: usize,
}

impl Journal {
    /// Opens the journal of a tuning: the one of an interrupted run, where it was about the same;
    /// else a new one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] if another run has it; what the system says of the file.
    pub fn open(path: &Path, about: &Value, seed: u64, restart: bool) -> Result<Self> {
        let failed = |what: &'static str| move |error| Error::from_io(error, what).path(path);
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed("cannot keep a journal"))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            let text = "another run is tuning the same with the same options; its journal is";
            return Err(Error::new(ErrorKind::Closed, text).path(path));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(failed("cannot read the journal"))?;
        let found = if restart { None } else { parse(&text, about) };
        let (seed, earlier, whole) = found.unwrap_or((seed, VecDeque::new(), 0));
        // What was cut off by the interruption goes.
        file.set_len(whole).map_err(failed("cannot cut the journal"))?;
        file.seek(SeekFrom::Start(whole)).map_err(failed("cannot write the journal"))?;
        let mut journal = Self { path: path.to_path_buf(), file, seed, earlier, played: 0 };
        if whole == 0 {
            journal.append(&Header { version: VERSION, seed, about: about.clone() })?;
        }
        Ok(journal)
    }

    /// What the order of samples is drawn by: that of the interrupted run, where there was one.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Samples of the interrupted run that are still to be played back.
    pub fn earlier_count(&self) -> usize {
        self.earlier.len()
    }

    /// Keeps the samples of `measure`, and plays back what was kept.
    pub fn keep<'a, M: Measure>(&'a mut self, measure: &'a mut M) -> impl Measure + 'a {
        Kept { journal: self, measure }
    }

    /// Removes it: the tuning is done.
    ///
    /// # Errors
    ///
    /// What the system says of that.
    pub fn finish(self) -> Result<()> {
        fs::remove_file(&self.path)
            .map_err(|error| Error::from_io(error, "cannot remove the journal").path(&self.path))
    }

    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(line)
            .map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))?;
        text.push(b'\n');
        self.file
            .write_all(&text)
            .map_err(|error| Error::from_io(error, "cannot write the journal").path(&self.path))
    }

    /// The next sample of the interrupted run, if it is of this.
    fn play(&mut self, wanted: &Entry) -> Option<Entry> {
        let next = self.earlier.pop_front()?;
        let same = Entry { sample: None, unavailable: None, ..next.clone() } == *wanted;
        if !same {
            // Another course was taken then: what it measured says nothing here.
            self.earlier.clear();
            return None;
        }
        self.played += 1;
        Some(next)
    }
}

/// The seed, the samples and the length of the whole lines of a journal about the same.
fn parse(text: &[u8], about: &Value) -> Option<(u64, VecDeque<Entry>, u64)> {
    let mut lines =
        text.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n"));
    let first = lines.next()?;
    let header: Header = serde_json::from_slice(first).ok()?;
    if header.version != VERSION || header.about != *about {
        return None;
    }
    let mut whole = first.len() as u64;
    let mut entries = VecDeque::new();
    for line in lines {
        let Ok(entry) = serde_json::from_slice(line) else { break };
        entries.push_back(entry);
        whole += line.len() as u64;
    }
    Some((header.seed, entries, whole))
}

struct Kept<'a, M> {
    journal: &'a mut Journal,
    measure: &'a mut M,
}

impl<M: Measure> Measure for Kept<'_, M> {
    fn measure(
        &mut self,
        candidate: &Candidate,
        direction: Direction,
        bytes: u64,
    ) -> Result<Sample> {
        let mut entry = Entry {
            write: direction == Direction::Store,
            bytes,
            candidate: *candidate,
            sample: None,
            unavailable: None,
        };
        if let Some(earlier) = self.journal.play(&entry) {
            return earlier.sample.ok_or_else(|| {
                Error::new(ErrorKind::Unsupported, earlier.unavailable.unwrap_or_default())
            });
        }
        let measured = self.measure.measure(candidate, direction, bytes);
        match &measured {
            Ok(sample) => entry.sample = Some(*sample),
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                entry.unavailable = Some(error.to_string());
            }
            Err(_) => return measured,
        }
        self.journal.append(&entry)?;
        measured
    }

    fn progress(&mut self, progress: &Progress) {
        self.measure.progress(progress);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Settings, Space, tune};
    use super::*;
    use crate::io::EngineKind;

    /// Rates by lot; ends the run after so many samples.
    struct Lot {
        random: fastrand::Rng,
        left: usize,
        taken: usize,
    }

    impl Measure for Lot {
        fn measure(&mut self, candidate: &Candidate, _: Direction, _: u64) -> Result<Sample> {
            if candidate.queue_depth == 128 {
                return Err(Error::new(ErrorKind::Unsupported, "too deep"));
            }
            if self.taken == self.left {
                return Err(Error::new(ErrorKind::Cancelled, "interrupted"));
            }
            self.taken += 1;
            let rate = 1e9 + 1e7 * self.random.f64();
            Ok(Sample { bytes_per_second: rate, ..Sample::default() })
        }
    }

    fn lot(left: usize) -> Lot {
        Lot { random: fastrand::Rng::with_seed(1), left, taken: 0 }
    }

    fn settings(seed: u64) -> Settings {
        let space = Space::standard(vec![EngineKind::Threads], 1);
        Settings { space, io_bytes: 1 << 28, loops: 1, read: true, write: true, seed }
    }

    #[test]
    fn an_interrupted_run_goes_on_with_the_same_course() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("j");
        let about = json!({"io": 1});
        let mut journal = Journal::open(&path, &about, 7, false).unwrap();
        let mut first = lot(150);
        let error = tune(&settings(7), &mut journal.keep(&mut first)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        drop(journal);
        // A line that was cut off.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"write\":false,\"by").unwrap();
        drop(file);

        let mut journal = Journal::open(&path, &about, 8, false).unwrap();
        assert_eq!(journal.seed(), 7);
        let earlier = journal.earlier_count();
        assert!(earlier > 150, "samples, and candidates that can't be had");
        let mut rest = lot(usize::MAX);
        let tuning = tune(&settings(7), &mut journal.keep(&mut rest)).unwrap();
        assert_eq!(journal.played, earlier);
        let read = tuning.read.unwrap();
        assert_eq!(read.outcome.reason(), Some("too deep"));
        journal.finish().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn what_is_played_back_is_what_was_measured_to_the_last_bit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("j");
        let candidate = Space::standard(vec![EngineKind::Threads], 1).modes()[0];
        let mut random = fastrand::Rng::with_seed(3);
        let entries: Vec<Entry> = (0..1000)
            .map(|_| {
                let bytes_per_second = 1e8 + 1e10 * random.f64();
                let sample = Sample { bytes_per_second, ..Sample::default() };
                let sample = Some(sample);
                Entry { write: false, bytes: 1, candidate, sample, unavailable: None }
            })
            .collect();
        let mut journal = Journal::open(&path, &json!(1), 7, false).unwrap();
        for entry in &entries {
            journal.append(entry).unwrap();
        }
        drop(journal);
        assert_eq!(Journal::open(&path, &json!(1), 7, false).unwrap().earlier, entries);
    }

    #[test]
    fn a_journal_of_something_else_or_thrown_away_is_not_gone_on_with() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("j");
        for (about, restart) in [(json!(1), false), (json!(2), false), (json!(2), true)] {
            let mut journal = Journal::open(&path, &about, 7, restart).unwrap();
            assert_eq!(journal.earlier_count(), 0);
            let _ = tune(&settings(7), &mut journal.keep(&mut lot(5)));
        }
        fs::write(&path, "nonsense\n").unwrap();
        assert_eq!(Journal::open(&path, &json!(2), 7, false).unwrap().earlier_count(), 0);
    }

    #[test]
    fn a_journal_belongs_to_one_run_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("j");
        let _first = Journal::open(&path, &json!(1), 7, false).unwrap();
        let error = Journal::open(&path, &json!(1), 7, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().contains("another run"), "{error}");
    }
}
