//! The conformance suite over every engine, decorated and faulty ones included.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "these are tests")]

use std::sync::Arc;
use std::time::Duration;

use forebay_io::engine::aio::AioEngine;
use forebay_io::engine::record::RecordFactory;
use forebay_io::engine::throttle::ThrottleFactory;
use forebay_io::engine::{AutoFactory, Engine, EngineFactory, EngineKind, EngineOptions};
use forebay_io::error::Result;
use forebay_testkit::conformance::{Outcome, Shape, run};
use forebay_testkit::fault::{Cut, FaultFactory, FaultPlan, Scope, When};

/// A test that runs the suite over a factory, in a directory on the drive that holds the build.
macro_rules! conforms {
    ($name:ident, $factory:expr) => {
        conforms!($name, $factory, Shape::default());
    };
    ($name:ident, $factory:expr, $shape:expr) => {
        #[test]
        fn $name() {
            check(stringify!($name), $factory, $shape);
        }
    };
}

fn check(name: &str, factory: &dyn EngineFactory, shape: Shape) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    match run(factory, directory.path(), shape) {
        Outcome::Passed { case_count } => assert!(case_count > 20),
        Outcome::Skipped { reason } => {
            assert!(!name.starts_with("threads"), "threads can always be had: {reason}");
            eprintln!("skipped: {name}: {reason}");
        }
    }
}

fn over(kind: EngineKind, plan: FaultPlan) -> FaultFactory {
    FaultFactory::new(Arc::new(kind), plan)
}

/// Linux AIO as on kernels before 4.18.
#[derive(Debug)]
struct AioWithoutPolls;

impl EngineFactory for AioWithoutPolls {
    fn build(&self, options: &EngineOptions) -> Result<Box<dyn Engine>> {
        Ok(Box::new(AioEngine::without_polls(options)?))
    }
}

/// A plan's faults of every survivable kind, over several seeds.
fn check_faults(name: &str, kind: EngineKind) {
    for seed in 0..3 {
        check(name, &over(kind, FaultPlan::survivable(seed)), Shape::default());
    }
}

const SINGLE: Shape = Shape { queue_depth: 1, single_submit: true, sqpoll: false, iopoll: false };
const DEEP: Shape = Shape { queue_depth: 128, single_submit: false, sqpoll: false, iopoll: false };
const SQPOLL: Shape = Shape { queue_depth: 16, single_submit: false, sqpoll: true, iopoll: false };
const IOPOLL: Shape = Shape { queue_depth: 16, single_submit: false, sqpoll: false, iopoll: true };

conforms!(uring, &EngineKind::Uring);
conforms!(uring_deep, &EngineKind::Uring, DEEP);
conforms!(uring_single, &EngineKind::Uring, SINGLE);
conforms!(uring_sqpoll, &EngineKind::Uring, SQPOLL);
conforms!(uring_iopoll, &EngineKind::Uring, IOPOLL);
conforms!(aio, &EngineKind::Aio);
conforms!(aio_deep, &EngineKind::Aio, DEEP);
conforms!(aio_single, &EngineKind::Aio, Shape { queue_depth: 4, ..SINGLE });
conforms!(aio_without_polls, &AioWithoutPolls);
conforms!(threads, &EngineKind::Threads);
conforms!(threads_deep, &EngineKind::Threads, DEEP);
conforms!(threads_single, &EngineKind::Threads, SINGLE);
conforms!(auto, &AutoFactory::default());
conforms!(
    throttle_uring,
    &ThrottleFactory::new(Arc::new(EngineKind::Uring), 10_000_000_000).unwrap()
);
conforms!(
    throttle_threads,
    &ThrottleFactory::new(Arc::new(EngineKind::Threads), 1_000_000_000).unwrap()
);
conforms!(record_uring, &RecordFactory::new(Arc::new(EngineKind::Uring)));
conforms!(record_aio, &RecordFactory::new(Arc::new(EngineKind::Aio)));
conforms!(fault_full_queues, &over(EngineKind::Uring, FaultPlan::new(1).full_queues(3, 2)), DEEP);
conforms!(
    fault_late,
    &over(EngineKind::Aio, FaultPlan::new(2).late(2, Duration::from_millis(5)).reordered())
);
conforms!(
    fault_every_second_is_short,
    &over(
        EngineKind::Threads,
        FaultPlan::new(3).shorten(When::Every(2), Scope::Direct, Cut::Ragged).shorten(
            When::Every(2),
            Scope::Buffered,
            Cut::Ragged
        )
    )
);

#[test]
fn fault_uring() {
    check_faults("fault_uring", EngineKind::Uring);
}

#[test]
fn fault_aio() {
    check_faults("fault_aio", EngineKind::Aio);
}

#[test]
fn fault_threads() {
    check_faults("fault_threads", EngineKind::Threads);
}
