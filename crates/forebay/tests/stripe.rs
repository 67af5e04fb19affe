//! Striped files on engines that fail as planned: right bytes, or an error that names the member,
//! and never a file that looks whole.

#![expect(unsafe_code, reason = "requests name memory by address")]
#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay::io::{
    Direction, Durability, EngineKind, ErrorKind, Handle, Options, Request, Result, Target,
};
use forebay::stripe::Stripe;
use forebay_testkit::fault::{FaultFactory, FaultPlan, Scope, When};
use forebay_testkit::memory::pattern;

/// `EIO` of `errno(3)`.
const EIO: i32 = 5;
/// Several stripes for each member, and a ragged end.
const LENGTH: usize = (1 << 20) + 12_345;
const NAME: &str = "w.bin";

struct Drives {
    root: tempfile::TempDir,
    stripe: Stripe,
}

impl Drives {
    fn new() -> Self {
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let directories: Vec<PathBuf> =
            (0..3).map(|index| root.path().join(index.to_string())).collect();
        for directory in &directories {
            std::fs::create_dir(directory).unwrap();
        }
        let stripe = Stripe::new(&directories, 64 << 10).unwrap();
        Self { root, stripe }
    }

    fn has(&self, path: &Path) -> bool {
        path.starts_with(self.root.path()) && path.ends_with(NAME)
    }

    fn run(
        &self,
        handle: &Handle,
        direction: Direction,
        bytes: &mut [u8],
        durability: Durability,
    ) -> Result<()> {
        let target = Target::Path(NAME.into());
        let whole_file = direction == Direction::Store;
        let request = Request {
            whole_file,
            durability: Some(durability),
            ..Request::new(direction, target, 0, bytes.as_mut_ptr(), bytes.len())
        };
        let request = self.stripe.spread(request, Durability::None)?;
        // SAFETY: the bytes are borrowed until `run` returns.
        unsafe { handle.run(request) }
    }

    fn store(&self, handle: &Handle, content: &[u8], durability: Durability) -> Result<()> {
        self.run(handle, Direction::Store, &mut content.to_vec(), durability)
    }

    fn load(&self, handle: &Handle, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0xEE; length];
        self.run(handle, Direction::Load, &mut bytes, Durability::None).map(|()| bytes)
    }
}

fn faulty(plan: FaultPlan) -> Handle {
    let options = Options {
        block_size: 64 << 10,
        queue_depth: 8,
        page_cache: false,
        staging_bytes: 1 << 20,
        ..Options::default()
    };
    let factory = FaultFactory::new(Arc::new(EngineKind::Threads), plan);
    Handle::with_factory(options, Arc::new(factory)).unwrap()
}

fn sound() -> Handle {
    Handle::new(Options::default()).unwrap()
}

#[test]
fn what_can_be_survived_is_survived_with_the_right_bytes() {
    let drives = Drives::new();
    for seed in 0..20 {
        let handle = faulty(FaultPlan::survivable(seed));
        let content = pattern(seed, LENGTH);
        drives.store(&handle, &content, Durability::Full).unwrap();
        assert!(drives.load(&handle, LENGTH).unwrap() == content, "seed {seed}");
        assert!(drives.load(&sound(), LENGTH).unwrap() == content, "seed {seed}");
    }
}

#[test]
fn a_write_that_fails_names_its_member_and_leaves_nothing_that_looks_whole() {
    let drives = Drives::new();
    for nth in 1..=17 {
        drives.store(&sound(), &pattern(1, LENGTH), Durability::None).unwrap();
        let handle = faulty(FaultPlan::new(0).fail(When::From(nth), Scope::Writes, EIO));
        let error = drives.store(&handle, &pattern(2, LENGTH), Durability::None).unwrap_err();
        assert_eq!(error.os_code(), Some(EIO), "{error}");
        assert!(drives.has(error.path_ref().unwrap()), "{error}");
        let error = drives.load(&sound(), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
    }
}

#[test]
fn a_new_file_whose_store_fails_is_gone_from_every_directory() {
    for scope in [Scope::Writes, Scope::Syncs] {
        let drives = Drives::new();
        let handle = faulty(FaultPlan::new(0).fail(When::From(2), scope, EIO));
        let error = drives.store(&handle, &pattern(2, LENGTH), Durability::Full).unwrap_err();
        assert_eq!(error.os_code(), Some(EIO), "{error}");
        assert!(!drives.stripe.exists(NAME).unwrap());
        for directory in drives.stripe.directories() {
            assert_eq!(std::fs::read_dir(directory).unwrap().count(), 0);
        }
    }
}

#[test]
fn a_read_that_fails_names_its_member_and_the_handle_goes_on() {
    let drives = Drives::new();
    let content = pattern(3, LENGTH);
    drives.store(&sound(), &content, Durability::None).unwrap();
    let handle = faulty(FaultPlan::new(0).fail(When::Nth(5), Scope::Reads, EIO));
    let error = drives.load(&handle, LENGTH).unwrap_err();
    assert_eq!(error.os_code(), Some(EIO), "{error}");
    assert!(drives.has(error.path_ref().unwrap()), "{error}");
    assert!(drives.load(&handle, LENGTH).unwrap() == content);
}
