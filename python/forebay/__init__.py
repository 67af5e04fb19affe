"""Moves tensors between NVMe drives and memory as fast as the drive can go.

A :class:`Handle` loads and stores whole arrays, or parts of files, blocking, asynchronously or
awaited; :func:`empty` gives arrays in pinned memory, which move with the least work;
:class:`aio_handle` has the names of DeepSpeed's DeepNVMe; :mod:`forebay.torch` and
:mod:`forebay.numpy` have those of safetensors. What can go wrong is in
:mod:`forebay.errors`. Importing the package imports neither numpy nor a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay._forebay import file_facts, probe_engines
from forebay.deepnvme import aio_handle
from forebay.errors import ForebayError, ForebayWarning
from forebay.gds import gds_handle
from forebay.handle import Handle
from forebay.memory import Pool, empty, register_with_cuda
from forebay.operation import Operation
from forebay.stripe import Stripe

if TYPE_CHECKING:
    from forebay import deepspeed
    from forebay import numpy as numpy
    from forebay import torch as torch
    from forebay import transformers as transformers
    from forebay.torch.file_writer import FastFileWriter as FastFileWriter
    from forebay.torch.file_writer import FastFileWriterConfig as FastFileWriterConfig

__all__ = [
    "ForebayError",
    "ForebayWarning",
    "Handle",
    "Operation",
    "Pool",
    "Stripe",
    "aio_handle",
    "deepspeed",
    "empty",
    "file_facts",
    "gds_handle",
    "probe_engines",
    "register_with_cuda",
]

_LATER = {
    "FastFileWriter": "forebay.torch.file_writer",
    "FastFileWriterConfig": "forebay.torch.file_writer",
}
"""What comes from modules that import a framework: only when asked for, and by no ``import *``."""

_INTEGRATIONS = ("numpy", "torch", "transformers")
"""Packages that import what they are named after: when asked for, and by no ``import *`` either."""


def __getattr__(name: str) -> Any:
    import importlib

    if name == "deepspeed" or name in _INTEGRATIONS:
        return importlib.import_module(f"forebay.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATER, *_INTEGRATIONS})
