"""Memory: what a process holds stays flat, and torch's allocators may do as they like."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

import forebay
from gpu.machine import contents, held, pattern, run_child

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.machine import Gpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LENGTH = (3 << 20) + 77
OPERATIONS = 1000
WARM_UP = 100
SLACK_BYTES = 24 << 20
"""What allocators of the host and drivers keep for themselves; a leak of a thousandth shows."""


def test_a_thousand_operations_leave_memory_descriptors_and_threads_as_they_were(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    tensor = gpu.bytes(LENGTH, 1)
    expected = contents(tensor)

    def turns(count: int) -> None:
        for turn in range(count // 4):
            handle.store(tensor[turn % 64 :], path)
            handle.load(tensor[turn % 64 :], path)
            handle.store_async(tensor, path).wait()
            target = torch.empty_like(tensor)
            handle.load_async(target, path).wait()
            del target

    turns(WARM_UP)
    gpu.synchronize()
    gc.collect()
    before, used = held(), gpu.used_bytes()
    turns(OPERATIONS)
    gpu.synchronize()
    gc.collect()
    after = held()
    assert contents(tensor) == expected
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    assert after.resident_bytes - before.resident_bytes < SLACK_BYTES
    assert gpu.used_bytes() - used < SLACK_BYTES


def test_handles_that_come_and_go_leave_nothing(gpu: Gpu, path: Path) -> None:
    tensor = gpu.bytes(LENGTH, 2)

    def turns(count: int) -> None:
        for _ in range(count):
            with forebay.Handle() as handle:
                handle.store(tensor, path)
                handle.load(tensor, path)

    turns(10)
    gc.collect()
    before, used = held(), gpu.used_bytes()
    turns(50)
    gc.collect()
    after = held()
    assert contents(tensor) == pattern(LENGTH, 2).tobytes()
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    assert after.resident_bytes - before.resident_bytes < SLACK_BYTES
    assert gpu.used_bytes() - used < SLACK_BYTES


def test_operations_that_fail_leave_nothing_either(
    gpu: Gpu, handle: forebay.Handle, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(100))
    tensor = gpu.empty(LENGTH)

    def turns(count: int) -> None:
        for _ in range(count):
            with pytest.raises(forebay.errors.ShortFileError):
                handle.load(tensor, short)
            with pytest.raises(FileNotFoundError):
                handle.load(tensor, tmp_path / "missing")

    turns(50)
    gc.collect()
    before = held()
    turns(200)
    gc.collect()
    after = held()
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    assert after.resident_bytes - before.resident_bytes < SLACK_BYTES


def test_tensors_may_be_dropped_and_their_memory_given_back_at_once(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    for turn in range(20):
        tensor = gpu.bytes(LENGTH + turn, turn)
        handle.store(tensor, path)
        del tensor
        gpu.empty_cache()
        target = gpu.empty(LENGTH + turn)
        handle.load(target, path)
        assert contents(target) == pattern(LENGTH + turn, turn).tobytes()
        del target
        gpu.empty_cache()


def test_a_tensor_dropped_right_after_an_asynchronous_store_is_stored_as_it_was(
    gpu: Gpu, handle: forebay.Handle, tmp_path: Path
) -> None:
    # A handle that keeps no reference has the allocator hand the memory to the next tensor.
    for turn in range(10):
        tensor = gpu.bytes(LENGTH, turn)
        handle.store_async(tensor, tmp_path / str(turn))
        del tensor
        gpu.empty_cache()
        other = gpu.empty(LENGTH)
        other.fill_(0xEE)
    handle.wait()
    for turn in range(10):
        assert (tmp_path / str(turn)).read_bytes() == pattern(LENGTH, turn).tobytes()


def test_a_tensor_that_was_loaded_into_outlives_the_handle(gpu: Gpu, path: Path) -> None:
    data = pattern(LENGTH, 3).tobytes()
    path.write_bytes(data)
    target = gpu.empty(LENGTH)
    with forebay.Handle() as handle:
        handle.load_async(target, path)
    del handle
    gc.collect()
    assert contents(target) == data


ALLOCATOR = """
import sys
import forebay
import torch

