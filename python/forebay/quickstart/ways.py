"""The ways to store and load tensors that are compared: Forebay, and what people use today.

The latter are subjects of the bench.
"""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from forebay.bench.subjects.frameworks import TORCH_TYPES, Safetensors, Torch
from forebay.bench.subjects.plain import Numpy, Python
from forebay.bench.subjects.subject import Settings
from forebay.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.subjects.subject import Timing
    from forebay.bench.tensor import Bytes, Tensor

__all__ = ["Forebay", "Way", "ways"]

_MISSING = "not installed (pip install torch safetensors)"


class Way(Protocol):
    """One way: ``store`` returns when the bytes are on the drive, ``load`` when all are here."""

    title: str

    def clear(self) -> None:
        """Wipe what an earlier load left in memory that the next one uses again."""
        return  # mypy takes a body of words alone for an abstract one

    def store(self, path: str) -> Timing | None:
        """Write all tensors to the drive."""

    def load(self, path: str) -> list[Bytes] | Timing:
        """Read all tensors; return the bytes of each."""


class Forebay(Way):
    """One operation for all tensors, each way; loads go into pinned memory that is used again."""

    title = "forebay"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.handle = Handle()
        self._tensors = tensors
        sizes = (tensor.data.nbytes for tensor in tensors)
        *self._offsets, size = itertools.accumulate(sizes, initial=0)
        # The tensors lie in memory as they do in the file, so whole pages of it land in place.
        self._block = self.handle.empty(size)
        self.clear()

    def clear(self) -> None:
        """Wipe the block."""
        self._block.fill(0)

    def store(self, path: str) -> None:
        """Write all tensors, one behind the other."""
        arrays = (tensor.data for tensor in self._tensors)
        items = zip(arrays, itertools.repeat(path), self._offsets, strict=False)
        self.handle.store_many(items, whole_file=True, durability="data")

    def load(self, path: str) -> list[Bytes]:
        """Read all tensors at once."""
        self.handle.load(self._block, path)
        return [
            self._block[offset : offset + tensor.data.nbytes]
            for offset, tensor in zip(self._offsets, self._tensors, strict=True)
        ]


def ways(tensors: Sequence[Tensor]) -> tuple[Forebay, list[Way], list[str]]:
    """Return Forebay, all ways that can be taken here, and why others can't."""
    forebay = Forebay(tensors)
    settings = Settings()
    found: list[Way] = [forebay, Python(tensors, settings), Numpy(tensors, settings)]
    left_out = []
    try:
        import torch  # noqa: F401
    except (ImportError, OSError, ValueError) as error:
        # What a broken installation of torch raises isn't always an ImportError.
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return forebay, found, [f"torch.save/load and safetensors: torch is {_MISSING}"]
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return forebay, found, [f"torch.save/load and safetensors: torch: {first_line}"]
    if unknown := {tensor.dtype for tensor in tensors} - set(TORCH_TYPES):
        names = ", ".join(sorted(unknown))
        return forebay, found, [f"torch.save/load and safetensors: torch has no type {names}"]
    found.append(Torch(tensors, settings))
    if find_spec("safetensors"):
        found.append(Safetensors(tensors, settings))
    else:
        left_out.append(f"safetensors: {_MISSING}")
    return forebay, found, left_out
