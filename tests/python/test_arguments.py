"""What can't be an argument: refused with its name, by an error that fits."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
import forebay.numpy
from conftest import pattern
from forebay.errors import ClosedError, InvalidBufferError, InvalidInputError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRONG: dict[str, Callable[[forebay.Handle, Path], object]] = {
    "offset": lambda handle, path: handle.load(bytearray(1), path, "1"),  # type: ignore[arg-type]
    "block_size": lambda _, __: forebay.Handle(block_size=1.5),  # type: ignore[arg-type]
    "queue_depth": lambda _, __: forebay.Handle(queue_depth=[1]),  # type: ignore[arg-type]
    "intra_op_parallelism": lambda _, __: forebay.Handle(
        intra_op_parallelism=b"2"  # type: ignore[arg-type]
    ),
    "pool": lambda _, __: forebay.Handle(pool=7),  # type: ignore[arg-type]
    "engine": lambda _, __: forebay.Handle(engine=7),  # type: ignore[arg-type]
    "sqpoll": lambda _, __: forebay.Handle(sqpoll="no"),  # type: ignore[arg-type]
    "priority": lambda handle, path: handle.store(b"x", path, priority=1),  # type: ignore[arg-type]
    "budget": lambda _, __: forebay.Pool(budget=1.5),  # type: ignore[arg-type]
    "timeout": lambda handle, _: handle.wait("1"),  # type: ignore[arg-type]
    "timeout ": lambda handle, path: handle.store_async(b"x", path).wait(
        "1"  # type: ignore[arg-type]
    ),
    "timeout  ": lambda handle, _: handle.empty(1, timeout="1"),  # type: ignore[arg-type]
    "shape": lambda handle, _: handle.empty(1.5),  # type: ignore[arg-type]
    "shape ": lambda handle, _: handle.empty("12"),  # type: ignore[arg-type]
    "item": lambda handle, path: handle.load_many([(b"", path, 0, 1)]),  # type: ignore[list-item]
    "item ": lambda handle, _: handle.load_many([7]),  # type: ignore[list-item]
    "class": lambda handle, path: handle.store(np.ndarray, path),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_the_wrong_type_is_named(
    handle: forebay.Handle, path: Path, name: str
) -> None:
    with pytest.raises(TypeError, match=name.strip()):
        WRONG[name](handle, path)


FILES: dict[str, Callable[[Path, Any], object]] = {
    "load_file": lambda path, handle: forebay.numpy.load_file(path, handle=handle),
    "load_file cast": lambda path, handle: forebay.numpy.load_file(
        path, dtype="float64", handle=handle
    ),
    "plan_load": lambda path, handle: forebay.numpy.plan_load(path, handle=handle),
    "stream": lambda path, handle: forebay.numpy.stream(path, handle=handle),
    "safe_open": lambda path, handle: forebay.numpy.safe_open(path, "numpy", handle=handle),
    "load_into": lambda path, handle: forebay.numpy.load_into(
        {"x": np.zeros(3, "float32")}, path, handle=handle
    ),
    "save_file": lambda path, handle: forebay.numpy.save_file(
        {"x": np.ones(3, "float32")}, path, handle=handle
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_handle_is_none_of_tensor_files_either(path: Path, name: str) -> None:
    forebay.numpy.save_file({"x": np.zeros(3, "float32")}, path)
    before = path.read_bytes()
    for wrong in (7, "aio", forebay.aio_handle()):
        with pytest.raises(TypeError, match=r"handle must be a forebay\.Handle, not"):
            FILES[name](path, wrong)
    assert path.read_bytes() == before


OUT_OF_RANGE: dict[str, Callable[[forebay.Handle, Path], object]] = {
    "offset": lambda handle, path: handle.load(bytearray(1), path, 1 << 70),
    "block_size": lambda _, __: forebay.Handle(block_size=1 << 70),
    "queue_depth": lambda _, __: forebay.Handle(queue_depth=1 << 62),
    "staging_bytes": lambda _, __: forebay.Handle(staging_bytes="99999999T"),
    "throttle": lambda _, __: forebay.Handle(throttle="9" * 5000),
    "budget": lambda _, __: forebay.Pool(budget="9" * 400 + ".5T"),
    "shape": lambda handle, _: handle.empty((0, 1 << 70)),
    "timeout": lambda handle, _: handle.wait(float("nan")),
    "timeout ": lambda handle, _: handle.wait(10**400),
    "descriptor": lambda handle, _: handle.store(b"x", 1 << 31),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_number_out_of_range_is_named(handle: forebay.Handle, path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=name.strip()):
        OUT_OF_RANGE[name](handle, path)


def test_an_array_larger_than_memory_can_be_is_out_of_memory(handle: forebay.Handle) -> None:
    with pytest.raises(OutOfMemoryError):
        handle.empty((2**62,), "f8")
    with pytest.raises(OutOfMemoryError):
        handle.empty((2**62,))


def test_numpys_integers_are_integers(path: Path) -> None:
    data = pattern(1000)
    with forebay.Handle(block_size=np.int64(4096), queue_depth=np.uint8(4)) as handle:
        with path.open("w+b") as file:
            handle.store(data, np.int32(file.fileno()), np.int64(24))
        back = handle.empty(np.array([10, 100]))
        handle.load(back, path, np.uint16(24))
        assert handle.empty(np.array(3)).shape == (3,)
    assert np.array_equal(back.ravel(), data)


def test_the_wrong_way_of_a_descriptor_is_said(handle: forebay.Handle, path: Path) -> None:
    path.write_bytes(b"kept")
    with path.open("rb") as file, pytest.raises(OSError, match="reading only"):
        handle.store(b"lost", file)
    descriptor = os.open(path, os.O_WRONLY)
    with pytest.raises(OSError, match="writing only"):
        handle.load(bytearray(4), descriptor)
    os.close(descriptor)
    assert path.read_bytes() == b"kept"


def test_a_closed_handle_makes_no_arrays() -> None:
    handle = forebay.Handle()
    handle.close()
    with pytest.raises(ClosedError):
        handle.empty(1)


def test_masked_arrays_are_refused(handle: forebay.Handle, path: Path) -> None:
    masked: Any = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidBufferError, match="mask"):
        handle.store(masked, path)
    assert not path.exists()
    handle.store(masked.data, path)
    assert path.read_bytes() == np.array([1, 2, 3]).tobytes()


class Structure(ctypes.Structure):
    """A structure with a pointer."""

    _fields_ = (("x", ctypes.c_int), ("address", ctypes.c_void_p))


class Plain(ctypes.Structure):
    """A structure whose names look like pointers' codes."""

    _fields_ = (("OPzZ", ctypes.c_int), ("y", ctypes.c_int))


