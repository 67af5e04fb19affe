"""numpy, as tensor files need it."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay._tensor_files.frame import NAMES, View, byte_count
from forebay._tensor_files.indices import plain_indices
from forebay.errors import InvalidInputError, TensorFileError, UnsupportedError
from forebay.memory import parse_dtype

__all__ = ["FRAME", "dtype_code"]

_TYPES = {code: name for code, name in NAMES.items() if code != "F4"}
"""What numpy, or ml_dtypes for it, calls the types of the format."""

_CODES = {name: code for code, name in _TYPES.items()}


def dtype_code(dtype: np.dtype[Any]) -> str:
    """Return what the format calls a type."""
    code = _CODES.get(dtype.name)
    if code is None:
        raise InvalidInputError(
            f"the format has no type {dtype.name!r}: convert it to one of {', '.join(_CODES)}"
        )
    return code


class _Numpy:
    title = "numpy"

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:  # noqa: ARG002 (any will do)
        self._dtype(dtype)

    def over(self, memory: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> Any:
        kind = self._dtype(dtype)
        return memory[: byte_count(dtype, shape)].view(kind).reshape(shape)

    def view(self, dtype: str, shape: tuple[int, ...], index: Any) -> View | None:
        item = self._dtype(dtype).itemsize
        indices = plain_indices(shape, index)
        # An array of one item that is said to have the shape: only addresses are computed.
        strides = [item] * len(shape)
        for axis in range(len(shape) - 1, 0, -1):
            strides[axis - 1] = strides[axis] * max(shape[axis], 1)
        origin = np.empty(1, f"V{item}")
        whole = np.lib.stride_tricks.as_strided(origin, shape, strides)
        # With an ellipsis, one item is an array as well.
        place = (*indices, ...)
        part = whole[place]
        offset = part.__array_interface__["data"][0] - origin.__array_interface__["data"][0]
        return View(offset // item, part.shape, tuple(step // item for step in part.strides))

    def parse_device(self, device: Any) -> None:
        if device not in {None, "cpu"}:
            raise _no_device(device)

    def move(self, array: Any, device: Any, code: str) -> Any:  # noqa: ARG002 (no device)
        raise _no_device(device)

    def reaches(self, device: Any) -> bool:
        raise _no_device(device)

    def empty(self, length: int, device: Any) -> Any:  # noqa: ARG002 (no device)
        raise _no_device(device)

    def clone(self, memory: Any) -> Any:
        return memory.copy()

    def typed(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return self.over(memory, dtype, shape)

    def cast(self, array: Any, code: str) -> Any:
        return array.astype(self._dtype(code))

    def copy(self, target: Any, source: Any) -> None:
        np.copyto(target, source, casting="unsafe")

    def code_of(self, dtype: Any) -> str:
        return dtype_code(parse_dtype(dtype))

    @staticmethod
    def _dtype(code: str) -> np.dtype[Any]:
        name = _TYPES.get(code)
        if name is None:
            raise UnsupportedError(
                f"numpy has no type for {code}: load it with forebay.torch, if torch has one"
            )
        return parse_dtype(name)


def _no_device(device: Any) -> TensorFileError:
    return TensorFileError(f'numpy has no device {device!r}, only "cpu"')


FRAME = _Numpy()
"""numpy."""
