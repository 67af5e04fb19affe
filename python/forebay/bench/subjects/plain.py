"""What Python and numpy bring themselves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from forebay.bench.subjects.subject import Subject, sizes_of

if TYPE_CHECKING:
    from forebay.bench.tensor import Bytes

__all__ = ["Numpy", "Python"]


class Python(Subject):
    """Loads into memory that is used again; most others make their own each time."""

    name = "python"
    title = "open().write/readinto"
    _arrays: list[Bytes] | None = None

    def clear(self) -> None:
        """Have a wiped array for each tensor."""
        import numpy as np

        if self._arrays is None:
            self._arrays = [np.empty(size, np.uint8) for size in sizes_of(self._tensors)]
        for array in self._arrays:
            array.fill(0)

    def store(self, path: str) -> None:
        """Write all tensors."""
        with open(path, "wb") as file:
            file.writelines(tensor.data.data for tensor in self._tensors)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Bytes]:
        """Read all tensors."""
        arrays = self._arrays or []
        with open(path, "rb") as file:
            for array in arrays:
                if file.readinto(array.data) != array.nbytes:
                    message = f"{path} is shorter than the tensors"
                    raise EOFError(message)
        return arrays

    def release(self) -> None:
        """Let go of the arrays."""
        self._arrays = None


class Numpy(Subject):
    """``tofile`` and ``fromfile``."""

    name = "numpy"
    title = "numpy tofile/fromfile"
    package = "numpy"

    def store(self, path: str) -> None:
        """Write all tensors."""
        with open(path, "wb") as file:
            for tensor in self._tensors:
                tensor.data.tofile(file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Bytes]:
        """Read all tensors."""
        import numpy as np

        with open(path, "rb") as file:
            return [np.fromfile(file, np.uint8, size) for size in sizes_of(self._tensors)]
