"""Files of which tensor after tensor is asked for, read in large pieces.

``transformers`` asks for a slice of each tensor of each file first, and later, from several
threads, for all of each slice, in the order of the model. One read for each is what makes that
slow. Here, the first request for a tensor loads it with its neighbours, and they are let go of as
they are asked for: of a piece, what is loaded and hasn't been asked for yet is what is held.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from forebay._tensor_files.file import OpenFile
from forebay._tensor_files.frame import byte_count
from forebay._tensor_files.opened import safe_open
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from forebay._tensor_files.frame import Frame

__all__ = ["AheadOpen"]

_PIECE_BYTES = 256 << 20
"""Bytes of neighbours that are loaded together, unless one of them is longer."""


class _Piece:
    """Neighbours in a file that are loaded together, and which of them have been handed out."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.lock = threading.Lock()
        self.loaded: dict[str, Any] | None = None


class _AheadFile(OpenFile):
    """A file whose tensors are loaded with their neighbours."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._process = os.getpid()
        self._pieces: dict[str, _Piece] = {}
        names: list[str] = []
        length = 0
        for name in self.header.names:
            entry = self.entry(name)
            bytes_of = byte_count(entry.dtype, entry.shape)
            if names and length + bytes_of > _PIECE_BYTES:
                self._add(names)
                names, length = [], 0
            names.append(name)
            length += bytes_of
        self._add(names)

    def _add(self, names: list[str]) -> None:
        piece = _Piece(names)
        self._pieces.update(dict.fromkeys(names, piece))

    def whole(self, frame: Frame, name: str, device: Any | None) -> Any:
        """Return a tensor. The second time, and in a forked child, it is loaded alone."""
        if os.getpid() != self._process:
            # A thread that isn't there may hold the lock.
            return super().whole(frame, name, device)
        entry = self.entry(name)
        frame.check(entry.dtype, entry.shape)
        piece = self._pieces[name]
        with piece.lock:
            if piece.loaded is None:
                names = [neighbour for neighbour in piece.names if self._has_type(frame, neighbour)]
                piece.loaded = dict(self.some(frame, names, device))
            found = piece.loaded.pop(name, None)
        return super().whole(frame, name, device) if found is None else found

    def _has_type(self, frame: Frame, name: str) -> bool:
        """Whether the framework has a tensor's type: one that it hasn't is no concern of others."""
        entry = self.entry(name)
        try:
            frame.check(entry.dtype, entry.shape)
        except UnsupportedError:
            return False
        return True


class AheadOpen(safe_open):
    """``safe_open`` over such a file."""

    _file_class = _AheadFile
