"""Tensor files straight to and from device memory, on the stand-in for CUDA."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
import forebay.numpy as faces
from conftest import pattern
from forebay._tensor_files import load as loading
from forebay._tensor_files.device import DeviceLoad, shelves_of
from forebay._tensor_files.file import OpenFile
from forebay._tensor_files.into import IntoPlan
from forebay._tensor_files.load import Wish
from forebay._tensor_files.opened import TensorSlice
from forebay._tensor_files.rooms import Room
from forebay._tensor_files.source import Entry, OpenSource
from forebay._tensor_files.stream import TensorStream
from forebay.errors import (
    ClosedError,
    DeviceError,
    InvalidInputError,
    MismatchError,
    OutOfMemoryError,
    TensorFileError,
)
from forebay.numpy.frame import FRAME as HOST
from forebay.numpy.frame import dtype_code
from standin_frame import Array, StandinFrame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cuda_standin import Standin

STAGING_BYTES = 8 << 20


@pytest.fixture
def frame(standin: Standin) -> Iterator[StandinFrame]:
    frame = StandinFrame(standin)
    yield frame
    gc.collect()
    assert frame.held_bytes == 0
    frame.close()
    assert standin.violations() == []


@pytest.fixture
def small() -> Iterator[forebay.Handle]:
    """Return a handle whose staging blocks hold a small part of what tests load."""
    # Whatever else was to be in the host's memory would have no room.
    pool = forebay.Pool(3 * STAGING_BYTES)
    options = {"staging_bytes": STAGING_BYTES // 2, "device_staging_bytes": STAGING_BYTES}
    with forebay.Handle(pool=pool, block_size=1 << 20, **options) as handle:
        yield handle


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    """Return tensors of many lengths: odd ones, empty ones, many small ones, two large ones."""
    random = np.random.default_rng(3)
    found: dict[str, np.ndarray[Any, Any]] = {
        "large": pattern(9_000_001, 1),
        "wide": pattern(4 << 20, 2).view(np.float32).reshape(1024, 1024),
        "scalar": np.array(0.25),
        "empty": np.empty((0, 5), np.float32),
        "halves": random.standard_normal((77, 33)).astype(np.float16),
    }
    for index in range(300):
        length = int(random.integers(1, 4000))
        found[f"small.{index}"] = pattern(length, index)
        found[f"scale.{index}"] = np.array(index, np.float32)
    return found


def same(found: Any, wanted: dict[str, np.ndarray[Any, Any]]) -> None:
    found = dict(found)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        there = found[name].host()
        assert (there.dtype, there.shape) == (array.dtype, array.shape), name
        assert there.tobytes() == array.tobytes(), name


def test_a_file_several_times_larger_than_staging_goes_to_a_device_without_a_host_copy(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    wanted |= {f"layer.{index}": pattern(16 << 20, index) for index in range(6)}
    faces.save_file(wanted, path)
    total = sum(array.nbytes for array in wanted.values())
    assert total > 10 * STAGING_BYTES
    for device in range(2):
        found = loading.load(path, frame, Wish(device=f"cuda:{device}"), small)
        assert list(found) == [name for name, _ in faces.stream(path)]
        assert {array.memory.allocation.device for array in found.values()} == {device}
        same(found, wanted)
    stats = small.stats()
    assert stats["bytes_device"] == 2 * total
    assert stats["bytes_read"] == stats["bytes_device"]
    assert stats["staging_bytes"] <= 2 * STAGING_BYTES
    assert stats["fallbacks"] == {}
    assert frame.moved == []


def test_what_is_said_to_be_taken_of_the_host_is_staging_alone(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    wish = Wish(device="cuda:0", budget=STAGING_BYTES)
    planned = loading.plan(path, frame, wish, small)
    assert (planned.peak_bytes, planned.kept_bytes) == (STAGING_BYTES, 0)
    assert planned.tensor_bytes == sum(array.nbytes for array in wanted.values())
    with pytest.raises(OutOfMemoryError):
        loading.load(path, frame, Wish(device="cuda:0", budget=STAGING_BYTES - 1), small)


def test_many_small_tensors_move_in_few_blocks_and_begin_where_a_gpu_wants_them(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    wanted = {f"{index:05}": pattern(4096, index) for index in range(2000)}
    wanted |= {f"odd.{index}": pattern(4099, index) for index in range(50)}
    faces.save_file(wanted, path)
    found = loading.load(path, frame, Wish(device="cuda:0"), small)
    assert all(array.memory.address % 16 == 0 for array in found.values())
    same(found, wanted)
    transfers = small.stats()["transfers"]
    assert transfers < 50, "about one for each block of 1 MiB, not for each tensor"
    # What is held keeps no more than the memory that it shares.
    kept = found["00007"]
    del found
    gc.collect()
    assert frame.held_bytes <= 4 << 20
    assert kept.host().tobytes() == wanted["00007"].tobytes()


def test_what_is_cast_is_cast_on_the_device_in_memory_of_bounded_size(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    wanted = {
        f"{index:02}": np.random.default_rng(index).standard_normal(2 << 20).astype(np.float32)
        for index in range(40)
    }
    wanted["integers"] = pattern(1001)
    faces.save_file(wanted, path)
    wish = Wish(device="cuda:1", dtype="float16")
    found = loading.load(path, frame, wish, small)
    same(
        found,
        {
            name: array if array.dtype == np.uint8 else array.astype(np.float16)
            for name, array in wanted.items()
        },
    )
    stored = sum(array.nbytes for array in wanted.values())
    cast = sum(array.memory.nbytes for array in found.values())
    # Three requests and the one that is being cast, each with a tensor more.
    assert frame.held_bytes_max - cast <= 4 * (72 << 20) < stored


def test_a_stream_reads_ahead_within_its_budget_on_the_device(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    wanted = tensors() | {f"layer.{index}": pattern(5 << 20, index) for index in range(8)}
    faces.save_file(wanted, path)
    longest = max(array.nbytes for array in wanted.values())
    for budget in (longest, 2 * longest + 5, 64 << 20):
        frame.held_bytes_max = 0
        seen = {}
        with TensorStream(path, frame, Wish(device="cuda:0", budget=budget), small, 1.0) as stream:
            for name, array in stream:
                seen[name] = array.host()
                del array
        assert frame.held_bytes_max <= budget + longest, "what the consumer holds counts apart"
        assert {name: items.tobytes() for name, items in seen.items()} == {
            name: array.tobytes() for name, array in wanted.items()
        }
    with pytest.raises(OutOfMemoryError, match=str(longest)):
        TensorStream(path, frame, Wish(device="cuda:0", budget=longest - 1), small, 1.0)


def test_a_stream_that_is_left_in_the_middle_lets_go_of_what_it_has_read_ahead(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    faces.save_file({str(index): pattern(5 << 20, index) for index in range(60)}, path)
    for name, array in TensorStream(path, frame, Wish(device="cuda:0"), small, 1.0):
        assert array.host().tobytes() == pattern(5 << 20, int(name)).tobytes()
        del array
        break
    gc.collect()
    assert frame.held_bytes == 0


def test_a_stream_passes_over_nothing_that_there_was_no_memory_for(
    frame: StandinFrame,
    small: forebay.Handle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "model.safetensors"
    faces.save_file({str(index): pattern(1 << 20, index) for index in range(8)}, path)
    empty, made = frame.empty, []

    def refusing(length: int, device: int) -> Any:
        made.append(length)
        if len(made) == 5:
            raise MemoryError("the device is full")
        return empty(length, device)

    monkeypatch.setattr(frame, "empty", refusing)
    wish = Wish(device="cuda:0", budget=3 << 20)
    with TensorStream(path, frame, wish, small, 1.0) as stream:
        names = []
        with pytest.raises(MemoryError):
            names += (name for name, _ in stream)
        with pytest.raises(MemoryError):
            next(stream)
    assert names == [str(index) for index in range(len(names))]


def test_several_threads_take_from_one_stream(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    with (
        TensorStream(path, frame, Wish(device="cuda:0"), small, 1.0) as stream,
        ThreadPoolExecutor(4) as pool,
    ):
        taken = [list(items) for items in pool.map(lambda _: list(stream), range(4))]
    assert sum(map(len, taken)) == len(wanted)
    same([item for items in taken for item in items], wanted)


def test_a_stream_that_is_closed_early_leaves_nothing_under_way(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    faces.save_file({str(index): pattern(30 << 20, index) for index in range(5)}, path)
    stream = TensorStream(path, frame, Wish(device="cuda:0"), small, 1.0)
    name, array = next(stream)
    stream.close()
    assert array.host().tobytes() == pattern(30 << 20, int(name)).tobytes()
    with pytest.raises(ClosedError):
        next(stream)


@pytest.mark.parametrize("name", ["large", "small.7", "scale.250", "scalar"])
def test_a_flipped_bit_is_found_named_and_not_handed_out(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path, name: str
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    with OpenFile(str(path), Wish(), small)._source.reading():
        offset = OpenFile(str(path), Wish(), small).entry(name).offset
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(MismatchError, match=name.replace(".", r"\.")) as caught:
        loading.load(path, frame, Wish(device="cuda:0"), small)
    assert str(path) in str(caught.value)
    handed: list[str] = []
    stream = TensorStream(path, frame, Wish(device="cuda:0"), small, 1.0)
    with pytest.raises(MismatchError, match="saved"):
        handed += (found for found, _ in stream)
    assert name not in handed
    with pytest.raises(MismatchError, match="saved"):
        next(stream)
    stream.close()
    found = loading.load(path, frame, Wish(device="cuda:0", verify=False), small)
    assert found["wide"].host().tobytes() == wanted["wide"].tobytes()


def test_what_the_driver_refuses_ends_the_load_and_the_next_one_works(
    frame: StandinFrame, standin: Standin, small: forebay.Handle, tmp_path: Path
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    standin.configure("fail=cuMemcpyHtoDAsync_v2:7:2")
    with pytest.raises(DeviceError, match="cuda error 2"):
        loading.load(path, frame, Wish(device="cuda:0"), small)
    gc.collect()
    assert frame.held_bytes == 0
    same(loading.load(path, frame, Wish(device="cuda:0"), small), wanted)


def test_shards_are_read_in_turn_and_come_in_the_order_of_the_files(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    wanted = {}
    for number, path in enumerate(paths):
        shard = {f"{number}.{name}": array for name, array in tensors().items()}
        faces.save_file(shard, path)
        wanted |= {name: shard[name] for name, _ in faces.stream(path)}
    found = loading.load(paths, frame, Wish(device="cuda:1"), small)
    assert list(found) == list(wanted)
    same(found, wanted)


def test_single_tensors_and_slices_go_to_the_device(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    file = OpenFile(str(path), Wish(), small)
    for name in ("large", "empty", "scalar", "small.3"):
        assert file.whole(frame, name, 1).host().tobytes() == wanted[name].tobytes()
    same(file.some(frame, None, 0), wanted)
    frame.moved.clear()
    rows = TensorSlice(file, frame, 0, file.entry("wide"))
    assert rows[3:900].host().tobytes() == wanted["wide"][3:900].tobytes()
    assert rows[17].host().tobytes() == wanted["wide"][17].tobytes()
    assert rows[5:5].host().shape == (0, 1024)
    assert frame.moved == [], "whole rows need no picking"
    columns = rows[:, 100:228]
    assert columns.host().tobytes() == wanted["wide"][:, 100:228].tobytes()
    assert frame.moved == [1024 * 128 * 4]


class _Places:
    """Arrays that are loaded into: on devices, and of the host."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays = arrays
        self.copied: list[str] = []

    def shape(self, name: str) -> tuple[int, ...] | None:
        array = self.arrays.get(name)
        return None if array is None else array.shape

    def problem(self, name: str, dtype: str) -> str | None:
        del name, dtype
        return None

    def room(self, name: str, dtype: str) -> Room | None:
        array = self.arrays[name]
        if array.dtype != dtype:
            return None
        return Room(array.memory, array.memory.address, array.memory.nbytes)

    def device(self, name: str) -> int:
        return self.arrays[name].memory.allocation.device

    def copy(self, name: str, array: Array) -> None:
        self.copied.append(name)
        target = self.arrays[name]
        kind = HOST.over(np.empty(0, np.uint8), target.dtype, (0,)).dtype
        target.memory.write(array.host().astype(kind).tobytes())


