"""What a framework does in its own way: types, arrays over memory, indexing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forebay.errors import TensorFileError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["BITS", "NAMES", "Frame", "View", "byte_count", "frame_for"]

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""The types of the format, in the order in which files have them, last first; bits of an item."""

NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""What torch, and numpy with ml_dtypes, call the types of the format; older ones lack some."""

_PYTORCH = frozenset({"pt", "torch", "pytorch"})
_NUMPY = frozenset({"np", "numpy"})
_OTHERS = frozenset({"tf", "tensorflow", "jax", "flax", "mlx", "paddle"})


@dataclass(frozen=True)
class View:
    """Where the items that an index asks for are: counted in items, not bytes."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Frame(Protocol):
    """A framework, as far as tensor files need one."""

    title: str

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise an error that says what to do if it has no such type, or not of this shape."""

    def over(self, memory: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> Any:
        """Return an array over bytes, which stay as long as the array or a view of it."""

    def view(self, dtype: str, shape: tuple[int, ...], index: Any) -> View | None:
        """Return which items an index asks for, or None if that is no plain view."""

    def parse_device(self, device: Any) -> Any | None:
        """Return a device as the framework has it, or None for the memory of the host."""

    def move(self, array: Any, device: Any, code: str) -> Any:
        """Return the array on a device, as a type of the format, in memory of its own."""

    def reaches(self, device: Any) -> bool:
        """Whether bytes go to a device by the core: what follows is there then."""

    def empty(self, length: int, device: Any) -> Any:
        """Return memory on a device: bytes that can be sliced, and that the core can load into."""

    def clone(self, memory: Any) -> Any:
        """Return a copy of bytes, on their device."""

    def typed(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return an array over bytes on a device, as `over` does in the host's memory."""

    def cast(self, array: Any, code: str) -> Any:
        """Return an array as a type of the format, on its device."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy items into another array of the same shape, converting them to its type."""

    def code_of(self, dtype: Any) -> str:
        """Return what the format calls one of the framework's types, however it is written."""


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor has in a file."""
    return math.prod(shape) * BITS[dtype] // 8


def frame_for(framework: str) -> Frame:
    """Return the framework that a name stands for, as ``safetensors`` has them."""
    if not isinstance(framework, str):
        raise TypeError(f"framework must be a text, not {type(framework).__name__}")
    if framework in _PYTORCH:
        from forebay.torch.frame import FRAME as TORCH

        return TORCH
    if framework in _NUMPY:
        from forebay.numpy.frame import FRAME as NUMPY

        return NUMPY
    known = 'they are "pt" and "np" here'
    if framework in _OTHERS:
        raise TensorFileError(f"framework {framework!r} isn't there: {known}")
    raise TensorFileError(f"framework {framework!r} is invalid: {known}")
