"""What Python costs: the latency of a small load, of a submission, and DeepNVMe beside Forebay.

Run by ``make bench``. DeepNVMe takes part when DeepSpeed is installed in the same environment
(``DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed``, and libaio's headers for its
compiler). Measures and reports; nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import forebay

if TYPE_CHECKING:
    from collections.abc import Callable

_GIB = 1 << 30


def main() -> None:
    """Run what can be run here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default="target/bench", help="where the files go")
    parser.add_argument("--size", type=int, default=512, help="MiB of the tensors for DeepNVMe")
    parser.add_argument("--pairs", type=int, default=7, help="times that each takes its turn")
    options = parser.parse_args()
    os.makedirs(options.dir, exist_ok=True)
    path = os.path.join(options.dir, "through-python.bin")
    try:
        _small_loads(path)
        _submissions(path)
        _beside_deepnvme(path, options.size << 20, options.pairs)
    finally:
        if os.path.exists(path):
            os.unlink(path)


def _small_loads(path: str) -> None:
    handle = forebay.Handle()
    tensor = np.zeros(4096, np.uint8)
    handle.store(tensor, path)

    def plain() -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(tensor.data)

    print("4 KiB from a cached file, median of 10,000, µs")
    for name, load in (
        ("forebay", lambda: handle.load(tensor, path)),
        ("open().readinto()", plain),
    ):
        print(f"  {name:20} {_median_us(load, 10_000):8.1f}")


def _submissions(path: str) -> None:
    handle = forebay.Handle()
    print("submitting 256 MiB, median of 9, µs")
    for name, tensor in (
        ("pool memory", forebay.empty(256 << 20)),
        ("ordinary memory", _like_torch(256 << 20)),
    ):
        handle.store(tensor, path)
        for way in (handle.store_async, handle.load_async):
            took = []
            for _ in range(9):
                start = time.perf_counter_ns()
                operation = way(tensor, path)
                took.append(time.perf_counter_ns() - start)
                operation.wait()
            print(f"  {way.__name__:12} {name:16} {statistics.median(took) / 1e3:8.1f}")


def _beside_deepnvme(path: str, size: int, pairs: int) -> None:
    try:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        reference: Any = AsyncIOBuilder().load()
    except Exception as error:  # whatever keeps it from loading is the reason to show
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        print(f"DeepNVMe left out: {first_line}")
        return
    for locked in (False, True):
        theirs = _Deepnvme(reference, size, locked, path)
        ours = _Forebay(size, locked, path)
        kind = "locked" if locked else "ordinary"
        ours.tensor.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        theirs.tensor.copy_(ours.tensor)
        for operation in ("store", "load"):
            _compare(f"{operation}, {kind} tensors", operation, ours, theirs, size, pairs, path)
        assert torch.equal(ours.tensor, theirs.tensor), "the bytes differ"
        theirs.free()


class _Deepnvme:
    """DeepSpeed's handle with the best of a few settings."""

    def __init__(self, reference: Any, size: int, locked: bool, path: str) -> None:
        import torch

        self.path = path
        example = torch.empty(0, dtype=torch.uint8)
        self._locked = locked
        settings = [
            (block << 20, depth, parallelism)
            for block in (1, 8)
            for depth in (32, 128)
            for parallelism in (1, 2)
        ]
        maker = reference.aio_handle(1 << 20, 32, False, True, 1)
        self._maker = maker
        if locked:
            self.tensor = maker.new_cpu_locked_tensor(size, example)
        else:
            self.tensor = torch.empty(size, dtype=torch.uint8)
        self.tensor.zero_()
        handles = [
            reference.aio_handle(block, depth, False, True, parallelism)
            for block, depth, parallelism in settings
        ]

        def seconds(handle: Any) -> float:
            start = time.perf_counter()
            handle.sync_pwrite(self.tensor, path)
            handle.sync_pread(self.tensor, path)
            return time.perf_counter() - start

        self._handle = min(handles, key=lambda handle: min(seconds(handle) for _ in range(2)))

    def store(self) -> None:
        self._handle.sync_pwrite(self.tensor, self.path)

    def load(self) -> None:
        self._handle.sync_pread(self.tensor, self.path)

    def free(self) -> None:
        if self._locked:
            self._maker.free_cpu_locked_tensor(self.tensor)


class _Forebay:
    def __init__(self, size: int, locked: bool, path: str) -> None:
        import torch

        self.path = path
        self._handle = forebay.Handle()
        if locked:
            self.tensor = self._handle.empty(size, like=torch)
        else:
            self.tensor = torch.empty(size, dtype=torch.uint8)

    def store(self) -> None:
        self._handle.store(self.tensor, self.path)

    def load(self) -> None:
        self._handle.load(self.tensor, self.path)


def _compare(
    title: str, operation: str, ours: Any, theirs: Any, size: int, pairs: int, path: str
) -> None:
    times: dict[Any, list[tuple[float, float]]] = {ours: [], theirs: []}
    for turn in range(pairs + 1):
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        for who in order:
            _drop(path)
            cpu, start = _cpu(), time.perf_counter()
            getattr(who, operation)()
            took = time.perf_counter() - start, _cpu() - cpu
            if turn:
                times[who].append(took)
    ratio = statistics.median(t[0] / o[0] for o, t in zip(times[ours], times[theirs], strict=True))
    gib = size / _GIB
    rate = {who: size / 1e9 / statistics.median(t[0] for t in took) for who, took in times.items()}
    cpu_per_gib = {who: statistics.median(t[1] for t in took) / gib for who, took in times.items()}
    print(
        f"{title}: {ratio:.2f} × DeepNVMe; "
        f"GB/s {rate[ours]:.2f} and {rate[theirs]:.2f}, "
        f"CPU s/GiB {cpu_per_gib[ours]:.3f} and {cpu_per_gib[theirs]:.3f}"
    )


def _like_torch(size: int) -> np.ndarray[Any, Any]:
    """Return memory 64 bytes behind a page, as torch and numpy allocate it."""
    block = np.frombuffer(mmap.mmap(-1, size + 4096), np.uint8)
    block.fill(1)
    return block[64 : 64 + size]


def _drop(path: str) -> None:
    if os.path.exists(path):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _median_us(call: Callable[[], object], count: int) -> float:
    took = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - start)
    return statistics.median(took) / 1e3


if __name__ == "__main__":
    main()
