//! What is measured: Forebay through its public Rust API, and the memory it moves.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail};
use forebay::ByteSize;
use forebay::stripe::Stripe;
use forebay_io::{
    Direction, Durability, EngineChoice, Handle, Operation, Options, Part, Pool, PoolBuffer,
    Request, Target,
};

use crate::measure::{Figure, Way, cpu_seconds};

/// Where an ordinary buffer starts within a page: a multiple of 64 bytes and not of 512, as
/// `torch.empty` gives for large tensors.
const ORDINARY_START: usize = 64;

/// The kind of memory that tensors are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Forebay's own pool: aligned, and registered with the engine.
    Pool,
    /// An allocator's, aligned to 64 bytes.
    Ordinary,
}

impl MemoryKind {
    pub(crate) const BOTH: [Self; 2] = [Self::Pool, Self::Ordinary];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Ordinary => "ordinary",
        }
    }
}

/// Bytes to move, all of them touched before anything is measured.
#[derive(Debug)]
pub(crate) enum Memory {
    Pool(PoolBuffer),
    Ordinary { bytes: Vec<u8>, start: usize, length: usize },
}

impl Memory {
    pub(crate) fn new(kind: MemoryKind, length: usize) -> Result<Self> {
        let mut memory = match kind {
            MemoryKind::Pool => Self::Pool(Pool::global().allocate(length, 4096)?),
            MemoryKind::Ordinary => {
                let bytes = vec![0; length + 4096 + ORDINARY_START];
                let start = bytes.as_ptr().align_offset(4096) + ORDINARY_START;
                Self::Ordinary { bytes, start, length }
            }
        };
        memory.bytes_mut().fill(1);
        Ok(memory)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Pool(buffer) => buffer.as_slice(),
            Self::Ordinary { bytes, start, length } => &bytes[*start..*start + *length],
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Pool(buffer) => buffer.as_mut_slice(),
            Self::Ordinary { bytes, start, length } => &mut bytes[*start..*start + *length],
        }
    }
}

/// A tensor of the vectored measurement: where it is in the file and in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub(crate) offset: u64,
    pub(crate) position: usize,
    pub(crate) length: usize,
}

/// A live handle.
#[derive(Debug)]
pub(crate) struct Subject {
    handle: Handle,
}

impl Subject {
    pub(crate) fn new(options: Options) -> Result<Self> {
        Ok(Self { handle: Handle::new(options)? })
    }

    /// Engine and options, in words.
    pub(crate) fn describe(&self) -> String {
        let options = self.handle.options();
        format!(
            "{} {} KiB × {} × {}",
            self.handle.engine().name(),
            options.block_size >> 10,
            options.queue_depth,
            options.parallelism
        )
    }

    /// Transfers that can be in flight at once.
    pub(crate) fn depth(&self) -> u64 {
        let options = self.handle.options();
        (options.queue_depth * options.parallelism) as u64
    }

    pub(crate) fn staging_bytes(&self) -> u64 {
        self.handle.stats().staging_bytes
    }

    /// Fallbacks that were taken and not told yet.
    pub(crate) fn notices(&self) -> Vec<String> {
        self.handle.notices()
    }

    /// Moves the whole of the memory, from or to the start of the file; a write leaves the file
    /// exactly as long.
    pub(crate) fn run(&self, path: &Path, way: Way, memory: &mut Memory) -> Result<Figure> {
        let bytes = memory.bytes().len() as u64;
        Figure::of(bytes, || {
            match way {
                Way::Read => self.handle.load(path, 0, memory.bytes_mut())?,
                Way::Write => self.handle.store(path, memory.bytes())?,
            }
            Ok(())
        })
    }

    /// Reads the file into a memory that is smaller, half of it at a time: a stream of tensors of
    /// which two are held.
    pub(crate) fn run_streamed(
        &self,
        path: &Path,
        memory: &mut Memory,
        total_bytes: u64,
    ) -> Result<Figure> {
        Figure::of(total_bytes, || {
            let whole = request(path, Way::Read, memory).parts[0];
            let half = whole.length / 2;
            let mut before: Option<Operation> = None;
            let halves = [whole.address, whole.address.wrapping_add(half)];
            for (offset, address) in (0..total_bytes).step_by(half).zip(halves.iter().cycle()) {
                let length = half.min(usize::try_from(total_bytes - offset)?);
                let target = Target::Path(path.into());
                let request = Request::new(Direction::Load, target, offset, *address, length);
                let operation = self.submit(request)?;
                if let Some(before) = before.replace(operation) {
                    before.wait()?;
                }
            }
            before.map_or(Ok(()), |last| last.wait())?;
            Ok(())
        })
    }

