//! What is searched: the values of each option, and the candidates they make together.
//!
//! A sweep configuration is a JSON object of lists, as `ds_nvme_tune --sweep-config` takes it. A key
//! that isn't known is an error: a typing mistake would otherwise leave an option unsearched.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::io::{EngineChoice, EngineKind, Error, ErrorKind, MemoryKind, Options, Result};
use crate::{Best, ByteSize};

/// Keys of a sweep configuration, for the error that names them.
const KEYS: &str = "engine, block_size, queue_depth, intra_op_parallelism (or io_parallel), \
    single_submit, overlap_events (or sequential_requests), device_staging_bytes";
/// The product of all options is searched at once up to this many candidates.
const PRODUCT_MAX: usize = 200;

/// Options of a handle that are searched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Candidate {
    /// Which engine moves the blocks.
    #[serde(with = "crate::profile::engine_name")]
    pub engine: EngineKind,
    /// Whether each transfer is handed to the kernel by a call of its own.
    pub single_submit: bool,
    /// Most bytes in one transfer.
    pub block_size: usize,
    /// Transfers in flight per worker.
    pub queue_depth: usize,
    /// Workers.
    pub parallelism: usize,
    /// Memory for staging blocks; `None`: what handles have by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_staging_bytes: Option<usize>,
}

impl Candidate {
    /// The most bytes that are in flight at once.
    pub fn window_bytes(&self) -> u64 {
        [self.queue_depth, self.parallelism]
            .iter()
            .fold(self.block_size as u64, |window, factor| window.saturating_mul(*factor as u64))
    }

    /// The options of a handle.
    pub fn options(&self) -> Options {
        let defaults = Options::default();
        let device_staging_bytes =
            self.device_staging_bytes.unwrap_or(defaults.device_staging_bytes);
        let least = self.parallelism << 20;
        Options {
            engine: EngineChoice::Named(self.engine),
            block_size: self.block_size,
            queue_depth: self.queue_depth,
            parallelism: self.parallelism,
            single_submit: self.single_submit,
            staging_bytes: defaults.staging_bytes.max(least),
            device_staging_bytes: device_staging_bytes.max(least),
            ..defaults
        }
    }
}

impl Candidate {
    /// These options with the rate that they came to, for a profile.
    pub fn best(&self, bytes_per_second: f64, conclusive: bool) -> Best {
        Best {
            engine: self.engine,
            block_size: self.block_size,
            queue_depth: self.queue_depth,
            parallelism: self.parallelism,
            single_submit: self.single_submit,
            device_staging_bytes: self.device_staging_bytes,
            bytes_per_second,
            conclusive,
        }
    }
}

impl From<Best> for Candidate {
    fn from(best: Best) -> Self {
        Self {
            engine: best.engine,
            single_submit: best.single_submit,
            block_size: best.block_size,
            queue_depth: best.queue_depth,
            parallelism: best.parallelism,
            device_staging_bytes: best.device_staging_bytes,
        }
    }
}

/// The block `"aio"` of a DeepSpeed configuration, and the arguments of `forebay.aio_handle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AioBlock {
    block_size: usize,
    queue_depth: usize,
    intra_op_parallelism: usize,
    single_submit: bool,
    overlap_events: bool,
}

impl From<Candidate> for AioBlock {
    fn from(candidate: Candidate) -> Self {
        Self {
            block_size: candidate.block_size,
            queue_depth: candidate.queue_depth,
            intra_op_parallelism: candidate.parallelism,
            single_submit: candidate.single_submit,
            // Submission and completion always overlap here, and do by default in DeepSpeed.
            overlap_events: true,
        }
    }
}

/// The values that each option can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// Engines.
    pub engines: Vec<EngineKind>,
    /// Submission modes.
    pub single_submits: Vec<bool>,
    /// Block sizes in bytes.
    pub block_sizes: Vec<usize>,
    /// Queue depths.
    pub queue_depths: Vec<usize>,
    /// Parallelisms.
    pub parallelisms: Vec<usize>,
    /// Bytes of memory for staging blocks; `None`: what handles have by default.
    pub device_staging_bytes: Vec<Option<usize>>,
}

