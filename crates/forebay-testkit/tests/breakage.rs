//! Engines that break: everything under way fails with the reason, nothing hangs, nobody waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use forebay_io::engine::{
    Capabilities, Completion, Engine, EngineFactory, EngineKind, EngineOptions, Transfer,
};
use forebay_io::{Error, ErrorKind, Handle, Options, Result};
use forebay_testkit::memory::pattern;

#[derive(Clone, Copy, Debug)]
enum Way {
    SubmitFails,
    ReapFails,
    ReapPanics,
}

/// Does a few submissions right, then breaks.
#[derive(Debug)]
struct Breaking {
    inner: Box<dyn Engine>,
    way: Way,
    left: Arc<AtomicUsize>,
}

impl Breaking {
    fn breaks(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::Unsupported, "the engine broke")
}

impl Engine for Breaking {
    fn kind(&self) -> EngineKind {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    #[expect(unsafe_code, reason = "the trait's method is unsafe")]
    unsafe fn submit(&mut self, transfers: &[Transfer]) -> Result<usize> {
        if matches!(self.way, Way::SubmitFails) && self.breaks() {
            return Err(broken());
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner.submit(transfers) }
    }

    fn reap(&mut self, timeout: Option<Duration>, completions: &mut Vec<Completion>) -> Result<()> {
        match self.way {
            Way::ReapFails if self.breaks() => Err(broken()),
            Way::ReapPanics if self.breaks() => panic!("the engine panicked, as planned"),
            _ => self.inner.reap(timeout, completions),
        }
    }
}

#[derive(Debug)]
struct BreakingFactory {
    way: Way,
    left: Arc<AtomicUsize>,
}

impl EngineFactory for BreakingFactory {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        Ok(Box::new(Breaking {
            inner: EngineKind::Threads.build(options)?,
            way: self.way,
            left: Arc::clone(&self.left),
        }))
    }
}

#[test]
fn an_engine_that_breaks_fails_what_is_under_way_and_what_comes_after() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let content = pattern(1, 3 << 20);
    for way in [Way::SubmitFails, Way::ReapFails, Way::ReapPanics] {
        for after in [0, 1, 5, 20] {
            for parallelism in [1, 3] {
                let left = Arc::new(AtomicUsize::new(after));
                let options = Options {
                    block_size: 64 << 10,
                    queue_depth: 4,
                    parallelism,
                    staging_bytes: 1 << 20,
                    ..Options::default()
                };
                let factory = Arc::new(BreakingFactory { way, left });
                let handle = Handle::with_factory(options, factory).unwrap();
                let path = directory.path().join("w.bin");
                let mut failures = 0;
                for _ in 0..4 {
                    failures += usize::from(handle.store(&path, &content).is_err());
                }
                assert!(failures > 0, "{way:?} after {after}, {parallelism} workers");
                assert_eq!(handle.pending(), 0);
                // Whatever is left to say is said at close, which returns.
                let _ = handle.close();
            }
        }
    }
}
