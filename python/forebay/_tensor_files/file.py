"""Files opened for single tensors, and the reads of these."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from forebay._tensor_files.device import DeviceLoad
from forebay._tensor_files.frame import BITS, byte_count
from forebay._tensor_files.load import straight
from forebay._tensor_files.shared import given_or_shared, room
from forebay._tensor_files.slices import read_runs, runs_of
from forebay._tensor_files.source import OpenSource
from forebay.errors import TensorFileError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay._tensor_files.frame import Frame, View
    from forebay._tensor_files.load import Wish
    from forebay._tensor_files.source import Entry
    from forebay.handle import Handle

__all__ = ["OpenFile"]


class OpenFile:
    """A file that stays the one which was opened, whatever its name is given to meanwhile."""

    def __init__(self, path: str, wish: Wish, handle: Handle | None) -> None:
        # In a list: a directory is no file, whatever is in it.
        self._source = OpenSource([path])
        self.path = path
        self.header = self._source.headers[0]
        self._wish = wish
        self._handle = given_or_shared(handle)

    def entry(self, name: str) -> Entry:
        """Return what is known of a tensor."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a text, not {type(name).__name__}")
        if self.header.get(name) is None:
            raise TensorFileError(f"{self.path} has no tensor {name!r}", filename=self.path)
        return self._source.entry(name)

    def whole(self, frame: Frame, name: str, device: Any | None) -> Any:
        """Return a tensor, on a device or, for None, in the host's memory."""
        entry = self.entry(name)
        frame.check(entry.dtype, entry.shape)
        return dict(self.some(frame, [name], device))[name]

    def some(
        self, frame: Frame, names: list[str] | None, device: Any | None
    ) -> Iterable[tuple[str, Any]]:
        """Return tensors, loaded in few large reads; all of them for None."""
        if device is None or not frame.reaches(device):
            for name, array in straight(self._source, frame, names, self._wish, self._handle):
                if device is None:
                    yield name, array
                else:
                    yield name, frame.move(array, device, self.entry(name).dtype)
            return
        entries = [self.entry(name) for name in (self.header.names if names is None else names)]
        arrays = DeviceLoad(self._source, frame, device, entries, self._wish.verify, self._handle)
        with contextlib.closing(arrays):
            yield from ((entry.name, array) for entry, array in arrays)

    def part(self, frame: Frame, name: str, view: View, device: Any | None) -> Any:
        """Return the items of a view of a tensor."""
        entry = self.entry(name)
        runs = runs_of(view, BITS[entry.dtype] // 8, entry.offset)
        length = byte_count(entry.dtype, view.sizes)
        descriptor = self._source.descriptors[entry.file]
        reached = device is not None and frame.reaches(device)
        # Items that are picked out of longer stretches are so on the host.
        straight_there = reached and not runs.inner
        memory = frame.empty(length, device) if straight_there else room(self._handle, length)
        with self._source.reading():
            read_runs(self._handle, descriptor, runs, memory, length)
        if straight_there:
            return frame.typed(memory, entry.dtype, view.sizes)
        array = frame.over(memory, entry.dtype, view.sizes)
        return array if device is None else frame.move(array, device, entry.dtype)
