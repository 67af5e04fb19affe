"""What ``UtilsBuilder().load()`` returns where DeepSpeed has none: tensors seen as bytes."""

from __future__ import annotations

from typing import overload

import torch

from forebay.errors import InvalidBufferError

__all__ = ["cast_to_byte_tensor"]


@overload
def cast_to_byte_tensor(src_tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def cast_to_byte_tensor(src_tensor: list[torch.Tensor]) -> list[torch.Tensor]: ...


def cast_to_byte_tensor(
    src_tensor: torch.Tensor | list[torch.Tensor],
) -> torch.Tensor | list[torch.Tensor]:
    """Return a tensor's bytes as a one-dimensional tensor that shares its memory; a list's too.

    Raises
    ------
    InvalidBufferError
        The tensor isn't contiguous: its bytes aren't one after the other.
    """
    if isinstance(src_tensor, torch.Tensor):
        return _bytes_of(src_tensor)
    return [_bytes_of(tensor) for tensor in src_tensor]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InvalidBufferError(
            f"the bytes of a tensor of shape {tuple(tensor.shape)} were asked for, but it isn't "
            "contiguous: call .contiguous() first"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)