    /// As [`Self::run`], of a striped file.
    pub(crate) fn run_striped(
        &self,
        stripe: &Stripe,
        name: &Path,
        way: Way,
        memory: &mut Memory,
    ) -> Result<Figure> {
        let bytes = memory.bytes().len() as u64;
        Figure::of(bytes, || {
            let request = striped(stripe, name, way, memory)?;
            self.submit(request)?.wait()?;
            Ok(())
        })
    }

    /// As [`Self::time_submit`], of a striped file; cutting the request up is part of it.
    pub(crate) fn time_striped_submit(
        &self,
        stripe: &Stripe,
        name: &Path,
        way: Way,
        memory: &mut Memory,
    ) -> Result<Duration> {
        let started = Instant::now();
        let operation = self.submit(striped(stripe, name, way, memory)?)?;
        let latency = started.elapsed();
        operation.wait()?;
        Ok(latency)
    }

    /// Loads many tensors in one call.
    pub(crate) fn run_vectored(
        &self,
        path: &Path,
        memory: &mut Memory,
        tensors: &[Tensor],
    ) -> Result<Figure> {
        let bytes = tensors.iter().map(|tensor| tensor.length as u64).sum();
        Figure::of(bytes, || {
            let mut request = request(path, Way::Read, memory);
            let start = request.parts[0].address;
            let part = |tensor: &Tensor| Part {
                file: 0,
                offset: tensor.offset,
                address: start.wrapping_add(tensor.position),
                length: tensor.length,
                device: None,
            };
            request.parts = tensors.iter().map(part).collect();
            self.submit(request)?.wait()?;
            Ok(())
        })
    }

    /// How long it takes to hand the whole of the memory over for an asynchronous transfer,
    /// which is then waited for.
    pub(crate) fn time_submit(
        &self,
        path: &Path,
        way: Way,
        memory: &mut Memory,
    ) -> Result<Duration> {
        let request = request(path, way, memory);
        let started = Instant::now();
        let operation = self.submit(request)?;
        let latency = started.elapsed();
        operation.wait()?;
        Ok(latency)
    }

    #[expect(unsafe_code, reason = "requests name memory by address")]
    fn submit(&self, request: Request) -> Result<Operation> {
        // SAFETY: every caller borrows the memory for as long as it waits for the operation.
        Ok(unsafe { self.handle.submit(request) }?)
    }
}

fn request(path: &Path, way: Way, memory: &mut Memory) -> Request {
    let direction = if way == Way::Read { Direction::Load } else { Direction::Store };
    let bytes = memory.bytes_mut();
    Request::new(direction, Target::Path(path.into()), 0, bytes.as_mut_ptr(), bytes.len())
}

/// The whole of the memory, to or from a striped file that is then exactly as long.
fn striped(stripe: &Stripe, name: &Path, way: Way, memory: &mut Memory) -> Result<Request> {
    let request = Request { whole_file: way == Way::Write, ..request(name, way, memory) };
    Ok(stripe.spread(request, Durability::None)?)
}

/// CPU seconds that a handle which has worked and now has nothing to do takes in `time`.
pub(crate) fn idle_cpu_seconds(time: Duration) -> f64 {
    let before = cpu_seconds();
    std::thread::sleep(time);
    cpu_seconds() - before
}

/// Sets one of Forebay's options by its name.
pub(crate) fn set_option(options: &mut Options, key: &str, value: &str) -> Result<()> {
    let size = || -> Result<usize> {
        let ByteSize(bytes) = value.parse().map_err(Error::msg)?;
        Ok(usize::try_from(bytes)?)
    };
    let switch = || value.parse::<bool>().context("true or false");
    match key {
        "engine" => options.engine = value.parse::<EngineChoice>()?,
        "block_size" => options.block_size = size()?,
        "queue_depth" => options.queue_depth = value.parse()?,
        "parallelism" => options.parallelism = value.parse()?,
        "staging_bytes" => options.staging_bytes = size()?,
        "single_submit" => options.single_submit = switch()?,
        "sqpoll" => options.sqpoll = switch()?,
        "iopoll" => options.iopoll = switch()?,
        "page_cache" => options.page_cache = switch()?,
        "direct" => options.direct = value.parse()?,
        "durability" => options.durability = value.parse()?,
        _ => bail!("no option {key:?}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_memory_is_as_misaligned_as_a_tensor() {
        let mut memory = Memory::new(MemoryKind::Ordinary, 1 << 20).unwrap();
        assert_eq!(memory.bytes().len(), 1 << 20);
        assert_eq!(memory.bytes_mut().as_ptr().addr() % 4096, ORDINARY_START);
    }

    #[test]
    fn options_are_set_by_name() {
        let mut options = Options::default();
        set_option(&mut options, "block_size", "4M").unwrap();
        set_option(&mut options, "parallelism", "3").unwrap();
        assert_eq!((options.block_size, options.parallelism), (4 << 20, 3));
        assert!(set_option(&mut options, "block", "4M").is_err());
        assert!(set_option(&mut options, "sqpoll", "yes").is_err());
    }
}
