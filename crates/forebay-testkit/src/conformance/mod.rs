//! The suite that every engine passes.
//!
//! It asks for what [`Engine`](forebay_io::engine::Engine) promises and no more: transfers may be
//! cut short or interrupted, completions may come late and in any order, a reap may end early. So a
//! fault engine whose faults a careful caller survives passes it too.

mod binding;
mod ending;
mod failing;
mod memory;
mod moving;
mod rig;
mod stress;
mod waiting;

use std::path::Path;
use std::rc::Rc;

use forebay_io::engine::EngineFactory;

pub use memory::Device;
use memory::set_device;
use rig::Rig;
pub use stress::stress;

/// How the engines under test are built, beside the factory.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Transfers in flight at the most.
    pub queue_depth: usize,
    /// One call for each transfer.
    pub single_submit: bool,
    /// A kernel thread polls the submission queue.
    pub sqpoll: bool,
    /// Completions are polled for.
    pub iopoll: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self { queue_depth: 16, single_submit: false, sqpoll: false, iopoll: false }
    }
}

/// What became of a run of the suite that found no fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All cases passed.
    Passed {
        /// How many there are.
        case_count: usize,
    },
    /// The engine can't be built on this host.
    Skipped {
        /// Why not.
        reason: String,
    },
}

/// A promise of the trait, and the check of it.
struct Case {
    name: &'static str,
    check: fn(&mut Rig<'_>),
}

/// Cases, and whether they are about memory of the host whatever else an engine moves: no kernel
/// registers a device's.
const CASES: &[(&[Case], bool)] = &[
    (moving::CASES, false),
    (failing::CASES, false),
    (waiting::CASES, false),
    (binding::CASES, true),
    (ending::CASES, false),
];

/// Runs the suite over the engines that `factory` builds, with files in `directory`.
///
/// # Panics
///
/// When an engine breaks a promise; the name of the case is printed.
pub fn run(factory: &dyn EngineFactory, directory: &Path, shape: Shape) -> Outcome {
    run_over(factory, directory, shape, None)
}

/// The same with memory of a device.
///
/// # Panics
///
/// As for [`run`].
pub fn run_on(
    device: &Rc<dyn Device>,
    factory: &dyn EngineFactory,
    directory: &Path,
    shape: Shape,
) -> Outcome {
    run_over(factory, directory, shape, Some(device))
}

fn run_over(
    factory: &dyn EngineFactory,
    directory: &Path,
    shape: Shape,
    device: Option<&Rc<dyn Device>>,
) -> Outcome {
    if let Err(error) = Rig::new(factory, directory, shape) {
        return Outcome::Skipped { reason: error.to_string() };
    }
    let mut case_count = 0;
    let all = CASES.iter().flat_map(|(cases, host)| cases.iter().map(move |case| (case, *host)));
    for (case, of_host) in all {
        set_device(device.filter(|_| !of_host).cloned());
        let _context = Context { case: case.name, factory, shape };
        // Each on a thread of its own would lose the panic's place; each has an engine of its own.
        let mut rig = match Rig::new(factory, directory, shape) {
            Ok(rig) => rig,
            Err(error) => panic!("an engine could be built once and not again: {error}"),
        };
        (case.check)(&mut rig);
        case_count += 1;
    }
    set_device(None);
    Outcome::Passed { case_count }
}

/// Prints what was being checked if the check panics.
struct Context<'a> {
    case: &'a str,
    factory: &'a dyn EngineFactory,
    shape: Shape,
}

impl Drop for Context<'_> {
    #[expect(clippy::print_stderr, reason = "a failing check has to tell its name")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("conformance: {} ({:?}, {:?})", self.case, self.factory, self.shape);
        }
    }
}
