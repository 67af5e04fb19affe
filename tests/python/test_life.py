"""The life of a handle: pending work, drops, threads, forks, signals, the end of the program."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import descriptor_count, pattern, run_python

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def failing_store(handle: forebay.Handle, path: Path) -> forebay.Operation:
    """Start a store that fails after it has been accepted: a file that shrinks is too short."""
    path.write_bytes(bytes(4 * MIB))
    operation = handle.load_async(bytearray(4 * MIB), path)
    os.truncate(path, 0)
    return operation


def slow_handle() -> forebay.Handle:
    """Return a handle that hands out few blocks at a time, and those slowly."""
    return forebay.Handle(
        throttle="8MiB",
        page_cache=False,
        block_size="64k",
        queue_depth=2,
        intra_op_parallelism=1,
    )


def test_waiting_with_nothing_pending_is_zero(handle: forebay.Handle) -> None:
    assert handle.wait() == 0
    assert handle.wait(timeout=0) == 0


def test_wait_counts_what_finished_since_the_last_wait(
    handle: forebay.Handle, tmp_path: Path
) -> None:
    operations = [handle.store_async(pattern(5000), tmp_path / str(index)) for index in range(200)]
    operations[7].wait()
    handle.store(b"blocking ones are not counted", tmp_path / "b")
    assert handle.wait() == 200
    assert handle.wait() == 0
    handle.store_async(b"x", tmp_path / "c")
    assert handle.wait() == 1


def test_an_array_dropped_right_after_submission_is_still_written(path: Path) -> None:
    expected = pattern(4 * MIB)
    with slow_handle() as handle:
        operation = handle.store_async(expected.copy(), path)
        gc.collect()
        junk = [np.full(4 * MIB, 7, np.uint8) for _ in range(4)]
        operation.wait()
    assert len(junk) == 4
    assert path.read_bytes() == expected.tobytes()


def test_what_is_done_gives_its_array_back_at_once(path: Path) -> None:
    pool = forebay.Pool(budget="8MiB")
    with forebay.Handle(pool=pool, staging_bytes="1MiB") as handle:
        for turn in range(20):
            array = pool.empty(MIB)
            array[:] = turn
            operation = handle.store_async(array, path, turn * MIB)
            while not operation.done():
                pass
            del array, operation
        assert handle.wait() == 20
    expected = np.repeat(np.arange(20, dtype=np.uint8), MIB)
    assert path.read_bytes() == expected.tobytes()


def test_a_bytearray_can_be_resized_once_its_operation_is_done(path: Path) -> None:
    path.write_bytes(b"x" * 5000)
    with forebay.Handle() as handle:
        target = bytearray(5000)
        operation = handle.load_async(target, path)
        while not operation.done():
            pass
        target.extend(b"y")
        assert target == b"x" * 5000 + b"y"
        assert handle.wait() == 1


def test_finished_operations_hold_nothing_once_the_handle_is_used(path: Path) -> None:
    with forebay.Handle() as handle:
        arrays = [bytearray(bytes([index]) * 100) for index in range(30)]
        for index, array in enumerate(arrays):
            core = handle.store_async(array, path, 100 * index)._core
            while not core.done():
                pass
        handle.empty(1)
        for array in arrays:
            array.extend(b"c")
        assert handle.wait() == 30
    assert path.read_bytes() == b"".join(bytes([index]) * 100 for index in range(30))


def test_a_dropped_operation_goes_on(path: Path) -> None:
    data = pattern(MIB + 5)
    with slow_handle() as handle:
        handle.store_async(data, path)
        gc.collect()
        assert handle.wait() == 1
    assert path.read_bytes() == data.tobytes()


def test_a_dropped_handle_finishes_its_work(path: Path) -> None:
    data = pattern(2 * MIB)
    handle = slow_handle()
    handle.store_async(data, path)
    del handle
    gc.collect()
    assert path.read_bytes() == data.tobytes()


def test_a_handle_lives_as_long_as_its_operations(path: Path) -> None:
    data = pattern(MIB)
    operation = forebay.Handle().store_async(data, path)
    gc.collect()
    operation.wait()
    assert path.read_bytes() == data.tobytes()


def test_a_failure_that_nobody_waited_for_is_raised_by_close(path: Path) -> None:
    handle = slow_handle()
    failing_store(handle, path)
    with pytest.raises(forebay.ForebayError):
        handle.close()
    handle.close()


def test_a_failure_that_nobody_waited_for_is_warned_of_when_dropped(path: Path) -> None:
    handle = slow_handle()
    failing_store(handle, path)
    holder = [handle]
    del handle
    with pytest.warns(forebay.ForebayWarning, match="nobody waited"):
        holder.clear()


def test_a_failure_is_raised_once_by_wait_and_not_again_by_close(path: Path) -> None:
    with slow_handle() as handle:
        operation = failing_store(handle, path)
        with pytest.raises(forebay.ForebayError):
            handle.wait()
        assert handle.wait() == 0
        with pytest.raises(forebay.ForebayError):
            operation.wait()


def test_a_failure_that_somebody_heard_of_is_not_raised_again(path: Path) -> None:
    with slow_handle() as handle:
        operation = failing_store(handle, path)
        with pytest.raises(forebay.ForebayError):
            operation.wait()
        assert handle.wait() == 1


def test_an_exception_in_the_block_is_what_comes_out(path: Path) -> None:
    def work() -> None:
        with slow_handle() as handle:
            failing_store(handle, path)
            raise ZeroDivisionError

    with pytest.warns(forebay.ForebayWarning), pytest.raises(ZeroDivisionError):
        work()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "import sys; sys.exit(0)"])
def test_the_end_of_the_program_waits_for_pending_writes(path: Path, ending: str) -> None:
    done = run_python(
        f"""
        import forebay
        handle = forebay.Handle(throttle="16MiB", block_size="64k")
        operation = handle.store_async(b"z" * (4 << 20), {str(path)!r})
        {ending}
        """
    )
    assert done.stderr == ""
    assert path.read_bytes() == b"z" * (4 * MIB)


def test_the_end_of_the_program_warns_of_unseen_failures(path: Path) -> None:
    path.write_bytes(bytes(4 * MIB))
    done = run_python(
        f"""
        import os, forebay
        handle = forebay.Handle(
            throttle="8MiB", page_cache=False, block_size="64k", queue_depth=2
        )
        operation = handle.load_async(bytearray(4 << 20), {str(path)!r})
        os.truncate({str(path)!r}, 0)
        """
    )
    assert "ForebayWarning" in done.stderr
    assert str(path) in done.stderr


def test_an_uncaught_exception_with_work_pending_ends_cleanly(path: Path) -> None:
    done = run_python(
        f"""
        import forebay
        handle = forebay.Handle(throttle="16MiB", block_size="64k")
        handle.store_async(b"z" * (4 << 20), {str(path)!r})
        raise ZeroDivisionError
        """,
        check=False,
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "ForebayWarning" not in done.stderr
    assert path.read_bytes() == b"z" * (4 * MIB)


@pytest.mark.parametrize("way", ["wait", "run", "handle.wait", "close"])
def test_other_threads_run_while_one_waits(path: Path, way: str) -> None:
    path.write_bytes(bytes(2 * MIB))
    handle = slow_handle()
    target = bytearray(2 * MIB)
    counts = []
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1
        counts.append(number)

    thread = threading.Thread(target=count)
    thread.start()
    if way == "run":
        handle.load(target, path)
    else:
        operation = handle.load_async(target, path)
        {"wait": operation.wait, "handle.wait": handle.wait, "close": handle.close}[way]()
    stop.set()
    thread.join()
    handle.close()
    # A wait that held the GIL would leave the other thread no turn in a quarter of a second.
    assert counts[0] > 1000


def test_other_threads_run_while_many_arrays_are_looked_up(
    handle: forebay.Handle, path: Path
) -> None:
    turns = [0]
    stop = threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            turns[0] += 1
            # Another turn takes another thread that lets go.
            time.sleep(0)

    array: Any = pattern(64)
    # The last is refused, so that nothing is submitted: all the time goes to looking arrays up.
    items = [(array, str(path), 64 * index) for index in range(40_000)] + [(None, str(path), 0)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other = threading.Thread(target=take_turns)
    other.start()
    try:
        before = turns[0]
        with pytest.raises(TypeError):
            handle._core.submit(True, items, False, "demand", None)
        after = turns[0]
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(interval)
    assert after - before > 10


def test_threads_share_a_handle(handle: forebay.Handle, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                data = pattern(50_001, seed=100 * number + turn)
                file = tmp_path / str(number)
                handle.store_async(data, file).wait()
                back = np.zeros_like(data)
                handle.load(back, file)
                assert np.array_equal(back, data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_who_waits_beside_another_thread_waits_for_all(path: Path) -> None:
    data = pattern(2 * MIB)
    with slow_handle() as handle:
        operation = handle.store_async(data, path)
        counts: list[int] = []
        other = threading.Thread(target=lambda: counts.append(handle.wait()))
        other.start()
        while handle._pending.others() == []:
            pass
        with pytest.raises(forebay.errors.WaitTimeoutError):
            handle.wait(timeout=0)
        counts.append(handle.wait())
        assert operation.done()
        other.join()
        assert sorted(counts) == [0, 1]
        assert handle.wait() == 0
    assert path.read_bytes() == data.tobytes()


def test_a_failure_that_two_threads_wait_for_is_raised_in_one(path: Path) -> None:
    with slow_handle() as handle:
        slow = handle.store_async(pattern(MIB), path.with_suffix(".slow"))
        failing_store(handle, path)
        raised: list[forebay.ForebayError] = []

        def wait() -> None:
            try:
                handle.wait()
            except forebay.ForebayError as error:
                raised.append(error)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert slow.done()
        assert [type(error) for error in raised] == [forebay.errors.ShortFileError]


def test_a_thread_that_gives_up_waiting_leaves_its_operations_to_others(path: Path) -> None:
    data = pattern(2 * MIB)
    with slow_handle() as handle:
        handle.store_async(data, path)
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                handle.wait(timeout=0.01)
            except forebay.errors.WaitTimeoutError as error:
                raised.append(error)

        other = threading.Thread(target=wait)
        other.start()
        other.join()
        assert len(raised) == 1
        assert handle.wait() == 1
    assert path.read_bytes() == data.tobytes()


def test_a_forked_child_gets_fresh_workers(path: Path) -> None:
    done = run_python(
        f"""
        import os, warnings, forebay
        warnings.simplefilter("ignore", DeprecationWarning)
        handle = forebay.Handle(throttle="16MiB", block_size="64k")
        handle.store(b"before" * 1000, {str(path)!r})
        handle.store_async(b"p" * (4 << 20), {str(path) + ".parent"!r})
        child = os.fork()
        if child == 0:
            try:
                assert handle.wait() == 0
                back = bytearray(6000)
                handle.load(back, {str(path)!r})
                assert back == b"before" * 1000
                handle.store_async(b"c" * 300_000, {str(path) + ".child"!r}).wait()
                pinned = handle.empty(5000)
                pinned[:] = 1
                handle.close()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert handle.wait() == 1
        """
    )
    assert done.stderr == ""
    assert path.with_name(path.name + ".child").read_bytes() == b"c" * 300_000
    assert path.with_name(path.name + ".parent").read_bytes() == b"p" * (4 * MIB)


@pytest.mark.parametrize("wait", ["operation.wait()", "asyncio.run(wrap())"])
def test_an_operation_of_the_parent_is_refused_in_the_child(path: Path, wait: str) -> None:
    run_python(
        f"""
        import asyncio, os, signal, warnings, forebay
        async def wrap():
            await operation
        warnings.simplefilter("ignore", DeprecationWarning)
        handle = forebay.Handle(throttle="16MiB", block_size="64k")
        operation = handle.store_async(b"p" * (4 << 20), {str(path)!r})
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                {wait}
            except forebay.errors.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        operation.wait()
        """
    )


@pytest.mark.parametrize(
    "wait",
    [
        "handle.load(target, path)",
        "handle.load(bytearray(99999), path)",
        "operation().wait()",
        "operation(); handle.wait()",
        "operation(); handle.close()",
        "aio.sync_pread(target, path)",
    ],
)
def test_control_c_ends_a_long_wait(path: Path, wait: str) -> None:
    path.write_bytes(pattern(8 * MIB).tobytes())
    done = run_python(
        f"""
        import os, signal, threading, time, forebay
        path = {str(path)!r}
        handle = forebay.Handle(
            throttle="64k", page_cache=False, block_size="4k", queue_depth=1, intra_op_parallelism=1
        )
        aio = forebay.aio_handle(block_size=4096)
        aio._handle = handle
        target = bytearray(8 << 20)
        operations = []
        def operation():
            operations.append(handle.load_async(target, path))
            return operations[-1]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            {wait}
        except KeyboardInterrupt:
            print("interrupted")
        for operation in operations:
            operation.cancel()
        if operations:
            assert handle.wait() == 1
        handle.close()
        """
    )
    assert done.stdout == "interrupted\n"
    assert done.stderr == ""


@pytest.mark.parametrize("engine", ["uring", "aio", "threads"])
def test_a_profilers_timer_loses_nothing(path: Path, engine: str) -> None:
    run_python(
        f"""
        import signal, forebay
        ticks = []
        signal.signal(signal.SIGPROF, lambda *_: ticks.append(1))
        signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            handle = forebay.Handle({engine!r}, intra_op_parallelism=3)
        except NotImplementedError:
            raise SystemExit
        data = bytes(range(256)) * 40_000
        for turn in range(5):
            handle.store(data, {str(path)!r})
            back = bytearray(len(data))
            handle.load(back, {str(path)!r})
            assert back == data
        handle.close()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert ticks
        """
    )


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_operations_leave_no_descriptors_and_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "w"
    data: Any = pattern(4096)
    back = np.zeros_like(data)

    def turns(handle: forebay.Handle, count: int) -> None:
        for _ in range(count):
            handle.store(data, path)
            handle.load_async(back, path)
            with pytest.raises(FileNotFoundError):
                handle.load(back, tmp_path / "missing")
            with pytest.raises(EOFError):
                handle.load_async(np.zeros(5000, np.uint8), path).wait()

    with forebay.Handle() as handle:
        turns(handle, 300)
        handle.wait()
        descriptors, memory = descriptor_count(), resident_bytes()
        staged = handle.stats()["staging_bytes"]
        turns(handle, 2500)
        assert handle.wait() == 2500
        # What earlier tests left may go meanwhile.
        assert descriptor_count() <= descriptors
        # A worker may have met its first staged block only now.
        staged = handle.stats()["staging_bytes"] - staged
        assert resident_bytes() - memory < 8 * MIB + staged


def test_handles_come_and_go_without_a_trace(path: Path) -> None:
    for turn in range(40):
        if turn == 5:
            descriptors, threads = descriptor_count(), len(os.listdir("/proc/self/task"))
        with forebay.Handle() as handle:
            handle.store(b"x" * 10_000, path)
    assert descriptor_count() == descriptors
    assert len(os.listdir("/proc/self/task")) <= threads


def test_a_child_of_multiprocessing_finishes_what_it_began(path: Path) -> None:
    run_python(
        f"""
        import multiprocessing, forebay

        handle = forebay.Handle(block_size="64KiB", queue_depth=1, throttle="8MB")

        def begin():
            handle.store_async(bytes(range(256)) * 8192, {str(path)!r})

        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=begin)
            child.start()
            child.join()
            assert child.exitcode == 0
        """
    )
    assert path.read_bytes() == bytes(range(256)) * 8192


def test_no_path_is_a_type_error(handle: forebay.Handle) -> None:
    with pytest.raises(TypeError):
        handle.load_many([(bytearray(4), None)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__
)
def test_what_belongs_to_a_process_cant_be_copied(path: Path, duplicate: Any) -> None:
    handle = forebay.Handle()
    operation = handle.store_async(b"first", path)
    for original in (handle, forebay.aio_handle(), operation, forebay.Pool()):
        with pytest.raises(TypeError, match="can't be copied"):
            duplicate(original)
    gc.collect()
    operation.wait()
    assert path.read_bytes() == b"first"
    handle.store(b"the original still works", path)
    assert path.read_bytes() == b"the original still works"
    handle.close()


def test_an_exception_in_the_block_comes_out_though_warnings_are_errors(path: Path) -> None:
    path.write_bytes(bytes(4 * MIB))
    done = run_python(
        f"""
        import os, warnings, forebay
        warnings.simplefilter("error")
        try:
            with forebay.Handle(
                throttle="8MiB", page_cache=False, block_size="64k", queue_depth=2
            ) as handle:
                handle.load_async(bytearray(4 << 20), {str(path)!r})
                os.truncate({str(path)!r}, 0)
                raise ZeroDivisionError
        except ZeroDivisionError as error:
            assert error.__context__ is None
            print("the user's own")
        """
    )
    assert done.stdout == "the user's own\n"
    assert "ForebayWarning" in done.stderr


def test_at_the_end_one_handles_failure_leaves_the_others_their_turn(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import os, warnings, forebay
        warnings.simplefilter("error")
        handles = []
        for name in ("a", "b", "c"):
            path = os.path.join({str(tmp_path)!r}, name)
            with open(path, "wb") as file:
                file.truncate(4 << 20)
            handle = forebay.Handle(
                throttle="8MiB", page_cache=False, block_size="64k", queue_depth=2
            )
            handle.load_async(bytearray(4 << 20), path)
            os.truncate(path, 0)
            handles.append(handle)
        last = forebay.Handle(throttle="16MiB", block_size="64k")
        last.store_async(b"z" * (4 << 20), os.path.join({str(tmp_path)!r}, "z"))
        """
    )
    for name in ("a", "b", "c"):
        assert str(tmp_path / name) in done.stderr
    assert (tmp_path / "z").read_bytes() == b"z" * (4 * MIB)
