//! Somebody else brings CUDA up, and pool memory is registered without a word to Forebay. What is
//! looked at is the process as a whole, so this is one test, in a process of its own.
#![expect(clippy::unwrap_used, reason = "this is a test")]

use std::sync::Arc;

use forebay_io::device::{Cuda, Devices, Place, Search, memory_at, notice};
use forebay_io::memory::{ALIGNMENT_DEFAULT, PoolBuffer};
use forebay_io::{Handle, Options, Pool, PoolOptions};
use forebay_standin::Standin;

const LENGTH: usize = 3 << 20;

fn buffer(pool: &Arc<Pool>) -> PoolBuffer {
    pool.allocate(LENGTH, ALIGNMENT_DEFAULT).unwrap()
}

#[test]
fn pools_are_registered_once_somebody_has_a_context_and_not_before() {
    let pinned = Pool::new(PoolOptions { touch: false, ..PoolOptions::default() });
    let ordinary = Pool::new(PoolOptions { pinned: false, ..PoolOptions::default() });
    let early = [buffer(&pinned), buffer(&pinned)];
    let left_alone = buffer(&ordinary);
    assert!(!notice(), "there is no driver");

    let standin = Standin::new().unwrap();
    let search = Search { folders: vec![standin.folder().to_path_buf()], system: false };
    Devices::search_in(search.clone());
    let before_start = buffer(&pinned);
    assert!(!notice(), "nobody has started the driver");
    assert_eq!(standin.count("cuInit"), 0);

    // Somebody starts it, and has contexts, which the stand-in holds already.
    let theirs = Cuda::load(&search).unwrap();
    let place =
        |buffer: &PoolBuffer| memory_at(&theirs, buffer.as_ptr().expose_provenance()).unwrap();
    let held = standin.census();
    assert_eq!(place(&early[0]), Place::Host);
    let late = pinned.allocate_wait(LENGTH, ALIGNMENT_DEFAULT, None).unwrap();
    for buffer in early.iter().chain([&before_start, &late]) {
        assert_eq!(place(buffer), Place::RegisteredHost);
    }
    assert_eq!(place(&left_alone), Place::Host);
    assert_eq!(standin.count("cuMemHostRegister_v2"), 4);
    assert_ne!(standin.census(), held);
    assert!(notice());

    // Once seen, nothing is asked for any more but the registration of what is new.
    let calls = standin.calls().len();
    let handle = Handle::new(Options { pool: Some(pinned), ..Options::default() }).unwrap();
    let path = standin.folder().join("tensor");
    handle.store(&path, early[0].as_slice()).unwrap();
    assert_eq!(standin.calls().len(), calls);
    assert_eq!(std::fs::read(&path).unwrap(), early[0].as_slice());
    drop(handle);

    drop((early, before_start, late, left_alone));
    assert_eq!(standin.count("cuMemHostUnregister"), standin.count("cuMemHostRegister_v2"));
    assert_eq!(standin.violations(), Vec::<String>::new());
}
