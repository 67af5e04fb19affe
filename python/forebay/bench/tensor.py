"""A tensor as comparisons have it: bytes with a name, a type and a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]

__all__ = ["Tensor"]


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, its type as safetensors calls it, its shape and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes
