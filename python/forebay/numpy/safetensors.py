"""Loading, saving and streaming safetensors files as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from forebay._tensor_files import into
from forebay._tensor_files import load as loading
from forebay._tensor_files import save as saving
from forebay._tensor_files.load import LoadPlan, Wish
from forebay._tensor_files.opened import is_mapped
from forebay._tensor_files.rooms import Room
from forebay._tensor_files.stream import DEFAULT_BUDGET, DEFAULT_TIMEOUT, TensorStream
from forebay.errors import InvalidInputError
from forebay.numpy.device import DeviceArray
from forebay.numpy.frame import FRAME, dtype_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay._tensor_files.select import Keys, Path, Source
    from forebay.handle import Durability, Handle

__all__ = ["load", "load_file", "load_into", "plan_load", "save", "save_file", "stream"]

Array = np.ndarray[Any, Any]


def load_file(
    filename: Source,
    *,
    backend: str = "mmap",
    keys: Keys = None,
    dtype: Any = None,
    verify: bool = True,
    budget: int | str | None = None,
    handle: Handle | None = None,
) -> dict[str, Array]:
    """Load arrays: all of a file, or some; cast or not; of one file or of a sharded model.

    Parameters and errors are those of :func:`forebay.torch.load_file`, without a device.

    Returns
    -------
    dict of str to numpy.ndarray
        By name, in the order in which they are in the files.
    """
    mapped = is_mapped(backend)
    wish = Wish(keys=keys, dtype=dtype, verify=verify, budget=budget, mapped=mapped)
    return loading.load(filename, FRAME, wish, handle)


def plan_load(
    filename: Source,
    *,
    keys: Keys = None,
    dtype: Any = None,
    budget: int | str | None = None,
    handle: Handle | None = None,
) -> LoadPlan:
    """Say what a :func:`load_file` takes, from the headers alone."""
    wish = Wish(keys=keys, dtype=dtype, budget=budget)
    return loading.plan(filename, FRAME, wish, handle)


def stream(
    filename: Source,
    *,
    budget: int | str = DEFAULT_BUDGET,
    keys: Keys = None,
    dtype: Any = None,
    verify: bool = True,
    timeout: float | None = DEFAULT_TIMEOUT,
    handle: Handle | None = None,
) -> TensorStream:
    """Iterate over ``(name, array)`` within a budget: see :func:`forebay.torch.stream`."""
    wish = Wish(keys=keys, dtype=dtype, verify=verify, budget=budget)
    return TensorStream(filename, FRAME, wish, handle, timeout)


def save_file(
    tensor_dict: dict[str, Array],
    filename: Path,
    metadata: dict[str, str] | None = None,
    *,
    checksums: bool = True,
    durability: Durability = "full",
    handle: Handle | None = None,
) -> None:
    """Save arrays to a file that any reader of safetensors takes.

    Parameters and promises are those of :func:`forebay.torch.save_file`. Arrays that aren't in C
    order are saved as if they were.
    """
    saving.write(_entries(tensor_dict), filename, metadata, durability, checksums, handle)


def save(tensor_dict: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file of arrays: those of ``safetensors``, without checksums."""
    return saving.serialize(_entries(tensor_dict), metadata)


def load(data: bytes, *, verify: bool = True) -> dict[str, Array]:
    """Return the arrays in the bytes of a file."""
    return saving.deserialize(data, FRAME, verify)


def load_into(
    target: Mapping[str, Any],
    filename: Source,
    *,
    strict: bool = True,
    keys: Keys = None,
    budget: int | str | None = None,
    verify: bool = True,
    handle: Handle | None = None,
) -> tuple[list[str], list[str]]:
    """Load tensors of files into arrays that are there: see :func:`forebay.torch.load_into`.

    Arrays of the host are numpy's. Those in a device's memory are any with the CUDA array interface
    that can be written to, such as cupy's: contiguous, and of the type that the file has.
    """
    places = _Places(target)
    wish = Wish(keys=keys, verify=verify, budget=budget)
    plan = into.load_into(places, filename, FRAME, wish)
    missing = [] if keys is not None else [name for name in target if name not in plan.found]
    if strict and (missing or plan.unexpected):
        raise RuntimeError(
            f"the files have no {missing}, and there are no arrays for {plan.unexpected}"
        )
    plan.run(handle)
    return missing, plan.unexpected


class _Places:
    """Arrays that are loaded into."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays: dict[str, Array] = {}
        self._on_devices: dict[str, DeviceArray] = {}
        for name, array in arrays.items():
            if isinstance(array, np.ndarray):
                self._arrays[name] = array
            elif hasattr(array, "__cuda_array_interface__"):
                self._on_devices[name] = DeviceArray(array)
            else:
                raise InvalidInputError(f"{name!r} is a {type(array).__name__}, not a numpy array")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of an array, or None if it isn't there."""
        if name in self._on_devices:
            return self._on_devices[name].shape
        array = self._arrays.get(name)
        return None if array is None else array.shape

    def problem(self, name: str, dtype: str) -> str | None:
        """Return why an array can't be loaded into, if it can't."""
        if name in self._on_devices:
            return self._on_devices[name].problem(dtype)
        return None if self._arrays[name].flags.writeable else "is read-only: load into a copy"

    def room(self, name: str, dtype: str) -> Room | None:
        """Return an array's memory, if the bytes of the file can go there as they are."""
        if name in self._on_devices:
            return self._on_devices[name].room()
        array = self._arrays[name]
        plain = array.flags.c_contiguous and array.dtype.isnative
        if not plain or dtype_code(array.dtype) != dtype:
            return None
        memory = array.reshape(-1).view(np.uint8)
        return Room(memory, array.ctypes.data, memory.nbytes)

    def device(self, name: str) -> None:
        """Return None: there is no device."""

    def copy(self, name: str, array: Array) -> None:
        """Copy what was read into an array, as its type."""
        np.copyto(self._arrays[name], array, casting="unsafe")


def _entries(arrays: dict[str, Array]) -> list[saving.Entry]:
    if not isinstance(arrays, dict):
        raise TypeError(f"a dict of arrays by name is needed, not {type(arrays).__name__}")
    entries = []
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r} is a {type(array).__name__}, not a numpy array")
        code = dtype_code(array.dtype)
        # The format has little-endian items in C order, and so has what is written.
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        memory = plain.view(np.ndarray).reshape(-1).view(np.uint8)
        entries.append((saving.parse_name(name), code, array.shape, memory))
    return entries
