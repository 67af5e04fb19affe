"""What ``AsyncIOBuilder().load()`` returns: handles for files, and three functions.

The functions have DeepSpeed's arguments, all by position or by name. They print nothing, and
raise where DeepSpeed's return -1 or end the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from forebay._arguments import parse_switch, parse_target
from forebay.deepnvme import aio_handle
from forebay.errors import InvalidBufferError, MismatchError

if TYPE_CHECKING:
    import torch

    from forebay._arguments import Target

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]


def aio_read(
    buffer: Any,
    filename: Target,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill a tensor with all of a file, which is exactly as long; returns 0.

    Raises
    ------
    MismatchError
        The file has more bytes than the tensor.
    ShortFileError
        It has fewer.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    target = parse_target(filename)
    size = os.stat(target).st_size
    if size > buffer.nbytes:
        raise MismatchError(
            f"{target} has {size} bytes, the tensor {buffer.nbytes}: aio_read reads whole files, "
            "use a handle to read a part",
            filename=str(target),
            wanted=buffer.nbytes,
        )
    return handle.read(buffer, target, validate)


def aio_write(
    buffer: Any,
    filename: Target,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Make a file of a tensor, exactly as long; returns 0."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    return handle.write(buffer, filename, parse_switch(validate, "validate"))


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy a tensor in host memory into another of the same type and number of items; returns 0.

    DeepSpeed's copies as many 4-byte items as the first extent of ``dest`` has, whatever the two
    tensors are; for one-dimensional tensors of that size, it is the same.
    """
    for name, tensor in (("dest", dest), ("src", src)):
        if not hasattr(tensor, "copy_"):
            raise TypeError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
    if dest.dtype != src.dtype or dest.numel() != src.numel():
        raise InvalidBufferError(
            f"a copy from {src.numel()} items of {src.dtype} to {dest.numel()} of {dest.dtype} was "
            "asked for: give tensors of the same type and number of items"
        )
    dest.detach().copy_(src.detach().reshape(dest.shape))
    return 0
