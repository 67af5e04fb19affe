//! The conformance suite over every engine, decorated and faulty ones included.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "these are tests")]

use std::fs::File;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_io::device::{Context, CuFile, Cuda, Search};
use forebay_io::engine::aio::AioEngine;
use forebay_io::engine::gds::{Channel, OpenChannel};
use forebay_io::engine::record::RecordFactory;
use forebay_io::engine::throttle::ThrottleFactory;
use forebay_io::engine::{AutoFactory, Channels, Engine, EngineFactory, EngineKind, EngineOptions};
use forebay_io::error::Result;
use forebay_standin::Standin;
use forebay_testkit::conformance::{Device, Outcome, Shape, run, run_on};
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

/// A device of the stand-in for CUDA and cuFile.
#[derive(Debug)]
struct StandinDevice {
    channels: Arc<Channels>,
    context: Arc<Context>,
    cufile: Arc<CuFile>,
    // The last to go.
    standin: Standin,
}

impl StandinDevice {
    fn new() -> Self {
        let standin = Standin::new().unwrap();
        let search = Search { folders: vec![standin.folder().to_path_buf()], system: false };
        let cuda = Cuda::load(&search).unwrap();
        let cufile = CuFile::load(&cuda, &search).unwrap();
        let context = Context::retain(&cuda, 1).unwrap();
        Self { channels: Arc::default(), context, cufile, standin }
    }
}

impl Device for StandinDevice {
    fn allocate(&self, length: usize) -> usize {
        self.standin.allocate(1, length)
    }

    fn free(&self, address: usize) {
        self.standin.free(address);
    }

    fn read(&self, address: usize, length: usize) -> Vec<u8> {
        self.standin.peek(address, length)
    }

    fn write(&self, address: usize, bytes: &[u8]) {
        self.standin.poke(address, bytes);
    }

    fn channels(&self) -> Arc<Channels> {
        Arc::clone(&self.channels)
    }

    fn open(&self, file: &File) -> OpenChannel {
        let registered = Arc::new(self.cufile.register_file(file.as_fd()).unwrap());
        let context = Arc::clone(&self.context);
        self.channels.add(Channel::new(registered, context, None, Vec::new()))
    }
}

/// The suite over device memory, and what the stand-in found wrong with that.
fn check_on_device(factory: &dyn EngineFactory, shape: Shape) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = Rc::new(StandinDevice::new());
    let before = device.standin.census();
    let source: Rc<dyn Device> = Rc::<StandinDevice>::clone(&device);
    match run_on(&source, factory, directory.path(), shape) {
        Outcome::Passed { case_count } => assert!(case_count > 20),
        Outcome::Skipped { reason } => eprintln!("skipped: {factory:?}: {reason}"),
    }
    assert!(device.standin.count("cuFileRead") > 0 && device.standin.count("cuFileWrite") > 0);
    assert_eq!(device.standin.violations(), Vec::<String>::new());
    assert_eq!(device.standin.census(), before);
}

#[test]
fn gds_over_threads() {
    for shape in [Shape::default(), DEEP, SINGLE] {
        check_on_device(&EngineKind::Threads, shape);
    }
}

#[test]
fn gds_over_the_first_engine_there_is() {
    check_on_device(&AutoFactory::default(), DEEP);
}

#[test]
fn gds_over_aio() {
    check_on_device(&EngineKind::Aio, Shape { queue_depth: 4, ..SINGLE });
}

#[test]
fn gds_throttled_and_recorded() {
    let throttle = ThrottleFactory::new(Arc::new(EngineKind::Uring), 1_000_000_000).unwrap();
    check_on_device(&RecordFactory::new(Arc::new(throttle)), Shape::default());
}

#[test]
fn gds_with_faults() {
    for seed in 0..2 {
        let plan = FaultPlan::survivable(seed);
        check_on_device(&over(EngineKind::Threads, plan), Shape::default());
    }
}
