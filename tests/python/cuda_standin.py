"""The stand-in for CUDA as Python tests see it: an application's memory, streams and kernels.

What it models, and what it doesn't, is in the header of ``crates/forebay-standin/src/lib.rs``.
"""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

_TEXT_BYTES_MAX = 1 << 20


def find_standin() -> str | None:
    """Return where cargo built the stand-in, if it has."""
    root = Path(__file__).resolve().parents[2]
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    built = [target / profile / "libforebay_standin.so" for profile in ("debug", "release")]
    return next((str(path) for path in built if path.exists()), None)


class Standin:
    """The shared object, in this process."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.forebay_standin_reset()
        for device in range(2):
            self._call("retain", device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._library[f"forebay_standin_{name}"](*arguments)
        assert code == 0, f"{name}: {code}, {self.violations()}"

    def close(self) -> None:
        """Let go of what an application would hold."""
        for device in range(2):
            self._call("release", device)

    def start(self) -> None:
        """Have somebody start the driver, whose contexts are held already.

        It takes as long as the loader isn't asked again, which a real driver takes many times.
        """
        assert self._library.cuInit(0) == 0
        time.sleep(0.1)

    def reset_device(self, device: int) -> None:
        """Destroy the context of a device with all that is in it."""
        self._call("reset_device", device)

    def is_registered(self, address: int) -> bool:
        """Return whether the driver knows an address as registered host memory."""
        kind = ctypes.c_uint()
        attribute = ctypes.c_uint(2)
        results = (ctypes.c_void_p * 1)(ctypes.addressof(kind))
        code = self._library.cuPointerGetAttributes(
            1, ctypes.byref(attribute), results, ctypes.c_size_t(address)
        )
        assert code == 0, code
        return kind.value == 1

    def configure(self, text: str) -> None:
        """Set it up, in the words of the Rust face."""
        data = text.encode()
        self._call("configure", data, ctypes.c_size_t(len(data)))

    def violations(self) -> list[str]:
        """Return what was found to be wrong so far."""
        room = ctypes.create_string_buffer(_TEXT_BYTES_MAX)
        text = self._library.forebay_standin_text
        text.restype = ctypes.c_size_t
        length = text(0, room, ctypes.c_size_t(_TEXT_BYTES_MAX))
        return room.raw[:length].decode().splitlines()

    def count(self, symbol: str) -> int:
        """Return how often a function of the driver was called."""
        data = symbol.encode()
        count = self._library.forebay_standin_count
        count.restype = ctypes.c_uint64
        return int(count(data, ctypes.c_size_t(len(data))))

    def allocate(self, device: int, length: int) -> int:
        """Return the address of new device memory."""
        address = ctypes.c_size_t()
        self._call("allocate", device, ctypes.c_size_t(length), 0, ctypes.byref(address))
        return address.value

    def free(self, address: int) -> None:
        """Free device memory; that it is in use is a violation."""
        self._call("free", ctypes.c_size_t(address))

    def stream(self, device: int) -> int:
        """Return a new stream."""
        handle = ctypes.c_size_t()
        self._call("stream", device, ctypes.byref(handle))
        return handle.value

    def end(self, stream: int) -> None:
        """End a stream."""
        self._call("destroy_stream", ctypes.c_size_t(stream))

    def synchronize(self, device: int, stream: int) -> None:
        """Wait for a stream."""
        self._call("synchronize", device, ctypes.c_size_t(stream))

    def kernel_write(self, device: int, stream: int, address: int, data: bytes) -> None:
        """Have a kernel on a stream write bytes."""
        self._call(
            "kernel_write",
            device,
            ctypes.c_size_t(stream),
            ctypes.c_size_t(address),
            data,
            ctypes.c_size_t(len(data)),
        )

    def kernel_read(self, device: int, stream: int, address: int, length: int) -> bytes:
        """Return what a kernel on a stream reads."""
        room = ctypes.create_string_buffer(max(length, 1))
        self._call(
            "kernel_read",
            device,
            ctypes.c_size_t(stream),
            ctypes.c_size_t(address),
            ctypes.c_size_t(ctypes.addressof(room)),
            ctypes.c_size_t(length),
        )
        self._call("synchronize", device, ctypes.c_size_t(stream))
        return room.raw[:length]


class CudaArray:
    """Bytes on a device, known by the CUDA array interface."""

    def __init__(self, address: int, shape: tuple[int, ...], stream: int | None) -> None:
        self.interface: dict[str, Any] = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": stream,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface


class _Tensor(ctypes.Structure):
    """``DLManagedTensorVersioned`` of DLPack 1.0."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLPackArray:
    """Bytes on a device, known by DLPack. ``streams`` are those that a consumer asked for."""

    def __init__(self, device: int, address: int, offset: int, length: int) -> None:
        self._shape = (ctypes.c_int64 * 1)(length)
        self._tensor = _Tensor(
            major=1,
            data=address,
            device_kind=2,
            device_id=device,
            dimensions=1,
            code=1,
            bits=8,
            lanes=1,
            shape=self._shape,
            byte_offset=offset,
        )
        self._device = device
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device)

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> Any:
        assert max_version >= (1, 0)
        self.streams.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self._tensor), b"dltensor_versioned", None)
