"""Machines with more than one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpu.machine import contents, pattern

if TYPE_CHECKING:
    from pathlib import Path

    import forebay
    from gpu.machine import Gpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LENGTH = (5 << 20) + 77


def test_one_call_moves_tensors_of_all_gpus(
    gpus: list[Gpu], handle: forebay.Handle, tmp_path: Path
) -> None:
    tensors = [gpu.bytes(LENGTH + seed, seed) for seed, gpu in enumerate(gpus)]
    paths = [tmp_path / str(index) for index in range(len(gpus))]
    handle.store_many(list(zip(tensors, paths, strict=True)))
    for seed, path in enumerate(paths):
        assert path.read_bytes() == pattern(LENGTH + seed, seed).tobytes()
    for tensor in tensors:
        tensor.zero_()
    handle.load_many(list(zip(tensors, paths, strict=True)))
    for seed, tensor in enumerate(tensors):
        assert contents(tensor) == pattern(LENGTH + seed, seed).tobytes()


def test_what_one_gpu_stored_another_loads(
    gpus: list[Gpu], handle: forebay.Handle, path: Path
) -> None:
    first, *others = gpus
    handle.store(first.bytes(LENGTH, 1), path)
    for other in others:
        target = other.empty(LENGTH)
        handle.load(target, path)
        assert contents(target) == pattern(LENGTH, 1).tobytes()


def test_the_current_device_of_the_thread_stays(
    gpus: list[Gpu], handle: forebay.Handle, path: Path
) -> None:
    for gpu in gpus:
        before = torch.cuda.current_device() if gpu.is_real else None
        tensor = gpu.bytes(LENGTH, 2)
        handle.store(tensor, path)
        handle.load(tensor, path)
        assert (torch.cuda.current_device() if gpu.is_real else None) == before
        assert contents(tensor) == pattern(LENGTH, 2).tobytes()


def test_the_stream_that_counts_is_that_of_the_tensors_device(
    gpus: list[Gpu], handle: forebay.Handle, path: Path
) -> None:
    last = gpus[-1]
    source, tensor = last.bytes(LENGTH, 3), last.empty(LENGTH)
    last.synchronize()
    with last.stream():
        last.keep_busy()
        torch.bitwise_xor(source, 0x33, out=tensor)
        with gpus[0].current():
            handle.store(tensor, path)
    assert path.read_bytes() == (pattern(LENGTH, 3) ^ 0x33).tobytes()
