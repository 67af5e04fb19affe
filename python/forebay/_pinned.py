"""The tensors in pinned memory that DeepNVMe's handles gave out, known to the whole process.

DeepSpeed allocates with one handle, asks another whether a slice of that is pinned, and frees by
address. So there is one table for all handles: which ranges of memory are pinned and not yet
freed. An entry goes with the memory, which stays while any array or tensor over it does; being
freed is only a mark, so nothing that is still referenced is ever unmapped.
"""

from __future__ import annotations

import bisect
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

__all__ = ["allocate", "free", "free_at", "is_pinned", "is_pinned_anyhow"]


class _Range:
    """One allocation: its addresses, the memory's owner, and the tensor that was given out."""

    def __init__(self, begin: int, length: int, owner: Any, tensor: Any) -> None:
        self.begin = begin
        self.end = begin + length
        self.owner = weakref.ref(owner, lambda _: _table.drop(self))
        self.tensor = weakref.ref(tensor)


class _Table:
    """Ranges of memory by where they begin; tensors without bytes by what they are."""

    def __init__(self) -> None:
        # Reentrant: memory can go, and tell of it, at any allocation.
        self._lock = threading.RLock()
        self._begins: list[int] = []
        self._ranges: dict[int, _Range] = {}
        self._empty: dict[int, weakref.ref[Any]] = {}

    def add(self, owner: Any, tensor: Any) -> None:
        begin, length = _extent(tensor)
        if length == 0:
            identity = id(tensor)
            self._empty[identity] = weakref.ref(tensor, lambda _: self._empty.pop(identity, None))
            return
        entry = _Range(begin, length, owner, tensor)
        with self._lock:
            if begin not in self._ranges:
                bisect.insort(self._begins, begin)
            self._ranges[begin] = entry

    def drop(self, entry: _Range) -> None:
        with self._lock:
            # The address may be in use again.
            if self._ranges.get(entry.begin) is entry:
                self.pop(entry.begin)

    def pop(self, begin: int) -> _Range | None:
        with self._lock:
            entry = self._ranges.pop(begin, None)
            if entry is not None:
                del self._begins[bisect.bisect_left(self._begins, begin)]
            return entry

    def pop_empty(self, tensor: Any) -> bool:
        return self._empty.pop(id(tensor), None) is not None

    def has(self, tensor: Any) -> bool:
        begin, length = _extent(tensor)
        if length == 0:
            return id(tensor) in self._empty
        with self._lock:
            index = bisect.bisect_right(self._begins, begin) - 1
            return index >= 0 and begin + length <= self._ranges[self._begins[index]].end

    def forget(self) -> None:
        """Forget everything, in a forked child: the pool's memory isn't there."""
        self._lock = threading.RLock()
        self._begins.clear()
        self._ranges.clear()
        self._empty.clear()


_table = _Table()
os.register_at_fork(after_in_child=_table.forget)


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor or a numpy array."""
    return hasattr(value, "dtype") and (
        hasattr(value, "data_ptr") or hasattr(value, "__array_interface__")
    )


def allocate(empty: Callable[..., Any], count: int, example: Any) -> Any:
    """Return a pinned array of the example's kind and type, known to the table.

    ``empty`` is that of a handle or a pool.
    """
    kind = type(example).__name__
    if not _is_array(example):
        raise TypeError(f"example_tensor must be a tensor or a numpy array, not {kind}")
    if hasattr(example, "data_ptr"):
        from forebay import torch

        dtype = torch.parse_dtype(example.dtype)
        memory = empty((count * dtype.itemsize,))
        tensor = torch.tensor_of(memory, dtype, (count,))
    else:
        memory = tensor = empty((count,), dtype=example.dtype)
    _table.add(_root(memory), tensor)
    return tensor


def is_pinned(tensor: Any) -> bool:
    """Return whether all of a tensor is in memory that was given out here and not freed."""
    if not _is_array(tensor):
        raise TypeError(f"tensor must be a tensor or a numpy array, not {type(tensor).__name__}")
    return _on_cpu(tensor) and _table.has(tensor)


def is_pinned_anyhow(tensor: Any) -> bool:
    """Return whether a tensor is pinned, by this process's table or by torch."""
    if is_pinned(tensor):
        return True
    by_torch = getattr(tensor, "is_pinned", None)
    return by_torch is not None and bool(by_torch())


def free(tensor: Any) -> bool:
    """Mark the memory that begins where a tensor does as freed, and empty the tensor."""
    if not is_pinned(tensor):
        return False
    begin, length = _extent(tensor)
    if length == 0:
        _empty_tensor(tensor)
        return _table.pop_empty(tensor)
    return free_at(begin, tensor)


def free_at(begin: int, *views: Any) -> bool:
    """Mark the memory that begins at an address as freed, and empty its tensor and the views."""
    entry = _table.pop(begin)
    if entry is None:
        return False
    for view in (*views, entry.tensor()):
        if view is not None:
            _empty_tensor(view)
    return True


def _empty_tensor(tensor: Any) -> None:
    if hasattr(tensor, "untyped_storage"):
        # Not `set_`, which autograd refuses for parameters, and torch for tensors made in
        # inference mode.
        tensor.data = tensor.data.new_empty(0)
        tensor.forebay_freed = True


def _on_cpu(tensor: Any) -> bool:
    device = getattr(tensor, "device", "cpu")
    return str(getattr(device, "type", device)) == "cpu"


def _extent(tensor: Any) -> tuple[int, int]:
    """Return where an array begins, and its length in bytes."""
    if tensor.nbytes == 0:
        return 0, 0
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr()), int(tensor.nbytes)
    return int(tensor.__array_interface__["data"][0]), int(tensor.nbytes)


def _root(array: np.ndarray[Any, Any]) -> Any:
    """Return the array that every view of this one keeps alive."""
    base = array
    while type(getattr(base, "base", None)) is type(array):
        base = base.base  # type: ignore[assignment]
    return base
