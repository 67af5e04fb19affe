"""Takes the ways in turn, and measures and checks each."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.quickstart.problem import EXIT_FAILED, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.quickstart.tensors import Tensor
    from forebay.quickstart.ways import Way

__all__ = ["Result", "measure"]

_PAGE_BYTES = 4096


@dataclass
class Samples:
    """Seconds of each run, by the clock and of the processor (user and system)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def seconds(self) -> float:
        """Return the median time."""
        return statistics.median(self.wall)

    def rate(self, size: int) -> float:
        """Return GB/s, of the median."""
        return size / 1e9 / self.seconds()

    def cpu_per_gib(self, size: int) -> float:
        """Return processor seconds per GiB, of the median."""
        return statistics.median(self.cpu) / (size / (1 << 30))


@dataclass
class Result:
    """What one way took."""

    name: str
    store: Samples = field(default_factory=Samples)
    load: Samples = field(default_factory=Samples)


def measure(
    ways: Sequence[Way],
    tensors: Sequence[Tensor],
    directory: str,
    repeats: int,
    progress: Callable[[str], None],
) -> list[Result]:
    """Store and load by each way in turn, ``repeats`` times, and compare every byte."""
    results = [Result(way.name) for way in ways]
    pairs = list(zip(ways, results, strict=True))
    for turn in range(repeats):
        # Who is first changes: a drive slows down and recovers.
        start = turn % len(pairs)
        for way, result in pairs[start:] + pairs[:start]:
            path = os.path.join(directory, f"tensors-{turn}")
            progress(f"{way.name}: store")
            _time(result.store, lambda way=way, path=path: way.store(path))  # type: ignore[misc]
            _make_cold(path)
            way.clear()
            progress(f"{way.name}: load")
            loaded = _time(
                result.load,
                lambda way=way, path=path: _touched(way.load(path)),  # type: ignore[misc]
            )
            progress(f"{way.name}: compare")
            _compare(way.name, tensors, loaded)
            del loaded
            os.unlink(path)
    return results


def _time(samples: Samples, work: Callable[[], Any]) -> Any:
    cpu, wall = _cpu_seconds(), time.perf_counter()
    answer = work()
    samples.wall.append(time.perf_counter() - wall)
    samples.cpu.append(_cpu_seconds() - cpu)
    return answer


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _touched(arrays: list[Any]) -> list[Any]:
    """Touch every page: a way that only maps the file has not loaded it yet."""
    for array in arrays:
        array[::_PAGE_BYTES].sum()
    return arrays


def _make_cold(path: str) -> None:
    """Remove a file, all of which is on the drive, from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # Root can also drop what others keep mapped.
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as switch:
        switch.write("1")


def _compare(way: str, tensors: Sequence[Tensor], loaded: Sequence[Any]) -> None:
    import numpy as np

    for tensor, array in zip(tensors, loaded, strict=True):
        if not np.array_equal(tensor.data, array):
            text = f"{way}: tensor {tensor.name!r} came back with different bytes"
            raise Problem(text, EXIT_FAILED)
