//! A handle that has nothing to do uses no processor. Alone in its process, since it counts that.

use std::time::{Duration, Instant};

use forebay_io::{EngineChoice, EngineKind, Handle, Options};
use forebay_testkit::memory::pattern;
use forebay_testkit::usage::process_cpu;

#[test]
fn an_idle_handle_uses_no_cpu() {
    for kind in EngineKind::ALL {
        let options = Options { engine: EngineChoice::Named(kind), ..Options::default() };
        let Ok(handle) = Handle::new(options) else { continue };
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        handle.store(directory.path().join("w"), &pattern(1, 1 << 20)).unwrap();
        let before = process_cpu();
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(500));
        let used = process_cpu().saturating_sub(before);
        assert!(used < start.elapsed() / 10, "{kind}: {used:?}");
    }
}
