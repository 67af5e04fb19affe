"""Loading of what files have: models in shards, some keys, other types, memory, interrupts."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import safetensors.torch
import torch

import forebay
import forebay.torch
from conftest import run_python
from forebay.errors import InvalidInputError, OutOfMemoryError, TensorFileError
from forebay.torch.frame import FRAME
from reference import (
    answer,
    assert_holds,
    data_start,
    experts,
    random_tensor,
    save_shards,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

THEIRS = safetensors.torch
OURS = forebay.torch
MIB = 1 << 20


# Sources


def test_a_sharded_model_is_loaded_by_directory_index_or_files(tmp_path: Path) -> None:
    tensors = experts()
    index = save_shards(tmp_path, tensors)
    files = sorted(tmp_path.glob("*.safetensors"))
    for source in (tmp_path, str(tmp_path), index, files, [str(file) for file in files]):
        assert_holds(OURS.load_file(source), tensors)
        assert_holds(dict(OURS.stream(source)), tensors)
        assert OURS.plan_load(source).tensors == len(tensors)
    assert sorted(OURS.plan_load(tmp_path).files) == [str(file) for file in files]


def test_a_directory_of_one_file_is_loaded(tmp_path: Path) -> None:
    OURS.save_file(experts(), tmp_path / "model.safetensors")
    assert_holds(OURS.load_file(tmp_path), experts())


def test_files_without_an_index_are_loaded_together(tmp_path: Path) -> None:
    tensors = experts()
    save_shards(tmp_path, tensors).unlink()
    assert_holds(OURS.load_file(tmp_path), tensors)


def test_an_index_that_doesnt_fit_its_files_is_refused(tmp_path: Path) -> None:
    index = save_shards(tmp_path, experts())
    right = json.loads(index.read_text())
    first = tmp_path / "model-00001-of-00003.safetensors"

    def refused(change: Callable[[dict[str, Any]], Any]) -> str:
        wrong = json.loads(json.dumps(right))
        change(wrong["weight_map"])
        index.write_text(json.dumps(wrong))
        well, error = answer(lambda: OURS.load_file(tmp_path))
        assert not well
        assert isinstance(error, forebay.ForebayError), repr(error)
        return str(error)

    assert "gone.safetensors" in refused(
        lambda map_: map_.update({"norm.count": "gone.safetensors"})
    )
    assert "never" in refused(lambda map_: map_.update({"never": first.name}))
    secret = tmp_path.parent / "elsewhere.safetensors"
    OURS.save_file({"norm.count": torch.tensor(3)}, secret)
    for path in (f"../{secret.name}", str(secret)):
        refused(lambda map_, path=path: map_.update({"norm.count": path}))
    index.write_text("{")
    assert not answer(lambda: OURS.load_file(tmp_path))[0]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path, experts())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(OSError, match="model-00002-of-00003"):
        OURS.load_file(tmp_path)


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    OURS.save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    OURS.save_file({"x": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(forebay.ForebayError, match="x"):
        OURS.load_file([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


# Keys


def test_one_ranks_experts_are_loaded_and_the_rest_isnt_read(tmp_path: Path) -> None:
    tensors = {f"e.{rank}.w": random_tensor((MIB,), torch.float32, rank) for rank in range(8)}
    path = tmp_path / "x.safetensors"
    OURS.save_file(tensors, path)
    wanted = {name: tensors[name] for name in ("e.2.w", "e.6.w")}
    for keys in (["e.2.*", "e.6.*"], "e.[26].w", lambda name: name[2] in "26", list(wanted)):
        with forebay.Handle() as handle:
            assert_holds(OURS.load_file(path, keys=keys, handle=handle), wanted)
            read = handle.stats()["bytes_read"]
            assert 8 * MIB <= read < 12 * MIB
        assert OURS.plan_load(path, keys=keys).read_bytes < 12 * MIB
        assert_holds(dict(OURS.stream(path, keys=keys)), wanted)


def test_a_name_with_a_patterns_characters_is_itself(tmp_path: Path) -> None:
    tensors = {"a[0]": torch.ones(1), "a0": torch.zeros(1), "*": torch.ones(2)}
    OURS.save_file(tensors, tmp_path / "x.safetensors")
    assert OURS.load_file(tmp_path / "x.safetensors", keys="a[0]").keys() == {"a[0]"}
    assert OURS.load_file(tmp_path / "x.safetensors", keys="*").keys() == {"*"}
    assert OURS.load_file(tmp_path / "x.safetensors", keys="?0").keys() == {"a0"}


@pytest.mark.parametrize("keys", ["expert.*", ["norm.*", "typo"], lambda _: False, []])
def test_keys_that_pick_nothing_are_refused(tmp_path: Path, keys: Any) -> None:
    OURS.save_file(experts(), tmp_path / "x.safetensors")
    for ask in (OURS.load_file, OURS.stream, OURS.plan_load):
        with pytest.raises(InvalidInputError, match=r"norm\.count"):
            ask(tmp_path / "x.safetensors", keys=keys)


# Types


def test_floats_are_cast_as_torch_casts_and_the_rest_stays(tmp_path: Path) -> None:
    tensors = {
        "double": torch.linspace(-70000, 70000, 999, dtype=torch.float64),
        "single": random_tensor((33, 7), torch.float32),
        "brain": random_tensor((50,), torch.bfloat16),
        "half": random_tensor((), torch.float16),
        "eight": random_tensor((16,), torch.float8_e4m3fn),
        "whole": torch.arange(9),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 3),
        "complex": random_tensor((4,), torch.complex64),
    }
    path = tmp_path / "x.safetensors"
    OURS.save_file(tensors, path)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        wanted = {
            name: tensor.to(dtype)
            if name in {"double", "single", "brain", "half", "none"}
            else tensor
            for name, tensor in tensors.items()
        }
        found = OURS.load_file(path, dtype=dtype)
        assert_holds(found, wanted)
        assert_holds(dict(OURS.stream(path, dtype=dtype)), wanted)
        plan = OURS.plan_load(path, dtype=dtype)
        assert plan.tensor_bytes == sum(tensor.nbytes for tensor in wanted.values())
    assert list(found) == list(OURS.load_file(path))
    assert_holds(OURS.load_file(path, dtype="float64"), found)


@pytest.mark.parametrize("dtype", [torch.int8, "float8_e5m2", torch.complex64, torch.complex128])
def test_casts_to_what_is_no_plain_float_are_refused(tmp_path: Path, dtype: Any) -> None:
    OURS.save_file(experts(), tmp_path / "x.safetensors")
    for ask in (OURS.load_file, OURS.stream, OURS.plan_load):
        with pytest.raises(InvalidInputError):
            ask(tmp_path / "x.safetensors", dtype=dtype)


# Memory


def test_a_load_beyond_its_budget_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": torch.zeros(3 * MIB, dtype=torch.uint8)}, path)
    plan = OURS.plan_load(path)
    assert plan.peak_bytes >= 3 * MIB
    for ask in (OURS.load_file, OURS.plan_load):
        with pytest.raises(OutOfMemoryError, match=str(plan.peak_bytes)) as caught:
            ask(path, budget="3MB")
        assert "3000000" in str(caught.value)
        assert caught.value.wanted == plan.peak_bytes
    assert OURS.load_file(path, budget=plan.peak_bytes)["x"].numel() == 3 * MIB


PEAK = """
    import resource, sys
    import torch, forebay.torch
    options = dict({options})
    path = {path!r}
    def high_water():
        status = open("/proc/self/status").read()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    forebay.torch.load_file({small!r}, **options)
    plan = forebay.torch.plan_load(path, **options)
    before = high_water()
    tensors = forebay.torch.load_file(path, **options)
    taken = high_water() - before
    print(plan.peak_bytes, plan.kept_bytes, taken, sum(t.nbytes for t in tensors.values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "dtype=torch.float32", "dtype=torch.float16, keys='w.?'"])
