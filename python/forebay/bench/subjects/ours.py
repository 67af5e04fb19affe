"""Forebay: from and into pinned memory of its pool, or memory as the allocator gives it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.subject import Settings, Subject, pieces_of, sizes_of
from forebay.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.tensor import Bytes, Tensor

__all__ = ["Ordinary", "Pinned"]


class Pinned(Subject):
    """Tensors lie in pinned memory as they do in the file, so whole pages of it land in place."""

    name = "forebay"
    title = "forebay"
    package = "forebay"

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._handle = Handle()
        self._block: Any = None

    def setup(self, directory: str) -> str:  # noqa: ARG002 (the same everywhere)
        """Return the engine."""
        return f"engine {self._handle.stats()['engine']}, pinned memory"

    def fill(self) -> bool:
        """Copy the tensors into pinned memory."""
        self.clear()
        for piece, tensor in zip(pieces_of(self._block, self._tensors), self._tensors, strict=True):
            piece[:] = tensor.data
        return True

    def store(self, path: str) -> None:
        """Write the block as one operation."""
        self._handle.store(self._block, path, durability="data")

    def clear(self) -> None:
        """Have a wiped block."""
        if self._block is None:
            self._block = self._handle.empty(sum(sizes_of(self._tensors)))
        self._block.fill(0)

    def load(self, path: str) -> list[Bytes]:
        """Read the block as one operation."""
        self._handle.load(self._block, path)
        return pieces_of(self._block, self._tensors)

    def release(self) -> None:
        """Let go of the block."""
        self._block = None


class Ordinary(Subject):
    """Tensors lie where the allocator puts them, off by 64 bytes from a page as often as not."""

    name = "forebay-ordinary"
    title = "forebay, ordinary memory"
    package = "forebay"

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._handle = Handle()
        self._offsets = list(itertools.accumulate(sizes_of(tensors), initial=0))[:-1]
        self._arrays: list[Bytes] = []

    def setup(self, directory: str) -> str:  # noqa: ARG002 (the same everywhere)
        """Return the engine."""
        return f"engine {self._handle.stats()['engine']}, memory of the allocator"

    def store(self, path: str) -> None:
        """Write all tensors as one operation."""
        arrays = (tensor.data for tensor in self._tensors)
        items = zip(arrays, itertools.repeat(path), self._offsets, strict=False)
        self._handle.store_many(items, whole_file=True, durability="data")

    def clear(self) -> None:
        """Have a wiped array for each tensor."""
        import numpy as np

        if not self._arrays:
            self._arrays = [np.empty(size, np.uint8) for size in sizes_of(self._tensors)]
        for array in self._arrays:
            array.fill(0)

    def load(self, path: str) -> list[Bytes]:
        """Read all tensors as one operation."""
        paths = itertools.repeat(path)
        self._handle.load_many(zip(self._arrays, paths, self._offsets, strict=False))
        return self._arrays

    def release(self) -> None:
        """Let go of the arrays."""
        self._arrays = []
