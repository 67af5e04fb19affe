"""Torch tensors in checkpoints: what they are, where their bytes are, how they come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._tensor_files.rooms import Room
from forebay.checkpoint.arrays import Plain, shape_of, shares_elements
from forebay.errors import InvalidBufferError, InvalidInputError, MismatchError
from forebay.torch.frame import FRAME
from forebay.torch.tensors import as_bytes, tensor_of, view_over

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np

__all__ = ["TorchState"]

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""What files call torch's types."""

_NAMES = {name: own for own, name in _DTYPES.items()}


class TorchState:
    """Torch's tensors. Parameters are saved as tensors, whatever their gradients."""

    name = "torch"

    def plain(self, tensor: torch.Tensor) -> Plain:
        """Return what a tensor is."""
        if hasattr(tensor, "to_local"):
            raise InvalidInputError("a distributed tensor: save its .to_local()")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise InvalidInputError(
                f"a tensor of layout {tensor.layout} and type {tensor.dtype} has no plain values: "
                "save its parts"
            )
        if tensor.is_meta:
            raise InvalidInputError("a tensor on the device meta has no values")
        own = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        name = _DTYPES.get(own)
        if name is None:
            return Plain("U8", (*shape, tensor.element_size()), own)
        return Plain(name, shape, None)

    def identity(self, tensor: torch.Tensor) -> Hashable:
        """Return its place in memory and its layout."""
        if tensor.numel() == 0:
            return id(tensor)
        layout = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return ("torch", str(tensor.device), layout, tensor.is_conj(), tensor.is_neg())

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it, or a copy in C order, where the core takes its bytes from."""
        plain = tensor.detach()
        if not FRAME.reaches(plain.device):
            plain = plain.cpu()
        return plain.resolve_conj().resolve_neg().contiguous()

    def parse_device(self, device: Any) -> torch.device | None:
        """Return a device as torch has it, or None for the CPU."""
        return FRAME.parse_device(device)

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor on a device that the core doesn't reach."""
        return tensor.to(device)

    def reaches(self, device: torch.device) -> bool:
        """Return whether the core moves bytes to a device."""
        return FRAME.reaches(device)

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device that a tensor is on, if the core reaches it."""
        return tensor.device if FRAME.reaches(tensor.device) else None

    def room(self, tensor: torch.Tensor) -> Room | None:
        """Return a tensor's memory, if its bytes are its values in C order."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        memory = as_bytes(tensor.detach())
        return Room(memory, tensor.data_ptr(), memory.numel())

    def empty(self, length: int, device: torch.device) -> torch.Tensor:
        """Return bytes on a device."""
        return FRAME.empty(length, device)

    def clone(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a copy of bytes on a device."""
        return FRAME.clone(memory)

    def build(self, memory: np.ndarray[Any, Any] | torch.Tensor, plain: Plain) -> torch.Tensor:
        """Return a tensor over bytes, of the host or of a device."""
        dtype = getattr(torch, plain.own_dtype or _NAMES.get(plain.dtype, ""), None)
        if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
            raise MismatchError(
                f"torch has no type for tensors of {plain.own_dtype or plain.dtype}"
            )
        shape = shape_of(plain, dtype.itemsize)
        if isinstance(memory, torch.Tensor):
            return view_over(memory, dtype, shape)
        is_aligned = memory.size == 0 or memory.ctypes.data % dtype.itemsize == 0
        return tensor_of(memory if is_aligned else memory.copy(), dtype, shape)

    def refuse_target(self, tensor: torch.Tensor) -> None:
        """Raise an error if a tensor's elements share memory, so that they can't be filled."""
        if shares_elements(tensor.shape, tensor.stride(), 1):
            raise InvalidBufferError(
                "elements of the tensor to load into share memory, as of an expanded one"
            )

    def fill(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Copy values to a tensor, on any device."""
        tensor.detach().copy_(source)
