"""Torch tensors in pinned memory, and as bytes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forebay._forebay import notice_cuda
from forebay.errors import InvalidBufferError, InvalidInputError
from forebay.memory import dtype_name

if TYPE_CHECKING:
    from forebay._forebay import PinnedBuffer

__all__ = ["as_bytes", "parse_dtype", "tensor_of", "tensor_over", "view_over"]


def parse_dtype(dtype: Any) -> torch.dtype:
    """Return the torch type for a name, a numpy type or a torch type."""
    name = dtype_name(np.dtype(dtype) if isinstance(dtype, type) else dtype)
    parsed = getattr(torch, name, None)
    if not isinstance(parsed, torch.dtype):
        # numpy's other spellings: "f4", "<i8", "double".
        with contextlib.suppress(TypeError):
            parsed = getattr(torch, np.dtype(name).name, None)
    if not isinstance(parsed, torch.dtype):
        raise InvalidInputError(f"torch has no type {name!r}")
    return parsed


def tensor_over(buffer: PinnedBuffer, dtype: torch.dtype, extents: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor in a buffer, which is given back with the last view of it."""
    return tensor_of(np.asarray(buffer), dtype, extents)


def tensor_of(
    memory: np.ndarray[Any, Any], dtype: torch.dtype, extents: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor over an array's bytes, which stay while the tensor or a view of it does.

    It isn't itself a view, so that a view of it refers to it (``_base``), and lives as long.
    """
    storage = torch.from_numpy(memory).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.set_(storage, 0, extents)  # type: ignore[call-overload,no-any-return]


def view_over(memory: torch.Tensor, dtype: torch.dtype, extents: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over bytes on any device, which begin at a whole item.

    As for :func:`tensor_of`, it isn't itself a view.
    """
    if memory.numel() == 0:
        return torch.empty(extents, dtype=dtype, device=memory.device)
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    begin = memory.storage_offset() // dtype.itemsize
    return tensor.set_(  # type: ignore[call-overload,no-any-return]
        memory.untyped_storage(), begin, extents
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a one-dimensional tensor that shares its memory.

    Raises
    ------
    InvalidBufferError
        The tensor isn't contiguous: its bytes aren't one after the other.
    """
    if not tensor.is_contiguous():
        raise InvalidBufferError(
            f"the bytes of a tensor of shape {tuple(tensor.shape)} were asked for, but it isn't "
            "contiguous: call .contiguous() first"
        )
    item_bytes = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    # Not a view as bytes: that is refused for one item with whatever stride.
    return flat.set_(  # type: ignore[call-overload,no-any-return]
        tensor.untyped_storage(),
        tensor.storage_offset() * item_bytes,
        (tensor.numel() * item_bytes,),
    )


def _notice_cuda_when_torch_starts_it() -> None:
    """Have torch say when it starts CUDA, so that the memory of pools is registered early.

    What it is asked by is private. Without it, and where there is no context yet when torch says
    so, the next allocation or transfer notices.
    """
    lazy_call = getattr(torch.cuda, "_lazy_call", None)
    if lazy_call is not None:
        # Whatever it has become, importing this must not fail for it.
        with contextlib.suppress(Exception):
            lazy_call(notice_cuda)


_notice_cuda_when_torch_starts_it()
