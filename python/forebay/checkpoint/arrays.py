"""Tensors of any framework: what they are called, where their bytes are, how they come back.

A framework is an object with the methods of :class:`Framework`. numpy's is here, torch's in
:mod:`forebay.torch.state`; neither is imported before there is a tensor of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from forebay.errors import (
    InvalidBufferError,
    InvalidInputError,
    MismatchError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy as np

    from forebay._tensor_files.rooms import Room

__all__ = ["Framework", "Plain", "framework_named", "framework_of", "shape_of", "shares_elements"]


class Plain(NamedTuple):
    """What a tensor is, whatever its framework."""

    dtype: str
    """Its type as files have it; ``"U8"`` for a type that they don't have."""
    shape: tuple[int, ...]
    """Its extents; with one more for the bytes of an item, of a type that files don't have."""
    own_dtype: str | None
    """What its framework calls its type, if files don't have it."""


class Framework(Protocol):
    """What the tensors of a framework are, and how they are made."""

    name: str

    def plain(self, tensor: Any) -> Plain:
        """Return what a tensor is; an error says why it can't be saved."""

    def identity(self, tensor: Any) -> Hashable:
        """Return what is the same for tensors that are one view of one memory."""

    def contiguous(self, tensor: Any) -> Any:
        """Return an array whose bytes are the tensor's values in C order, copied if need be."""

    def build(self, memory: Any, plain: Plain) -> Any:
        """Return a tensor over bytes, of the host or of a device, which stay while it does."""

    def parse_device(self, device: Any) -> Any | None:
        """Return a device as the framework has it, or None for the host."""

    def reaches(self, device: Any) -> bool:
        """Return whether the core moves bytes to a device."""

    def device(self, tensor: Any) -> Any | None:
        """Return the device that a tensor is on, if the core reaches it; None for the host."""

    def move(self, tensor: Any, device: Any) -> Any:
        """Return a tensor on a device that the core doesn't reach."""

    def room(self, tensor: Any) -> Room | None:
        """Return the memory of a tensor on a device, if its bytes are its values in C order."""

    def empty(self, length: int, device: Any) -> Any:
        """Return bytes on a device, which the core can load into."""

    def clone(self, memory: Any) -> Any:
        """Return a copy of bytes, on their device."""

    def refuse_target(self, tensor: Any) -> None:
        """Raise an error if a tensor can't be filled."""

    def fill(self, tensor: Any, source: Any) -> None:
        """Copy values to a tensor from another of the same framework."""


def framework_of(value: Any) -> Framework | None:
    """Return the framework of a tensor; ``None`` for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return framework_named("torch")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return framework_named("numpy")
    return None


def framework_named(name: str) -> Framework:
    """Return a framework by its name, which a checkpoint gives."""
    if name == "torch":
        from forebay.torch.state import TorchState

        return TorchState()
    if name == "numpy":
        return NumpyState()
    raise MismatchError(f"the checkpoint has tensors of {name!r}, which isn't known here")


_NUMPY_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    # Of ml_dtypes.
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""What files call numpy's types, in the byte order that they have."""

_REGISTERED = 2
"""What ``dtype.isbuiltin`` is of types that other packages have registered."""

_NUMPY_NAMES = {name: own for own, name in _NUMPY_DTYPES.items()}


