"""Takes the ways in turn, and measures and checks each."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.bench.problem import EXIT_FAILED, Problem
from forebay.bench.worker import difference, touched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.tensor import Tensor
    from forebay.quickstart.ways import Way

__all__ = ["Result", "measure"]


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
    results = [Result(way.title) for way in ways]
    pairs = list(zip(ways, results, strict=True))
    for turn in range(repeats):
        # Who is first changes: a drive slows down and recovers.
        start = turn % len(pairs)
        for way, result in pairs[start:] + pairs[:start]:
            path = os.path.join(directory, f"tensors-{turn}")
            progress(f"{way.title}: store")
            _time(result.store, lambda way=way, path=path: way.store(path))  # type: ignore[misc]
            _make_cold(path)
            way.clear()
            progress(f"{way.title}: load")
            loaded = _time(
                result.load,
                lambda way=way, path=path: touched(way.load(path)),  # type: ignore[misc]
            )
            progress(f"{way.title}: compare")
            _compare(way.title, tensors, loaded)
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


def _make_cold(path: str) -> None:
    """Remove a file, all of which is on the drive, from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # Root can also drop what others keep mapped.
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as switch:
        switch.write("1")


def _compare(way: str, tensors: Sequence[Tensor], loaded: Sequence[Any]) -> None:
    differs = difference(tensors, loaded)
    if differs is not None:
        text = f"{way}: tensor {differs!r} came back with different bytes"
        raise Problem(text, EXIT_FAILED)
