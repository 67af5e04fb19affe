"""What counts as an array, and what is refused with what to do about it."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import pattern
from forebay.errors import InvalidBufferError, InvalidInputError, UnsupportedBufferError

if TYPE_CHECKING:
    from pathlib import Path


class Exporter:
    """An array that has nothing but DLPack."""

    def __init__(
        self, array: Any, *, legacy: bool = False, device: tuple[int, int] = (1, 0)
    ) -> None:
        self._array, self._legacy, self._device = array, legacy, device

    def __dlpack__(self, **options: Any) -> Any:
        if self._legacy and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda data: memoryview(bytearray(data)),
        lambda data: array.array("B", data),
        lambda data: (ctypes.c_uint8 * len(data)).from_buffer_copy(data),
        lambda data: np.frombuffer(bytearray(data), np.uint8),
        lambda data: Exporter(np.frombuffer(bytearray(data), np.uint8)),
    ],
    ids=["bytearray", "memoryview", "array", "ctypes", "numpy", "dlpack"],
)
def test_every_kind_of_buffer_can_be_stored_and_loaded(
    handle: forebay.Handle, path: Path, make: Any
) -> None:
    data = pattern(10_001).tobytes()
    handle.store(make(data), path)
    assert path.read_bytes() == data
    target = make(bytes(10_001))
    handle.load(target, path)
    handle.store(target, path, offset=0)
    assert path.read_bytes() == data
    if not isinstance(target, Exporter):
        assert bytes(target) == data


def test_anonymous_memory_maps_are_buffers_that_stay_open_meanwhile(
    handle: forebay.Handle, path: Path
) -> None:
    data = pattern(1 << 20).tobytes()
    path.write_bytes(data)
    with mmap.mmap(-1, 1 << 20) as target:
        handle.load(target, path)
        assert target[:] == data


def test_a_bytearray_cannot_be_resized_while_it_is_loaded(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    with forebay.Handle(throttle="4MiB", direct="never", page_cache=False) as handle:
        target = bytearray(1 << 20)
        operation = handle.load_async(target, path)
        if not operation.done():
            with pytest.raises(BufferError):
                target.append(0)
        operation.wait()
        target.append(0)


@pytest.mark.parametrize(
    "array",
    [
        b"abc",
        memoryview(b"abc"),
        np.frombuffer(b"abc", np.uint8),
        Exporter(np.zeros(3, np.uint8), legacy=True),
    ],
    ids=["bytes", "memoryview", "numpy", "legacy dlpack"],
)
def test_read_only_buffers_are_sources_but_not_destinations(
    handle: forebay.Handle, path: Path, array: Any
) -> None:
    handle.store(array, path)
    assert path.stat().st_size == 3
    with pytest.raises(InvalidBufferError, match="cannot load into it"):
        handle.load(array, path)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((8, 8))[:, 1],
        np.zeros((8, 8)).T,
        np.zeros(8)[::-1],
        np.broadcast_to(np.zeros(1), (8,)),
        memoryview(bytearray(8))[::2],
    ],
    ids=["column", "transposed", "reversed", "broadcast", "memoryview"],
)
def test_arrays_that_are_not_contiguous_are_refused_with_what_to_do(
    handle: forebay.Handle, path: Path, array: Any
) -> None:
    with pytest.raises(ValueError, match=r"contiguous|copy it"):
        handle.store(array, path)
    assert not path.exists()


def test_arrays_of_objects_are_refused(handle: forebay.Handle, path: Path) -> None:
    for objects in (np.zeros(3, object), np.zeros(3, [("a", "i4"), ("b", object)])):
        with pytest.raises(InvalidBufferError, match="plain bytes"):
            handle.store(objects, path)


def test_what_has_no_memory_is_a_type_error(handle: forebay.Handle, path: Path) -> None:
    for thing in ([1, 2], 3.5, None, "text"):
        with pytest.raises(TypeError, match="no memory"):
            handle.store(thing, path)


def test_device_memory_is_refused_by_name(handle: forebay.Handle, path: Path) -> None:
    class OnDevice:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (1,), "typestr": "<f4", "data": (8, False)}

    # There may be a driver here, which doesn't know the address.
    with pytest.raises((UnsupportedBufferError, InvalidInputError), match=r"CUDA|can't be read"):
        handle.store(OnDevice(), path)
    for device, name in [((10, 0), "ROCm device 0"), ((14, 1), "oneAPI device 1"), ((99, 2), "99")]:
        with pytest.raises(UnsupportedBufferError, match=name):
            handle.store(Exporter(np.zeros(3), device=device), path)


def test_a_dlpack_tensor_is_let_go_after_its_operation(handle: forebay.Handle, path: Path) -> None:
    class Tracked(np.ndarray):
        pass

    source = pattern(5000).view(Tracked)
    gone = weakref.ref(source)
    operation = handle.store_async(Exporter(source), path)
    data = source.tobytes()
    del source
    operation.wait()
    gc.collect()
    assert gone() is None
    assert path.read_bytes() == data


@pytest.mark.parametrize("given", ["str", "bytes", "path", "descriptor", "file"])
def test_files_are_named_in_every_usual_way(handle: forebay.Handle, path: Path, given: str) -> None:
    data = pattern(5000)
    with path.open("w+b") as file:
        target = {
            "str": str(path),
            "bytes": bytes(path),
            "path": path,
            "descriptor": file.fileno(),
            "file": file,
        }[given]
        handle.store(data, target)
        back = np.zeros_like(data)
        handle.load(back, target)
        assert file.tell() == 0
    assert np.array_equal(back, data)


def test_what_python_has_buffered_of_a_file_comes_first(handle: forebay.Handle, path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"header")
        handle.store(b"body", file, offset=6)
    assert path.read_bytes() == b"headerbody"


@pytest.mark.parametrize("target", ["", "a\0b", True, -1, 3.5, None])
def test_what_names_no_file_is_refused(handle: forebay.Handle, target: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        handle.store(b"x", target)


@pytest.mark.parametrize("offset", [-1, 1 << 63, "0", 1.5])
def test_what_is_no_offset_is_refused(handle: forebay.Handle, path: Path, offset: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        handle.store(b"x", path, offset=offset)
    assert not path.exists()


def test_names_that_are_not_utf8_work(handle: forebay.Handle, tmp_path: Path) -> None:
    name = bytes(tmp_path) + b"/\xff\xfe.bin"
    handle.store(b"x", name)
    with open(name, "rb") as file:
        assert file.read() == b"x"
