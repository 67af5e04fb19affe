"""Arrays in device memory, on the stand-in for CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import forebay
from conftest import pattern
from cuda_standin import CudaArray, DLPackArray, Standin
from forebay.errors import (
    DeviceError,
    InvalidBufferError,
    UnsupportedBufferError,
)

LENGTH = (3 << 20) + 77


def test_the_cuda_array_interface_is_stored_and_loaded_in_stream_order(
    standin: Standin, tmp_path: Path
) -> None:
    path, data = tmp_path / "tensor", pattern(LENGTH).tobytes()
    with forebay.Handle() as handle:
        for device in range(2):
            stream, memory = standin.stream(device), standin.allocate(device, LENGTH + 1)
            array = CudaArray(memory + 1, (LENGTH,), stream)
            standin.kernel_write(device, stream, memory + 1, data)
            handle.store(array, path)
            assert path.read_bytes() == data
            standin.kernel_write(device, stream, memory, bytes(LENGTH + 1))
            handle.load(array, path)
            assert standin.kernel_read(device, stream, memory, LENGTH + 1) == b"\0" + data
            standin.free(memory)
            standin.end(stream)
        stats = handle.stats()
    assert stats["bytes_device"] == 4 * LENGTH
    assert stats["fallbacks"] == {}
    assert standin.violations() == []


def test_dlpack_is_asked_for_the_default_stream_and_moved_behind_it(
    standin: Standin, tmp_path: Path
) -> None:
    path, data = tmp_path / "tensor", pattern(LENGTH).tobytes()
    memory = standin.allocate(1, LENGTH + 9)
    array = DLPackArray(1, memory, 9, LENGTH)
    with forebay.Handle() as handle:
        # The producer has the default stream wait for its own: here it works there.
        standin.kernel_write(1, 1, memory + 9, data)
        handle.store(array, path)
        assert path.read_bytes() == data
        standin.kernel_write(1, 1, memory, bytes(LENGTH + 9))
        handle.load(array, path)
    assert standin.kernel_read(1, 1, memory, LENGTH + 9) == bytes(9) + data
    assert array.streams == [1, 1]
    standin.free(memory)
    assert standin.violations() == []


def test_an_array_without_items_is_validated_as_any_other(standin: Standin, tmp_path: Path) -> None:
    path, memory = tmp_path / "tensor", standin.allocate(1, 8)
    handle = forebay.aio_handle()
    assert handle.write(DLPackArray(1, memory, 0, 0), path, validate=True) == 0
    assert path.read_bytes() == b""
    assert handle.read(DLPackArray(1, memory, 0, 0), path, validate=True) == 0
    standin.free(memory)


def test_one_call_moves_arrays_of_the_host_and_of_devices(standin: Standin, tmp_path: Path) -> None:
    data = pattern(3 * LENGTH).tobytes()
    parts = [data[start : start + LENGTH] for start in range(0, len(data), LENGTH)]
    paths = [tmp_path / str(number) for number in range(3)]
    streams = [standin.stream(device) for device in range(2)]
    memory = [standin.allocate(device, LENGTH) for device in range(2)]
    on_devices = [
        CudaArray(address, (LENGTH,), stream)
        for address, stream in zip(memory, streams, strict=True)
    ]
    for device in range(2):
        standin.kernel_write(device, streams[device], memory[device], parts[device])
    host = bytearray(parts[2])
    with forebay.Handle() as handle:
        handle.store_many(list(zip([*on_devices, host], paths, strict=True)))
        assert [path.read_bytes() for path in paths] == parts
        for device in range(2):
            standin.kernel_write(device, streams[device], memory[device], bytes(LENGTH))
        host[:] = bytes(LENGTH)
        handle.load_many(list(zip([*on_devices, host], paths, strict=True)))
    assert host == parts[2]
    for device in range(2):
        loaded = standin.kernel_read(device, streams[device], memory[device], LENGTH)
        assert loaded == parts[device]
        standin.free(memory[device])
        standin.end(streams[device])
    assert standin.violations() == []


def test_memory_of_pools_is_registered_before_and_after_cuda_comes_up(
    standin: Standin, tmp_path: Path
) -> None:
    memory = standin.allocate(0, 10)
    with forebay.Handle() as handle:
        handle.store(CudaArray(memory, (10,), None), tmp_path / "tensor")
        before = standin.count("cuMemHostRegister_v2")
        buffer = handle.empty((5 << 20,), dtype="uint8")
        assert standin.count("cuMemHostRegister_v2") == before + 1
        gone = standin.count("cuMemHostUnregister")
        del buffer
        assert standin.count("cuMemHostUnregister") == gone + 1
    standin.free(memory)
    assert standin.violations() == []


def test_slices_on_a_device_are_moved_in_place_by_their_rows(
    standin: Standin, tmp_path: Path
) -> None:
    rows, columns, width = 33, 9001, 5003
    path, matrix = tmp_path / "tensor", pattern(rows * columns).reshape(rows, columns)
    view = matrix[:, 17 : 17 + width]
    memory, stream = standin.allocate(1, matrix.nbytes), standin.stream(1)
    array = CudaArray(memory + 17, (rows, width), stream)
    array.interface["strides"] = (columns, 1)
    with forebay.Handle() as handle:
        standin.kernel_write(1, stream, memory, matrix.tobytes())
        handle.store(array, path)
        assert path.read_bytes() == view.tobytes()
        standin.kernel_write(1, stream, memory, bytes(matrix.nbytes))
        handle.load(array, path)
    expected = np.zeros_like(matrix)
    expected[:, 17 : 17 + width] = view
    assert standin.kernel_read(1, stream, memory, matrix.nbytes) == expected.tobytes()
    standin.free(memory)
    standin.end(stream)
    assert standin.violations() == []


def test_what_the_driver_says_is_in_the_exception(standin: Standin, tmp_path: Path) -> None:
    memory = standin.allocate(0, 1000)
    array = CudaArray(memory, (1000,), None)
    path = tmp_path / "tensor"
    with forebay.Handle() as handle:
        standin.configure("fail=cuMemcpyDtoHAsync_v2:1:719")
        with pytest.raises(DeviceError, match="cuda error 719"):
            handle.store(array, path)
        assert not path.exists()
        handle.store(array, path)
    assert path.stat().st_size == 1000
    standin.free(memory)
    assert standin.violations() == []


def test_arrays_that_cannot_be_moved_are_refused(standin: Standin, tmp_path: Path) -> None:
    path = tmp_path / "tensor"
    memory = standin.allocate(0, 1000)
    array = CudaArray(memory, (10, 10), None)
    with forebay.Handle() as handle:
        array.interface["strides"] = (1, 10)
        with pytest.raises(InvalidBufferError, match="C order"):
            handle.store(array, path)
        array.interface["strides"] = None
        array.interface["stream"] = 0
        with pytest.raises(InvalidBufferError, match="stream is 0"):
            handle.store(array, path)
        array.interface["stream"] = 1
        array.interface["data"] = (memory, True)
        handle.store(array, path)
        with pytest.raises(InvalidBufferError, match="read-only"):
            handle.load(array, path)
        with pytest.raises(UnsupportedBufferError, match="no CUDA device 7"):
            handle.store(DLPackArray(7, memory, 0, 10), path)
    standin.free(memory)
    assert standin.violations() == []


def test_a_torch_tensor_is_ordered_with_the_current_stream_of_its_device(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    path, data = tmp_path / "tensor", pattern(1000).tobytes()
    stream, memory = standin.stream(1), standin.allocate(1, 1000)
    asked = []

    class Tensor:
        """What Forebay asks of a tensor."""

        device = torch.device("cuda:1")
        nbytes = 1000

        @staticmethod
        def data_ptr() -> int:
            return memory

    def current_stream(device: object) -> object:
        asked.append(device)
        return type("Stream", (), {"cuda_stream": stream})()

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    with forebay.Handle() as handle:
        standin.kernel_write(1, stream, memory, data)
        handle.store(Tensor(), path)
        assert path.read_bytes() == data
        monkeypatch.setattr(torch.version, "hip", "6.4")
        with pytest.raises(UnsupportedBufferError, match="cuda:1"):
            handle.store(Tensor(), path)
    assert asked == [torch.device("cuda:1")]
    standin.free(memory)
    standin.end(stream)
    assert standin.violations() == []


def test_a_forked_child_is_told_and_does_not_hang(library: str, tmp_path: Path) -> None:
    script = """
import os, sys
sys.path.insert(0, sys.argv[3])
import forebay
from forebay._forebay import search_cuda
from cuda_standin import CudaArray, Standin

search_cuda([sys.argv[1]], False)
standin = Standin(sys.argv[2])
array = CudaArray(standin.allocate(0, 1000), (1000,), None)
handle = forebay.Handle()
handle.store(array, sys.argv[4])
child = os.fork()
if child == 0:
    try:
        handle.store(array, sys.argv[4])
    except forebay.errors.UnsupportedBufferError as error:
        print(error, flush=True)
        os._exit(0 if "fork" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
handle.store(array, sys.argv[4])
handle.close()
assert standin.violations() == [], standin.violations()
"""
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "libcuda.so.1").symlink_to(library)
    arguments = [str(folder), library, str(Path(__file__).parent), str(tmp_path / "tensor")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
