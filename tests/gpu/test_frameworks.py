"""Arrays of other libraries, and those that are known by DLPack or an array interface alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from gpu.machine import contents, pattern

if TYPE_CHECKING:
    from pathlib import Path

    import forebay
    from gpu.machine import Gpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LENGTH = (4 << 20) + 77


class DLPackOnly:
    """A tensor of which nothing but DLPack is known."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


class InterfaceOnly:
    """A tensor of which nothing but the CUDA array interface is known."""

    def __init__(self, tensor: Any, stream: int | None) -> None:
        self._tensor = tensor
        self._stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._tensor.__cuda_array_interface__, "version": 3, "stream": self._stream}


def test_dlpack_alone_is_enough_and_ordered(gpu: Gpu, handle: forebay.Handle, path: Path) -> None:
    source, tensor = gpu.bytes(LENGTH, 1), gpu.empty(LENGTH)
    gpu.synchronize()
    with gpu.stream():
        gpu.keep_busy()
        torch.bitwise_xor(source, 0x77, out=tensor)
        handle.store(DLPackOnly(tensor), path)
    assert path.read_bytes() == (pattern(LENGTH, 1) ^ 0x77).tobytes()
    tensor.zero_()
    gpu.synchronize()
    handle.load(DLPackOnly(tensor), path)
    assert contents(tensor) == (pattern(LENGTH, 1) ^ 0x77).tobytes()


def test_the_cuda_array_interface_alone_is_enough_and_ordered(
    real_gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    source, tensor = real_gpu.bytes(LENGTH, 2), real_gpu.empty(LENGTH)
    real_gpu.synchronize()
    with torch.cuda.device(real_gpu.device), real_gpu.stream():
        stream = torch.cuda.current_stream().cuda_stream
        real_gpu.keep_busy()
        torch.bitwise_xor(source, 0x11, out=tensor)
        handle.store(InterfaceOnly(tensor, stream), path)
        assert path.read_bytes() == (pattern(LENGTH, 2) ^ 0x11).tobytes()
        tensor.zero_()
        handle.load(InterfaceOnly(tensor, stream), path)
        assert contents(tensor) == (pattern(LENGTH, 2) ^ 0x11).tobytes()


def test_tensors_that_require_gradients_are_moved(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    parameter = torch.nn.Parameter(torch.linspace(0, 1, 100_003, device=gpu.device))
    before = contents(parameter)
    handle.store(parameter, path)
    assert path.read_bytes() == before
    with torch.no_grad():
        parameter.zero_()
    handle.load(parameter, path)
    assert contents(parameter) == before
    assert parameter.requires_grad


def test_arrays_of_cupy_come_back_on_their_own_streams(
    real_gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(real_gpu.device.index), cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.asarray(pattern(LENGTH, 3))
        array ^= 0x44
        handle.store(array, path)
        assert path.read_bytes() == (pattern(LENGTH, 3) ^ 0x44).tobytes()
        target = cupy.zeros_like(array)
        handle.load(target, path)
        assert bool((target == array).all())
        stream.synchronize()


def test_arrays_of_jax_are_stored(
    gpu: Gpu, handle: forebay.Handle, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes most of a GPU's memory otherwise, which the other tests need.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("cuda" if gpu.is_real else "cpu")[gpu.device.index or 0]
    except RuntimeError as error:
        pytest.skip(f"jax has no such device: {error}")
    array = jax.device_put(pattern(LENGTH, 4), device) ^ 0x22
    handle.store(array, path)
    assert path.read_bytes() == (pattern(LENGTH, 4) ^ 0x22).tobytes()
