"""A store takes what kernels before it made, and kernels after a load see what it brought."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

import forebay
from forebay.errors import ForebayError
from gpu.machine import contents, pattern

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.machine import Gpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LENGTH = (6 << 20) + 77
THREADS = 8
TURNS = 12


def test_a_store_waits_for_the_kernels_that_make_the_tensor(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    source, tensor = gpu.bytes(LENGTH, 1), gpu.empty(LENGTH)
    gpu.synchronize()
    for turn in range(5):
        with gpu.stream():
            gpu.keep_busy()
            torch.bitwise_xor(source, turn, out=tensor)
            handle.store(tensor, path)
        assert path.read_bytes() == (pattern(LENGTH, 1) ^ turn).tobytes()


def test_an_asynchronous_store_waits_for_them_as_well_and_does_not_hold_up_the_caller(
    gpu: Gpu, handle: forebay.Handle, tmp_path: Path
) -> None:
    source = gpu.bytes(LENGTH, 2)
    tensors = [gpu.empty(LENGTH) for _ in range(6)]
    gpu.synchronize()
    for turn, tensor in enumerate(tensors):
        with gpu.stream():
            gpu.keep_busy()
            torch.bitwise_xor(source, turn, out=tensor)
            handle.store_async(tensor, tmp_path / str(turn))
    assert handle.wait() == len(tensors)
    for turn in range(len(tensors)):
        stored = (tmp_path / str(turn)).read_bytes()
        assert stored == (pattern(LENGTH, 2) ^ turn).tobytes()


def test_a_load_waits_for_the_kernels_that_still_use_the_tensor(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    data, tensor = pattern(LENGTH, 3).tobytes(), gpu.empty(LENGTH)
    path.write_bytes(data)
    seen = gpu.empty(LENGTH)
    gpu.synchronize()
    for turn in range(5):
        with gpu.stream():
            gpu.keep_busy()
            tensor.fill_(turn)
            seen.copy_(tensor)
            handle.load(tensor, path)
            loaded = tensor.clone()
            assert bool((seen == turn).all())
            assert contents(loaded) == data


def test_kernels_on_any_stream_see_what_a_load_brought(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    data, tensor = pattern(LENGTH, 4).tobytes(), gpu.empty(LENGTH)
    path.write_bytes(data)
    for _ in range(5):
        tensor.zero_()
        handle.load(tensor, path)
        with gpu.stream():
            assert contents(tensor.clone()) == data
        with gpu.stream():
            operation = handle.load_async(tensor, path)
        operation.wait()
        assert contents(tensor) == data


def test_one_operation_waits_for_the_streams_of_all_its_tensors_together(
    gpu: Gpu, handle: forebay.Handle, tmp_path: Path
) -> None:
    source = gpu.bytes(LENGTH, 5)
    tensors = [gpu.empty(LENGTH) for _ in range(3)]
    gpu.synchronize()
    with gpu.stream():
        gpu.keep_busy()
        for turn, tensor in enumerate(tensors):
            torch.bitwise_xor(source, turn, out=tensor)
        paths = [tmp_path / str(turn) for turn in range(3)]
        handle.store_many(list(zip(tensors, paths, strict=True)))
    for turn, path in enumerate(paths):
        assert path.read_bytes() == (pattern(LENGTH, 5) ^ turn).tobytes()


def test_threads_with_streams_of_their_own_meet_no_foreign_bytes(
    gpu: Gpu, handle: forebay.Handle, tmp_path: Path
) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            _turns(gpu, handle, tmp_path / str(number), number)
        except Exception as error:
            wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _turns(gpu: Gpu, handle: forebay.Handle, path: Path, number: int) -> None:
    """Make bytes, store them, wipe the tensor, load them, and compare, all behind late kernels."""
    length = (1 << 20) * (number + 1) // 2 + number
    expected = pattern(length, number)
    source, tensor = gpu.bytes(length, number), gpu.empty(length)
    gpu.synchronize()
    with gpu.stream():
        for turn in range(TURNS):
            if turn % 4 == number % 4:
                gpu.keep_busy()
            torch.bitwise_xor(source, turn, out=tensor)
            handle.store(tensor, path)
            tensor.zero_()
            handle.load(tensor, path)
            loaded = tensor.bitwise_xor(turn)
            assert contents(loaded) == expected.tobytes(), f"turn {turn}"


def test_other_streams_go_on_while_an_operation_waits_for_one(
    real_gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    tensor, other = real_gpu.bytes(LENGTH, 6), real_gpu.empty(LENGTH)
    # What is used for the first time may have the driver wait for the device.
    handle.store(tensor, path)
    other.fill_(2)
    real_gpu.synchronize()
    ended = torch.cuda.Event()
    with real_gpu.stream():
        for _ in range(10):
            real_gpu.keep_busy()
        late = torch.cuda.Event()
        late.record()
        operation = handle.store_async(tensor, path)
    with real_gpu.stream():
        other.fill_(1)
        ended.record()
    ended.synchronize()
    # A wait for the whole device, in the store or in the fill, would have taken the busy stream.
    assert not late.query()
    operation.wait()
    assert path.read_bytes() == contents(tensor)


def test_a_graph_is_captured_and_replayed_around_operations(
    real_gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    with torch.cuda.device(real_gpu.device):
        source, tensor = real_gpu.bytes(LENGTH, 7), real_gpu.empty(LENGTH)
        torch.bitwise_xor(source, 0x5A, out=tensor)
        real_gpu.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.bitwise_xor(source, 0x5A, out=tensor)
        for turn in range(3):
            path.write_bytes((pattern(LENGTH, turn)).tobytes())
            handle.load(source, path)
            graph.replay()
            handle.store(tensor, path)
            assert path.read_bytes() == (pattern(LENGTH, turn) ^ 0x5A).tobytes()


def test_an_operation_in_a_capture_is_an_error_and_the_handle_goes_on(
    real_gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    tensor = real_gpu.bytes(LENGTH, 8)
    real_gpu.synchronize()
    met: list[ForebayError] = []
    # What becomes of the disturbed capture is for torch to say.
    with torch.cuda.device(real_gpu.device), contextlib.suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            try:
                handle.store(tensor, path)
            except ForebayError as error:
                met.append(error)
    assert len(met) == 1
    assert not path.exists()
    expected = contents(tensor)
    handle.store(tensor, path)
    assert path.read_bytes() == expected
