"""Loads a shard some of whose tensors go to a device: each straight to where it belongs.

What goes to the host is in memory for these tensors alone, not for the whole shard.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay._tensor_files.batches import Batches, Piece
from forebay._tensor_files.device import DeviceLoad
from forebay._tensor_files.shared import room, shared_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from forebay._forebay import CheckpointReader
    from forebay._tensor_files.source import Entry
    from forebay.checkpoint.arrays import Framework
    from forebay.handle import Handle

__all__ = ["ShardLoad", "Wanted"]

_ALIGNMENT_BYTES = 64
"""Where tensors begin in the host's memory: a cache line, as frameworks have it."""


class Wanted(NamedTuple):
    """A tensor, and where it goes."""

    entry: Entry
    """Where it is; its type is that of bytes."""
    framework: Framework
    device: Any | None
    """The device that it goes to; None for the host."""
    memory: Any | None
    """Bytes on the device that are its place, if there are such."""
    take: Callable[[Any], None]
    """Is given its bytes when they are there."""


@dataclass(frozen=True)
class _Placed(Piece):
    """A tensor on its way to memory that is there."""

    take: Callable[[Any], None]


class _Bytes:
    """Has tensors be handed out as bytes."""

    def __init__(self, framework: Framework) -> None:
        self.empty = framework.empty
        self.clone = framework.clone

    def typed(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:  # noqa: ARG002 (bytes)
        """Return the bytes."""
        return memory


class ShardLoad:
    """The files of a checkpoint, and loads of tensors of theirs.

    Parameters
    ----------
    reader : CheckpointReader
        The checkpoint.
    verify : bool
        Compare tensors with their checksums.
    """

    def __init__(self, reader: CheckpointReader, verify: bool) -> None:
        self._paths = [str(path) for path in reader.shard_paths]
        names = (tensor[0] for tensor in reader.tensors)
        self._checksums = dict(zip(names, reader.checksums, strict=True))
        self._verify = verify

    def run(self, wanted: list[Wanted]) -> None:
        """Load tensors."""
        handle = shared_handle()
        groups = ([piece] for piece in self._into_place(wanted, handle))
        with contextlib.closing(Batches(handle, groups)) as batches:
            for batch in batches:
                for piece in batch:
                    if isinstance(piece, _Placed):
                        piece.take(piece.memory)
        devices: dict[tuple[str, Any], list[Wanted]] = {}
        for item in wanted:
            if item.device is not None and item.memory is None:
                devices.setdefault((item.framework.name, item.device), []).append(item)
        for (_, device), items in devices.items():
            self._to_device(device, items, handle)

    def _into_place(self, wanted: list[Wanted], handle: Handle) -> Iterator[_Placed]:
        """Return what goes to memory that is there: a device's, or some of the host's for all."""
        hosts = [item for item in wanted if item.device is None]
        memory = room(handle, sum(_padded(item.entry.shape[0]) for item in hosts))
        begin = 0
        for item in hosts:
            end = begin + item.entry.shape[0]
            yield self._piece(item, memory[begin:end])
            begin += _padded(item.entry.shape[0])
        for item in wanted:
            if item.memory is not None:
                yield self._piece(item, item.memory)

    def _piece(self, item: Wanted, memory: Any) -> _Placed:
        entry = item.entry
        return _Placed(
            name=entry.name,
            memory=memory,
            length=entry.shape[0],
            path=self.path(entry.file),
            file=self.target(entry.file),
            offset=entry.offset,
            checksum=self.checksum(entry) if self._verify else None,
            take=item.take,
        )

    def _to_device(self, device: Any, items: list[Wanted], handle: Handle) -> None:
        takes = {item.entry.name: item.take for item in items}
        entries = [item.entry for item in items]
        maker = _Bytes(items[0].framework)
        arrays = DeviceLoad(self, maker, device, entries, self._verify, handle)
        with contextlib.closing(arrays):
            for entry, memory in arrays:
                takes[entry.name](memory)

    # What a load asks of its files.

    def path(self, file: int) -> str:
        """Return a shard's name."""
        return self._paths[file]

    def target(self, file: int) -> str:
        """Return a shard's name."""
        return self._paths[file]

    def drive(self, file: int) -> int:  # noqa: ARG002 (all are in one directory)
        """Return the same for all."""
        return 0

    def checksum(self, entry: Entry) -> int:
        """Return the CRC32C of a tensor."""
        return self._checksums[entry.name]

    def reading(self) -> AbstractContextManager[None]:
        """Do nothing: whoever opened the checkpoint looks whether it is still there."""
        return contextlib.nullcontext()

    def note_unverified(self, handle: Handle, files: list[int]) -> None:
        """Do nothing: every tensor has a checksum."""


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