def test_what_fits_is_loaded_into_place_and_the_rest_by_way_of_the_device(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    arrays = {}
    for number, (name, items) in enumerate(wanted.items()):
        kept = np.zeros_like(items, np.float32 if name == "halves" else None)
        arrays[name] = frame.array(number % 2, kept, dtype_code(kept.dtype))
    places = _Places(arrays)
    addresses = {name: array.memory.address for name, array in arrays.items()}
    IntoPlan(places, path, frame, Wish()).run(small)
    assert places.copied == ["halves"]
    assert {name: array.memory.address for name, array in arrays.items()} == addresses
    same(arrays, wanted | {"halves": wanted["halves"].astype(np.float32)})
    assert frame.moved == []


def test_neighbours_share_memory_within_bounds() -> None:
    def entry(offset: int, length: int, file: int = 0) -> Entry:
        return Entry(str(offset), "U8", (length,), file, offset)

    def lengths(*entries: Entry) -> list[list[int]]:
        shelves = shelves_of(entries, 1 << 20)
        return [[item.shape[0] for item, _ in shelf.entries] for shelf in shelves]

    assert lengths(entry(0, 10), entry(10, 0), entry(10, 20)) == [[10, 0, 20]]
    assert lengths(entry(0, 10), entry(11, 20)) == [[10], [20]]
    assert lengths(entry(0, 10), entry(10, 20, file=1)) == [[10], [20]]
    assert lengths(entry(0, 10), entry(10, 1 << 20), entry((1 << 20) + 10, 5)) == [
        [10],
        [1 << 20],
        [5],
    ]
    full = [entry(index * 200_000, 200_000) for index in range(6)]
    assert lengths(*full) == [[200_000] * 5, [200_000]]


def test_numpy_has_no_devices(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    faces.save_file({"a": pattern(10)}, path)
    with pytest.raises(TensorFileError, match="numpy has no device 'cuda:0'"):
        forebay.numpy.safe_open(path, "np", "cuda:0")


# Faces


class _CudaArray:
    """An array that numpy's face takes by its CUDA array interface alone."""

    def __init__(self, array: Array, **changes: Any) -> None:
        self._array = array
        self._changes = changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = HOST.over(np.empty(0, np.uint8), self._array.dtype, (0,)).dtype
        interface = self._array.memory.__cuda_array_interface__
        interface |= {"shape": self._array.shape, "typestr": kind.str}
        return interface | self._changes


def test_arrays_with_the_cuda_array_interface_are_loaded_into(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    arrays = {
        name: frame.array(1, np.zeros_like(items), dtype_code(items.dtype))
        for name, items in wanted.items()
    }
    target: dict[str, Any] = {name: _CudaArray(array) for name, array in arrays.items()}
    target["wide"] = np.zeros_like(wanted["wide"])
    assert faces.load_into(target, path, handle=small) == ([], [])
    assert target["wide"].tobytes() == wanted["wide"].tobytes()
    del arrays["wide"]
    same(arrays, {name: items for name, items in wanted.items() if name != "wide"})


def test_arrays_on_devices_that_cannot_be_loaded_into_are_named_before_any_is(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path, items = tmp_path / "model.safetensors", pattern(64, 5).view(np.float32).reshape(4, 4)
    faces.save_file({"a": items, "b": items}, path)
    array = frame.array(0, np.zeros_like(items), "F32")
    for changes, text in [
        ({"data": (array.memory.address, True)}, "read-only"),
        ({"typestr": "<f2"}, "F16 on a device"),
        ({"strides": (4, 16)}, "isn't contiguous"),
        ({"shape": (2, 8)}, "shape"),
    ]:
        target = {"a": _CudaArray(array), "b": _CudaArray(array, **changes)}
        with pytest.raises(InvalidInputError, match=f"'b'.*{text}"):
            faces.load_into(target, path, handle=small)
    assert not array.host().any()


def test_two_tensors_for_one_memory_of_a_device_are_loaded_one_after_the_other(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    first, second = pattern(3 << 20, 1), pattern(3 << 20, 2)
    faces.save_file({"a": first, "b": second, "c": second[:1000]}, path)
    array = frame.array(1, np.zeros_like(first), "U8")
    part = Array(array.memory[77:1077], "U8", (1000,))
    target = {"a": _CudaArray(array), "b": _CudaArray(array), "c": _CudaArray(part)}
    assert faces.load_into(target, path, handle=small) == ([], [])
    wanted = second.copy()
    wanted[77:1077] = second[:1000]
    assert array.host().tobytes() == wanted.tobytes()


def test_torch_makes_tensors_over_what_was_loaded(small: forebay.Handle, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from forebay.torch import save_file
    from forebay.torch.frame import FRAME

    random = torch.Generator().manual_seed(1)
    wanted = {f"{index:03}": torch.rand(index, generator=random) for index in range(60)}
    wanted["odd"] = torch.arange(7, dtype=torch.uint8)
    wanted["half"] = torch.rand(3, 5, generator=random).to(torch.bfloat16)
    wanted["large"] = torch.rand(2000, 300, generator=random)
    wanted["none"] = torch.empty(0, 3)
    wanted["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    path = tmp_path / "model.safetensors"
    save_file(wanted, path)
    source = OpenSource(path)
    # The memory of the CPU takes the place of a device's: torch has no other here.
    load = DeviceLoad(source, FRAME, torch.device("cpu"), source.entries(None), True, small)
    found = {entry.name: tensor for entry, tensor in load}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert found[name].data_ptr() % 16 == 0
        assert not found[name]._is_view()
    assert found["large"].untyped_storage().nbytes() == wanted["large"].nbytes
    assert FRAME.cast(found["half"], "F32").dtype == torch.float32
    copy = FRAME.clone(FRAME.empty(5, torch.device("cpu")))
    assert copy.shape == (5,)


def test_torch_says_which_devices_the_core_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forebay.torch.frame import FRAME

    monkeypatch.setattr(torch.version, "hip", None)
    assert FRAME.reaches(torch.device("cuda:1"))
    assert not FRAME.reaches(torch.device("xpu"))
    assert not FRAME.reaches(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not FRAME.reaches(torch.device("cuda:1"))


def test_a_model_on_a_device_is_loaded_into_place_unless_a_module_has_a_way_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from forebay.torch import load_model, model, save_model

    # The CPU takes the place of a device: it is only asked where tensors go.
    class Reached:
        def __getattr__(self, name: str) -> Any:
            return getattr(FRAME, name)

        def reaches(self, device: Any) -> bool:
            return device.type == "cpu"

    from forebay.torch.frame import FRAME

    loaded: list[Any] = []
    monkeypatch.setattr(model, "FRAME", Reached())
    monkeypatch.setattr(model, "load_file", lambda *_, **__: loaded.append(1) or {})

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(30, 30)
            self.second = torch.nn.Linear(30, 30)
            self.second.weight = self.first.weight

    path, ours, theirs = tmp_path / "model.safetensors", Tied(), Tied()
    save_model(theirs, path)
    weight = ours.first.weight.data_ptr()
    assert load_model(ours, path) == (set(), [])
    assert ours.first.weight.data_ptr() == weight
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    assert loaded == []
    ours.third = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"no 'third\.bias', 'third\.weight'"):
        load_model(ours, path)
    assert load_model(ours, path, strict=False) == ({"third.weight", "third.bias"}, [])
    with pytest.raises(RuntimeError, match="shape"):
        load_model(torch.nn.ModuleDict({"first": torch.nn.Linear(3, 3)}), path, strict=False)
    assert loaded == []
    load_model(torch.nn.BatchNorm1d(3), path, strict=False)
    assert loaded == [1]


def test_files_read_ahead_go_to_the_device(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from forebay.transformers.ahead import _AheadFile

    path, wanted = tmp_path / "model.safetensors", tensors()
    faces.save_file(wanted, path)
    file = _AheadFile(str(path), Wish(), small)
    before = small.stats()["operations"]
    same({name: file.whole(frame, name, 1) for name in wanted}, wanted)
    assert small.stats()["operations"] - before < 5, "neighbours come together"
    assert frame.moved == []


def test_checksums_that_say_nothing_are_passed_over_with_a_notice(
    frame: StandinFrame, small: forebay.Handle, tmp_path: Path
) -> None:
    reference = pytest.importorskip("safetensors.numpy")
    path, wanted = tmp_path / "model.safetensors", {"a": pattern(5000), "b": pattern(70_000, 2)}
    faces.save_file(wanted, path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    reference.save_file(wanted | {"b": wanted["b"] ^ 1}, path, header["__metadata__"])
    found = loading.load(path, frame, Wish(device="cuda:0"), small)
    same(found, wanted | {"b": wanted["b"] ^ 1})
    (notice,) = small.stats()["fallbacks"]
    assert f"{path} is not verified" in notice
    arrays = frame.array(0, np.zeros(70_000, np.uint8), "U8")
    IntoPlan(_Places({"b": arrays}), path, frame, Wish(keys="b")).run(small)
    assert small.stats()["fallbacks"] == {notice: 2}
