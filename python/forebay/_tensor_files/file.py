"""Files that stay open: what is read is what was opened, whatever its name is given to meanwhile."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay._tensor_files.frame import BITS
from forebay._tensor_files.load import straight
from forebay._tensor_files.shared import shared_handle
from forebay._tensor_files.slices import read_view
from forebay.errors import ForebayError, TensorFileError, class_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forebay._tensor_files.frame import Frame, View
    from forebay.handle import Handle

__all__ = ["OpenFile"]


class OpenFile:
    """A file by descriptor: where its name is given to another file, this stays what is read."""

    def __init__(self, path: str, verify: bool, handle: Handle | None) -> None:
        self.path = path
        self._verify = verify
        self._handle = shared_handle() if handle is None else handle
        self._descriptor = _open_descriptor(path)
        weakref.finalize(self, os.close, self._descriptor)
        self._name = f"/proc/self/fd/{self._descriptor}"
        with self._naming_the_file():
            self.header = _forebay.read_header(self._name)

    def facts(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the type and the shape of a tensor."""
        dtype, shape, _, _ = self._entry(name)
        return dtype, tuple(shape)

    def whole(self, frame: Frame, name: str) -> Any:
        """Return a tensor."""
        dtype, _ = self.facts(name)
        frame.check(dtype)
        return dict(self.some(frame, [name]))[name]

    def some(self, frame: Frame, names: list[str] | None) -> Iterable[tuple[str, Any]]:
        """Return tensors, loaded in few large reads; all of them for None."""
        with self._naming_the_file():
            return list(straight(self._name, frame, names, self._verify, self._handle))

    def part(self, frame: Frame, name: str, view: View) -> Any:
        """Return the items of a view of a tensor."""
        dtype, _, start, _ = self._entry(name)
        begin = self.header.data_start + start
        with self._naming_the_file():
            memory = read_view(self._handle, self._name, view, BITS[dtype] // 8, begin)
        return frame.over(memory, dtype, view.sizes)

    def _entry(self, name: str) -> tuple[str, list[int], int, int]:
        if not isinstance(name, str):
            raise TypeError(f"name must be a text, not {type(name).__name__}")
        entry = self.header.get(name)
        if entry is None:
            raise TensorFileError(f"{self.path} has no tensor {name!r}", filename=self.path)
        return entry

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Have errors name the file as the user does, and not by its descriptor."""
        try:
            yield
        except ForebayError as error:
            error.message = error.message.replace(self._name, self.path)
            error.filename = self.path
            raise


def _open_descriptor(path: str) -> int:
    try:
        # A pipe would keep the call waiting for a writer.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        kind = class_for("os", error.errno)
        text = f"{path} can't be opened: {error.strerror}"
        raise kind(text, error.errno, path, operation="load") from None
