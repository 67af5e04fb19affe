"""Files opened for single tensors, and the reads of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay._tensor_files.frame import BITS
from forebay._tensor_files.load import straight
from forebay._tensor_files.shared import shared_handle
from forebay._tensor_files.slices import read_view
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
        self._handle = shared_handle() if handle is None else handle

    def entry(self, name: str) -> Entry:
        """Return what is known of a tensor."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a text, not {type(name).__name__}")
        if self.header.get(name) is None:
            raise TensorFileError(f"{self.path} has no tensor {name!r}", filename=self.path)
        return self._source.entry(name)

    def whole(self, frame: Frame, name: str) -> Any:
        """Return a tensor."""
        entry = self.entry(name)
        frame.check(entry.dtype, entry.shape)
        return dict(self.some(frame, [name]))[name]

    def some(self, frame: Frame, names: list[str] | None) -> Iterable[tuple[str, Any]]:
        """Return tensors, loaded in few large reads; all of them for None."""
        return straight(self._source, frame, names, self._wish, self._handle)

    def part(self, frame: Frame, name: str, view: View) -> Any:
        """Return the items of a view of a tensor."""
        entry = self.entry(name)
        item_bytes = BITS[entry.dtype] // 8
        descriptor = self._source.descriptors[entry.file]
        with self._source.reading():
            memory = read_view(self._handle, descriptor, view, item_bytes, entry.offset)
        return frame.over(memory, entry.dtype, view.sizes)
