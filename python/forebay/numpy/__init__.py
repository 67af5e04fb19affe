"""Tensor files as numpy arrays, with the names of ``safetensors.numpy``.

:func:`load_file`, :func:`save_file`, :func:`load`, :func:`save` and :class:`safe_open` take what
``safetensors`` takes and return what it returns; what they take beyond that is by keyword.
:func:`stream`, :func:`load_into` and :func:`plan_load` are Forebay's own. Types that numpy lacks
(bfloat16, float8) take the package ``ml_dtypes``.

Examples
--------
>>> import forebay.numpy, numpy, tempfile
>>> path = tempfile.mktemp(suffix=".safetensors")
>>> forebay.numpy.save_file({"w": numpy.ones((2, 3)), "b": numpy.zeros(2)}, path)
>>> forebay.numpy.load_file(path)["w"].shape
(2, 3)
>>> forebay.numpy.plan_load(path, keys="w").tensor_bytes
48
"""

from __future__ import annotations

from forebay._tensor_files.load import LoadPlan
from forebay._tensor_files.opened import TensorSlice, safe_open
from forebay._tensor_files.stream import TensorStream
from forebay.numpy.safetensors import (
    load,
    load_file,
    load_into,
    plan_load,
    save,
    save_file,
    stream,
)

__all__ = [
    "LoadPlan",
    "TensorSlice",
    "TensorStream",
    "load",
    "load_file",
    "load_into",
    "plan_load",
    "safe_open",
    "save",
    "save_file",
    "stream",
]
