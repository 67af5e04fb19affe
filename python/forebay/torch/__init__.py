"""Tensor files as torch tensors, with the names of ``safetensors.torch``; tensors in pinned memory.

:func:`load_file`, :func:`save_file`, :func:`load`, :func:`save`, :func:`load_model`,
:func:`save_model` and :class:`safe_open` take what ``safetensors`` takes and return what it
returns; what they take beyond that is by keyword. :func:`stream`, :func:`load_into` and
:func:`plan_load` are Forebay's own.
"""

from __future__ import annotations

from forebay._tensor_files.load import LoadPlan
from forebay._tensor_files.opened import TensorSlice, safe_open
from forebay._tensor_files.stream import TensorStream
from forebay.torch.model import load_into, load_model, save_model
from forebay.torch.safetensors import load, load_file, plan_load, save, save_file, stream
from forebay.torch.tensors import as_bytes, parse_dtype, tensor_of, tensor_over

__all__ = [
    "LoadPlan",
    "TensorSlice",
    "TensorStream",
    "as_bytes",
    "load",
    "load_file",
    "load_into",
    "load_model",
    "parse_dtype",
    "plan_load",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "stream",
    "tensor_of",
    "tensor_over",
]
