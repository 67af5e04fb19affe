"""Reads bytes of files straight into memory, of the host or of a device, in large requests.

A few requests are under way at a time. Their checksums are computed while their bytes pass, and
what differs from its own is an error that names the tensor and the file.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from forebay.handle import Handle
    from forebay.operation import Operation

__all__ = ["Batches", "Piece"]

_BATCH_BYTES = 64 << 20
"""Bytes of a request: enough to keep drives busy, few enough to go on with while more is read."""

_BATCHES_AHEAD = 3
"""Requests under way at a time."""

_PIECES_MAX = 4096
"""Most pieces of a request, which takes some memory for each."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a file that go to memory as they are.

    Attributes
    ----------
    name : str
        The tensor that they are of.
    memory : array
        Where to: as many bytes.
    length : int
        How many.
    path : str
        The file's name, for messages.
    file : int or str
        What to read from: a descriptor or a name.
    offset : int
        Where they begin there.
    checksum : int or None
        Their CRC32C, if it is to be compared.
    """

    name: str
    memory: Any
    length: int
    path: str
    file: int | str
    offset: int
    checksum: int | None


class Batches:
    """Pieces on their way.

    Parameters
    ----------
    handle : Handle
        What reads.
    groups : iterable of sequence of Piece
        Pieces that go in one request. Asked for when there is room for a further request, so that
        memory may be made then.
    budget, longest : int, optional
        Most bytes under way, and the most that a group has, which may be all of them.
    """

    def __init__(
        self,
        handle: Handle,
        groups: Iterable[Sequence[Piece]],
        budget: int | None = None,
        longest: int = 0,
    ) -> None:
        self._under_way: deque[tuple[Operation, list[Piece]]] = deque()
        self._handle = handle
        self._groups = iter(groups)
        self._ahead = _BATCHES_AHEAD
        self._batch_bytes = _BATCH_BYTES
        if budget is not None:
            # A request reaches behind its length by a group at the most.
            self._ahead = min(_BATCHES_AHEAD, max(1, budget // max(1, longest)))
            self._batch_bytes = min(_BATCH_BYTES, max(1, budget // self._ahead - longest))
        self._failure: BaseException | None = None

    def take(self) -> list[Piece] | None:
        """Return the next pieces, once they are there; None after the last.

        What fails is raised again by the next call: nothing is passed over. An interrupt of the
        wait takes nothing away.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._start()
        except BaseException as error:
            self._failure = error
            raise
        if not self._under_way:
            return None
        operation, batch = self._under_way[0]
        operation.wait()
        _compare(batch, operation.checksums)
        self._under_way.popleft()
        return batch

    def _start(self) -> None:
        while len(self._under_way) < self._ahead:
            batch = self._next_batch()
            if not batch:
                break
            items = [(piece.memory, piece.file, piece.offset) for piece in batch]
            checksums = any(piece.checksum is not None for piece in batch)
            operation = self._handle.load_many_async(items, checksums=checksums)
            self._under_way.append((operation, batch))

    def _next_batch(self) -> list[Piece]:
        batch: list[Piece] = []
        length = 0
        for group in self._groups:
            batch += group
            length += sum(piece.length for piece in group)
            if length >= self._batch_bytes or len(batch) >= _PIECES_MAX:
                break
        return batch

    def close(self) -> None:
        """Wait for what is under way: it writes to memory that may be the caller's."""
        for operation, _ in self._under_way:
            operation.cancel()
        for operation, _ in self._under_way:
            with contextlib.suppress(ForebayError):
                operation.wait()
        self._under_way.clear()
        self._groups = iter(())

    def __del__(self) -> None:
        # Of one that was left without being closed, the memory that is read ahead goes with it.
        self.close()

    def __iter__(self) -> Iterator[list[Piece]]:
        while (batch := self.take()) is not None:
            yield batch


def _compare(batch: list[Piece], checksums: list[int] | None) -> None:
    if checksums is None:
        return
    for piece, found in zip(batch, checksums, strict=True):
        if piece.checksum is not None and piece.checksum != found:
            raise MismatchError(
                f"the bytes of tensor {piece.name!r} in {piece.path} aren't those that were saved",
                filename=piece.path,
                operation="load",
            )
