"""Streams of tensors: lifetimes, budgets, ends."""

from __future__ import annotations

import gc
import queue
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import forebay
import forebay.numpy
import forebay.torch
from conftest import run_python
from forebay.errors import (
    ClosedError,
    MismatchError,
    OutOfMemoryError,
    WaitTimeoutError,
)
from reference import assert_identical, flip_bit, place_of, random_tensor

if TYPE_CHECKING:
    from pathlib import Path

OURS = forebay.torch
MIB = 1 << 20
COUNT = 24


def tensor(number: int) -> torch.Tensor:
    return random_tensor((MIB // 2, 2), torch.int16, number)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save 24 tensors of 2 MiB."""
    path = tmp_path_factory.mktemp("stream") / "x.safetensors"
    OURS.save_file({f"{number:02}": tensor(number) for number in range(COUNT)}, path)
    return path


def test_every_tensor_comes_once_and_in_the_order_of_the_file(file: Path) -> None:
    names = []
    with OURS.stream(file, budget="24MiB") as stream:
        for name, found in stream:
            assert_identical(found, tensor(int(name)))
            names.append(name)
            del found
    assert names == [f"{number:02}" for number in range(COUNT)]


def test_a_tensor_that_is_held_is_never_overwritten(file: Path) -> None:
    held: dict[str, torch.Tensor] = {}
    with OURS.stream(file, budget="40MiB") as stream:
        for name, found in stream:
            # Every fifth is kept, some as a view alone.
            if int(name) % 5 == 0:
                held[name] = found[10:20] if int(name) % 2 else found
            del found
    gc.collect()
    for name, found in held.items():
        wanted = tensor(int(name))
        assert_identical(found, wanted[10:20] if int(name) % 2 else wanted)


def test_tensors_outlive_the_stream_and_its_handle(file: Path) -> None:
    handle = forebay.Handle()
    stream = OURS.stream(file, handle=handle)
    _, first = next(stream)
    _, second = next(stream)
    stream.close()
    handle.close()
    del stream, handle
    gc.collect()
    assert_identical(first, tensor(0))
    assert_identical(second, tensor(1))


def hold(stream: Any, held: list[Any]) -> None:
    """Take everything, and let go of nothing."""
    for item in stream:
        held.append(item)  # noqa: PERF402 (what came before an error stays)


def test_a_consumer_that_holds_everything_gets_an_error_and_can_go_on(file: Path) -> None:
    held = []
    with OURS.stream(file, budget="24MiB", timeout=0.1) as stream:
        with pytest.raises(WaitTimeoutError, match="budget") as caught:
            hold(stream, held)
        assert isinstance(caught.value, TimeoutError)
        pattern = r"needs (\d+) bytes, and (\d+) of the budget of (\d+) .* (\d+) are for transfers"
        numbers = re.search(pattern, str(caught.value))
        assert numbers is not None
        needed, in_use, budget, for_transfers = map(int, numbers.groups())
        assert budget == 24 << 20
        assert needed + in_use + for_transfers > budget
        assert held
        for name, found in held:
            assert_identical(found, tensor(int(name)))
        before = len(held)
        last = int(held[-1][0])
        held.clear()
        del found
        rest = []
        for name, found in stream:
            assert_identical(found, tensor(int(name)))
            rest.append(int(name))
            del found
    assert rest == list(range(last + 1, COUNT))
    assert before <= 12


def test_a_cast_stream_whose_tensors_are_held_gets_an_error_and_loses_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.safetensors"
    values = {f"{number:02}": torch.full((MIB // 2,), float(number)) for number in range(16)}
    OURS.save_file(values, path)
    seen = []
    held = []
    with OURS.stream(path, budget="32MiB", dtype=torch.float64, timeout=0.05) as stream:
        while len(seen) < len(values):
            try:
                name, found = next(stream)
            except WaitTimeoutError:
                assert held
                held.clear()
                continue
            assert torch.equal(found, values[name].double())
            seen.append(name)
            held.append(found)
            del found
    assert seen == sorted(values)


class Interrupted(BaseException):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("finishes", [False, True], ids=["waits on", "finishes meanwhile"])
def test_an_interrupted_stream_goes_on_with_the_tensor_that_it_was_about_to_give(
    tmp_path: Path, finishes: bool, dtype: torch.dtype | None
) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({f"{n:02}": torch.full((MIB // 2,), float(n)) for n in range(16)}, path)
    held: list[torch.Tensor] = []

    def interrupt(*_: object) -> None:
        held.clear()
        if finishes:
            # There is room now, so that the call gets its tensor before it hears of this.
            time.sleep(0.3)
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    seen = []
    interrupts = 0
    try:
        with OURS.stream(path, budget="32MiB", dtype=dtype, timeout=None) as stream:
            while True:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                try:
                    item = next(stream, None)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    interrupts += 1
                    continue
                if item is None:
                    break
                seen.append(item[0])
                held.append(item[1])
                del item
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts
    assert seen == [f"{number:02}" for number in range(16)]


@pytest.mark.slow
def test_a_stream_takes_no_more_memory_than_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({f"{i:02}": torch.ones(8 * MIB, dtype=torch.bfloat16) for i in range(32)}, path)
    for options in ("", ", dtype=torch.float32"):
        done = run_python(
            f"""
            import torch, forebay.torch
            def high_water():
                status = open("/proc/self/status").read()
                return int(status.split("VmHWM:")[1].split()[0]) << 10
            for budget in ("1GiB", "96MiB"):
                if budget == "96MiB":
                    before = high_water()
                for name, tensor in forebay.torch.stream(
                    {str(path)!r}, budget="96MiB", keys="00" if budget == "1GiB" else None{options}
                ):
                    assert bool((tensor == 1).all())
                    del tensor
            print(high_water() - before)
            """
        )
        # The file has 512 MiB; comparing takes a tensor of booleans.
        assert int(done.stdout) < (96 + 64) * MIB


def test_threads_share_a_stream(file: Path) -> None:
    seen: queue.Queue[Any] = queue.Queue()

    def consume(stream: Any) -> None:
        try:
            for name, found in stream:
                assert_identical(found, tensor(int(name)))
                seen.put(name)
                del found
        except BaseException as error:
            seen.put(error)

    with OURS.stream(file, budget="40MiB") as stream:
        threads = [threading.Thread(target=consume, args=(stream,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(str, seen.queue)) == [f"{number:02}" for number in range(COUNT)]


def test_another_thread_lets_go_and_the_stream_goes_on(file: Path) -> None:
    work: queue.Queue[Any] = queue.Queue()
    right = []

    def consume() -> None:
        while (item := work.get()) is not None:
            name, found = item
            right.append(torch.equal(found, tensor(int(name))))
            del item, found

    thread = threading.Thread(target=consume)
    thread.start()
    with OURS.stream(file, budget="24MiB") as stream:
        for item in stream:
            work.put(item)
            del item
    work.put(None)
    thread.join()
    assert right == [True] * COUNT


def test_a_stream_can_be_closed_midway(file: Path) -> None:
    for taken in (0, 1, 5):
        stream = OURS.stream(file, budget="40MiB")
        held = [next(stream) for _ in range(taken)]
        stream.close()
        stream.close()
        with pytest.raises(ClosedError):
            next(stream)
        for name, found in held:
            assert_identical(found, tensor(int(name)))


def test_a_stream_that_is_dropped_midway_leaves_no_memory(file: Path) -> None:
    pool = forebay.Pool()
    with forebay.Handle(pool=pool) as handle:
        for _ in range(10):
            next(OURS.stream(file, budget="40MiB", handle=handle))
        gc.collect()
        assert pool.stats()["used_bytes"] == 0


def test_a_tensor_larger_than_the_budget_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"huge": torch.ones(10 * MIB)}, path)
    with pytest.raises(OutOfMemoryError, match="huge") as caught:
        OURS.stream(path, budget="20MiB")
    assert str(40 * MIB) in str(caught.value)
    assert str(20 * MIB) in str(caught.value)
    with pytest.raises(OutOfMemoryError, match=str(80 * MIB)):
        OURS.stream(path, budget="60MiB", dtype="float64")


def test_a_flipped_bit_ends_a_stream_at_its_tensor(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(file.read_bytes())
    flip_bit(path, place_of(path, "17"))
    held: list[Any] = []
    with OURS.stream(path) as stream, pytest.raises(MismatchError, match="17"):
        hold(stream, held)
    assert len(held) <= 17
    for name, found in held:
        assert_identical(found, tensor(int(name)))
    assert len(dict(OURS.stream(path, verify=False))) == COUNT


def test_streams_in_numpy_and_of_several_files(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "y.safetensors"
    forebay.numpy.save_file({"y": np.arange(7)}, other)
    found = dict(forebay.numpy.stream([other, file], keys=["y", "0?"]))
    assert list(found) == ["y", *(f"0{number}" for number in range(10))]
    assert_identical(found["07"], tensor(7).numpy())


def test_an_empty_file_is_an_empty_stream(tmp_path: Path) -> None:
    OURS.save_file({}, tmp_path / "x.safetensors")
    assert list(OURS.stream(tmp_path / "x.safetensors")) == []
    assert OURS.load_file(tmp_path / "x.safetensors") == {}
    OURS.save_file({"e": torch.empty(0, 4)}, tmp_path / "x.safetensors")
    assert [found.shape for _, found in OURS.stream(tmp_path / "x.safetensors")] == [(0, 4)]


@pytest.mark.parametrize("call", ["next(stream)", "stream.close()", "forget()"])
def test_a_forked_child_is_told_that_a_stream_in_use_is_the_parents(file: Path, call: str) -> None:
    done = run_python(
        f"""
        import gc, os, signal, threading, warnings, forebay, forebay.numpy
        warnings.simplefilter("ignore", DeprecationWarning)
        handle = forebay.Handle(
            throttle="1MiB", page_cache=False, block_size="64k", queue_depth=1,
            intra_op_parallelism=1,
        )
        stream = forebay.numpy.stream({str(file)!r}, handle=handle, budget="24MiB")
        def forget():
            global stream
            del stream
            gc.collect()
        calls = threading.Semaphore(0)
        def work():
            calls.release()
            next(stream)
        threading.Thread(target=work, daemon=True).start()
        calls.acquire()
        while handle.stats()["bytes_read"] == 0:
            pass
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                {call}
            except forebay.errors.ClosedError as error:
                os._exit(7 if "forked" in str(error) else 8)
            except BaseException:
                os._exit(9)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
        os._exit(0)
        """
    )
    assert done.stdout == ("7\n" if call == "next(stream)" else "0\n")
