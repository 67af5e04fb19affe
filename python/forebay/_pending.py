"""The asynchronous operations of a handle that its ``wait()`` has not accounted for yet."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from forebay._endings import living

if TYPE_CHECKING:
    from forebay._forebay import Operation
    from forebay.errors import ForebayError

__all__ = ["Pending", "release_finished"]

_LOOKS_PER_ADDITION = 4
"""Operations that each new one looks at: 0.1 µs each, and all are seen by a quarter as many."""


class Pending:
    """A list of operations that stays short although nobody waits.

    Every operation counts once in what :meth:`take` returns, in whichever order it finishes. Who
    takes some says when they are settled, so that others who wait know of them meanwhile. The
    arrays of finished ones are let go outside the lock: their finalizers may come back here.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._operations: list[Operation] = []
        self._finished = 0
        self._failures: list[ForebayError] = []
        self._next_index = 0
        self._taken: list[list[Operation]] = []
        _all.add(self)

    def reset(self) -> None:
        """Forget everything: in a forked child, where the parent's operations are not ours."""
        self.__init__()  # type: ignore[misc]  # a fresh lock too: the old one may be held for ever

    def add(self, operation: Operation) -> None:
        """Remember an operation, and forget some that have finished."""
        with self._lock:
            self._operations.append(operation)
            finished = self._sweep(_LOOKS_PER_ADDITION)
        for done in finished:
            done.release()

    def release(self) -> None:
        """Let go of the arrays of all operations that have finished."""
        with self._lock:
            finished = self._sweep(len(self._operations))
            taken = [operation for batch in self._taken for operation in batch]
        for operation in [*finished, *taken]:
            operation.release()

    def _sweep(self, looks: int) -> list[Operation]:
        """Take out what has finished among the next few operations, going round."""
        finished = []
        for _ in range(looks):
            if self._next_index >= len(self._operations):
                self._next_index = 0
            if not self._operations:
                break
            if self._operations[self._next_index].done():
                finished.append(self._operations.pop(self._next_index))
                self._finished += 1
            else:
                self._next_index += 1
        return finished

    def take(self) -> tuple[int, list[Operation], list[ForebayError]]:
        """Return how many finished and were forgotten, the others, and failures; start anew.

        The others are in the hands of the caller until :meth:`settle` or :meth:`put_back`.
        """
        with self._lock:
            taken = self._finished, self._operations, self._failures
            self._taken.append(self._operations)
            self._finished, self._operations, self._failures = 0, [], []
            return taken

    def settle(self, operations: list[Operation]) -> None:
        """Forget what was taken, all of which has finished."""
        with self._lock:
            self._taken = [batch for batch in self._taken if batch is not operations]

    def put_back(
        self, finished: int, operations: list[Operation], failures: list[ForebayError]
    ) -> None:
        """Undo a :meth:`take` that was cut short after so many of the operations."""
        with self._lock:
            self._finished += finished
            self._operations[:0] = operations
            self._failures[:0] = failures

    def others(self) -> list[Operation]:
        """Return what is in the hands of others, who wait for it and count it."""
        with self._lock:
            return [operation for batch in self._taken for operation in batch]


_all: weakref.WeakSet[Pending] = weakref.WeakSet()
"""Those of all handles."""


def release_finished() -> None:
    """Let go of the arrays of all operations that have finished, of whichever handle."""
    for pending in living(_all):
        pending.release()
