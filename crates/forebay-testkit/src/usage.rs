//! What a test process has used.

use std::time::Duration;

/// Processor time of this process, user and system, all threads that are or were.
pub fn process_cpu() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(clock).unwrap_or_default()
}

/// Open descriptors of this process.
pub fn descriptors() -> usize {
    // The listing itself has one open.
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1))
}
