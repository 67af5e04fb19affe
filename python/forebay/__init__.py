"""Moves tensors between NVMe drives and memory as fast as the drive can go.

A :class:`Handle` loads and stores whole arrays, or parts of files, blocking, asynchronously or
awaited; :func:`empty` gives arrays in pinned memory, which move with the least work;
:class:`aio_handle` has the names of DeepSpeed's DeepNVMe. What can go wrong is in
:mod:`forebay.errors`. Importing the package imports neither numpy nor a framework.
"""

from forebay._forebay import file_facts, probe_engines
from forebay.deepnvme import aio_handle
from forebay.errors import ForebayError, ForebayWarning
from forebay.handle import Handle
from forebay.memory import Pool, empty
from forebay.operation import Operation

__all__ = [
    "ForebayError",
    "ForebayWarning",
    "Handle",
    "Operation",
    "Pool",
    "aio_handle",
    "empty",
    "file_facts",
    "probe_engines",
]
