//! The stand-in runs late and out of order, and finds what would go wrong on a device.

use forebay_standin::Standin;

fn only_violation(standin: &Standin) -> String {
    let violations = standin.violations();
    assert_eq!(violations.len(), 1, "{violations:?}");
    violations[0].clone()
}

#[test]
fn a_held_stream_does_nothing_and_goes_on_in_order() {
    let standin = Standin::new().unwrap();
    let memory = standin.allocate(0, 8);
    standin.poke(memory, &[0; 8]);
    let stream = standin.stream(0);
    let held = standin.hold(stream);
    for round in 1..=5 {
        standin.kernel_write(stream, memory, &[round; 8]);
    }
    let other = standin.stream(0);
    assert_eq!(standin.kernel_read(other, memory, 8), [0; 8]);
    // Nothing ordered the two, so that was luck.
    assert!(only_violation(&standin).contains("isn't ordered after a kernel that writes"));
    drop(held);
    standin.synchronize(stream);
    assert_eq!(standin.peek(memory, 8), [5; 8]);
    standin.end(stream);
    standin.end(other);
    standin.free(memory);
    assert_eq!(standin.violations().len(), 1);
}

#[test]
fn streams_overtake_each_other() {
    let standin = Standin::new().unwrap();
    let memory = standin.allocate(1, 1);
    let (first, second) = (standin.stream(1), standin.stream(1));
    let mut last = Vec::new();
    for _ in 0..40 {
        standin.kernel_write(first, memory, &[1]);
        standin.kernel_write(second, memory, &[2]);
        standin.synchronize(first);
        standin.synchronize(second);
        last.extend(standin.peek(memory, 1));
    }
    assert!(last.contains(&1) && last.contains(&2), "{last:?}");
    standin.end(first);
    standin.end(second);
    standin.free(memory);
}

#[test]
fn memory_that_was_freed_or_is_in_use_is_found() {
    let standin = Standin::new().unwrap();
    let memory = standin.allocate(0, 100);
    let stream = standin.stream(0);
    let held = standin.hold(stream);
    standin.kernel_write(stream, memory + 10, &[1; 90]);
    standin.free(memory);
    assert!(only_violation(&standin).contains("freed in use"));
    drop(held);
    standin.synchronize(stream);
    standin.end(stream);
}

#[test]
fn what_a_test_touches_too_early_is_found() {
    let standin = Standin::new().unwrap();
    let memory = standin.allocate(0, 100);
    let stream = standin.stream(0);
    standin.kernel_write(stream, memory, &[1; 50]);
    standin.peek(memory + 50, 50);
    assert_eq!(standin.violations(), Vec::<String>::new());
    standin.peek(memory, 51);
    assert!(only_violation(&standin).contains("may not be over"));
    standin.synchronize(stream);
    standin.peek(memory, 51);
    assert_eq!(standin.violations().len(), 1);
    standin.end(stream);
    standin.free(memory);
}

#[test]
fn contexts_and_streams_are_counted() {
    let standin = Standin::new().unwrap();
    let before = standin.census();
    let memory = standin.allocate(0, 100);
    let stream = standin.stream(0);
    assert_ne!(standin.census(), before);
    standin.free(memory);
    standin.end(stream);
    assert_eq!(standin.census(), before);
}

#[test]
fn what_is_enqueued_when_a_context_breaks_never_runs() {
    let standin = Standin::new().unwrap();
    let memory = standin.allocate(0, 4);
    standin.poke(memory, &[1; 4]);
    let stream = standin.stream(0);
    let held = standin.hold(stream);
    standin.kernel_write(stream, memory, &[2; 4]);
    standin.configure("broken=700");
    drop(held);
    standin.synchronize(stream);
    standin.configure("broken=0");
    assert_eq!(standin.peek(memory, 4), [1; 4]);
    standin.kernel_write(stream, memory, &[3; 4]);
    standin.synchronize(stream);
    assert_eq!(standin.peek(memory, 4), [3; 4]);
    standin.end(stream);
    standin.free(memory);
    assert_eq!(standin.violations(), Vec::<String>::new());
}
