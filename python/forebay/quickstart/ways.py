"""The ways to store and load tensors that are compared: Forebay, and what people use today."""

from __future__ import annotations

import itertools
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from forebay.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from forebay.quickstart.tensors import Tensor

    Bytes = np.ndarray[Any, Any]

__all__ = ["Forebay", "Way", "ways"]

_TORCH_TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "U16": "uint16",
    "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip

_MISSING = "not installed (pip install torch safetensors)"


class Way(Protocol):
    """One way: ``store`` returns when the bytes are on the drive, ``load`` when all are here."""

    name: str

    def clear(self) -> None:
        """Wipe what an earlier load left in memory that the next one uses again."""
        return  # mypy takes a body of words alone for an abstract one

    def store(self, path: str) -> None:
        """Write all tensors to the drive."""

    def load(self, path: str) -> list[Bytes]:
        """Read all tensors; return the bytes of each."""


class Forebay(Way):
    """One operation for all tensors, each way; loads go into pinned memory that is used again."""

    name = "forebay"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.handle = Handle()
        self._tensors = tensors
        sizes = (tensor.data.nbytes for tensor in tensors)
        *self._offsets, size = itertools.accumulate(sizes, initial=0)
        # The tensors lie in memory as they do in the file, so whole pages of it land in place.
        self._block = self.handle.empty(size)
        self.clear()

    def clear(self) -> None:
        """Wipe the block."""
        self._block.fill(0)

    def store(self, path: str) -> None:
        """Write all tensors, one behind the other."""
        arrays = (tensor.data for tensor in self._tensors)
        items = zip(arrays, itertools.repeat(path), self._offsets, strict=False)
        self.handle.store_many(items, whole_file=True, durability="data")

    def load(self, path: str) -> list[Bytes]:
        """Read all tensors at once."""
        self.handle.load(self._block, path)
        return [
            self._block[offset : offset + tensor.data.nbytes]
            for offset, tensor in zip(self._offsets, self._tensors, strict=True)
        ]


class _Python(Way):
    """Loads into memory that is used again, too; the other ways make their own each time."""

    name = "open().write/readinto"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._arrays = [tensor.data.copy() for tensor in tensors]

    def clear(self) -> None:
        for array in self._arrays:
            array.fill(0)

    def store(self, path: str) -> None:
        with open(path, "wb") as file:
            file.writelines(tensor.data.data for tensor in self._tensors)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Bytes]:
        with open(path, "rb") as file:
            for array in self._arrays:
                if file.readinto(array.data) != array.nbytes:
                    message = f"{path} is shorter than the tensors"
                    raise EOFError(message)
        return self._arrays


class _Numpy(Way):
    name = "numpy tofile/fromfile"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def store(self, path: str) -> None:
        with open(path, "wb") as file:
            for tensor in self._tensors:
                tensor.data.tofile(file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Bytes]:
        import numpy as np

        with open(path, "rb") as file:
            sizes = (tensor.data.nbytes for tensor in self._tensors)
            return [np.fromfile(file, np.uint8, size) for size in sizes]


class _Torch(Way):
    name = "torch.save/load"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._names = [tensor.name for tensor in tensors]
        self._state = _state_dict(tensors)

    def store(self, path: str) -> None:
        import torch

        with open(path, "wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Bytes]:
        import torch

        state = torch.load(path, weights_only=True)
        return [_bytes_of(state[name]) for name in self._names]


class _Safetensors(Way):
    name = "safetensors"

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._names = [tensor.name for tensor in tensors]
        self._state = _state_dict(tensors)

    def store(self, path: str) -> None:
        from safetensors.torch import save_file

        save_file(self._state, path)
        # Its writer doesn't sync.
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Bytes]:
        from safetensors.torch import load_file

        state = load_file(path)
        return [_bytes_of(state[name]) for name in self._names]


def ways(tensors: Sequence[Tensor]) -> tuple[Forebay, list[Way], list[str]]:
    """Return Forebay, all ways that can be taken here, and why others can't."""
    forebay = Forebay(tensors)
    found: list[Way] = [forebay, _Python(tensors), _Numpy(tensors)]
    left_out = []
    try:
        import torch  # noqa: F401
    except (ImportError, OSError, ValueError) as error:
        # What a broken installation of torch raises isn't always an ImportError.
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return forebay, found, [f"torch.save/load and safetensors: torch is {_MISSING}"]
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return forebay, found, [f"torch.save/load and safetensors: torch: {first_line}"]
    if unknown := {tensor.dtype for tensor in tensors} - set(_TORCH_TYPES):
        names = ", ".join(sorted(unknown))
        return forebay, found, [f"torch.save/load and safetensors: torch has no type {names}"]
    found.append(_Torch(tensors))
    if find_spec("safetensors"):
        found.append(_Safetensors(tensors))
    else:
        left_out.append(f"safetensors: {_MISSING}")
    return forebay, found, left_out


def _state_dict(tensors: Sequence[Tensor]) -> dict[str, Any]:
    return {tensor.name: _torch_tensor(tensor) for tensor in tensors}


def _torch_tensor(tensor: Tensor) -> Any:
    import torch

    dtype = getattr(torch, _TORCH_TYPES[tensor.dtype])
    if not tensor.data.nbytes:
        # An array of no bytes has a stride that torch won't view as a wider type.
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.from_numpy(tensor.data).view(dtype).reshape(tensor.shape)


def _bytes_of(tensor: Any) -> Bytes:
    import torch

    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array
