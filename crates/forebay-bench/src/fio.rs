//! The yardstick: fio runs, and what they say about themselves.
//!
//! Everything is to fio's advantage where there is a choice: its time and CPU are those of its
//! I/O loop alone (start, memory and registration left out), its buffers aren't scrambled between
//! writes, and files are laid out beforehand. Both sides write in place without a final sync.

use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::measure::{Figure, Way};

/// How fio asks the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// io_uring with buffers registered once.
    UringFixed,
    /// io_uring.
    Uring,
    /// Linux AIO by libaio.
    Libaio,
    /// `pread` and `pwrite`; as it has no depth, as many threads as the depth, each with a
    /// stripe of its own.
    Psync,
}

impl Engine {
    /// All that the yardstick is chosen from.
    pub(crate) const ALL: [Self; 4] = [Self::UringFixed, Self::Uring, Self::Libaio, Self::Psync];

    fn name(self) -> &'static str {
        match self {
            Self::UringFixed => "io_uring fixed",
            Self::Uring => "io_uring",
            Self::Libaio => "libaio",
            Self::Psync => "psync",
        }
    }
}

/// One of the settings that fio's best is chosen from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) engine: Engine,
    pub(crate) block_bytes: u64,
    pub(crate) depth: u64,
}

impl Setting {
    /// Bytes of all of fio's buffers, which it uses again and again.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.block_bytes * self.depth
    }

    /// Engines × {1 MiB, 4 MiB} × depth {8, 32}.
    pub(crate) fn all() -> Vec<Self> {
        let mut settings = Vec::new();
        for engine in Engine::ALL {
            for block_bytes in [1 << 20, 4 << 20] {
                for depth in [8, 32] {
                    settings.push(Self { engine, block_bytes, depth });
                }
            }
        }
        settings
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} KiB × {}", self.engine.name(), self.block_bytes >> 10, self.depth)
    }
}

/// Says whether fio is there; if not, how to get it.
pub(crate) fn version() -> Result<String> {
    let output = Command::new("fio").arg("--version").output();
    let output = output.context("fio isn't here: apt-get install fio")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Moves `total_bytes` of the file at `path`, which has at least as many, once through.
pub(crate) fn run(path: &Path, way: Way, setting: Setting, total_bytes: u64) -> Result<Figure> {
    let mut command = base(path, setting.block_bytes);
    command.arg(format!("--rw={}", if way == Way::Read { "read" } else { "write" }));
    add_engine(&mut command, setting, total_bytes);
    finish(&mut command, way, total_bytes)
}

/// Reads blocks of the file in random order, each once, `total_bytes` in all.
pub(crate) fn run_random(path: &Path, setting: Setting, total_bytes: u64) -> Result<Figure> {
    let mut command = base(path, setting.block_bytes);
    command.args(["--rw=randread", "--randrepeat=0"]);
    add_engine(&mut command, setting, total_bytes);
    finish(&mut command, Way::Read, total_bytes)
}

fn base(path: &Path, block_bytes: u64) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=yardstick", "--output-format=json", "--direct=1", "--invalidate=1"]);
    command.args(["--end_fsync=0", "--scramble_buffers=0", "--thread", "--group_reporting"]);
    // fio reads a colon in a file name as a separator; it takes a backslash before it.
    command.arg(format!("--filename={}", path.to_string_lossy().replace(':', "\\:")));
    command.arg(format!("--bs={block_bytes}"));
    command
}

fn add_engine(command: &mut Command, setting: Setting, total_bytes: u64) {
    let Setting { engine, block_bytes, depth } = setting;
    match engine {
        Engine::Psync => {
            let stripe = stripe_bytes(total_bytes, block_bytes, depth);
            command.args(["--ioengine=psync", &format!("--numjobs={depth}")]);
            command.args([&format!("--size={stripe}"), &format!("--offset_increment={stripe}")]);
        }
        Engine::UringFixed | Engine::Uring | Engine::Libaio => {
            let name = if engine == Engine::Libaio { "libaio" } else { "io_uring" };
            command.arg(format!("--ioengine={name}"));
            command.args([format!("--iodepth={depth}"), format!("--size={total_bytes}")]);
            if engine == Engine::UringFixed {
                command.arg("--fixedbufs=1");
            }
        }
    }
}

/// Bytes for each of `jobs` threads, in whole blocks, so that together they move the file once;
/// what doesn't divide is left out, and counted as left out.
fn stripe_bytes(total_bytes: u64, block_bytes: u64, jobs: u64) -> u64 {
    (total_bytes / block_bytes / jobs).max(1) * block_bytes
}

fn finish(command: &mut Command, way: Way, total_bytes: u64) -> Result<Figure> {
    let output = command.output().context("cannot run fio: apt-get install fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "fio failed: {command:?}: {}{text}",
        String::from_utf8_lossy(&output.stderr)
    );
    // Warnings of fio's come before the JSON, on the same stream.
    let json = text.find('{').map_or("", |start| &text[start..]);
    let value = serde_json::from_str(json).context("cannot read fio's JSON")?;
    let figure = parse(&value, way)?;
    if figure.bytes * 10 < total_bytes * 9 {
        bail!("fio moved {} of {total_bytes} bytes: {command:?}", figure.bytes);
    }
    Ok(figure)
}

fn parse(value: &Value, way: Way) -> Result<Figure> {
    let job = &value["jobs"][0];
    let side = &job[if way == Way::Read { "read" } else { "write" }];
    let number = |value: &Value, name: &str| {
        value[name].as_f64().with_context(|| format!("fio's JSON has no {name}"))
    };
    ensure!(number(job, "error")? == 0.0, "fio reports error {}", job["error"]);
    let bytes = side["io_bytes"].as_u64().context("fio's JSON has no io_bytes")?;
    // Percentages of the time that all threads ran, in ms, added up.
    let busy_share = (number(job, "usr_cpu")? + number(job, "sys_cpu")?) / 100.0;
    Ok(Figure {
        bytes,
        seconds: number(side, "runtime")?.max(1.0) / 1e3,
        cpu_seconds: busy_share * number(job, "job_runtime")? / 1e3,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rate_and_cpu_come_from_what_fio_says() {
        let value = json!({ "jobs": [{
            "error": 0, "usr_cpu": 5.0, "sys_cpu": 20.0, "job_runtime": 4000,
            "read": { "io_bytes": 1_u64 << 30, "runtime": 500 },
        }]});
        let figure = parse(&value, Way::Read).unwrap();
        assert_eq!(figure, Figure { bytes: 1 << 30, seconds: 0.5, cpu_seconds: 1.0 });
        assert!(parse(&value, Way::Write).is_err());
        assert!(parse(&json!({ "jobs": [{ "error": 5 }] }), Way::Read).is_err());
    }

    #[test]
    fn stripes_of_threads_cover_the_file_once() {
        for block_bytes in [1 << 20, 4 << 20] {
            for jobs in [8, 32] {
                assert_eq!(stripe_bytes(1 << 30, block_bytes, jobs) * jobs, 1 << 30);
            }
        }
        assert_eq!(stripe_bytes(1 << 20, 4 << 20, 8), 4 << 20);
    }

    #[test]
    fn every_combination_is_a_setting_once() {
        let settings = Setting::all();
        assert_eq!(settings.len(), 16);
        for (index, setting) in settings.iter().enumerate() {
            assert!(!settings[..index].contains(setting));
        }
    }
}
