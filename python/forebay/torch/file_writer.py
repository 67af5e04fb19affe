"""A file to give to ``torch.save``, with the interface of DeepSpeed's ``FastFileWriter``.

What becomes of the bytes is in :mod:`forebay._staged_file`; here is what torch and DeepSpeed call.
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from forebay._arguments import parse_index, parse_switch, parse_target
from forebay._staged_file import FileStream
from forebay.deepnvme import aio_handle
from forebay.errors import ForebayWarning, InvalidInputError
from forebay.handle import Handle
from forebay.memory import empty
from forebay.torch import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

__all__ = ["FastFileWriter", "FastFileWriterConfig"]

_BUFFER_BYTES = 8 << 20
"""Of each of the two buffers, where none is given: blocks in flight while others are filled."""

_NO_DESCRIPTOR = -1

_CONFIG_FIELDS = (
    "dnvme_handle",
    "pinned_tensor",
    "double_buffer",
    "num_parallel_writers",
    "writer_rank",
)
"""What is read of a configuration, of whatever class."""


@dataclass
class FastFileWriterConfig:
    """How a writer works: the fields of DeepSpeed's class of that name, none required.

    Attributes
    ----------
    dnvme_handle : forebay.Handle or aio_handle, optional
        What stores the bytes; by default, a handle of the writer's own. Of a handle that isn't
        Forebay's, the settings are taken.
    pinned_tensor : torch.Tensor, optional
        Host memory to collect bytes in; by default, 16 MiB from the pool.
    double_buffer : bool
        Fill one half of it while the other is stored.
    num_parallel_writers, writer_rank : int
        Of the storages given to :meth:`FastFileWriter.save_torch_storage_object_list`, write the
        part that is this writer's.
    global_rank : int
        For whoever reads the configuration.
    """

    dnvme_handle: Any = None
    pinned_tensor: torch.Tensor | None = None
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter:
    """Writes a file that takes the old one's place, whole, when it is closed.

    Closing makes it durable: data, name and all. A writer that is dropped, fails, or is left with
    an exception leaves the old file as it was, with its mode; a killed program does too, and what
    it leaves beside the file is removed by the next writer of that file. Memory is fixed.

    Parameters
    ----------
    file_path : path
        The file.
    config : FastFileWriterConfig, optional
        This one's or DeepSpeed's.

    Notes
    -----
    A full disk, or whatever else goes wrong on the way, is raised by ``flush``, which
    ``torch.save`` calls at its end, and by ``close``; ``write`` itself doesn't, since torch would
    raise another error in its place.

    Examples
    --------
    >>> import forebay, tempfile, torch
    >>> path = tempfile.mktemp()
    >>> with forebay.FastFileWriter(path) as writer:
    ...     torch.save({"weights": torch.arange(5)}, writer)
    >>> torch.load(path)
    {'weights': tensor([0, 1, 2, 3, 4])}
    """

    def __init__(self, file_path: Any, config: Any = None) -> None:
        config = FastFileWriterConfig() if config is None else config
        if not all(hasattr(config, name) for name in _CONFIG_FIELDS):
            raise TypeError(f"config must be a FastFileWriterConfig, not {type(config).__name__}")
        path = parse_target(file_path)
        if isinstance(path, int):
            raise TypeError("file_path must be a path: an open file can't be replaced")
        self._path = path
        self._ranks = _ranks(config)
        handle, owns_handle = _handle_of(config.dnvme_handle)
        buffers = _buffers(
            config.pinned_tensor, parse_switch(config.double_buffer, "double_buffer")
        )
        self._stream = FileStream(path, handle, buffers, owns_handle)
        self._finalizer = weakref.finalize(self, _drop, self._stream, path)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a writer can't be copied: make one in each process")

    def write(self, buffer: Any) -> int:
        """Take bytes, or anything contiguous with the buffer protocol; return how many."""
        return self._stream.write(buffer)

    def save_torch_storage_object_list(
        self, storage_obj_list: Iterable[Any], save_size: bool
    ) -> int:
        """Write storages one after the other, and return how many bytes were written.

        Parameters
        ----------
        storage_obj_list : iterable
            Storages, or pairs of an untyped storage and its type. They may be on any device.
        save_size : bool
            Whether each comes after its number of items, 8 bytes in the machine's order.
        """
        with_sizes = parse_switch(save_size, "save_size")
        pieces = [
            piece for item in storage_obj_list for piece in _pieces(*_storage(item), with_sizes)
        ]
        count, rank = self._ranks
        parts = _share(pieces, count, rank) if count > 1 else iter(pieces)
        return sum(self._stream.write(part.cpu().numpy()) for part in parts)

    def flush(self) -> None:
        """Wait for what is on its way, and raise what went wrong so far."""
        self._stream.flush()

    def close(self) -> None:
        """Store the rest, make it durable, and put the file in its place.

        Raises
        ------
        OSError
            It couldn't be written; the old file is as it was, unless it was only the new one's name
            that couldn't be made durable.
        ForebayError
            A write was interrupted, or this process isn't the one that made the writer.
        """
        self._finalizer.detach()
        self._stream.finish()

    def fileno(self) -> int:
        """Return -1, by which torch writes through :meth:`write` and not around it."""
        return _NO_DESCRIPTOR

    def file_path(self) -> str:
        """Return the file's path, as given."""
        return self._path

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._stream.closed

    def __enter__(self) -> FastFileWriter:  # noqa: PYI034 (typing.Self is in 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        self._finalizer.detach()
        self._stream.discard()
        # An interrupt of a write is told as itself, not as what it did to the file, nor as what
        # torch made of it.
        failure = self._stream.failure
        if failure is None or kind in {type(failure), self._stream.interruption}:
            return
        if self._stream.interruption is KeyboardInterrupt:
            raise KeyboardInterrupt from value
        raise failure from value


