"""The asynchronous operations of a handle that its ``wait()`` has not accounted for yet."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay._forebay import Operation
    from forebay.errors import ForebayError

__all__ = ["Pending"]

_SWEEP_AT_LEAST = 64
"""Operations that may gather before finished ones are looked for: a look costs 0.1 µs each."""


class Pending:
    """A list of operations that stays short although nobody waits.

    Every operation counts once in what :meth:`take` returns, in whichever order it finishes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: list[Operation] = []
        self._finished = 0
        self._failures: list[ForebayError] = []
        self._sweep_at = _SWEEP_AT_LEAST

    def reset(self) -> None:
        """Forget everything: in a forked child, where the parent's operations are not ours."""
        self.__init__()  # type: ignore[misc]  # a fresh lock too: the old one may be held for ever

    def add(self, operation: Operation) -> None:
        """Remember an operation."""
        with self._lock:
            self._operations.append(operation)
            if len(self._operations) < self._sweep_at:
                return
            under_way = [operation for operation in self._operations if not operation.done()]
            self._finished += len(self._operations) - len(under_way)
            self._operations = under_way
            self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(under_way))

    def take(self) -> tuple[int, list[Operation], list[ForebayError]]:
        """Return how many finished and were forgotten, the others, and failures; start anew."""
        with self._lock:
            taken = self._finished, self._operations, self._failures
            self._finished, self._operations, self._failures = 0, [], []
            return taken

    def put_back(
        self, finished: int, operations: list[Operation], failures: list[ForebayError]
    ) -> None:
        """Undo a :meth:`take` that was cut short."""
        with self._lock:
            self._finished += finished
            self._operations[:0] = operations
            self._failures[:0] = failures