device, path = sys.argv[1:]
length = (3 << 20) + 77
with forebay.Handle() as handle:
    for turn in range(20):
        source = torch.randint(0, 256, (length + turn * 4097,), dtype=torch.uint8, device=device)
        view = source[turn:]
        handle.store(view, path)
        with open(path, "rb") as file:
            assert file.read() == view.cpu().numpy().tobytes(), turn
        target = torch.zeros_like(view)
        handle.load(target, path)
        assert torch.equal(target, view), turn
        del source, view, target
        if device != "cpu" and turn % 3 == 0:
            torch.cuda.empty_cache()
print(torch.cuda.get_allocator_backend() if device != "cpu" else "none")
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_of_torchs_other_allocators_is_moved_as_well(
    gpu: Gpu, path: Path, setting: str
) -> None:
    # The second is what the variable is called from torch 2.9 on.
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    printed = run_child(ALLOCATOR, gpu.name, path, **dict.fromkeys(names, setting))
    if gpu.is_real and setting.startswith("backend:"):
        assert printed.strip() == "cudaMallocAsync"


def test_more_than_the_staging_budget_moves_within_it(gpu: Gpu, path: Path) -> None:
    budget, length = 4 << 20, 256 << 20
    tensor = torch.arange(length // 4, dtype=torch.int32, device=gpu.device)
    with forebay.Handle(staging_bytes=budget) as handle:
        handle.store(tensor[: 8 << 20], path)
        before = held().resident_bytes
        handle.store(tensor, path)
        target = torch.zeros_like(tensor)
        with_target = 0 if gpu.is_real else length
        handle.load(target, path)
        grown = held().resident_bytes - before - with_target
    assert torch.equal(target, tensor)
    assert grown < budget + SLACK_BYTES


def test_memory_of_pools_is_pinned_and_copied_without_blocking(gpu: Gpu) -> None:
    tensor = forebay.empty(LENGTH, dtype="uint8", like="torch")
    on_device = gpu.empty(1)
    assert tensor.is_pinned() or not gpu.is_real
    tensor.copy_(torch.from_numpy(pattern(LENGTH, 4)))
    with gpu.stream():
        there = tensor.to(gpu.device, non_blocking=True)
        back = forebay.empty(LENGTH, dtype="uint8", like="torch")
        back.copy_(there, non_blocking=True)
    gpu.synchronize()
    assert contents(back) == pattern(LENGTH, 4).tobytes()
    del on_device


POOL_BEFORE = """
import sys
import forebay
import torch

device = sys.argv[1]
early = forebay.empty(5 << 20, dtype="uint8", like="torch")
on_device = torch.ones(5 << 20, dtype=torch.uint8, device=device)
late = forebay.empty(5 << 20, dtype="uint8", like="torch")
print(late.is_pinned(), early.is_pinned())
early.copy_(on_device, non_blocking=True)
late.copy_(on_device, non_blocking=True)
if device != "cpu":
    torch.cuda.synchronize()
assert int(early.sum()) == int(late.sum()) == 5 << 20
"""


def test_memory_that_was_there_before_cuda_is_pinned_once_it_is_up(gpu: Gpu) -> None:
    printed = run_child(POOL_BEFORE, gpu.name)
    assert printed.split() == ["True" if gpu.is_real else "False"] * 2


def test_memory_that_was_unpinned_is_not_taken_for_pinned(real_gpu: Gpu) -> None:
    real_gpu.empty(1)
    pool: Any = forebay.Pool()
    tensor = pool.empty(64 << 20, like="torch")
    assert tensor.is_pinned()
    del tensor
    gc.collect()
    # The region has gone, and what is mapped next, mostly in its place, is ordinary memory.
    again = [torch.empty(64 << 20, dtype=torch.uint8) for _ in range(4)]
    assert not any(one.is_pinned() for one in again)