def _drop(stream: FileStream, path: str) -> None:
    process = stream.process
    stream.discard()
    if process == os.getpid():
        warnings.warn(
            f"a FastFileWriter was dropped without close(): {path} is as it was",
            ForebayWarning,
            stacklevel=2,
        )


def _handle_of(given: Any) -> tuple[Handle, bool]:
    """Return the handle to use, and whether it is the writer's own."""
    if given is None:
        return Handle(), True
    if isinstance(given, Handle):
        return given, False
    if isinstance(given, aio_handle):
        return given._handle, False  # noqa: SLF001
    if not hasattr(given, "get_block_size"):
        raise TypeError(f"dnvme_handle must be a handle, not {type(given).__name__}")
    return Handle(
        block_size=given.get_block_size(),
        queue_depth=given.get_queue_depth(),
        intra_op_parallelism=given.get_intra_op_parallelism(),
    ), True


def _buffers(given: Any, double: bool) -> list[Any]:
    if given is None:
        return [empty(_BUFFER_BYTES) for _ in range(1 + double)]
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"pinned_tensor must be a torch tensor, not {type(given).__name__}")
    if given.device.type != "cpu":
        raise InvalidInputError(f"pinned_tensor is on {given.device}: give one in host memory")
    memory = as_bytes(given).numpy()
    count = 1 + (double and len(memory) > 1)
    if len(memory) < count:
        raise InvalidInputError("pinned_tensor is empty: give one with bytes, or none")
    half = len(memory) // count
    return [memory[index * half : (index + 1) * half] for index in range(count)]


def _ranks(config: Any) -> tuple[int, int]:
    count = parse_index(config.num_parallel_writers, "num_parallel_writers")
    rank = parse_index(config.writer_rank, "writer_rank")
    if not 0 <= rank < count:
        raise InvalidInputError(
            f"writer_rank is {rank}, of {count} writers it can be 0 to {count - 1}"
        )
    return count, rank


def _storage(item: Any) -> tuple[torch.UntypedStorage, torch.dtype]:
    if isinstance(item, tuple):
        storage, dtype = item
    else:
        storage, dtype = item, getattr(item, "dtype", torch.uint8)
    if isinstance(storage, torch.storage.TypedStorage):
        storage = storage._untyped_storage  # noqa: SLF001
    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError(f"a storage or (storage, dtype) is needed, not {type(item).__name__}")
    return storage, dtype


def _pieces(
    storage: torch.UntypedStorage, dtype: torch.dtype, with_size: bool
) -> Iterator[torch.Tensor]:
    """Return the bytes to write for a storage, as tensors."""
    if with_size:
        yield as_bytes(torch.tensor([storage.nbytes() // dtype.itemsize], dtype=torch.int64))
    yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _share(pieces: list[torch.Tensor], count: int, rank: int) -> Iterator[torch.Tensor]:
    """Return one of ``count`` shares of the pieces' bytes; the first ones have the odd bytes."""
    total = sum(piece.numel() for piece in pieces)
    each, odd = divmod(total, count)
    begin = each * rank + min(rank, odd)
    end = begin + each + (rank < odd)
    ends = itertools.accumulate(piece.numel() for piece in pieces)
    for piece, piece_end in zip(pieces, ends, strict=True):
        piece_begin = piece_end - piece.numel()
        first, last = max(begin, piece_begin), min(end, piece_end)
        if first < last:
            yield piece[first - piece_begin : last - piece_begin]
