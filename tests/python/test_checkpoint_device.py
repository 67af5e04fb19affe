"""Checkpoints of device memory, and tensor files saved from it, on the stand-in for CUDA."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
import forebay.numpy as faces
from conftest import pattern
from cuda_standin import DLPackArray
from forebay._tensor_files import save as saving
from forebay.checkpoint import Checkpointer
from forebay.errors import DeviceError, MismatchError
from standin_frame import Array, StandinFrame
from standin_state import StandinState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda_standin import Standin


@pytest.fixture
def frame(standin: Standin) -> Iterator[StandinFrame]:
    frame = StandinFrame(standin)
    yield frame
    gc.collect()
    assert frame.held_bytes == 0
    frame.close()
    assert standin.violations() == []


@pytest.fixture
def state_of(frame: StandinFrame, monkeypatch: pytest.MonkeyPatch) -> StandinState:
    state = StandinState(frame)
    state.join(monkeypatch)
    return state


def layers() -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = {
        "large": pattern((20 << 20) + 3, 1),
        "wide": pattern(4 << 20, 2).view(np.float32).reshape(1024, 1024),
        "empty": np.empty((0, 5), np.float32),
    }
    return found | {f"bias.{index}": pattern(index % 700 + 1, index) for index in range(400)}


def on_devices(frame: StandinFrame, items: dict[str, np.ndarray[Any, Any]]) -> dict[str, Array]:
    return {
        name: frame.array(number % 2, array, frame.code_of(array.dtype))
        for number, (name, array) in enumerate(items.items())
    }


def same(found: dict[str, Array], wanted: dict[str, np.ndarray[Any, Any]]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].host().tobytes() == array.tobytes(), name


# Files


def save(
    arrays: dict[str, Any], path: Path, handle: forebay.Handle, checksums: bool = True
) -> None:
    entries = [
        (name, array.dtype, array.shape, array.memory)
        if isinstance(array, Array)
        else (name, "U8", array.shape, array)
        for name, array in arrays.items()
    ]
    saving.write(entries, path, {"a": "b"}, "none", checksums, handle)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_file_saved_from_devices_is_that_saved_from_the_host(
    frame: StandinFrame, standin: Standin, tmp_path: Path, checksums: bool
) -> None:
    wanted = layers()
    theirs, ours = tmp_path / "host.safetensors", tmp_path / "device.safetensors"
    faces.save_file(wanted, theirs, {"a": "b"}, checksums=checksums)
    standin.configure("delay_us=200")
    arrays: dict[str, Any] = dict(on_devices(frame, wanted))
    # One of the host's among them, in the middle of a piece.
    arrays["bias.200"] = wanted["bias.200"]
    with forebay.Handle() as handle:
        save(arrays, ours, handle, checksums)
        stats = handle.stats()
    assert ours.read_bytes() == theirs.read_bytes()
    total = sum(array.nbytes for array in wanted.values())
    assert stats["bytes_device"] == total - wanted["bias.200"].nbytes
    assert stats["fallbacks"] == {}
    assert faces.load_file(ours).keys() == wanted.keys()


def test_a_save_from_a_device_takes_a_few_pieces_of_memory(
    frame: StandinFrame, tmp_path: Path
) -> None:
    wanted = {f"{index:02}": pattern(9 << 20, index) for index in range(12)}
    arrays = on_devices(frame, wanted)
    path = tmp_path / "model.safetensors"
    for budget in ("9MiB", "17MiB", "32MiB"):
        # A piece alone, two, and some.
        with forebay.Handle(pool=forebay.Pool(budget)) as handle:
            save(arrays, path, handle)
        found = faces.load_file(path)
        assert all(np.array_equal(found[name], array) for name, array in wanted.items())


def test_a_save_comes_behind_the_kernel_that_makes_the_tensor(
    frame: StandinFrame, standin: Standin, tmp_path: Path
) -> None:
    standin.configure("delay_us=3000")
    array = frame.array(1, np.zeros(5 << 20, np.uint8), "U8")
    content = pattern(5 << 20)
    array.memory.write(content.tobytes())
    with forebay.Handle() as handle:
        save({"a": array}, tmp_path / "model.safetensors", handle)
    assert np.array_equal(faces.load_file(tmp_path / "model.safetensors")["a"], content)


class Joining(DLPackArray):
    """An array whose kernel is in the default stream only once somebody has asked for it."""

    def __init__(self, standin: Standin, address: int, data: bytes) -> None:
        super().__init__(1, address, 0, len(data))
        self.shape = (len(data),)
        self._write = lambda: standin.kernel_write(1, 1, address, data)

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> Any:
        self._write()
        return super().__dlpack__(stream=stream, max_version=max_version)


@pytest.mark.usefixtures("frame")
def test_a_save_waits_for_streams_as_each_array_joins_them(
    standin: Standin, tmp_path: Path
) -> None:
    standin.configure("delay_us=3000")
    wanted = {str(index): pattern(1 << 20, index) for index in range(3)}
    memory = {name: standin.allocate(1, array.nbytes) for name, array in wanted.items()}
    arrays = {
        name: Joining(standin, memory[name], array.tobytes()) for name, array in wanted.items()
    }
    with forebay.Handle() as handle:
        save(arrays, tmp_path / "model.safetensors", handle)
    found = faces.load_file(tmp_path / "model.safetensors")
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())
    for address in memory.values():
        standin.free(address)


@pytest.mark.parametrize("number", [1, 2, 300])
def test_a_save_that_the_driver_refuses_leaves_the_file_that_was_there(
    frame: StandinFrame, standin: Standin, tmp_path: Path, number: int
) -> None:
    wanted, path = layers(), tmp_path / "model.safetensors"
    path.write_bytes(b"before")
    arrays = on_devices(frame, wanted)
    with forebay.Handle() as handle:
        standin.configure(f"fail=cuMemcpyDtoHAsync_v2:{number}:719")
        with pytest.raises(DeviceError, match="cuda error 719"):
            save(arrays, path, handle)
        assert path.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [path]
        save(arrays, path, handle)
    assert faces.load_file(path).keys() == wanted.keys()


# Checkpoints


def test_a_state_on_devices_is_captured_as_it_was_and_comes_back_where_it_is_wanted(
    frame: StandinFrame, state_of: StandinState, tmp_path: Path
) -> None:
    wanted = layers()
    arrays = on_devices(frame, wanted)
    state = {"model": arrays, "step": np.array(7), "lr": 0.5, "tied": arrays["wide"]}
    with Checkpointer(tmp_path, shard_size="8MiB", budget="64MiB") as checkpointer:
        operation = checkpointer.save_async(3, state)
        for array in arrays.values():
            array.memory.write(bytes(array.memory.nbytes))
        operation.wait()
        # Into the tensors that are there.
        loaded = checkpointer.load(into={"model": arrays, "tied": arrays["wide"]})
        assert loaded["model"]["wide"] is arrays["wide"]
        same(arrays, wanted)
        assert (loaded["step"], loaded["lr"]) == (7, 0.5)
        # To a device, anew.
        loaded = checkpointer.load(device="cuda:1")
        same(loaded["model"], wanted)
        devices = {array.memory.allocation.device for array in loaded["model"].values()}
        assert devices == {1}
        assert loaded["tied"] is loaded["model"]["wide"]
        assert all(array.memory.address % 16 == 0 for array in loaded["model"].values())
        assert isinstance(loaded["step"], np.ndarray)
    assert frame.moved == []
    assert state_of.filled <= 1, "all but a tied one is loaded into place"


def test_a_save_that_is_waited_for_leaves_the_same_files(
    frame: StandinFrame, state_of: StandinState, tmp_path: Path
) -> None:
    del state_of
    wanted = layers()
    state = on_devices(frame, wanted)
    with Checkpointer(tmp_path, budget="16MiB") as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save_async(2, state).wait()
        checkpointer.save(3, wanted)
        checkpointer.verify()
    files = [
        {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
        for folder in sorted(tmp_path.glob("step-*"))
    ]
    assert len(files) == 3
    assert files[0] == files[1] == files[2] != {}


def test_a_capture_comes_behind_the_kernel_that_makes_the_tensor(
    frame: StandinFrame, state_of: StandinState, standin: Standin, tmp_path: Path
) -> None:
    del state_of
    standin.configure("delay_us=2000")
    array = frame.array(0, np.zeros(5 << 20, np.uint8), "U8")
    content = pattern(5 << 20)
    array.memory.write(content.tobytes())
    with Checkpointer(tmp_path) as checkpointer:
        operation = checkpointer.save_async(1, {"a": array})
        array.memory.write(bytes(content.nbytes))
        operation.wait()
        assert checkpointer.load(device=1)["a"].host().tobytes() == content.tobytes()


def test_tensors_that_are_to_go_to_one_memory_do_so_in_turn(
    frame: StandinFrame, state_of: StandinState, tmp_path: Path
) -> None:
    del state_of
    first, second = pattern(1 << 20, 1), pattern(1 << 20, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": frame.array(0, first, "U8"), "b": frame.array(0, second, "U8")})
        one = frame.array(0, np.zeros(1 << 20, np.uint8), "U8")
        checkpointer.load(into={"a": one, "b": one})
    assert one.host().tobytes() == second.tobytes(), "the last one stays, as in the host's memory"


def test_a_damaged_tensor_is_named_and_no_other_state_is_handed_out(
    frame: StandinFrame, state_of: StandinState, tmp_path: Path
) -> None:
    del state_of
    wanted = layers()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, on_devices(frame, wanted))
        (shard,) = tmp_path.glob("step-*/*.safetensors")
        content = bytearray(shard.read_bytes())
        place = content.index(wanted["bias.300"].tobytes())
        content[place] ^= 1
        shard.write_bytes(content)
        for into in (None, {"large": frame.array(0, np.zeros_like(wanted["large"]), "U8")}):
            with pytest.raises(MismatchError, match=r"bias\.300") as caught:
                checkpointer.load(into=into, device="cuda:0")
            assert str(shard) in str(caught.value)
    with Checkpointer(tmp_path, verify=False) as checkpointer:
        loaded = checkpointer.load(device="cuda:0")
    assert loaded["large"].host().tobytes() == wanted["large"].tobytes()


def test_a_capture_that_the_driver_refuses_saves_nothing_and_the_next_one_works(
    frame: StandinFrame, state_of: StandinState, standin: Standin, tmp_path: Path
) -> None:
    del state_of
    state = on_devices(frame, layers())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        number = standin.count("cuMemcpyDtoHAsync_v2") + 9
        standin.configure(f"fail=cuMemcpyDtoHAsync_v2:{number}:719")
        with pytest.raises(DeviceError, match="step 2 wasn't saved"):
            checkpointer.save_async(2, state)
        assert checkpointer.steps() == [1]
        checkpointer.save(3, state)
        assert checkpointer.latest() == 3
