"""Loads tensors of files into the memory of arrays that are there.

What can go there as it is in the file is read straight into place, a few requests ahead, and its
checksum is computed while the next ones are read. The rest streams, and is copied.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from forebay import _forebay
from forebay._arguments import parse_size
from forebay._tensor_files.frame import byte_count
from forebay._tensor_files.load import Wish
from forebay._tensor_files.shared import shared_handle
from forebay._tensor_files.source import OpenSource
from forebay._tensor_files.stream import DEFAULT_BUDGET, TensorStream
from forebay.errors import ForebayError, InvalidInputError, MismatchError

if TYPE_CHECKING:
    from forebay._tensor_files.frame import Frame
    from forebay._tensor_files.select import Source
    from forebay._tensor_files.source import Entry
    from forebay.handle import Handle
    from forebay.operation import Operation

__all__ = ["IntoPlan", "Places", "load_into"]

_BATCH_BYTES = 64 << 20
"""Bytes of a request: enough to keep drives busy, few enough to check while the next is read."""

_BATCHES_AHEAD = 3
"""Requests under way at a time."""


class Places(Protocol):
    """Arrays that are loaded into, by name."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that an array has in a file, or None if it isn't there."""

    def problem(self, name: str) -> str | None:
        """Return why an array can't be loaded into, if it can't."""

    def memory(self, name: str, dtype: str) -> Any | None:
        """Return an array's bytes, if those of the file can go there as they are."""

    def copy(self, name: str, array: Any) -> None:
        """Copy what was read into an array."""


class _Straight:
    """A tensor that is read into place: from where, to where, and what its checksum is."""

    def __init__(
        self,
        name: str,
        memory: Any,
        path: str,
        descriptor: int,
        offset: int,
        checksum: int | None,
    ) -> None:
        self.name = name
        self.memory = memory
        self.path = path
        self.descriptor = descriptor
        self.offset = offset
        self.checksum = checksum


class IntoPlan:
    """A load into arrays, with everything compared that can be before the first byte is read.

    Attributes
    ----------
    found : set of str
        Arrays that are loaded.
    unexpected : list of str
        Tensors of the files that there is no array for.
    """

    def __init__(self, places: Places, source: Source, frame: Frame, wish: Wish) -> None:
        self._places = places
        self._frame = frame
        self._wish = wish
        self.found: set[str] = set()
        self.unexpected: list[str] = []
        self._straight: list[_Straight] = []
        self._copied: dict[str, int] = {}
        self._taken: list[tuple[int, int]] = []
        self._source = OpenSource(source)
        problems: list[str] = []
        for entry in self._source.entries(wish.keys):
            self._place(entry, problems)
        if problems:
            raise InvalidInputError("; ".join(problems))

    def _place(self, entry: Entry, problems: list[str]) -> None:
        name = entry.name
        here = self._places.shape(name)
        if here is None:
            self.unexpected.append(name)
            return
        path = self._source.paths[entry.file]
        problem = self._places.problem(name)
        if here != entry.shape:
            problem = f"has shape {entry.shape} in {path} and {here} here"
        if problem is not None:
            problems.append(f"{name!r} {problem}")
            return
        self._frame.check(entry.dtype, entry.shape)
        self.found.add(name)
        memory = self._places.memory(name, entry.dtype)
        if memory is None or not self._take(memory):
            self._copied[name] = byte_count(entry.dtype, entry.shape)
            return
        checksum = self._source.headers[entry.file].checksum(name) if self._wish.verify else None
        descriptor = self._source.descriptors[entry.file]
        self._straight.append(_Straight(name, memory, path, descriptor, entry.offset, checksum))

    def _take(self, memory: Any) -> bool:
        """Whether no other tensor is read into the same memory: the order would be by chance."""
        begin = memory.__array_interface__["data"][0]
        end = begin + memory.nbytes
        place = bisect.bisect(self._taken, (begin, end))
        before = self._taken[place - 1][1] if place else 0
        after = self._taken[place][0] if place < len(self._taken) else end
        if begin == end:
            return True
        if before > begin or after < end:
            return False
        self._taken.insert(place, (begin, end))
        return True

    def run(self, handle: Handle | None) -> None:
        """Load."""
        handle = shared_handle() if handle is None else handle
        with self._source.reading():
            self._read(handle)
        if not self._copied:
            return
        budget = self._budget() if self._wish.budget is None else self._wish.budget
        wish = Wish(list(self._copied), verify=self._wish.verify, budget=budget)
        with TensorStream(self._source, self._frame, wish, handle, None) as stream:
            for name, array in stream:
                self._places.copy(name, array)
                # Before the next is asked for: the budget has room for it then.
                del array

    def _budget(self) -> int:
        """Return the least that a stream does well with, however long its tensors are."""
        return max(parse_size(DEFAULT_BUDGET), 2 * max(self._copied.values()))

    def _read(self, handle: Handle) -> None:
        under_way: deque[tuple[Operation, list[_Straight]]] = deque()
        try:
            for batch in _batches(self._straight):
                items = [(item.memory, item.descriptor, item.offset) for item in batch]
                under_way.append((handle.load_many_async(items), batch))
                if len(under_way) >= _BATCHES_AHEAD:
                    _finish(*under_way[0])
                    under_way.popleft()
            while under_way:
                _finish(*under_way[0])
                under_way.popleft()
        finally:
            # After a failure: what is under way writes to memory of the caller's.
            for operation, _ in under_way:
                operation.cancel()
            for operation, _ in under_way:
                with contextlib.suppress(ForebayError):
                    operation.wait()


def load_into(places: Places, source: Source, frame: Frame, wish: Wish) -> IntoPlan:
    """Return a load into arrays, planned and compared."""
    return IntoPlan(places, source, frame, wish)


def _batches(items: list[_Straight]) -> Any:
    batch: list[_Straight] = []
    length = 0
    for item in items:
        batch.append(item)
        length += item.memory.nbytes
        if length >= _BATCH_BYTES:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _finish(operation: Operation, batch: list[_Straight]) -> None:
    operation.wait()
    for item in batch:
        if item.checksum is not None and _forebay.crc32c(item.memory) != item.checksum:
            raise MismatchError(
                f"the bytes of tensor {item.name!r} in {item.path} aren't those that were saved",
                filename=item.path,
                operation="load",
            )
