"""What a save in the background costs the program that goes on meanwhile.

The time for which it is held up is set beside that of copying the tensors to memory that has been
touched. What it loses while the save goes on is told by a loop of small computations, counted
before, meanwhile and after.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.subjects.subject import Subject
    from forebay.bench.tensor import Tensor

__all__ = ["measure_background"]

_ALONE_SECONDS = 0.5
"""How long the loop runs before and after the save, at the least."""
_ELEMENTS = 8192
"""Numbers that the loop computes with: they stay in a core's own cache."""
_STEPS = 32
"""Computations between two looks at the clock."""


@dataclass(frozen=True)
class Cost:
    """What one save in the background took."""

    copy_seconds: float
    """Of a copy of the tensors to touched memory."""
    blocked_seconds: float
    """Until the tensors might change."""
    total_seconds: float
    """Until the save was done."""
    compute_loss: float
    """The share of its speed that the loop lost meanwhile."""


def measure_background(subject: Subject, tensors: Sequence[Tensor], path: str) -> dict[str, float]:
    """Save once in the background."""
    copy_seconds = _copy(tensors)
    loop = _Loop()
    before = loop.speed(_for(_ALONE_SECONDS))
    start = time.perf_counter()
    save = subject.save_async(path)
    blocked_seconds = time.perf_counter() - start
    meanwhile = loop.speed(save.done)
    save.wait()
    total_seconds = time.perf_counter() - start
    after = loop.speed(_for(max(_ALONE_SECONDS, total_seconds - blocked_seconds)))
    loss = 1 - meanwhile * 2 / (before + after)
    return asdict(Cost(copy_seconds, blocked_seconds, total_seconds, loss))


def _copy(tensors: Sequence[Tensor]) -> float:
    """Return the time of a copy of all tensors, with the pages on both sides touched."""
    import numpy as np

    target = np.empty(sum(tensor.data.nbytes for tensor in tensors), np.uint8)
    seconds = 0.0
    for _ in range(2):  # the first touches
        start, offset = time.perf_counter(), 0
        for tensor in tensors:
            end = offset + tensor.data.nbytes
            np.copyto(target[offset:end], tensor.data)
            offset = end
        seconds = time.perf_counter() - start
    return seconds


def _for(seconds: float) -> Callable[[], bool]:
    """Return what says that so much time has passed."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


class _Loop:
    """Computes with a few numbers, over and over."""

    def __init__(self) -> None:
        import numpy as np

        self._numbers: np.ndarray[Any, Any] = np.linspace(1, 2, _ELEMENTS)
        self._found = np.empty_like(self._numbers)

    def speed(self, ended: Callable[[], bool]) -> float:
        """Return the computations a second, until told to end."""
        import numpy as np

        start, count = time.perf_counter(), 0
        while True:
            for _ in range(_STEPS):
                np.sqrt(self._numbers, out=self._found)
            count += _STEPS
            if ended():
                return count / (time.perf_counter() - start)
