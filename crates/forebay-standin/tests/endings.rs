//! The context of a device goes away under its users.

use forebay_standin::Standin;

#[test]
fn a_device_that_is_reset_loses_what_it_had_and_the_other_one_goes_on() {
    let standin = Standin::new().unwrap_or_else(|error| panic!("{error}"));
    let before = standin.census();
    standin.configure("delay_us=20000");
    let memory = [standin.allocate(0, 100), standin.allocate(1, 100)];
    let streams = [standin.stream(0), standin.stream(1)];
    standin.kernel_write(streams[0], memory[0], &[1; 100]);
    standin.reset_device(0);
    standin.kernel_write(streams[1], memory[1], &[2; 100]);
    assert_eq!(standin.kernel_read(streams[1], memory[1], 100), [2; 100]);
    standin.free(memory[1]);
    standin.end(streams[1]);
    assert_eq!(standin.census(), before);
    assert_eq!(standin.violations(), Vec::<String>::new());
}

#[test]
fn contexts_are_current_by_thread_and_in_order() {
    let standin = Standin::new().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(standin.current(), None);
    let first = standin.make_current(1);
    {
        let _second = standin.make_current(0);
        assert_eq!(standin.current(), Some(0));
    }
    assert_eq!(standin.current(), Some(1));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| standin.current());
        assert_eq!(other.join().ok(), Some(None));
    });
    drop(first);
    assert_eq!(standin.current(), None);
}
