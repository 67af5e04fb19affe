"""Pinned memory: exact sizes, budgets, the life of arrays, limits of the host."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import forebay
from conftest import need_root, pattern, run_python
from forebay._arguments import parse_size
from forebay.errors import InvalidInputError, OutOfMemoryError, UnsupportedError, WaitTimeoutError

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize(
    ("dtype", "numpy_type"),
    [
        ("uint8", np.uint8),
        ("float32", np.float32),
        (np.dtype("complex64"), np.complex64),
        (np.int16, np.int16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("shape", [(), 5, (0,), (3, 5, 7), [2, 0], np.int64(4)])
def test_arrays_have_the_shape_and_type_asked_for(
    handle: forebay.Handle, dtype: Any, numpy_type: Any, shape: Any
) -> None:
    array = handle.empty(shape, dtype)
    assert array.dtype == np.dtype(numpy_type)
    assert array.shape == np.empty(shape).shape
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_arrays_begin_at_a_page(handle: forebay.Handle) -> None:
    for length in (1, 5000, MIB + 1):
        assert handle.empty(length).ctypes.data % 4096 == 0


def test_arrays_move_straight_between_drive_and_memory(path: Path) -> None:
    with forebay.Handle(page_cache=False) as handle:
        if not forebay.file_facts(path.parent)["direct"]:
            pytest.skip("no direct I/O here")
        array = handle.empty(4 * MIB)
        array[:] = pattern(4 * MIB)
        handle.store(array, path)
        back = handle.empty(4 * MIB)
        handle.load(back, path)
        assert np.array_equal(back, array)
        stats = handle.stats()
        assert stats["bytes_direct"] == 8 * MIB
        assert stats["bytes_staged"] == 0


@pytest.mark.parametrize(
    ("dtype", "error"),
    [("float33", InvalidInputError), (object, InvalidInputError), ("O", InvalidInputError)],
)
def test_what_is_no_type_is_refused(handle: forebay.Handle, dtype: Any, error: Any) -> None:
    with pytest.raises(error):
        handle.empty(1, dtype)


def test_a_type_that_numpy_lacks_says_what_to_install(
    handle: forebay.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedError, match="ml_dtypes"):
        handle.empty(1, "int33")


def test_what_is_no_shape_or_library_is_refused(handle: forebay.Handle) -> None:
    with pytest.raises(InvalidInputError):
        handle.empty(-1)
    with pytest.raises(InvalidInputError):
        handle.empty(1, like="jax")


def test_a_pool_costs_what_was_asked_for_and_no_power_of_two() -> None:
    pool = forebay.Pool()
    arrays = [pool.empty(5 * MIB + 1) for _ in range(3)]
    stats = pool.stats()
    assert stats["used_bytes"] == 3 * (5 * MIB + 1)
    assert stats["mapped_bytes"] < 3 * 6 * MIB + 2 * MIB
    del arrays
    gc.collect()
    assert pool.stats()["used_bytes"] == 0
    assert pool.stats()["mapped_bytes"] <= 2 * MIB


def test_memory_lives_as_long_as_any_view() -> None:
    pool = forebay.Pool()
    array = pool.empty((1000, 1000), "float32")
    array[:] = 7
    view = array[500:501, ::2].T
    del array, pool
    gc.collect()
    assert (view == 7).all()


def test_an_array_outlives_its_handle(path: Path) -> None:
    with forebay.Handle() as handle:
        array = handle.empty(10_000)
        handle.store(np.full(10_000, 3, np.uint8), path)
        handle.load(array, path)
    del handle
    gc.collect()
    assert (array == 3).all()


def test_a_budget_holds_and_says_the_numbers() -> None:
    pool = forebay.Pool(budget="8MiB")
    array = pool.empty(6 * MIB)
    with pytest.raises(OutOfMemoryError, match=str(8 * MIB)):
        pool.empty(4 * MIB)
    with pytest.raises(MemoryError):
        pool.empty(9 * MIB)
    del array
    assert pool.empty(8 * MIB).nbytes == 8 * MIB


def test_a_full_pool_can_be_waited_for() -> None:
    pool = forebay.Pool(budget="8MiB")
    held = [pool.empty(8 * MIB)]
    with pytest.raises(WaitTimeoutError):
        pool.empty(MIB, timeout=0.15)
    threading.Timer(0.2, held.clear).start()
    assert pool.empty(8 * MIB, timeout=None).nbytes == 8 * MIB


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("who", ["handle", "pool"])
def test_who_waits_for_room_gets_what_finished_operations_held(
    path: Path, who: str, timeout: float | None
) -> None:
    pool = forebay.Pool(budget="4MiB")
    with forebay.Handle(pool=pool, staging_bytes="1MiB", throttle="16MiB") as handle:
        giver: Any = {"handle": handle, "pool": pool}[who]
        for turn in range(4):
            array = giver.empty(2 * MIB, timeout=timeout)
            array[:] = turn
            handle.store_async(array, path, 2 * MIB * turn)
            del array
        assert handle.wait() == 4
    assert path.read_bytes() == np.repeat(np.arange(4, dtype=np.uint8), 2 * MIB).tobytes()


def test_room_that_finished_operations_hold_is_found_at_once(path: Path) -> None:
    pool = forebay.Pool(budget="4MiB")
    with forebay.Handle(pool=pool, staging_bytes="1MiB") as handle:
        operation = handle.store_async(pool.empty(3 * MIB), path)
        while not operation._core.done():
            pass
        assert pool.empty(3 * MIB).nbytes == 3 * MIB
        assert handle.wait() == 1


def test_what_another_thread_waits_for_makes_room_as_it_finishes(path: Path) -> None:
    pool = forebay.Pool(budget="5MiB")
    path.write_bytes(bytes(2 * MIB))
    slow = forebay.Handle(
        pool=pool,
        staging_bytes="1MiB",
        throttle="1MiB",
        page_cache=False,
        block_size="64k",
        queue_depth=1,
        intra_op_parallelism=1,
    )
    with slow:
        endless = slow.load_async(bytearray(2 * MIB), path)
        quick = slow.store_async(pool.empty(3 * MIB)[:4096], path.with_suffix(".quick"))
        waiter = threading.Thread(target=slow.wait)
        waiter.start()
        assert pool.empty(3 * MIB, timeout=60).nbytes == 3 * MIB
        assert quick.done()
        assert not endless.done()
        endless.cancel()
        waiter.join()


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    pool = forebay.Pool(budget="8MiB")
    got = threading.Event()
    turns: list[int] = []

    def small(number: int) -> None:
        time.sleep(0.09 * number)
        while not got.is_set() and len(turns) < 200:
            array = pool.empty(2 * MIB, timeout=None)
            turns.append(number)
            # Longer than the time between two looks at signals.
            time.sleep(0.35)
            del array

    threads = [threading.Thread(target=small, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    while len(turns) < 5:
        time.sleep(0.01)
    asked_after = len(turns)
    array = pool.empty(7 * MIB, timeout=None)
    got_after = len(turns)
    del array
    got.set()
    for thread in threads:
        thread.join()
    # Each of the others may have had one more turn before it came to wait behind this.
    assert got_after - asked_after <= len(threads)


def test_an_interrupt_ends_the_wait_for_memory() -> None:
    done = run_python(
        """
        import os, signal, threading, forebay
        pool = forebay.Pool(budget="1MiB")
        held = pool.empty(1 << 20)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            pool.empty(4096, timeout=None)
        except KeyboardInterrupt:
            print("interrupted")
        del held
        assert pool.empty(1 << 20).nbytes == 1 << 20
        """
    )
    assert done.stdout == "interrupted\n"
    assert done.stderr == ""


def test_the_time_waited_for_memory_is_that_asked_for() -> None:
    pool = forebay.Pool(budget="1MiB")
    held = pool.empty(MIB)
    with pytest.raises(forebay.errors.WaitTimeoutError, match=r"after 250ms: 1048576 of"):
        pool.empty(MIB, timeout=0.25)
    assert held.nbytes == MIB


def test_a_pool_keeps_memory_only_if_asked_and_up_to_a_limit() -> None:
    pool = forebay.Pool(retain="12MiB")
    for size in (8, 4, 3):
        array = pool.empty(size * MIB)
        del array
        gc.collect()
    stats = pool.stats()
    assert (stats["used_bytes"], stats["kept_bytes"]) == (0, 7 * MIB)
    assert pool.trim() == 7 * MIB
    assert pool.stats()["mapped_bytes"] == 0
    plain = forebay.Pool()
    array = plain.empty(8 * MIB)
    del array
    gc.collect()
    assert plain.stats()["kept_bytes"] == plain.trim() == 0


def test_kept_memory_holds_its_bytes_and_moves_the_new_ones(path: Path) -> None:
    pool = forebay.Pool(retain=16 * MIB)
    with forebay.Handle(pool=pool, staging_bytes="1MiB") as handle:
        addresses = set()
        for seed in range(4):
            array = handle.empty((2, MIB), "float32")
            if seed:
                assert (array == seed).all()
            addresses.add(array.ctypes.data)
            array[:] = seed + 1
            handle.store(array, path)
            array[:] = 0
            handle.load(array, path)
            assert (array == seed + 1).all()
            assert np.array_equal(np.fromfile(path, "float32"), array.ravel())
            del array
            gc.collect()
    assert len(addresses) == 1


def test_kept_memory_makes_room_in_the_budget() -> None:
    pool = forebay.Pool("8MiB", "8MiB")
    kept = pool.empty(6 * MIB)
    del kept
    gc.collect()
    assert pool.stats()["kept_bytes"] == 6 * MIB
    assert pool.empty(8 * MIB).nbytes == 8 * MIB
    with pytest.raises(InvalidInputError):
        forebay.Pool(retain="much")


@pytest.mark.parametrize("touch", [True, False])
def test_long_arrays_are_touched_ahead_if_asked(touch: bool) -> None:
    done = run_python(
        f"""
        import time
        import forebay

        def resident():
            with open("/proc/self/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * 4096

        pool = forebay.Pool(touch={touch})
        before = resident()
        array = pool.empty(160 << 20)
        deadline = time.monotonic() + (60 if {touch} else 0.2)
        while resident() - before < array.nbytes and time.monotonic() < deadline:
            time.sleep(0.005)
        print(resident() - before >= array.nbytes)
        """
    )
    assert done.stdout.strip() == str(touch)


def test_more_than_the_machine_has_is_refused_at_once() -> None:
    with open("/proc/meminfo", encoding="ascii") as file:
        total = int(file.readline().split()[1]) << 10
    with pytest.raises(OutOfMemoryError, match=r"\d{9}"):
        forebay.empty(2 * total)
    with pytest.raises(OutOfMemoryError):
        forebay.Pool().empty((1 << 40, 1 << 10))


def test_a_handle_can_have_a_pool_of_its_own() -> None:
    pool = forebay.Pool(budget="4MiB")
    with forebay.Handle(pool=pool, staging_bytes="1MiB") as handle:
        array = handle.empty(MIB)
        assert pool.stats()["used_bytes"] >= array.nbytes
        with pytest.raises(OutOfMemoryError):
            handle.empty(5 * MIB)


def test_unlocked_pools_lock_nothing() -> None:
    pool = forebay.Pool(lock=False)
    array = pool.empty(4 * MIB)
    array[:] = 1
    assert pool.stats()["locked_bytes"] == 0


def test_a_lock_limit_is_a_flag_and_not_an_end(path: Path) -> None:
    need_root()
    limit = ["prlimit", "--memlock=65536:65536"]
    wrapper = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *limit]
    done = run_python(
        f"""
        import forebay
        handle = forebay.Handle()
        array = handle.empty(4 << 20)
        array[:] = 5
        handle.store(array, {str(path)!r})
        back = handle.empty(4 << 20)
        handle.load(back, {str(path)!r})
        assert (back == 5).all()
        handle.close()
        stats = forebay.Pool._over(forebay._forebay.Pool.shared()).stats()
        print(stats["locked_bytes"], stats["lock_refused"])
        """,
        *wrapper,
    )
    locked, reason = done.stdout.split(" ", 1)
    assert int(locked) <= 65536
    assert "memlock" in reason.lower()


def test_the_gil_is_free_while_waiting_for_memory() -> None:
    pool = forebay.Pool(budget="2MiB")
    held = pool.empty(2 * MIB)
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(WaitTimeoutError):
            pool.empty(2 * MIB, timeout=0.2)
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    turns = 0
    while not failed.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert held.nbytes == 2 * MIB
    assert turns > 10


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("4096", 4096), ("64k", 65536), ("1MiB", MIB), ("1M", MIB),
        ("1.5m", 3 * MIB // 2), ("2KB", 2000), ("1 GiB", 1 << 30),
        ("1g", 1 << 30), ("3B", 3), ("1TiB", 1 << 40),
    ],
)  # fmt: skip
def test_sizes_are_numbers_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "1 parsec", "-1", "1MiBs", "1e3", "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_size(text)


def test_memory_that_cannot_be_touched_is_an_error_and_no_crash(path: Path) -> None:
    run_python(
        f"""
        import os, warnings
        import numpy as np
        import forebay

        data = np.arange(100_000, dtype="u1")
        data.tofile({str(path)!r})
        read_only = np.memmap({str(path)!r}, "u1", "r")

        class Liar:
            __array_interface__ = dict(
                read_only.__array_interface__, data=(read_only.ctypes.data + 64, False),
                shape=(50_000,), strides=None,
            )

        with forebay.Handle(page_cache=False) as handle:
            try:
                handle.load(Liar(), {str(path)!r})
            except ValueError as error:
                assert "read-only" in str(error), error
            else:
                raise AssertionError("memory that is mapped read-only was loaded into")

            parents = handle.empty(10_000)
            child = os.fork()
            if child == 0:
                try:
                    handle.store(parents, {str(path)!r} + ".child")
                except ValueError as error:
                    os._exit(0 if "parent" in str(error) else 2)
                os._exit(3)
            assert os.waitpid(child, 0)[1] == 0
        assert np.fromfile({str(path)!r}, "u1").tobytes() == data.tobytes()
        """
    )