impl Space {
    /// What is searched unless told otherwise, on a machine with these engines and processors.
    pub fn standard(engines: Vec<EngineKind>, processors: usize) -> Self {
        Self {
            engines,
            single_submits: vec![false, true],
            block_sizes: [128, 256, 512, 1024, 2048, 4096, 8192].map(|kib| kib << 10).to_vec(),
            queue_depths: vec![4, 8, 16, 32, 64, 128],
            parallelisms: [1, 2, 4, 8]
                .into_iter()
                .filter(|workers| *workers == 1 || *workers <= 2 * processors)
                .collect(),
            device_staging_bytes: vec![None],
        }
    }

    /// The same for memory of a GPU. On the way through the host's memory, staging blocks are what
    /// is in flight, so how much memory they have is searched and the depth less finely. By
    /// GPUDirect Storage there are none, and neither an engine nor a way to submit to choose.
    pub fn of_device(engines: Vec<EngineKind>, processors: usize, memory: MemoryKind) -> Self {
        let standard = Self::standard(engines, processors);
        match memory {
            MemoryKind::Host => standard,
            MemoryKind::Gpu => Self {
                block_sizes: [256, 512, 1024, 2048, 4096, 8192].map(|kib| kib << 10).to_vec(),
                queue_depths: vec![8, 32],
                device_staging_bytes: [16, 64, 256].map(|mib| Some(mib << 20)).to_vec(),
                ..standard
            },
            MemoryKind::Gds => Self {
                engines: standard.engines.into_iter().take(1).collect(),
                single_submits: vec![false],
                block_sizes: [1, 2, 4, 8, 16].map(|mib| mib << 20).to_vec(),
                queue_depths: vec![4, 8, 16, 32],
                ..standard
            },
        }
    }

