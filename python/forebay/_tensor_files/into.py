"""Loads tensors of files into the memory of arrays that are there.

What can go there as it is in the file is read straight into place, in the host's memory or a
device's, a few requests ahead, and its checksum is computed on the way. The rest goes through
memory of bounded size, on the device that it is for, and is copied.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from forebay._arguments import parse_size
from forebay._tensor_files.batches import Batches, Piece
from forebay._tensor_files.device import DeviceLoad
from forebay._tensor_files.frame import byte_count
from forebay._tensor_files.load import Wish
from forebay._tensor_files.rooms import Room, Rooms
from forebay._tensor_files.shared import given_or_shared
from forebay._tensor_files.source import OpenSource
from forebay._tensor_files.stream import DEFAULT_BUDGET, TensorStream
from forebay.errors import InvalidInputError

if TYPE_CHECKING:
    from forebay._tensor_files.frame import Frame
    from forebay._tensor_files.select import Source
    from forebay._tensor_files.source import Entry
    from forebay.handle import Handle

__all__ = ["IntoPlan", "Places", "load_into"]


class Places(Protocol):
    """Arrays that are loaded into, by name."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that an array has in a file, or None if it isn't there."""

    def problem(self, name: str, dtype: str) -> str | None:
        """Return why an array can't be loaded into from a type of the format, if it can't."""

    def room(self, name: str, dtype: str) -> Room | None:
        """Return an array's memory, if the bytes of the file can go there as they are."""

    def device(self, name: str) -> Any | None:
        """Return the device that an array is on, if the core reaches it; None for the host."""

    def copy(self, name: str, array: Any) -> None:
        """Copy what was read, on that device, into an array."""


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
        self._straight: list[Piece] = []
        self._after: list[Piece] = []
        self._copied: dict[Any | None, list[Entry]] = {}
        self._rooms = Rooms()
        self._files: set[int] = set()
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
        problem = self._places.problem(name, entry.dtype)
        if here != entry.shape:
            problem = f"has shape {entry.shape} in {path} and {here} here"
        if problem is not None:
            problems.append(f"{name!r} {problem}")
            return
        self._frame.check(entry.dtype, entry.shape)
        self.found.add(name)
        room = self._places.room(name, entry.dtype)
        if room is None:
            self._copied.setdefault(self._places.device(name), []).append(entry)
            return
        checksum = self._source.checksum(entry) if self._wish.verify else None
        descriptor = self._source.target(entry.file)
        # Into memory that another tensor is read into, one is read when that is done.
        pieces = self._straight if self._rooms.take(room) else self._after
        pieces.append(
            Piece(name, room.memory, room.length, path, descriptor, entry.offset, checksum)
        )
        self._files.add(entry.file)

    def run(self, handle: Handle | None) -> None:
        """Load."""
        handle = given_or_shared(handle)
        with self._source.reading():
            self._read(handle, self._straight)
            for piece in self._after:
                self._read(handle, [piece])
        if self._wish.verify:
            self._source.note_unverified(handle, sorted(self._files))
        for device, entries in self._copied.items():
            if device is None:
                self._stream(entries, handle)
            else:
                self._through_device(device, entries, handle)

    def _read(self, handle: Handle, pieces: list[Piece]) -> None:
        batches = Batches(handle, ([piece] for piece in pieces))
        with contextlib.closing(batches):
            while batches.take() is not None:
                pass

    def _stream(self, entries: list[Entry], handle: Handle) -> None:
        names = [entry.name for entry in entries]
        budget = self._budget(entries) if self._wish.budget is None else self._wish.budget
        wish = Wish(names, verify=self._wish.verify, budget=budget)
        with TensorStream(self._source, self._frame, wish, handle, None) as stream:
            for name, array in stream:
                self._places.copy(name, array)
                # Before the next is asked for: the budget has room for it then.
                del array

    def _through_device(self, device: Any, entries: list[Entry], handle: Handle) -> None:
        verify = self._wish.verify
        arrays = DeviceLoad(self._source, self._frame, device, entries, verify, handle)
        with contextlib.closing(arrays):
            for entry, array in arrays:
                self._places.copy(entry.name, array)

    def _budget(self, entries: list[Entry]) -> int:
        """Return the least that a stream does well with, however long its tensors are."""
        longest = max(byte_count(entry.dtype, entry.shape) for entry in entries)
        return max(parse_size(DEFAULT_BUDGET), 2 * longest)


def load_into(places: Places, source: Source, frame: Frame, wish: Wish) -> IntoPlan:
    """Return a load into arrays, planned and compared."""
    return IntoPlan(places, source, frame, wish)
