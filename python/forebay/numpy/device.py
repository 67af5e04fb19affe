"""Arrays in a device's memory that are loaded into, known by the CUDA array interface."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay._tensor_files.rooms import Room
from forebay.errors import InvalidInputError
from forebay.numpy.frame import dtype_code

__all__ = ["DeviceArray"]


class DeviceArray:
    """Such an array. Version 3 of the interface is described in the documentation of Numba."""

    def __init__(self, array: Any) -> None:
        interface = array.__cuda_array_interface__
        self._array = array
        self._dtype = np.dtype(interface["typestr"])
        self._address, self._is_read_only = interface["data"]
        self._strides = interface.get("strides")
        # jax doesn't say in this interface that its arrays can't be changed.
        self._is_read_only |= type(array).__module__.startswith("jax")
        self.shape = tuple(interface["shape"])

    def problem(self, dtype: str) -> str | None:
        """Return why it can't be loaded into from a type of the format, if it can't."""
        if self._is_read_only:
            return "is read-only: load into a copy"
        try:
            own = dtype_code(self._dtype)
        except InvalidInputError:
            own = self._dtype.str
        if own != dtype:
            return f"is of {own} on a device, and of {dtype} in the file: load into one of that"
        if not self._is_contiguous():
            return "isn't contiguous, on a device: load into one that is"
        return None

    def room(self) -> Room:
        """Return its memory."""
        length = int(np.prod(self.shape, dtype=np.int64)) * self._dtype.itemsize
        return Room(self._array, self._address, length)

    def _is_contiguous(self) -> bool:
        if self._strides is None or 0 in self.shape:
            return True
        step = self._dtype.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True
