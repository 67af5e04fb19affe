"""Casts while loading: what they apply to, and what they take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from forebay._tensor_files.frame import byte_count
from forebay.errors import InvalidInputError

if TYPE_CHECKING:
    from forebay._tensor_files.frame import Frame

__all__ = ["cast_code", "padded", "parse_cast"]

_ALIGNMENT_BYTES = 64
"""Where tensors that were cast begin: a cache line, as torch and numpy have it."""

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""What a cast applies to, and what it can give. Smaller floats come with scales, without which
they mean nothing."""


def parse_cast(frame: Frame, dtype: Any) -> str:
    """Return what the format calls the type that floats are to be cast to.

    Raises
    ------
    InvalidInputError
        It isn't one of float16, bfloat16, float32 and float64.
    """
    code = frame.code_of(dtype)
    if code not in _FLOATS:
        raise InvalidInputError(
            f"dtype is {dtype}: floats can be cast to float16, bfloat16, float32 and float64"
        )
    return code


def cast_code(stored: str, target: str | None) -> str:
    """Return the type that a stored one is handed out as."""
    return stored if target is None or stored not in _FLOATS else target


def padded(code: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes beside others."""
    return math.ceil(byte_count(code, shape) / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