    /// Replaces the values of the options that a sweep configuration names. Options that it
    /// doesn't name keep DeepSpeed's default, as there: the engine is the first that works.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`]: what is no JSON object, an unknown key with the known ones, a
    /// value that the option can't take.
    pub fn from_sweep(text: &str, engines: &[EngineKind]) -> Result<Self> {
        let object: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| invalid(format!("not a JSON object of lists: {error}")))?;
        let mut space = Self {
            engines: engines.iter().copied().take(1).collect(),
            single_submits: vec![false],
            block_sizes: vec![1 << 20],
            queue_depths: vec![32],
            parallelisms: vec![1],
            device_staging_bytes: vec![None],
        };
        let mut named: Vec<&str> = Vec::new();
        for (key, value) in &object {
            let values = match value {
                Value::Array(values) => &values[..],
                value => std::slice::from_ref(value),
            };
            if values.is_empty() {
                return Err(invalid(format!("{key} has no values")));
            }
            let option = space.take(key, values)?;
            if named.contains(&option) {
                return Err(invalid(format!("{key} is given twice, under two names")));
            }
            named.push(option);
        }
        space.check()?;
        Ok(space)
    }

    /// Takes the values of one key; returns the option that it is a name of.
    fn take(&mut self, key: &str, values: &[Value]) -> Result<&'static str> {
        match key {
            "engine" => {
                self.engines = parse_all(key, values, engine_of)?;
                Ok("engine")
            }
            "block_size" => {
                self.block_sizes = parse_all(key, values, bytes_of)?;
                Ok("block_size")
            }
            "queue_depth" => {
                self.queue_depths = parse_all(key, values, count_of)?;
                Ok("queue_depth")
            }
            "intra_op_parallelism" | "io_parallel" => {
                self.parallelisms = parse_all(key, values, count_of)?;
                Ok("intra_op_parallelism")
            }
            "device_staging_bytes" => {
                self.device_staging_bytes =
                    parse_all(key, values, |value| bytes_of(value).map(Some))?;
                Ok("device_staging_bytes")
            }
            "single_submit" => {
                self.single_submits = parse_all(key, values, switch_of)?;
                Ok("single_submit")
            }
            // Submission and completion overlap in any case, so there is nothing to search.
            "overlap_events" | "sequential_requests" => {
                parse_all(key, values, switch_of)?;
                Ok("overlap_events")
            }
            _ => Err(invalid(format!("{key:?} is not known")).hint(format!("one of: {KEYS}"))),
        }
    }

    fn check(&self) -> Result<()> {
        self.product().iter().try_for_each(|candidate| candidate.options().validate())
    }

    /// Whether engine and submission mode are searched together with the rest.
    pub fn is_small(&self) -> bool {
        self.product().len() <= PRODUCT_MAX
    }

    /// Every candidate there is.
    pub fn product(&self) -> Vec<Candidate> {
        self.modes().into_iter().flat_map(|mode| self.grid(mode)).collect()
    }

    /// Every engine and submission mode, with the middle of what the other options can be.
    pub fn modes(&self) -> Vec<Candidate> {
        let mut modes = Vec::new();
        for &single_submit in &self.single_submits {
            for &engine in &self.engines {
                modes.push(Candidate {
                    engine,
                    single_submit,
                    block_size: nearest(&self.block_sizes, 1 << 20),
                    queue_depth: nearest(&self.queue_depths, 32),
                    parallelism: nearest(&self.parallelisms, 2),
                    device_staging_bytes: middle(&self.device_staging_bytes),
                });
            }
        }
        modes
    }

    /// Every block size, depth, parallelism and staging memory, with the engine
    /// and submission mode of `mode`.
    pub fn grid(&self, mode: Candidate) -> Vec<Candidate> {
        let mut grid = Vec::new();
        for &device_staging_bytes in &self.device_staging_bytes {
            for &parallelism in &self.parallelisms {
                for &queue_depth in &self.queue_depths {
                    grid.extend(self.block_sizes.iter().map(|&block_size| Candidate {
                        block_size,
                        queue_depth,
                        parallelism,
                        device_staging_bytes,
                        ..mode
                    }));
                }
            }
        }
        grid
    }
}

/// The value that is fewest doublings away.
fn nearest(values: &[usize], wanted: usize) -> usize {
    let ratio = |value: usize| value.max(wanted) / value.min(wanted).max(1);
    values.iter().copied().min_by_key(|value| ratio(*value)).unwrap_or(wanted)
}

