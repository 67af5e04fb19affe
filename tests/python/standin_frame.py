"""A framework whose devices are those of the stand-in for CUDA: what Forebay asks of one, no more.

Arrays on a device are bytes of the stand-in's with a type and a shape; what a kernel would do to
them (a copy, a cast) is done by reads and writes in order on a stream.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuda_standin import CudaArray
from forebay.numpy.frame import FRAME as HOST

if TYPE_CHECKING:
    from cuda_standin import Standin


class Allocation:
    """Device memory that is freed with the last reference, and counted."""

    def __init__(self, frame: StandinFrame, device: int, length: int) -> None:
        self.device = device
        self.length = length
        self.address = frame.standin.allocate(device, max(length, 1))
        frame.held_bytes += length
        frame.held_bytes_max = max(frame.held_bytes_max, frame.held_bytes)
        weakref.finalize(self, frame.free, device, self.address, length)


class Bytes:
    """A range of an allocation, known by the CUDA array interface."""

    def __init__(self, frame: StandinFrame, allocation: Allocation, begin: int, end: int) -> None:
        self._frame = frame
        self.allocation = allocation
        self.begin = begin
        self.nbytes = end - begin

    @property
    def address(self) -> int:
        return self.allocation.address + self.begin

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = self._frame.streams[self.allocation.device]
        return CudaArray(self.address, (self.nbytes,), stream).interface

    def __getitem__(self, index: slice) -> Bytes:
        begin, end, step = index.indices(self.nbytes)
        assert step == 1
        return Bytes(self._frame, self.allocation, self.begin + begin, self.begin + end)

    def read(self) -> bytes:
        """Return what a kernel reads."""
        if not self.nbytes:
            return b""
        device = self.allocation.device
        stream = self._frame.streams[device]
        return self._frame.standin.kernel_read(device, stream, self.address, self.nbytes)

    def write(self, data: bytes) -> None:
        """Have a kernel write."""
        if data:
            device = self.allocation.device
            stream = self._frame.streams[device]
            self._frame.standin.kernel_write(device, stream, self.address, data)


@dataclass
class Array:
    """Bytes with a type and a shape."""

    memory: Bytes
    dtype: str
    shape: tuple[int, ...]

    def host(self) -> np.ndarray[Any, Any]:
        """Return its items in the host's memory."""
        memory = np.frombuffer(self.memory.read(), np.uint8)
        return HOST.over(memory, self.dtype, self.shape)  # type: ignore[no-any-return]

    def reshape(self, shape: tuple[int, ...]) -> Array:
        assert math.prod(shape) == math.prod(self.shape)
        return Array(self.memory, self.dtype, shape)


class StandinFrame:
    """The framework, for as long as a test lasts."""

    title = "stand-in"

    def __init__(self, standin: Standin) -> None:
        self.standin = standin
        self.streams = [standin.stream(device) for device in range(2)]
        self.held_bytes = 0
        self.held_bytes_max = 0
        self.moved: list[int] = []
        """Lengths of what came to a device by way of an array of the host."""

    def free(self, device: int, address: int, length: int) -> None:
        """Free memory once the frame's own stream is done with it: Forebay's have to be by then."""
        self.standin.synchronize(device, self.streams[device])
        self.standin.free(address)
        self.held_bytes -= length

    def close(self) -> None:
        for stream in self.streams:
            self.standin.end(stream)

    def array(self, device: int, items: np.ndarray[Any, Any], dtype: str) -> Array:
        """Return a copy of items on a device."""
        memory = self.empty(items.nbytes, device)
        memory.write(items.tobytes())
        return Array(memory, dtype, items.shape)

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        HOST.check(dtype, shape)

    def over(self, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        return HOST.over(memory, dtype, shape)

    def view(self, dtype: str, shape: tuple[int, ...], index: Any) -> Any:
        return HOST.view(dtype, shape, index)

    def parse_device(self, device: Any) -> int | None:
        return None if device == "cpu" else int(str(device).removeprefix("cuda:"))

    def move(self, array: Any, device: int, code: str) -> Array:
        self.moved.append(array.nbytes)
        return self.cast(self.array(device, array, _code(array.dtype)), code)

    def reaches(self, device: int) -> bool:
        return device in {0, 1}

    def empty(self, length: int, device: int) -> Bytes:
        return Bytes(self, Allocation(self, device, length), 0, length)

    def clone(self, memory: Bytes) -> Bytes:
        copy = self.empty(memory.nbytes, memory.allocation.device)
        copy.write(memory.read())
        return copy

    def typed(self, memory: Bytes, dtype: str, shape: tuple[int, ...]) -> Array:
        return Array(memory, dtype, shape)

    def cast(self, array: Array, code: str) -> Array:
        items = array.host().astype(HOST._dtype(code))
        return self.array(array.memory.allocation.device, items, code)

    def copy(self, target: Any, source: Any) -> None:
        HOST.copy(target, source)

    def code_of(self, dtype: Any) -> str:
        return HOST.code_of(dtype)


def _code(dtype: np.dtype[Any]) -> str:
    return HOST.code_of(dtype)
