"""The tensors that are compared with, in memory that all processes share.

One process makes them; the others map the same memory, so that a dozen subjects hold one copy. A
subject that wrote to them would change its own copy only.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from forebay.bench.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Layout", "SharedTensors", "make", "write_safetensors"]

_ALIGNMENT = 64
"""Where allocators put arrays: at multiples of a cache line."""
_CHUNK_BYTES = 64 << 20
_GRAIN = 16
"""Sizes that any type's elements divide."""
_COLUMNS = 1024


@dataclass(frozen=True)
class Layout:
    """Where each tensor is: its size and its place in the shared memory."""

    sizes: list[int]
    places: list[int]
    memory_bytes: int

    @classmethod
    def of(cls, sizes: Sequence[int], total: int) -> Layout:
        """Take sizes in turn until they have ``total`` bytes, the last one cut to what is left."""
        taken: list[int] = []
        places: list[int] = []
        left, place = total, 0
        while left > 0:
            size = min(left, sizes[len(taken) % len(sizes)])
            taken.append(size)
            places.append(place)
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
            left -= size
        return cls(taken, places, max(place, 1))

    @classmethod
    def split(cls, total: int, count: int) -> Layout:
        """Share ``total`` bytes among ``count`` tensors, whole elements but for the last one's."""
        ends = [total * index // count // _GRAIN * _GRAIN for index in range(count)]
        sizes = [end - start for start, end in pairwise([*ends, total])]
        return cls.of(sizes, total)


def make(layout: Layout) -> int:
    """Make random bytes; return the descriptor of the memory."""
    import numpy as np

    number = os.memfd_create("forebay-bench")
    os.ftruncate(number, layout.memory_bytes)
    # Random bytes are values too, NaNs with payloads among them: they must come back as they are.
    random = np.random.default_rng(2)
    with mmap.mmap(number, layout.memory_bytes) as memory:
        for start in range(0, layout.memory_bytes, _CHUNK_BYTES):
            end = min(start + _CHUNK_BYTES, layout.memory_bytes)
            memory[start:end] = random.bytes(end - start)
    return number


class SharedTensors:
    """The tensors in a process that uses them."""

    def __init__(self, number: int, layout: Layout) -> None:
        import numpy as np

        self._memory = mmap.mmap(number, layout.memory_bytes, access=mmap.ACCESS_COPY)
        whole = np.frombuffer(self._memory, np.uint8)
        self.tensors = []
        for index, (size, place) in enumerate(zip(layout.sizes, layout.places, strict=True)):
            dtype, shape = _type_of(size)
            data = whole[place : place + size]
            self.tensors.append(Tensor(f"layers.{index}.weight", dtype, shape, data))

    def let_go(self) -> None:
        """Take the pages out of this process's resident memory; they stay with the others."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def _type_of(size: int) -> tuple[str, tuple[int, ...]]:
    if size % (4 * _COLUMNS) == 0:
        return "F32", (size // (4 * _COLUMNS), _COLUMNS)
    return ("F32", (size // 4,)) if size % 4 == 0 else ("U8", (size,))


def write_safetensors(path: str, tensors: Sequence[Tensor]) -> None:
    """Write a safetensors file for subjects that only load, and sync it."""
    import json

    header: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(tensor.data.data for tensor in tensors)
        file.flush()
        os.fsync(file.fileno())
