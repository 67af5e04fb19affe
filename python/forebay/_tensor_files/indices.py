"""The indices that slices of files take in numpy: those of ``safetensors``, and no others.

That is less than numpy's own: integers, and slices that step forward and end within the tensor.
What it refuses is refused here as well, so that code which relies on either works on both.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

from forebay.errors import TensorFileError

__all__ = ["plain_indices"]


def plain_indices(shape: tuple[int, ...], index: Any) -> tuple[int | slice, ...]:
    """Return an index as one entry for each leading axis, checked against the shape."""
    entries = _entries(shape, index)
    if len(entries) > len(shape):
        raise TensorFileError(
            f"the index {index!r} has {len(entries)} entries for a tensor of shape {list(shape)}"
        )
    return tuple(
        _entry(extent, axis, entry)
        for axis, (extent, entry) in enumerate(zip(shape, entries, strict=False))
    )


def _entries(shape: tuple[int, ...], index: Any) -> list[Any]:
    if isinstance(index, list):
        if index:
            raise TensorFileError("lists of indices aren't taken: load the tensor and index that")
        return [slice(0, 0)]
    entries = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if len(places) > 1:
        raise TensorFileError("an index can have one ellipsis (...) only")
    for place in places:
        between = len(shape) - (len(entries) - 1)
        entries[place : place + 1] = [slice(None)] * max(between, 0)
    return entries


def _entry(extent: int, axis: int, entry: Any) -> int | slice:
    if isinstance(entry, slice):
        return _slice(extent, axis, entry)
    try:
        number = operator.index(entry)
    except TypeError:
        number = None
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise TensorFileError(
            f"index {entry!r} at axis {axis} isn't an integer, a slice or an ellipsis"
        )
    if not -extent <= number < extent:
        _beyond(extent, axis, number)
    return number


def _slice(extent: int, axis: int, entry: slice) -> slice:
    start = 0 if entry.start is None else operator.index(entry.start)
    stop = extent if entry.stop is None else operator.index(entry.stop)
    step = 1 if entry.step is None else operator.index(entry.step)
    if step <= 0:
        raise TensorFileError(f"the step of a slice is {step} at axis {axis}, it must be positive")
    if start < 0 or stop < 0 or start > stop:
        raise TensorFileError(
            f"a slice goes from {start} to {stop} at axis {axis}: count both from the front, "
            "the smaller first"
        )
    if start >= extent:
        _beyond(extent, axis, start)
    if stop > extent:
        _beyond(extent, axis, stop - 1)
    return slice(start, stop, step)


def _beyond(extent: int, axis: int, number: int) -> NoReturn:
    raise TensorFileError(f"index {number} is out of bounds at axis {axis}, of size {extent}")
