"""Saving: in the background, in order, with others, on full disks, by processes that die."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import filecmp
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from conftest import ROOT, descriptor_count, run_python
from forebay.checkpoint import Checkpointer
from forebay.errors import (
    ClosedError,
    FileMissingError,
    ForebayWarning,
    InvalidInputError,
    SystemCallError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGET = "64MiB"


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_tensors_may_change_as_soon_as_an_asynchronous_save_returns(tmp_path: Path) -> None:
    flat = torch.arange(4 << 20, dtype=torch.float32)
    state = {
        "weights": torch.randn(1 << 20),
        "step": torch.tensor(7),
        "views": [flat[:100], flat[100:200], flat],
        "array": np.arange(100_000.0),
        "list": [1, 2],
        "bytes": bytearray(b"abc"),
    }
    wanted = {key: state[key].clone() for key in ("weights", "step")}
    with Checkpointer(tmp_path, budget=BUDGET) as checkpointer:
        operation = checkpointer.save_async(1, state)
        state["weights"].zero_()
        state["step"] += 1
        flat.fill_(-1)
        state["array"][:] = 0
        state["list"].append(3)
        state["bytes"][0] = 0
        back = checkpointer.load()
        assert operation.done()
        # What isn't captured yet can't be saved yet.
        assert 0 < operation.blocked_seconds <= operation.total_seconds
    assert torch.equal(back["weights"], wanted["weights"])
    assert back["step"] == 7
    assert torch.equal(back["views"][1], torch.arange(100, 200, dtype=torch.float32))
    assert torch.equal(back["views"][2], torch.arange(4 << 20, dtype=torch.float32))
    assert (back["array"] == np.arange(100_000.0)).all()
    assert back["list"] == [1, 2]
    assert back["bytes"] == b"abc"


def test_a_state_larger_than_the_budget_is_saved_within_it(tmp_path: Path) -> None:
    state = [np.random.default_rng(seed).integers(0, 99, 3 << 20) for seed in range(4)]
    with Checkpointer(tmp_path, budget="16MiB", shard_size="40MiB") as checkpointer:
        operation = checkpointer.save_async(1, state)
        wanted = [array.copy() for array in state]
        for array in state:
            array[:] = 0
        operation.wait()
        back = checkpointer.load()
    assert all((one == other).all() for one, other in zip(wanted, back, strict=True))


def test_synchronous_and_asynchronous_saves_leave_the_same_files(tmp_path: Path) -> None:
    state = {"b": torch.randn(3 << 20), "a": np.arange(10), "rest": [1, "x", None]}
    with Checkpointer(tmp_path / "one", budget=BUDGET) as one:
        one.save(3, state)
    with Checkpointer(tmp_path / "other", budget="16MiB", in_flight=2) as other:
        other.save_async(3, state)
    assert contents(tmp_path / "one" / "step-00000003") == contents(
        tmp_path / "other" / "step-00000003"
    )
    found = filecmp.dircmp(tmp_path / "one", tmp_path / "other")
    assert found.left_list == found.right_list == ["latest", "step-00000003"]
    assert (tmp_path / "one" / "latest").read_text() == "step-00000003\n"


def test_a_load_right_after_an_asynchronous_save_finds_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, budget=BUDGET, in_flight=3) as checkpointer:
        for step in range(5):
            checkpointer.save_async(step, {"x": np.full(1 << 20, step)})
            back = checkpointer.load()
            assert back["x"][0] == step
        checkpointer.save_async(9, {"x": np.full(1 << 20, 9)})
        assert checkpointer.load(9)["x"][-1] == 9


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, budget=BUDGET) as checkpointer:
        checkpointer.save(5, {"x": np.zeros(3 << 20), "more": np.ones(5)})
        checkpointer.save(5, {"x": np.arange(7)})
        assert checkpointer.load(5)["x"].tolist() == list(range(7))
        checkpointer.verify(5)
        assert checkpointer.steps() == [5]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000005"]


def test_steps_are_sorted_by_number_and_the_lowest_go_first(tmp_path: Path) -> None:
    last = 2**63 - 1
    with Checkpointer(tmp_path, keep=None, budget=BUDGET) as checkpointer:
        for step in (100_000_000, 99_999_999, last, 0, 7):
            checkpointer.save(step, {"step": step})
        assert checkpointer.steps() == [0, 7, 99_999_999, 100_000_000, last]
        assert checkpointer.latest() == 7
        assert checkpointer.load(last)["step"] == last
    assert (tmp_path / "step-9223372036854775807").is_dir()
    with Checkpointer(tmp_path, keep=3, budget=BUDGET) as checkpointer:
        checkpointer.save(1, {"step": 1})
        # The one just saved stays, whatever its number.
        assert checkpointer.steps() == [1, 100_000_000, last]
        assert checkpointer.load()["step"] == 1


@pytest.mark.parametrize("step", [-1, 2**63, 2**70])
def test_steps_out_of_range_are_refused(tmp_path: Path, step: int) -> None:
    with Checkpointer(tmp_path, budget=BUDGET) as checkpointer:
        for call in (checkpointer.save, checkpointer.save_async):
            with pytest.raises(InvalidInputError, match="step"):
                call(step, {})
        with pytest.raises(InvalidInputError, match="step"):
            checkpointer.load(step)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 0}, "keep"),
        ({"in_flight": 0}, "in_flight"),
        ({"on_busy": "hope"}, "on_busy"),
        ({"durability": "some"}, "durability"),
        ({"budget": "1MiB"}, "budget"),
        ({"shard_size": 0}, "shard_size"),
    ],
)
def test_options_out_of_range_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Checkpointer(tmp_path, **options)


def test_awaiting_a_save_leaves_the_loop_free(tmp_path: Path) -> None:
    async def run() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with Checkpointer(tmp_path, budget=BUDGET) as checkpointer:
            for step in range(20):
                await checkpointer.save_async(step, {"x": np.zeros(1 << 20)})
                assert checkpointer.latest() == step
        ticking.cancel()
        return ticks

    assert asyncio.run(run()) > 0


def test_memory_and_descriptors_are_flat_over_fifty_saves(tmp_path: Path) -> None:
    def resident() -> int:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    state = {"x": np.random.default_rng(0).random(2 << 20), "y": torch.randn(1 << 20)}
    with Checkpointer(tmp_path, budget="32MiB", in_flight=2) as checkpointer:
        for step in range(3):
            checkpointer.save_async(step, state)
        checkpointer.wait()
        descriptors, memory = descriptor_count(), resident()
        for step in range(3, 53):
            checkpointer.save_async(step, state)
        checkpointer.wait()
        assert descriptor_count() <= descriptors
        assert resident() - memory < 16 << 20
        assert len(checkpointer.steps()) == 3
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_an_error_with_its_path_and_keeps_what_was_there(
    mount: Callable[..., Path],
) -> None:
    directory = mount("-t", "tmpfs", "-o", "size=24m", "none") / "checkpoints"
    with Checkpointer(directory, budget=BUDGET) as checkpointer:
        checkpointer.save(1, {"x": np.full(1 << 20, 1.0)})
        for call in (checkpointer.save, lambda *args: checkpointer.save_async(*args).wait()):
            with pytest.raises(SystemCallError, match="step 2 wasn't saved") as caught:
                call(2, {"x": np.zeros(4 << 20)})
            assert caught.value.errno == errno.ENOSPC
            assert str(directory) in caught.value.filename
            assert caught.value.wanted >= 32 << 20
            assert "free some space" in str(caught.value)
            assert leftovers(directory) == []
            assert checkpointer.steps() == [1]
        assert checkpointer.load()["x"].sum() == 1 << 20
        checkpointer.save(2, {"x": np.zeros(1 << 20)})
        checkpointer.verify()


def test_a_full_drive_in_the_middle_is_survived(small_ext4: Path) -> None:
    with Checkpointer(small_ext4 / "c", budget=BUDGET, keep=None, shard_size="1MiB") as saver:
        state = {str(part): np.full(1 << 17, float(part)) for part in range(2)}
        step = 0

        def fill() -> None:
            nonlocal step
            while True:
                saver.save(step, state)
                step += 1

        with pytest.raises(SystemCallError) as caught:
            fill()
        assert caught.value.errno == errno.ENOSPC
        assert step >= 2
        assert saver.steps() == list(range(step))
        assert leftovers(saver.directory) == []
        for there in range(step):
            saver.verify(there)


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemCallError) as caught:
            Checkpointer(directory, budget=BUDGET)
        assert str(tmp_path / "file") in caught.value.filename


def test_a_file_system_that_is_read_only_can_be_loaded_from(small_ext4: Path) -> None:
    with Checkpointer(small_ext4, budget=BUDGET) as checkpointer:
        checkpointer.save(1, {"x": np.arange(5)})
    subprocess.run(["mount", "-o", "remount,ro", str(small_ext4)], check=True)
    with Checkpointer(small_ext4, budget=BUDGET) as checkpointer:
        assert checkpointer.load()["x"].tolist() == [0, 1, 2, 3, 4]
        checkpointer.verify()
        with pytest.raises(SystemCallError) as caught:
            checkpointer.save(2, {})
        assert caught.value.errno == errno.EROFS
        assert caught.value.filename == str(small_ext4)


def test_a_directory_behind_a_symlink_is_that_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    with Checkpointer("link", budget=BUDGET) as checkpointer:
        monkeypatch.chdir("/")
        checkpointer.save(1, {"x": 1})
        checkpointer.save(1, {"x": 2})
        assert checkpointer.load()["x"] == 2
    assert sorted(os.listdir(tmp_path / "real")) == ["latest", "step-00000001"]
    assert (tmp_path / "link").is_symlink()


def test_a_closed_checkpointer_says_so(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, budget=BUDGET)
    operation = checkpointer.save_async(1, {"x": np.zeros(1 << 20)})
    checkpointer.close()
    checkpointer.close()
    assert operation.done()
    calls: list[Callable[[], Any]] = [
        lambda: checkpointer.save(2, {}),
        lambda: checkpointer.save_async(2, {}),
        checkpointer.load,
        checkpointer.latest,
        checkpointer.steps,
        checkpointer.verify,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


@pytest.fixture
def doomed(tmp_path: Path) -> Checkpointer:
    """Return a checkpointer that can write and can't publish: a file has the step's name."""
    checkpointer = Checkpointer(tmp_path, budget=BUDGET)
    (tmp_path / "step-00000007").write_text("in the way")
    return checkpointer


def test_a_failure_is_raised_by_waiting_and_then_not_again(doomed: Checkpointer) -> None:
    operation = doomed.save_async(7, {"x": 1})
    for _ in range(2):
        with pytest.raises(SystemCallError, match="step 7 wasn't saved"):
            operation.wait()
    doomed.save(8, {"x": 1})
    doomed.close()


def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_save(doomed: Checkpointer) -> None:
    doomed.save_async(7, {"x": 1})
    with pytest.raises(SystemCallError, match="step 7 wasn't saved"):
        doomed.save_async(8, {"x": 1})
    assert doomed.latest() is None
    doomed.save(8, {"x": 1})
    assert doomed.latest() == 8
    doomed.close()


def test_a_failure_that_nobody_waited_for_is_raised_at_the_end(doomed: Checkpointer) -> None:
    doomed.save_async(7, {"x": 1})
    with pytest.raises(SystemCallError, match="step 7 wasn't saved"):
        doomed.close()


def test_a_failure_beside_another_exception_is_warned_of(doomed: Checkpointer) -> None:
    def run() -> None:
        with doomed:
            doomed.save_async(7, {"x": 1})
            raise KeyError

    with pytest.warns(ForebayWarning, match="step 7 wasn't saved"), pytest.raises(KeyError):
        run()


def test_a_save_under_way_at_exit_is_finished(tmp_path: Path) -> None:
    run_python(f"""
        import numpy
        from forebay.checkpoint import Checkpointer
        checkpointer = Checkpointer({str(tmp_path)!r}, budget="64MiB")
        checkpointer.save_async(1, {{"x": numpy.arange(5 << 20)}})
    """)
    with Checkpointer(tmp_path, budget=BUDGET) as checkpointer:
        assert checkpointer.load()["x"][-1] == (5 << 20) - 1


def test_a_failure_at_exit_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "step-00000007").write_text("in the way")
    done = run_python(f"""
        from forebay.checkpoint import Checkpointer
        checkpointer = Checkpointer({str(tmp_path)!r}, budget="64MiB")
        checkpointer.save_async(7, {{}})
    """)
    assert "step 7 wasn't saved" in done.stderr


def test_a_forked_child_loads_and_is_told_that_it_cannot_save(tmp_path: Path) -> None:
    done = run_python(f"""
        import os, numpy
        from forebay.checkpoint import Checkpointer
        from forebay.errors import ClosedError
        checkpointer = Checkpointer({str(tmp_path)!r}, budget="64MiB")
        checkpointer.save(1, {{"x": numpy.arange(1 << 20)}})
        operation = checkpointer.save_async(2, {{"x": numpy.arange(4 << 20)}})
        loaded = checkpointer.load(1)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert loaded["x"][-1] == (1 << 20) - 1
                assert checkpointer.load(1)["x"][-1] == (1 << 20) - 1
                try:
                    checkpointer.save(3, {{}})
                except ClosedError as error:
                    assert "forked" in str(error)
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        operation.wait()
        assert checkpointer.steps() == [1, 2]
        print("fine")
    """)
    assert done.stdout == "fine\n"


@pytest.mark.parametrize(
    ("policy", "expected"), [("wait", [0, 1, 2, 3, 4]), ("skip", [0]), ("error", [0])]
)
def test_five_saves_in_quick_succession_follow_the_policy(
    tmp_path: Path, policy: Any, expected: list[int]
) -> None:
    state = {"x": np.random.default_rng(0).random(8 << 20)}
    with Checkpointer(tmp_path, None, budget="256MiB", on_busy=policy) as checkpointer:
        operations, refusals = [], []
        for step in range(5):
            state["x"][0] = step
            try:
                operations.append(checkpointer.save_async(step, state))
            except SystemCallError as error:
                refusals.append((step, error))
        assert policy == "error" or not refusals
        for step, error in refusals:
            assert error.errno == errno.EBUSY
            assert f"step {step} isn't saved while" in str(error)
        for operation in operations:
            operation.wait()
        done = [operation.step for operation in operations if not operation.skipped]
        # A save may be through before the next begins.
        assert done[: len(expected)] == expected
        assert checkpointer.steps() == done
        for step in done:
            assert checkpointer.load(step)["x"][0] == step


def test_eight_processes_save_into_one_new_directory_at_once(tmp_path: Path) -> None:
    code = """
        import sys, numpy, time
        from forebay.checkpoint import Checkpointer
        rank, start = int(sys.argv[1]), float(sys.argv[2])
        while time.time() < start:
            pass
        with Checkpointer(sys.argv[3], keep=None, budget="16MiB", durability="none") as saver:
            for step in range(3):
                saver.save(step * 8 + rank, {"rank": numpy.full(100_000, rank)})
                saver.save(1000 + step, {"shared": numpy.full(100_000, rank)})
    """
    code = "\n".join(line[8:] for line in code.splitlines())
    directory = tmp_path / "deeper" / "checkpoints"
    start = str(time.time() + 4)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), start, str(directory)], stderr=subprocess.PIPE
        )
        for rank in range(8)
    ]
    for process in processes:
        _, text = process.communicate(timeout=100)
        assert process.returncode == 0, text.decode()
    assert leftovers(directory) == []
    with Checkpointer(directory, budget=BUDGET) as checkpointer:
        assert checkpointer.steps() == [*range(24), 1000, 1001, 1002]
        for step in range(24):
            assert (checkpointer.load(step)["rank"] == step % 8).all()
        for step in (1000, 1001, 1002):
            shared = checkpointer.load(step)["shared"]
            assert (shared == shared[0]).all()
        assert checkpointer.latest() in checkpointer.steps()


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_a_save_that_waits_is_never_skipped_or_refused(tmp_path: Path, policy: Any) -> None:
    with Checkpointer(
        tmp_path, None, "none", budget=BUDGET, on_busy=policy, in_flight=1
    ) as checkpointer:
        together = threading.Barrier(4)
        errors = []

        def save(rank: int) -> None:
            try:
                for step in range(10):
                    together.wait(60)
                    checkpointer.save(rank * 10 + step, {"x": np.full(200_000, rank)})
            except Exception as error:
                errors.append(error)
                together.abort()

        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert checkpointer.steps() == list(range(40))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("again", [True, False], ids=["replaced", "removed"])
def test_a_load_meets_no_checkpoint_that_goes_meanwhile(
    tmp_path: Path, verify: bool, again: bool
) -> None:
    def state(number: int) -> Any:
        return [number, *(np.full(8192, number) for _ in range(8))]

    options: Any = {"keep": 1, "durability": "none", "budget": BUDGET, "shard_size": "64KiB"}
    with (
        Checkpointer(tmp_path, **options) as saver,
        Checkpointer(tmp_path, verify=verify, **options) as reader,
    ):
        saver.save(0, state(0))
        real = reader._core
        number = 0

        class Core:
            """Saves the next checkpoint as soon as one is open, a few times."""

            def open(self, step: int | None, verify: bool) -> Any:
                nonlocal number
                opened = real.open(step, verify)
                if number < 3:
                    number += 1
                    saver.save(0 if again else number, state(number))
                return opened

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        reader._core = Core()  # type: ignore[assignment]
        first, *others = reader.load()
        assert first == 3
        assert all((other == 3).all() for other in others)
        number = 0
        reader.verify()
        number = 0
        if not again:
            with pytest.raises(FileMissingError, match="there is no checkpoint of step 3"):
                reader.load(3)
        reader._core = real


def test_threads_of_one_process_save_with_one_checkpointer(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, None, budget=BUDGET, in_flight=3) as checkpointer:

        def save(rank: int) -> None:
            for step in range(5):
                checkpointer.save(rank * 100 + step, {"x": np.full(50_000, rank)})

        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(checkpointer.steps()) == 20
        for step in checkpointer.steps():
            assert (checkpointer.load(step)["x"] == step // 100).all()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    saver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, numpy\n"
            "from forebay.checkpoint import Checkpointer\n"
            "saver = Checkpointer(sys.argv[1], budget='16MiB')\n"
            "state = {'x': numpy.zeros(32 << 20)}\n"
            "for step in range(1000):\n"
            "    print(step, flush=True)\n"
            "    saver.save(step, state)\n",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert saver.stdout is not None
    saver.stdout.readline()
    while not leftovers(tmp_path):
        time.sleep(0.001)
    os.kill(saver.pid, signal.SIGSTOP)
    try:
        while not (left := leftovers(tmp_path)):
            os.kill(saver.pid, signal.SIGCONT)
            time.sleep(0.01)
            os.kill(saver.pid, signal.SIGSTOP)
        Checkpointer(tmp_path, budget=BUDGET).close()
        assert leftovers(tmp_path) == left
    finally:
        saver.kill()
        saver.wait()
        saver.stdout.close()
    Checkpointer(tmp_path, budget=BUDGET).close()
    assert leftovers(tmp_path) == []


def test_an_interrupt_during_a_long_capture_ends_it(tmp_path: Path) -> None:
    done = run_python(f"""
        import os, signal, threading, numpy
        from forebay.checkpoint import Checkpointer
        saver = Checkpointer({str(tmp_path)!r}, budget="16MiB")
        state = {{"x": numpy.zeros(128 << 20)}}
        saver.save(1, {{"x": 1}})
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            saver.save(2, state)
        except KeyboardInterrupt:
            print("interrupted", saver.steps())
        saver.save(3, {{"x": 3}})
        saver.close()
    """)
    assert done.stdout == "interrupted [1]\n"
    assert leftovers(tmp_path) == []


def test_waiting_gives_up_after_its_time(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, budget="256MiB") as checkpointer:
        operation = checkpointer.save_async(1, {"x": np.zeros(16 << 20)})
        if not operation.done():
            with contextlib.suppress(WaitTimeoutError):
                operation.wait(0)
        operation.wait(100)
        operation.wait(0)


def test_a_checkpoint_says_what_is_in_it_without_forebay(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, budget=BUDGET) as checkpointer:
        checkpointer.save(42, {"w": np.arange(6.0).reshape(2, 3), "lr": 0.1})
    manifest = json.loads((tmp_path / "step-00000042" / "manifest.json").read_bytes())
    assert manifest["step"] == 42
    (tensor,) = manifest["tensors"]
    assert (tensor["name"], tensor["dtype"], tensor["shape"]) == ("w", "F64", [2, 3])
    shard = tmp_path / "step-00000042" / manifest["shards"][tensor["shard"]]["file"]
    raw = shard.read_bytes()[tensor["start"] : tensor["end"]]
    assert np.frombuffer(raw, "<f8").tolist() == [0, 1, 2, 3, 4, 5]
    state = json.loads((tmp_path / "step-00000042" / "state.json").read_bytes())
    assert state == {"w": {"$tensor": "w", "of": "numpy"}, "lr": 0.1}
    # The documentation shows this one.
    text = (tmp_path / "step-00000042" / "manifest.json").read_text(encoding="utf-8")
    assert f"```json\n{text}```" in (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


@pytest.fixture
def seed() -> int:
    """Return a seed, which a failing test prints."""
    seed = random.SystemRandom().randrange(1 << 32)
    sys.stdout.write(f"seed: {seed}\n")
    return seed


def test_a_saver_that_is_killed_leaves_what_it_saved(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    code = (
        "import sys, torch\n"
        "from forebay.checkpoint import Checkpointer\n"
        "saver = Checkpointer(sys.argv[1], keep=2, budget='64MiB', shard_size='3MiB')\n"
        "step = saver.latest() or 0\n"
        "while True:\n"
        "    step += 1\n"
        "    state = {'step': step, 'w': [torch.full((1 << 20,), step) for _ in range(2)]}\n"
        "    print('began', step, flush=True)\n"
        "    saver.save_async(step, state).wait()\n"
        "    print('returned', step, flush=True)\n"
    )
    newest = 0
    for _ in range(8):
        saver = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout is not None
        lines = [saver.stdout.readline()]
        time.sleep(chance.random() * 0.4)
        saver.kill()
        lines += saver.stdout.read().splitlines()
        saver.stdout.close()
        saver.wait()
        words = [line.split() for line in lines if line]
        began = max(int(step) for word, step in words if word == "began")
        newest = max([newest, *(int(step) for word, step in words if word == "returned")])
        with Checkpointer(tmp_path, budget=BUDGET) as checkpointer:
            assert leftovers(tmp_path) == []
            if newest == 0 and checkpointer.latest() is None:
                continue
            state = checkpointer.load()
        assert state["step"] in {newest, began}
        assert all((part == state["step"]).all() for part in state["w"])
        newest = state["step"]