@pytest.mark.parametrize(
    "kind",
    [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_wchar_p,
        ctypes.POINTER(ctypes.c_int),
        ctypes.py_object,
        ctypes.CFUNCTYPE(None),
        Structure,
    ],
)
def test_pointers_are_refused(handle: forebay.Handle, path: Path, kind: Any) -> None:
    with pytest.raises(InvalidBufferError, match="pointers"):
        handle.store((kind * 2)(), path)
    assert not path.exists()


def test_plain_structures_and_complex_numbers_are_bytes(handle: forebay.Handle, path: Path) -> None:
    array = (Plain * 2)((1, 2), (3, 4))
    handle.store(array, path)
    assert path.read_bytes() == bytes(array)
    numbers = memoryview(np.array([1 + 2j, 3j]))
    handle.store(numbers, path)
    assert path.read_bytes() == numbers.tobytes()


class Interface:
    """An array by its interface alone."""

    def __init__(self, address: int, shape: tuple[int, ...] = (4,)) -> None:
        self.__array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@pytest.mark.parametrize("broken", [Interface(-4096), Interface(1 << 70), Interface(4096, (-1,))])
def test_impossible_addresses_and_shapes_are_refused(
    handle: forebay.Handle, path: Path, broken: Interface
) -> None:
    with pytest.raises(InvalidBufferError):
        handle.store(broken, path)


def test_a_capsule_of_something_else_is_refused(handle: forebay.Handle, path: Path) -> None:
    class Foreign:
        def __dlpack__(self) -> object:
            import datetime as dt

            return dt.datetime_CAPI  # type: ignore[attr-defined]

    with pytest.raises(InvalidBufferError, match="capsule"):
        handle.store(Foreign(), path)


def test_a_capsule_that_was_used_is_refused(handle: forebay.Handle, path: Path) -> None:
    torch = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))
    capsule = torch.zeros(4).__dlpack__()
    torch.from_dlpack(capsule)

    class Used:
        def __dlpack__(self) -> object:
            return capsule

    with pytest.raises(InvalidBufferError, match="used already"):
        handle.store(Used(), path)


def test_torch_takes_numpys_names_of_types(handle: forebay.Handle) -> None:
    torch = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))
    for name, kind in {"f4": torch.float32, "<i8": torch.int64, "u1": torch.uint8}.items():
        assert handle.empty(3, name, like="torch").dtype is kind
    with pytest.raises(InvalidInputError, match="M8"):
        handle.empty(3, "M8[s]", like="torch")


def test_the_class_of_tensors_isnt_a_tensor(handle: forebay.Handle, path: Path) -> None:
    torch = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))
    with pytest.raises(TypeError, match="Tensor is a class"):
        handle.store(torch.Tensor, path)


@pytest.mark.filterwarnings("ignore")
def test_quantized_items_that_share_a_byte_are_refused(handle: forebay.Handle, path: Path) -> None:
    torch = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))
    tensor = torch._empty_per_channel_affine_quantized(
        (4, 4), scales=torch.ones(4), zero_points=torch.zeros(4), axis=0, dtype=torch.quint4x2
    )
    with pytest.raises(InvalidBufferError, match="share a byte"):
        handle.store(tensor, path)
