"""Reads the items that an index asks for, and little else.

The items of a view of a file are runs of bytes at regular distances. Runs that are long, or far
apart, are read one by one, all in one request; short ones that are close together are read with
what lies between them, in pieces of bounded size, and picked out. Pure arithmetic first
(:func:`runs_of`), then the reading.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from forebay._tensor_files.frame import View
    from forebay.handle import Handle

__all__ = ["Runs", "read_runs", "runs_of"]

_GAP_BYTES_MAX = 64 << 10
"""What is read to no use between two runs rather than asking twice: a drive moves that in the time
of one more request."""

_SHORT_BYTES = 1 << 20
"""Runs of this length and more are read one by one: asking for them costs little beside them."""

_PIECE_BYTES = 32 << 20
"""Most memory for what is read to be picked from."""

_ITEMS_PER_REQUEST = 4096
"""Most runs in one request, which takes some memory for each."""


@dataclass(frozen=True)
class Runs:
    """Stretches of a file at regular distances, all of one pattern.

    Attributes
    ----------
    offset : int
        Where the first begins.
    outer : tuple of (int, int)
        How many there are and how far apart, axis by axis.
    inner : tuple of (int, int)
        The same for the items within one; none if it is all wanted.
    item_bytes : int
        Bytes of an item; of the whole run if it is all wanted.
    """

    offset: int
    outer: tuple[tuple[int, int], ...]
    inner: tuple[tuple[int, int], ...]
    item_bytes: int

    @property
    def span_bytes(self) -> int:
        """From the first byte of a run to its last."""
        return self.item_bytes + sum((size - 1) * step for size, step in self.inner)

    def starts(self) -> Iterator[int]:
        """Return where each begins, in the order of the items."""
        steps = (range(0, size * step, step) if step else [0] * size for size, step in self.outer)
        for places in itertools.product(*steps):
            yield self.offset + sum(places)


def runs_of(view: View, item_bytes: int, begin: int) -> Runs:
    """Return the runs that a view of items is.

    Parameters
    ----------
    view : View
        Sizes and strides; strides fall from axis to axis, and no two items are the same.
    item_bytes : int
        Bytes of an item.
    begin : int
        Where the first item of the tensor is in the file.

    Examples
    --------
    >>> from forebay._tensor_files.frame import View
    >>> runs_of(View(8, (2, 4), (1_000_000, 1)), 2, 100)
    Runs(offset=116, outer=((2, 2000000),), inner=(), item_bytes=8)
    """
    axes = [
        (size, stride * item_bytes)
        for size, stride in zip(view.sizes, view.strides, strict=True)
        if size != 1
    ]
    run = item_bytes
    while axes and axes[-1][1] == run:
        run *= axes.pop()[0]
    inner: list[tuple[int, int]] = []
    span = run
    while axes and span < _SHORT_BYTES and axes[-1][1] - span <= _GAP_BYTES_MAX:
        size, step = axes.pop()
        inner.insert(0, (size, step))
        span += (size - 1) * step
    return Runs(begin + view.offset * item_bytes, tuple(axes), tuple(inner), run)


def read_runs(handle: Handle, file: int, runs: Runs, result: Any, length: int) -> None:
    """Read the items of runs of a file, one after the other, into bytes.

    Parameters
    ----------
    handle : Handle
        What reads.
    file : int
        The file's descriptor.
    runs : Runs
        The items.
    result : array
        Where to. It is in the host's memory, unless the runs are wanted as a whole.
    length : int
        Bytes of all items.
    """
    if length == 0:
        return
    if runs.inner:
        _pick(handle, file, runs, result)
        return
    items = (
        (result[index * runs.item_bytes : (index + 1) * runs.item_bytes], file, start)
        for index, start in enumerate(runs.starts())
    )
    while batch := list(itertools.islice(items, _ITEMS_PER_REQUEST)):
        handle.load_many(batch)


def _pick(handle: Handle, file: int, runs: Runs, result: np.ndarray[Any, Any]) -> None:
    """Read runs with what lies between their items, and copy the items out."""
    (size, step), *rest = runs.inner
    row_bytes = runs.item_bytes + sum((extent - 1) * stride for extent, stride in rest)
    row_items = math.prod(extent for extent, _ in rest) * runs.item_bytes
    rows_per_piece = max(1, min(size, (_PIECE_BYTES - row_bytes) // step + 1))
    scratch = handle.empty((rows_per_piece - 1) * step + row_bytes)
    done = 0
    for start in runs.starts():
        for first in range(0, size, rows_per_piece):
            rows = min(rows_per_piece, size - first)
            piece = scratch[: (rows - 1) * step + row_bytes]
            handle.load(piece, file, start + first * step)
            wanted = _strided(piece, [(rows, step), *rest], runs.item_bytes)
            target = result[done : done + rows * row_items]
            target.reshape(wanted.shape)[...] = wanted
            done += rows * row_items


def _strided(
    memory: np.ndarray[Any, Any], axes: list[tuple[int, int]], item_bytes: int
) -> np.ndarray[Any, Any]:
    import numpy as np

    shape = [*(size for size, _ in axes), item_bytes]
    strides = [*(step for _, step in axes), 1]
    return np.lib.stride_tricks.as_strided(memory, shape, strides, writeable=False)
