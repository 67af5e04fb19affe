"""Any length, offset, address, shape and type comes back exactly."""

from __future__ import annotations

import itertools
import os
import shutil
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import forebay
from conftest import pattern
from forebay.errors import ShortFileError

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, MIB + 100, 3 * MIB + 7]
ENGINES = ["uring", "aio", "threads"]


@pytest.mark.parametrize("direct", ["auto", "never"])
@pytest.mark.parametrize("parallelism", [1, 2, 3, 7, 8])
def test_every_length_makes_an_exact_round_trip(path: Path, parallelism: int, direct: Any) -> None:
    with forebay.Handle(intra_op_parallelism=parallelism, direct=direct) as handle:
        for seed, size in enumerate(SIZES):
            data = pattern(size, seed)
            handle.store(data, path)
            assert path.read_bytes() == data.tobytes(), size
            back = np.zeros_like(data)
            handle.load(back, path)
            assert np.array_equal(back, data), size


@pytest.mark.parametrize("block_size", [4096, "64k", "1MiB", 12345, "8MiB"])
def test_every_block_size_makes_an_exact_round_trip(path: Path, block_size: int | str) -> None:
    with forebay.Handle(block_size=block_size, queue_depth=3) as handle:
        data = pattern(2 * MIB + 4097)
        handle.store(data, path)
        back = np.zeros_like(data)
        handle.load(back, path)
        assert path.read_bytes() == data.tobytes()
        assert np.array_equal(back, data)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_writes_the_same_bytes(path: Path, engine: str) -> None:
    available = {name: (there, why) for name, there, why in forebay.probe_engines()}
    if not available[engine][0]:
        pytest.skip(f"{engine}: {available[engine][1]}")
    data = pattern(5 * MIB + 13)
    with forebay.Handle(engine) as handle:
        assert handle.engine == engine
        handle.store(data, path)
        back = np.zeros_like(data)
        handle.load(back, path)
    assert path.read_bytes() == data.tobytes()
    assert np.array_equal(back, data)


@pytest.mark.parametrize("shift", [1, 64, 511])
def test_a_view_at_a_byte_shift_is_exact(handle: forebay.Handle, path: Path, shift: int) -> None:
    storage = pattern(MIB + 4096)
    view = storage[shift : shift + MIB + 100]
    handle.store(view, path)
    assert path.read_bytes() == view.tobytes()
    target = np.full(MIB + 4096, 0xAA, np.uint8)
    handle.load(target[shift : shift + MIB + 100], path)
    assert np.array_equal(target[shift : shift + MIB + 100], view)
    assert (target[:shift] == 0xAA).all()
    assert (target[shift + MIB + 100 :] == 0xAA).all()


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "<U3",
        "M8[ns]",
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    ],
)
def test_every_numpy_type_keeps_every_bit(handle: forebay.Handle, path: Path, dtype: Any) -> None:
    dtype = np.dtype(dtype)
    count = 1003
    # Random bytes: NaNs with payloads, negative zeros, denormals.
    raw = pattern(count * dtype.itemsize) & (1 if dtype.kind == "b" else 255)
    array = raw.view(dtype)
    handle.store(array, path)
    back = np.zeros(count, dtype)
    handle.load(back, path)
    assert back.view(np.uint8).tobytes() == array.view(np.uint8).tobytes() == path.read_bytes()


def test_a_structured_array_keeps_its_fields(handle: forebay.Handle, path: Path) -> None:
    array = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i2"), ("b", "f8")])
    handle.store(array, path)
    back = np.zeros_like(array)
    handle.load(back, path)
    assert np.array_equal(back, array)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7), (0, 5), (4, 1, 1)])
def test_every_shape_is_exact(handle: forebay.Handle, path: Path, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.random.default_rng(1).standard_normal(shape, np.float32))
    handle.store(array, path)
    assert path.stat().st_size == array.nbytes
    back = np.zeros(shape, np.float32)
    handle.load(back, path)
    assert np.array_equal(back, array)


def test_a_write_at_an_offset_changes_those_bytes_and_no_others(
    handle: forebay.Handle, path: Path
) -> None:
    path.write_bytes(b"\xaa" * 20_000)
    data = pattern(4096)
    handle.store(data, path, offset=100)
    expected = b"\xaa" * 100 + data.tobytes() + b"\xaa" * (20_000 - 4196)
    assert path.read_bytes() == expected
    back = np.zeros(4096, np.uint8)
    handle.load(back, path, offset=100)
    assert np.array_equal(back, data)