fn middle(values: &[Option<usize>]) -> Option<usize> {
    values.get(values.len() / 2).copied().flatten()
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

/// Parses the values of a key, each once.
fn parse_all<T: PartialEq>(
    key: &str,
    values: &[Value],
    parse: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<T>> {
    let mut parsed = Vec::new();
    for value in values {
        let value =
            parse(value).ok_or_else(|| invalid(format!("{value} can't be a value of {key}")))?;
        if !parsed.contains(&value) {
            parsed.push(value);
        }
    }
    Ok(parsed)
}

fn engine_of(value: &Value) -> Option<EngineKind> {
    match value.as_str()?.parse() {
        Ok(EngineChoice::Named(kind)) => Some(kind),
        _ => None,
    }
}

fn bytes_of(value: &Value) -> Option<usize> {
    match value {
        Value::String(text) => usize::try_from(text.parse::<ByteSize>().ok()?.0).ok(),
        value => count_of(value),
    }
}

fn count_of(value: &Value) -> Option<usize> {
    match value {
        Value::String(text) => text.parse().ok(),
        value => usize::try_from(value.as_u64()?).ok(),
    }
}

fn switch_of(value: &Value) -> Option<bool> {
    match value {
        Value::String(text) => text.parse().ok(),
        value => value.as_bool(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINES: [EngineKind; 2] = [EngineKind::Uring, EngineKind::Threads];

    #[test]
    fn the_sweep_of_ds_nvme_tune_is_taken_as_it_is() {
        let text = r#"{"block_size": ["1M", "8M"], "queue_depth": [32, "128"],
            "sequential_requests": [true, false], "single_submit": [false, true],
            "io_parallel": [1, 2, 4, 8]}"#;
        let space = Space::from_sweep(text, &ENGINES).unwrap();
        assert_eq!(space.engines, [EngineKind::Uring]);
        assert_eq!(space.block_sizes, [1 << 20, 8 << 20]);
        assert_eq!(space.product().len(), 2 * 2 * 2 * 4);
        assert!(space.is_small());
    }

    #[test]
    fn an_unknown_key_lists_the_known_ones() {
        let error = Space::from_sweep(r#"{"block_sizes": [1]}"#, &ENGINES).unwrap_err().to_string();
        assert!(error.contains("block_sizes") && error.contains("intra_op_parallelism"), "{error}");
    }

    #[test]
    fn values_that_an_option_cannot_take_are_named() {
        for (text, words) in [
            (r#"{"block_size": ["1X"]}"#, "1X"),
            (r#"{"queue_depth": [0]}"#, "queue_depth is 0"),
            (r#"{"queue_depth": [-1]}"#, "-1"),
            (r#"{"queue_depth": []}"#, "no values"),
            (r#"{"single_submit": ["yes"]}"#, "yes"),
            (r#"{"engine": ["auto"]}"#, "auto"),
            (r#"{"io_parallel": [1], "intra_op_parallelism": [2]}"#, "twice"),
            ("[1]", "JSON object"),
            ("", "JSON object"),
        ] {
            let error = Space::from_sweep(text, &ENGINES).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn the_standard_space_is_searched_in_two_steps() {
        let space = Space::standard(ENGINES.to_vec(), 2);
        assert_eq!(space.parallelisms, [1, 2, 4]);
        assert!(!space.is_small());
        assert_eq!(space.modes().len(), 4);
        assert_eq!(space.modes()[0].block_size, 1 << 20);
        assert_eq!(space.grid(space.modes()[0]).len(), 7 * 6 * 3);
        assert_eq!(Space::standard(ENGINES.to_vec(), 0).parallelisms, [1]);
    }

    #[test]
    fn memory_of_a_gpu_is_searched_with_what_bounds_it() {
        let space = Space::of_device(ENGINES.to_vec(), 2, MemoryKind::Gpu);
        assert_eq!(space.grid(space.modes()[0]).len(), 6 * 2 * 3 * 3);
        assert_eq!(space.modes().len(), 4);
        assert!(space.product().iter().all(|candidate| candidate.device_staging_bytes.is_some()));
        let space = Space::of_device(ENGINES.to_vec(), 2, MemoryKind::Gds);
        assert_eq!(space.modes().len(), 1);
        assert!(space.is_small());
        assert!(space.product().iter().all(|candidate| candidate.options().validate().is_ok()));
        let same = Space::of_device(ENGINES.to_vec(), 2, MemoryKind::Host);
        assert_eq!(same, Space::standard(ENGINES.to_vec(), 2));
        let text = r#"{"device_staging_bytes": ["16M", 1048576]}"#;
        let space = Space::from_sweep(text, &ENGINES).unwrap();
        assert_eq!(space.device_staging_bytes, [Some(16 << 20), Some(1 << 20)]);
        assert_eq!(space.product()[0].options().device_staging_bytes, 16 << 20);
    }

    #[test]
    fn the_aio_block_has_real_booleans_and_deepspeeds_names() {
        let candidate = Space::standard(ENGINES.to_vec(), 2).modes()[0];
        let json = serde_json::to_value(AioBlock::from(candidate)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"block_size": 1 << 20, "queue_depth": 32,
                "intra_op_parallelism": 2, "single_submit": false, "overlap_events": true})
        );
    }
}
