"""What ``UtilsBuilder().load()`` returns where DeepSpeed has none: tensors seen as bytes."""

from __future__ import annotations

from typing import overload

import torch

from forebay.torch import as_bytes

__all__ = ["cast_to_byte_tensor"]


@overload
def cast_to_byte_tensor(src_tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def cast_to_byte_tensor(src_tensor: list[torch.Tensor]) -> list[torch.Tensor]: ...


def cast_to_byte_tensor(
    src_tensor: torch.Tensor | list[torch.Tensor],
) -> torch.Tensor | list[torch.Tensor]:
    """Return a tensor's bytes as a tensor that shares its memory; for a list, those of each."""
    if isinstance(src_tensor, torch.Tensor):
        return as_bytes(src_tensor)
    return [as_bytes(tensor) for tensor in src_tensor]
