//! Random transfers against a model, over every engine. The long run is `--ignored`.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "these are tests")]

use std::sync::Arc;

use forebay_io::engine::{EngineFactory, EngineKind};
use forebay_testkit::conformance::{Outcome, Shape, stress};
use forebay_testkit::fault::{FaultFactory, FaultPlan};

const PLAIN: Shape = Shape { queue_depth: 32, single_submit: false, sqpoll: false, iopoll: false };

fn check(seeds: std::ops::Range<u64>, round_count: usize) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for seed in seeds {
        for kind in EngineKind::ALL {
            let faulty = FaultFactory::new(Arc::new(kind), FaultPlan::survivable(seed));
            let mut cases: Vec<(&dyn EngineFactory, Shape)> =
                vec![(&kind, PLAIN), (&faulty, PLAIN)];
            if kind == EngineKind::Uring {
                cases.push((&kind, Shape { sqpoll: true, ..PLAIN }));
                cases.push((&kind, Shape { iopoll: true, ..PLAIN }));
                cases.push((&kind, Shape { single_submit: true, queue_depth: 3, ..PLAIN }));
            }
            for (factory, shape) in cases {
                match stress(factory, directory.path(), shape, seed, round_count) {
                    Outcome::Passed { .. } => {}
                    Outcome::Skipped { reason } => eprintln!("skipped: {kind}: {reason}"),
                }
            }
        }
    }
}

#[test]
fn random_transfers_leave_the_bytes_of_the_model() {
    check(0..1, 4);
}

#[test]
#[ignore = "takes minutes: 20 seeds of 2,000 transfers over every engine"]
fn random_transfers_for_long() {
    check(1..21, 42);
}
