"""torch, as tensor files need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._tensor_files.frame import NAMES, View
from forebay.errors import InvalidInputError, TensorFileError, UnsupportedError
from forebay.torch.tensors import parse_dtype, tensor_of, view_over

if TYPE_CHECKING:
    import numpy as np

__all__ = ["FRAME", "dtype_code", "find_dtype_code", "packed"]

_TYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in NAMES.items() if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def find_dtype_code(dtype: torch.dtype) -> str | None:
    """Return what the format calls a type, if it has it."""
    return _CODES.get(dtype)


def dtype_code(dtype: torch.dtype) -> str:
    """Return what the format calls a type."""
    code = find_dtype_code(dtype)
    if code is None:
        raise InvalidInputError(
            f"the format has no type {dtype}: convert it to one of {', '.join(NAMES.values())}"
        )
    return code


def packed(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that torch has for one of the format: two items of F4 are one of torch's."""
    if dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise UnsupportedError(
            f"torch has two items of F4 in one, and the last extent of shape {list(shape)} is odd"
        )
    return (*shape[:-1], shape[-1] // 2)


class _Torch:
    title = "torch"

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        self._dtype(dtype)
        packed(dtype, shape)

    def over(
        self, memory: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        kind = self._dtype(dtype)
        shape = packed(dtype, shape)
        if memory.size == 0:
            return torch.empty(shape, dtype=kind, device="cpu")
        return tensor_of(memory, kind, shape)

    def view(self, dtype: str, shape: tuple[int, ...], index: Any) -> View | None:
        if dtype == "F4":
            raise UnsupportedError("slices of F4 aren't taken: load the tensor, and slice that")
        # A tensor without memory answers as one with it would, errors included.
        whole = torch.empty(shape, dtype=self._dtype(dtype), device="meta")
        try:
            part = whole[index]
        except (NotImplementedError, RuntimeError):
            # How much a mask picks shows with memory only.
            return None
        if part is not whole and not part._is_view():  # noqa: SLF001 (there is no other way to ask)
            return None
        return View(int(part.storage_offset()), tuple(part.shape), tuple(part.stride()))

    def parse_device(self, device: Any) -> torch.device | None:
        if device is None or device == "cpu":
            return None
        found: torch.device | None = None
        if isinstance(device, str | int):
            try:
                found = torch.device(device)
            except (RuntimeError, OverflowError):
                found = None
        if found is None or found.type in {"cpu", "meta"}:
            raise TensorFileError(
                f'device {device!r} is invalid: write "cpu", "cuda", "cuda:1" or the number of a '
                "GPU"
            )
        return found

    def move(self, array: torch.Tensor, device: Any, code: str) -> torch.Tensor:
        # Cast there: devices are quicker at it, and the host needs no room for it.
        return array.to(device).to(self._dtype(code))

    def reaches(self, device: torch.device) -> bool:
        # AMD's are called cuda as well.
        return device.type == "cuda" and torch.version.hip is None

    def empty(self, length: int, device: torch.device) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, device=device)

    def clone(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.clone()

    def typed(self, memory: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return view_over(memory, self._dtype(dtype), packed(dtype, shape))

    def cast(self, array: torch.Tensor, code: str) -> torch.Tensor:
        return array.to(self._dtype(code))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def code_of(self, dtype: Any) -> str:
        return dtype_code(parse_dtype(dtype))

    @staticmethod
    def _dtype(code: str) -> torch.dtype:
        kind = _TYPES.get(code)
        if kind is None:
            raise UnsupportedError(f"torch {torch.__version__} has no type for {code}")
        return kind


FRAME = _Torch()
"""torch."""