def test_a_write_at_an_offset_can_make_the_file_longer(handle: forebay.Handle, path: Path) -> None:
    path.write_bytes(b"head")
    handle.store(b"tail", path, offset=10_000)
    assert path.read_bytes() == b"head" + bytes(9_996) + b"tail"


def test_overwriting_a_longer_file_leaves_no_tail_and_keeps_its_mode(
    handle: forebay.Handle, path: Path
) -> None:
    path.write_bytes(b"x" * (2 * MIB))
    path.chmod(0o640)
    data = pattern(MIB + 3)
    handle.store(data, path)
    assert path.read_bytes() == data.tobytes()
    assert path.stat().st_mode & 0o7777 == 0o640


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_mode_that_the_umask_leaves(
    handle: forebay.Handle, path: Path, mask: int
) -> None:
    before = os.umask(mask)
    try:
        handle.store(b"x", path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o7777 == 0o666 & ~mask


def test_many_arrays_go_to_many_places_in_one_operation(
    handle: forebay.Handle, path: Path, tmp_path: Path
) -> None:
    arrays = [pattern(length, length) for length in (0, 1, 4096, 70_000, 3)]
    offsets = np.cumsum([0] + [array.nbytes for array in arrays])[:-1].tolist()
    items = list(zip(arrays, [path] * 5, offsets, strict=True))
    path.write_bytes(b"y" * 200_000)
    handle.store_many(items, whole_file=True)
    assert path.read_bytes() == b"".join(array.tobytes() for array in arrays)
    backs = [np.zeros_like(array) for array in arrays]
    handle.load_many(zip(backs, [str(path)] * 5, offsets, strict=True))
    assert all(map(np.array_equal, backs, arrays))
    handle.store_many([(arrays[1], tmp_path / "a"), (arrays[3], tmp_path / "b")])
    assert (tmp_path / "b").read_bytes() == arrays[3].tobytes()


def test_ten_thousand_small_tensors_are_one_operation(handle: forebay.Handle, path: Path) -> None:
    data = pattern(10_000 * 100)
    rows = data.reshape(10_000, 100)
    operation = handle.store_many_async(
        ((row, path, 100 * index) for index, row in enumerate(rows)), whole_file=True
    )
    assert operation.bytes_total == data.nbytes
    operation.wait()
    assert path.read_bytes() == data.tobytes()


def test_no_items_are_done_at_once(handle: forebay.Handle) -> None:
    handle.store_many([])
    handle.load_many([])
    handle.load_many_async([]).wait()
    assert handle.wait() == 1


def test_items_that_could_mean_two_things_are_refused(handle: forebay.Handle, path: Path) -> None:
    with pytest.raises(ValueError, match="same file"):
        handle.store_many([(b"a", path), (b"b", path)])
    with pytest.raises(ValueError, match="whole_file"):
        handle.store_many([(b"a", path, 0), (b"b", path)])
    assert not path.exists()


def test_workers_that_share_ragged_ends_lose_no_bytes(path: Path) -> None:
    data = pattern(3_000_017)
    cuts = [0, 1, 777, 4097, 100_001, 1_000_003, 2_999_999, data.nbytes]
    with forebay.Handle(intra_op_parallelism=4) as handle:
        for begin, end in itertools.pairwise(cuts):
            handle.store_async(data[begin:end], path, offset=begin)
        assert handle.wait() == len(cuts) - 1
    assert path.read_bytes() == data.tobytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_operation_of_more_than_two_gib_is_exact(path: Path) -> None:
    size = (2 << 30) + 4097
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(int(line.split()[1]) << 10 for line in file if "MemAvailable" in line)
    if available < 3 * size:
        pytest.skip(f"takes {3 * size >> 30} GiB of memory, {available >> 30} are available")
    if shutil.disk_usage(path.parent).free < 2 * size:
        pytest.skip("takes 4 GiB of disk")
    data = np.arange(size // 8 + 1, dtype=np.uint64).view(np.uint8)[:size]
    with forebay.Handle() as handle:
        handle.store(data, path)
        back = np.zeros(size, np.uint8)
        handle.load(back, path)
    assert path.stat().st_size == size
    assert np.array_equal(back, data)


def test_an_error_of_a_descriptor_names_the_file_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 10)
    with forebay.Handle() as handle, path.open("rb") as file:
        with pytest.raises(ShortFileError) as caught:
            handle.load(bytearray(11), file.fileno())
        assert caught.value.filename == str(path)
        path.unlink()
        with pytest.raises(ShortFileError) as caught:
            handle.load(bytearray(11), file.fileno())
        assert caught.value.filename == f"descriptor {file.fileno()}"
