"""Streams of tensors within a budget of memory.

The core reads ahead as far as the budget has room, and the budget has room again when a tensor
that was handed out is no longer held; so nothing that is held is ever overwritten. What is cast
is in memory of a share of the budget of its own. To a device that the core reaches, what is read
ahead is there, and within the budget.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay._arguments import parse_seconds, parse_size
from forebay._tensor_files.cast import cast_code, padded, parse_cast
from forebay._tensor_files.device import DeviceLoad
from forebay._tensor_files.frame import BITS, byte_count
from forebay._tensor_files.shared import core_of, given_or_shared, tell
from forebay._tensor_files.source import OpenSource
from forebay.errors import ClosedError, OutOfMemoryError
from forebay.memory import Pool

if TYPE_CHECKING:
    from types import TracebackType

    from forebay._tensor_files.frame import Frame
    from forebay._tensor_files.load import Wish
    from forebay._tensor_files.select import Source
    from forebay._tensor_files.source import Entry
    from forebay.handle import Handle

__all__ = ["DEFAULT_BUDGET", "DEFAULT_TIMEOUT", "TensorStream"]

DEFAULT_BUDGET = "1GiB"
"""Memory of a stream if nothing else is said."""

DEFAULT_TIMEOUT = 30.0
"""Seconds that a stream waits for its consumer to let go of tensors if nothing else is said."""


class TensorStream:
    """Iterates over ``(name, tensor)`` within a budget of host memory.

    A tensor is valid for as long as it, or a view of it, is held. What is held counts against the
    budget: where the consumer holds so much that the next tensor has no room, and lets go of
    nothing for a while, that is a ``WaitTimeoutError``, after which the stream can go on.

    It can be iterated once, from any number of threads, each tensor going to one of them, and is a
    context manager; leaving it, or :meth:`close`, ends the reading, and leaves tensors that are
    held as they are.
    """

    def __init__(
        self,
        source: Source | OpenSource,
        frame: Frame,
        wish: Wish,
        handle: Handle | None,
        timeout: float | None,
    ) -> None:
        handle = given_or_shared(handle)
        core = core_of(handle)
        self._frame = frame
        self._device = frame.parse_device(wish.device)
        self._target = None if wish.dtype is None else parse_cast(frame, wish.dtype)
        opened = source if isinstance(source, OpenSource) else OpenSource(source)
        entries = opened.entries(wish.keys)
        for entry in entries:
            frame.check(entry.dtype, entry.shape)
        budget = parse_size(DEFAULT_BUDGET if wish.budget is None else wish.budget, "budget")
        self._pool, budget = self._share(budget, entries)
        self._handle = handle
        self._timeout = parse_seconds(timeout)
        self._waiting: list[tuple[str, str, list[int], Any, int]] = []
        self._core: _forebay.TensorStream | _DeviceStream
        if self._device is not None and frame.reaches(self._device):
            self._core = _DeviceStream(opened, frame, self._device, entries, budget, wish, handle)
        else:
            names = [entry.name for entry in entries]
            self._core = _forebay.TensorStream(
                core, opened.core, names, budget, wish.verify, self._timeout
            )
        tell(handle)

    def _share(self, budget: int, entries: list[Entry]) -> tuple[Pool | None, int]:
        """Set a share of the budget aside for what is cast in host memory."""
        casts = [
            (
                byte_count(entry.dtype, entry.shape),
                padded(self._target, entry.shape),
                BITS[self._target] / BITS[entry.dtype],
            )
            for entry in entries
            if self._target is not None and cast_code(entry.dtype, self._target) != entry.dtype
        ]
        if not casts or self._device is not None:
            return None, budget
        growth = max(ratio for _, _, ratio in casts)
        share = int(budget * growth / (1 + growth))
        stored, largest = max((stored, cast) for stored, cast, _ in casts)
        if largest > share or stored > budget - share:
            raise OutOfMemoryError(
                f"the largest tensor takes {stored} bytes in the file and {largest} cast, both at "
                f"once, and the budget is {budget}, of which {share} are for what is cast: raise "
                "it, or don't cast",
                wanted=stored + largest,
            )
        return Pool(share, pinned=False), budget - share

    def __iter__(self) -> TensorStream:
        return self

    def __next__(self) -> tuple[str, Any]:
        try:
            item = self._waiting.pop()
        except IndexError:
            item = next(self._core)
        try:
            return self._hand_out(*item)
        except BaseException:
            # No room, or an interrupt: the next call may do better.
            self._waiting.append(item)
            raise

    def _hand_out(
        self, name: str, dtype: str, extents: list[int], buffer: Any, offset: int
    ) -> tuple[str, Any]:
        import numpy as np

        shape = tuple(extents)
        if isinstance(self._core, _DeviceStream):
            code = cast_code(dtype, self._target)
            return name, buffer if code == dtype else self._frame.cast(buffer, code)
        memory = np.asarray(buffer)[offset : offset + byte_count(dtype, shape)]
        array = self._frame.over(memory, dtype, shape)
        code = cast_code(dtype, self._target)
        if self._device is not None:
            return name, self._frame.move(array, self._device, code)
        if code == dtype or self._pool is None:
            return name, array
        room = self._pool.empty(byte_count(code, shape), timeout=self._timeout)
        target = self._frame.over(room, code, shape)
        self._frame.copy(target, array)
        return name, target

    def close(self) -> None:
        """End the reading. Tensors that are held stay valid; calling it again does nothing."""
        self._waiting.clear()
        self._core.close()
        tell(self._handle)

    def __enter__(self) -> TensorStream:  # noqa: PYI034 (typing.Self is in 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _DeviceStream:
    """Tensors that go straight to a device, one after the other, for any number of threads."""

    def __init__(
        self,
        source: OpenSource,
        frame: Frame,
        device: Any,
        entries: list[Entry],
        budget: int,
        wish: Wish,
        handle: Handle,
    ) -> None:
        lengths = (byte_count(entry.dtype, entry.shape) for entry in entries)
        longest = max(lengths, default=0)
        if longest > budget:
            raise OutOfMemoryError(
                f"the largest tensor takes {longest} bytes, and the budget is {budget}: raise it",
                wanted=longest,
            )
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._ready: deque[tuple[Entry, Any]] = deque()
        self._is_closed = False
        self._load = DeviceLoad(source, frame, device, entries, wish.verify, handle, budget)

    def __next__(self) -> tuple[str, str, list[int], Any, int]:
        # In a forked child, a thread that isn't there may hold the lock.
        if os.getpid() != self._process:
            raise ClosedError(
                "the stream belongs to the process that this one was forked from; make a stream "
                "in this process"
            )
        with self._lock:
            if self._is_closed:
                raise ClosedError("the stream is closed")
            while not self._ready:
                found = self._load.take()
                if found is None:
                    raise StopIteration
                self._ready.extend(found)
            entry, array = self._ready.popleft()
        return entry.name, entry.dtype, list(entry.shape), array, 0

    def close(self) -> None:
        """End the reading."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_closed = True
            self._ready.clear()
            self._load.close()