def test_a_load_takes_what_its_plan_says(tmp_path: Path, options: str) -> None:
    tensors = {f"w.{i}": torch.ones(16 * MIB, dtype=torch.bfloat16) for i in range(12)}
    OURS.save_file(tensors, tmp_path / "x.safetensors")
    OURS.save_file({"w.0": torch.ones(100, dtype=torch.bfloat16)}, tmp_path / "s.safetensors")
    done = run_python(
        PEAK.format(
            options=options,
            path=str(tmp_path / "x.safetensors"),
            small=str(tmp_path / "s.safetensors"),
        )
    )
    peak, kept, taken, held = map(int, done.stdout.split())
    assert held <= kept <= peak
    # Beside the plan: the rings' staging memory, the interpreter, the allocator.
    assert 0.9 * held < taken < peak + 64 * MIB


@pytest.mark.slow
def test_a_save_takes_little_beside_what_is_saved(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import torch, forebay.torch
        def high_water():
            status = open("/proc/self/status").read()
            return int(status.split("VmHWM:")[1].split()[0]) << 10
        tensors = {{str(i): torch.ones(100 << 20, dtype=torch.uint8) for i in range(8)}}
        before = high_water()
        forebay.torch.save_file(tensors, {str(tmp_path / "x.safetensors")!r})
        print(high_water() - before)
        """
    )
    assert int(done.stdout) < 128 * MIB


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"keys": "*.w1.*"}])
def test_tensors_for_a_device_go_there_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    # A device that every machine has, and that loads don't go to otherwise.
    far = torch.device("meta")
    monkeypatch.setattr(
        type(FRAME), "parse_device", lambda _, device: None if device == "cpu" else far
    )
    save_shards(tmp_path, experts())
    wanted = OURS.load_file(tmp_path, **options)
    for found in (
        OURS.load_file(tmp_path, "far", **options),
        dict(OURS.stream(tmp_path, "far", **options)),
    ):
        assert list(found) == list(wanted)
        for name, tensor in found.items():
            assert (tensor.device, tensor.dtype, tensor.shape) == (
                far,
                wanted[name].dtype,
                wanted[name].shape,
            )
    plan = OURS.plan_load(tmp_path, "far", **options)
    assert plan.kept_bytes == 0
    assert plan.tensors == len(wanted)
    opened = OURS.safe_open(tmp_path / "model-00001-of-00003.safetensors", "pt", "far")
    assert opened.get_tensor("embed.weight").device == far
    assert opened.get_slice("embed.weight")[3:5].shape == (2, 16)
    assert all(tensor.device == far for tensor in opened.get_tensors().values())


def test_many_small_tensors_are_read_in_few_large_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({f"{i}.w": torch.full((5_000,), float(i)) for i in range(2_000)}, path)
    with forebay.Handle() as handle:
        found = OURS.load_file(path, handle=handle)
        stats = handle.stats()
    assert all(bool((tensor == int(name[:-2])).all()) for name, tensor in found.items())
    assert stats["bytes_read"] / stats["transfers"] >= MIB


@pytest.mark.slow
def test_a_tensor_longer_than_the_kernel_moves_at_once_is_whole(tmp_path: Path) -> None:
    length = (2 << 30) + 12_345
    path = tmp_path / "huge.safetensors"
    header = {
        "small": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "huge": {"dtype": "U8", "shape": [length], "data_offsets": [3, 3 + length]},
    }
    write_file(path, header, b"abc", padding=1)
    begin = data_start(path) + 3
    marks = {0: 1, 0x7FFFF000 - 1: 2, 0x7FFFF000: 3, (2 << 30) - 1: 4, length - 1: 5}
    with path.open("r+b") as file:
        file.truncate(begin + length)
        for offset, mark in marks.items():
            file.seek(begin + offset)
            file.write(bytes([mark]))
    huge = OURS.load_file(path)["huge"]
    assert {int(place): int(huge[place]) for place in huge.nonzero()[:, 0]} == marks


def test_an_interrupted_load_ends_and_the_next_one_works(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": torch.ones(20 * MIB)}, path)
    run_python(
        f"""
        import os, signal, threading, torch, forebay, forebay.torch
        for ask in (
            lambda handle: forebay.torch.load_file({str(path)!r}, handle=handle),
            lambda handle: list(forebay.torch.stream({str(path)!r}, handle=handle)),
            lambda handle: forebay.torch.load_into(
                {{"x": torch.zeros({20 * MIB})}}, {str(path)!r}, handle=handle
            ),
        ):
            # What the drive has in hand is waited for: little, here.
            handle = forebay.Handle(
                throttle="10MiB",
                page_cache=False,
                block_size="64KiB",
                queue_depth=2,
                intra_op_parallelism=1,
            )
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                ask(handle)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("not interrupted")
        assert bool((forebay.torch.load_file({str(path)!r})["x"] == 1).all())
        """
    )


# Many at once


def test_threads_load_and_save_at_the_same_time(tmp_path: Path) -> None:
    tensors = experts()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            path = tmp_path / f"{number}.safetensors"
            for _ in range(5):
                OURS.save_file(tensors, path)
                assert_holds(OURS.load_file(path), tensors)
                with OURS.safe_open(path, "pt") as opened:
                    assert_holds(opened.get_tensors(), tensors)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_forked_child_loads(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file(experts(), path)
    run_python(
        f"""
        import os, forebay.numpy, ml_dtypes
        before = forebay.numpy.load_file({str(path)!r})
        child = os.fork()
        if child == 0:
            found = forebay.numpy.load_file({str(path)!r})
            os._exit(0 if found["norm.count"] == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert before["norm.count"] == 3
        """
    )


def test_nothing_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file(experts(), path)

    def use() -> None:
        OURS.load_file(path)
        list(OURS.stream(path))
        with OURS.safe_open(path, "pt") as opened:
            opened.get_slice("embed.weight")[3:5]
        write_file(tmp_path / "bad", b"[]", b"")
        assert not answer(lambda: OURS.safe_open(tmp_path / "bad", "pt"))[0]

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        use()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_closed_handle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file(experts(), path)
    handle = forebay.Handle()
    handle.close()
    for ask in (
        lambda: OURS.load_file(path, handle=handle),
        lambda: OURS.stream(path, handle=handle),
        lambda: OURS.save_file(experts(), path, handle=handle),
    ):
        with pytest.raises(forebay.errors.ClosedError):
            ask()
    with pytest.raises(TypeError):
        OURS.load_file(path, handle="handle")
    assert_holds(OURS.load_file(path), experts())


def test_a_tensor_that_isnt_there_is_named(tmp_path: Path) -> None:
    OURS.save_file(experts(), tmp_path / "x.safetensors")
    opened = OURS.safe_open(tmp_path / "x.safetensors", "pt")
    with opened, pytest.raises(TensorFileError, match="never"):
        opened.get_tensor("never")
