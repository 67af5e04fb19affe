"""Libraries that move bytes of arrays, as Forebay does: DeepNVMe and kvikio."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.subject import Settings, Subject, missing, pieces_of, sizes_of, sync

if TYPE_CHECKING:
    from forebay.bench.tensor import Bytes

__all__ = ["HANDLE", "DeepNvme", "Kvikio", "kvikio_threads", "moved", "no_kvikio"]

_BLOCK_BYTES = 1 << 20
_QUEUE_DEPTH = 32
_PARALLELISM = 2
HANDLE = (_BLOCK_BYTES, _QUEUE_DEPTH, False, True, _PARALLELISM)
"""Arguments of DeepNVMe's handles: block, depth, single submission, overlapping, threads."""
_DRIVER = "libcuda.so.1"
_OPERATORS = ("pin_memory", "async_io")
"""The second takes symbols of the first."""


class DeepNvme(Subject):
    """DeepSpeed's ``aio_handle``, from and into its page-locked memory.

    It moves whole blocks only, so its file is padded.
    """

    name = "deepnvme"
    title = "DeepNVMe aio_handle"
    package = "deepspeed"
    _block: Any = None
    _handle: Any = None

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := missing("deepspeed") or missing("torch"):
            return reason
        if settings.compile or _compiled() is not None:
            return None
        return "its operators aren't compiled: pass --compile, which takes minutes"

    def setup(self, directory: str) -> str:  # noqa: ARG002 (the same everywhere)
        """Load, or compile, the operators, and make a handle."""
        self._handle = _operators().aio_handle(*HANDLE)
        return f"blocks of {_BLOCK_BYTES >> 10} KiB, depth {_QUEUE_DEPTH}, {_PARALLELISM} threads"

    @property
    def block(self) -> Any:
        """The page-locked memory that it moves."""
        return self._block

    def padded_bytes(self) -> int:
        """Return the size of the block, and of the file."""
        whole = _BLOCK_BYTES * _PARALLELISM
        return -(-sum(sizes_of(self._tensors)) // whole) * whole

    def fill(self) -> bool:
        """Copy the tensors into page-locked memory."""
        self.clear()
        for piece, tensor in zip(self._pieces(), self._tensors, strict=True):
            piece[:] = tensor.data
        return True

    def store(self, path: str) -> None:
        """Write the block."""
        self._handle.sync_pwrite(self._block, path)
        sync(path)

    def clear(self) -> None:
        """Have a wiped block."""
        import torch

        if self._block is None:
            like = torch.empty(0, dtype=torch.uint8)
            self._block = self._handle.new_cpu_locked_tensor(self.padded_bytes(), like)
        self._block.zero_()

    def load(self, path: str) -> list[Bytes]:
        """Read the block."""
        self._handle.sync_pread(self._block, path)
        return self._pieces()

    def release(self) -> None:
        """Let go of the block."""
        if self._block is not None:
            self._handle.free_cpu_locked_tensor(self._block)
            self._block = None

    def _pieces(self) -> list[Bytes]:
        return pieces_of(self._block.numpy(), self._tensors)


def _compiled() -> list[str] | None:
    """Return the operators that an earlier use has compiled, in the order to load, or None."""
    from torch.utils.cpp_extension import _get_build_directory

    paths = []
    for name in _OPERATORS:
        path = os.path.join(_get_build_directory(name, verbose=False), f"{name}.so")
        if os.path.exists(path):
            paths.append(path)
    return paths if len(paths) == len(_OPERATORS) else None


def _operators() -> Any:
    import torch  # noqa: F401 (the operators take its symbols)

    paths = _compiled()
    if paths is None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False)
    # DeepSpeed's own way compiles again where it thinks that something has changed.
    *needed, path = paths
    for library in needed:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location(_OPERATORS[-1], path)
    if spec is None or spec.loader is None:
        message = f"{path} isn't a module"
        raise ImportError(message)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Kvikio(Subject):
    """NVIDIA's ``kvikio``, between files and host memory."""

    name = "kvikio"
    title = "kvikio"
    package = "kvikio"
    _arrays: list[Bytes] | None = None

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:  # noqa: ARG003 (there are none)
        """Return why it can't be compared here, or None."""
        if reason := no_kvikio():
            return reason
        import kvikio  # noqa: F401

        try:
            # It looks for the driver at the first transfer, of host memory too.
            ctypes.CDLL(_DRIVER)
        except OSError as error:
            return f"needs the NVIDIA driver, for host memory too: {error}"
        return None

    def setup(self, directory: str) -> str:  # noqa: ARG002 (the same everywhere)
        """Return how many threads it has."""
        return kvikio_threads()

    def store(self, path: str) -> None:
        """Write all tensors."""
        import kvikio

        with kvikio.CuFile(path, "w") as file:
            offset = 0
            for tensor in self._tensors:
                moved(file.write(tensor.data, file_offset=offset), tensor.data, path)
                offset += tensor.data.nbytes
        sync(path)

    def clear(self) -> None:
        """Have a wiped array for each tensor."""
        import numpy as np

        if self._arrays is None:
            self._arrays = [np.empty(size, np.uint8) for size in sizes_of(self._tensors)]
        for array in self._arrays:
            array.fill(0)

    def load(self, path: str) -> list[Bytes]:
        """Read all tensors."""
        import kvikio

        arrays, offset = self._arrays or [], 0
        with kvikio.CuFile(path, "r") as file:
            for array in arrays:
                moved(file.read(array, file_offset=offset), array, path)
                offset += array.nbytes
        return arrays

    def release(self) -> None:
        """Let go of the arrays."""
        self._arrays = None


def no_kvikio() -> str | None:
    """Return how to get kvikio, whose package has a name for each CUDA, or None if it is here."""
    absent = missing("kvikio") is not None
    return "not installed (pip install kvikio-cu13, or kvikio-cu12)" if absent else None


def kvikio_threads() -> str:
    """Return how many threads kvikio has, in words: one, unless its environment says otherwise."""
    from kvikio import defaults

    return f"KVIKIO_NTHREADS={defaults.get('num_threads')}"


def moved(count: int, array: Any, path: str) -> None:
    """Raise where kvikio moved fewer bytes than an array has, which it says by a number only."""
    if count != array.nbytes:
        message = f"kvikio moved {count} of {array.nbytes} bytes of {path}"
        raise OSError(message)
