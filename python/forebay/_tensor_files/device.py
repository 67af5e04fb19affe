"""Loads tensors of files straight to a device: drive, staging blocks, memory of the device.

No tensor is ever in the host's memory as a whole. A large tensor has memory of its own. Small ones
that are neighbours in their file share some, so that they move in few blocks: they are views of it
where that leaves them well aligned, and copied out of it, on the device, where it doesn't.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forebay._tensor_files.batches import Batches, Piece
from forebay._tensor_files.frame import byte_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from forebay._tensor_files.source import Entry
    from forebay.handle import Handle

__all__ = ["DeviceLoad", "Files", "Maker", "Shelf", "shelves_of"]

_SMALL_BYTES = 256 << 10
"""Tensors of this length and more have memory of their own."""

_SHELF_BYTES = 4 << 20
"""Most memory that small tensors share: what is kept by the last of them that is held."""

_ALIGNMENT_BYTES = 16
"""Where tensors may begin in memory that they share: the widest access of a thread of a GPU."""


class Files(Protocol):
    """The files that tensors are in."""

    def path(self, file: int) -> str:
        """Return a file's name."""

    def target(self, file: int) -> int | str:
        """Return what to read a file from."""

    def drive(self, file: int) -> int:
        """Return the number of the drive that a file is on."""

    def checksum(self, entry: Entry) -> int | None:
        """Return the CRC32C of a tensor, if its file has one."""

    def reading(self) -> AbstractContextManager[None]:
        """Say of what is read within that it is of other files, if it is."""

    def note_unverified(self, handle: Handle, files: list[int]) -> None:
        """Say of files that were read that their checksums say nothing, where that is so."""


class Maker(Protocol):
    """What makes arrays on a device; a :class:`Frame` does."""

    def empty(self, length: int, device: Any) -> Any:
        """Return bytes on a device."""

    def clone(self, memory: Any) -> Any:
        """Return a copy of bytes, on their device."""

    def typed(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return an array over bytes."""


@dataclass
class Shelf:
    """Tensors that follow each other in a file, and share memory.

    Attributes
    ----------
    entries : list of (Entry, int)
        The tensors, and where they begin.
    length : int
        Bytes of all of them.
    """

    entries: list[tuple[Entry, int]]
    length: int = 0

    def takes(self, entry: Entry, length: int, shelf_bytes: int) -> bool:
        """Whether a tensor of some length can be put behind the others."""
        last, position = self.entries[-1]
        follows = entry.offset - last.offset == self.length - position
        small = max(length, self.length - position) < _SMALL_BYTES
        return follows and small and entry.file == last.file and self.length + length <= shelf_bytes


def shelves_of(entries: Sequence[Entry], shelf_bytes: int) -> list[Shelf]:
    """Return which tensors share memory, of at most so many bytes, in their order."""
    shelves: list[Shelf] = []
    for entry in entries:
        length = byte_count(entry.dtype, entry.shape)
        if not shelves or not shelves[-1].takes(entry, length, shelf_bytes):
            shelves.append(Shelf([]))
        shelf = shelves[-1]
        shelf.entries.append((entry, shelf.length))
        shelf.length += length
    return shelves


@dataclass(frozen=True)
class _Placed(Piece):
    """A tensor on its way, and the memory that it is in."""

    entry: Entry
    shelf: Any
    position: int


class DeviceLoad:
    """Tensors on their way to a device, as their files have them.

    Parameters
    ----------
    files : Files
        What they are in.
    maker : Maker
        What makes arrays on the device.
    device
        The device, as the maker has it.
    entries : sequence of Entry
        The tensors.
    verify : bool
        Compare them with the checksums of their files, where these have some.
    handle : Handle
        What reads.
    budget : int, optional
        Most memory of the device for what is read ahead.
    """

    def __init__(
        self,
        files: Files,
        maker: Maker,
        device: Any,
        entries: Sequence[Entry],
        verify: bool,
        handle: Handle,
        budget: int | None = None,
    ) -> None:
        self._files = files
        self._maker = maker
        self._device = device
        self._verify = verify
        self._handle = handle
        self._numbers = sorted({entry.file for entry in entries})
        shelf_bytes = _SHELF_BYTES if budget is None else min(budget, _SHELF_BYTES)
        shelves = shelves_of(entries, shelf_bytes)
        longest = max((shelf.length for shelf in shelves), default=0)
        groups = map(self._group, self._turns(shelves))
        self._batches = Batches(handle, groups, budget, longest)

    def take(self) -> list[tuple[Entry, Any]] | None:
        """Return the next tensors, once they are there; None after the last.

        As for :meth:`Batches.take`, a failure or an interrupt takes nothing away.
        """
        with self._files.reading():
            batch = self._batches.take()
        if batch is not None:
            return [self._array(piece) for piece in batch if isinstance(piece, _Placed)]
        if self._verify:
            self._files.note_unverified(self._handle, self._numbers)
        return None

    def close(self) -> None:
        """Read nothing more. Tensors that were handed out stay."""
        self._batches.close()

    def __iter__(self) -> Iterator[tuple[Entry, Any]]:
        while (found := self.take()) is not None:
            yield from found

    def _turns(self, shelves: list[Shelf]) -> Iterator[Shelf]:
        """Take turns between drives, so that they work at the same time."""
        drives: dict[int, list[Shelf]] = {}
        for shelf in shelves:
            drive = self._files.drive(shelf.entries[0][0].file)
            drives.setdefault(drive, []).append(shelf)
        for turn in itertools.zip_longest(*drives.values()):
            yield from (shelf for shelf in turn if shelf is not None)

    def _group(self, shelf: Shelf) -> list[Piece]:
        memory = self._maker.empty(shelf.length, self._device)
        return [self._piece(memory, entry, position) for entry, position in shelf.entries]

    def _piece(self, memory: Any, entry: Entry, position: int) -> _Placed:
        length = byte_count(entry.dtype, entry.shape)
        return _Placed(
            name=entry.name,
            memory=memory[position : position + length],
            length=length,
            path=self._files.path(entry.file),
            file=self._files.target(entry.file),
            offset=entry.offset,
            checksum=self._files.checksum(entry) if self._verify else None,
            entry=entry,
            shelf=memory,
            position=position,
        )

    def _array(self, piece: _Placed) -> tuple[Entry, Any]:
        memory = piece.memory
        if piece.position % _ALIGNMENT_BYTES:
            memory = self._maker.clone(memory)
        return piece.entry, self._maker.typed(memory, piece.entry.dtype, piece.entry.shape)