class NumpyState:
    """numpy's arrays."""

    name = "numpy"

    def plain(self, tensor: Any) -> Plain:
        """Return what an array is."""
        dtype = tensor.dtype
        if dtype.hasobject or dtype.fields is not None:
            what = "objects" if dtype.hasobject else "records"
            raise InvalidInputError(f"an array of {what} ({dtype}) can't be saved as a tensor")
        if hasattr(tensor, "mask"):
            raise InvalidBufferError("a masked array would lose its mask: save .data and .mask")
        name = _NUMPY_DTYPES.get(dtype.name)
        if name is not None and dtype.isnative and sys.byteorder == "little":
            return Plain(name, tensor.shape, None)
        # Types that others have registered, such as ml_dtypes', have no letters of their own.
        own = dtype.name if dtype.isbuiltin == _REGISTERED else dtype.str
        return Plain("U8", (*tensor.shape, dtype.itemsize), own)

    def identity(self, tensor: Any) -> Hashable:
        """Return its place in memory and its layout."""
        if tensor.size == 0:
            return id(tensor)
        interface = tensor.__array_interface__
        return ("numpy", interface["data"][0], tensor.shape, tensor.strides, tensor.dtype)

    def contiguous(self, tensor: Any) -> Any:
        """Return it, or a copy in C order."""
        return tensor if tensor.flags.c_contiguous else tensor.copy(order="C")

    def build(self, memory: np.ndarray[Any, Any], plain: Plain) -> Any:
        """Return an array over bytes."""
        import numpy as np

        from forebay.memory import parse_dtype

        dtype = parse_dtype(plain.own_dtype or _name_of(_NUMPY_NAMES, plain.dtype, "numpy"))
        if dtype.fields is not None or dtype.subdtype is not None:
            raise MismatchError(f"the checkpoint has a tensor of {plain.own_dtype!r}, not of items")
        shape = shape_of(plain, dtype.itemsize)
        if dtype.itemsize == 0:
            return np.empty(shape, dtype)
        if memory.size and memory.ctypes.data % dtype.alignment:
            memory = memory.copy()
        return memory.view(dtype).reshape(shape)

    def parse_device(self, device: Any) -> None:
        """Return None: arrays are in the host's memory, whatever tensors of others are on."""

    def reaches(self, device: Any) -> bool:  # noqa: ARG002 (as above)
        """Return that there is none."""
        return False

    def device(self, tensor: Any) -> None:
        """Return None: arrays are in the host's memory."""

    def move(self, tensor: Any, device: Any) -> Any:  # noqa: ARG002 (as above)
        """Return the array."""
        return tensor

    def room(self, tensor: Any) -> None:
        """Return None: it is on no device."""

    def empty(self, length: int, device: Any) -> Any:
        """Raise an error: there is no device."""
        raise UnsupportedError(f"numpy has no {length} bytes on device {device!r}")

    def clone(self, memory: Any) -> Any:
        """Return a copy."""
        return memory.copy()

    def refuse_target(self, tensor: Any) -> None:
        """Raise an error if an array is read-only, or its elements share memory."""
        if not tensor.flags.writeable:
            raise InvalidBufferError("the array to load into is read-only")
        if shares_elements(tensor.shape, tensor.strides, tensor.itemsize):
            raise InvalidBufferError("elements of the array to load into share memory")

    def fill(self, tensor: Any, source: Any) -> None:
        """Copy values to an array."""
        tensor[...] = source


def shape_of(plain: Plain, width: int) -> tuple[int, ...]:
    """Return the shape of a tensor in a checkpoint, as its framework has it.

    Parameters
    ----------
    plain : Plain
        What the checkpoint says of it.
    width : int
        Bytes of an item of the framework's type.

    Raises
    ------
    MismatchError
        Its bytes aren't items of that type.
    """
    if plain.own_dtype is None:
        return plain.shape
    if plain.dtype != "U8" or plain.shape[-1:] != (width,):
        raise MismatchError(
            f"the checkpoint has a tensor of {plain.dtype} and shape {plain.shape} that can't be "
            f"of {plain.own_dtype!r}, whose items take {width} bytes"
        )
    return plain.shape[:-1]


def shares_elements(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Return whether elements of a layout overlap.

    Parameters
    ----------
    shape, strides : sequence of int
        The layout.
    width : int
        What an element takes, in the unit of the strides.
    """
    if 0 in shape or width == 0:
        return False
    axes = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True))
    reach = width
    for stride, size in axes:
        if size > 1 and stride < reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if any(size > 1 and stride == 0 for stride, size in axes):
        return True
    # Rows can still lie between each other's elements.
    import numpy as np

    offsets = np.zeros(1, np.int64)
    for stride, size in axes:
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < width).any())


def _name_of(names: dict[str, str], dtype: str, framework: str) -> str:
    name = names.get(dtype)
    if name is None:
        raise MismatchError(f"{framework} has no type for tensors of {dtype}")
    return name
