"""The bytes that arrive are those that left, whatever their number, place and type."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import forebay
from forebay.errors import InvalidBufferError, ShortFileError
from gpu.machine import contents, pattern

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.machine import Gpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 511, 512, 513, 4095, 4097, (1 << 20) - 1, (1 << 20) + 100, (9 << 20) + 77]
SHIFTS = [0, 1, 64, 511]
GUARD = 512
LARGE = (2 << 30) + 4099
"""More than the kernel moves in one call."""
DTYPES = [
    name
    for name in (
        "bool", "uint8", "int16", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32",
        "int64", "float64", "complex64", "complex128",
    )
    if hasattr(torch, name)
]  # fmt: skip


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_at_every_shift_comes_back_and_no_neighbour_changes(
    gpu: Gpu, handle: forebay.Handle, path: Path, length: int
) -> None:
    for seed, shift in enumerate(SHIFTS):
        whole = gpu.bytes(GUARD + shift + length + GUARD, seed)
        before = contents(whole)
        begin, end = GUARD + shift, GUARD + shift + length
        view = whole[begin:end]
        handle.store(view, path)
        assert path.read_bytes() == before[begin:end]
        view.zero_()
        handle.load(view, path)
        assert contents(whole) == before


def test_file_offsets_of_any_size_leave_the_rest_of_the_file(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    size = (3 << 20) + 5
    data = pattern(1 << 20, 1).tobytes()
    tensor = gpu.bytes(1 << 20, 1)
    for offset in (0, 1, 100, 511, 4096, (1 << 20) + 13):
        path.write_bytes(b"\xaa" * size)
        handle.store(tensor, path, offset=offset)
        wanted = bytearray(b"\xaa" * size)
        wanted[offset : offset + len(data)] = data
        assert path.read_bytes() == wanted
        target = gpu.empty(len(data))
        handle.load(target, path, offset=offset)
        assert contents(target) == data


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_keeps_its_bits(gpu: Gpu, handle: forebay.Handle, path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    # Random bits are NaNs with payloads too; a bool of torch's is 0 or 1.
    data = pattern(1001 * dtype.itemsize, 3) & (1 if name == "bool" else 0xFF)
    tensor = torch.from_numpy(data).to(gpu.device).view(dtype).reshape(7, 11, 13)
    handle.store(tensor, path)
    assert path.read_bytes() == data.tobytes()
    target = torch.zeros_like(tensor)
    handle.load(target, path)
    assert contents(target) == data.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "uring"},
        {"engine": "aio"},
        {"engine": "threads"},
        {"block_size": "64KiB", "queue_depth": 3, "intra_op_parallelism": 7},
        {"block_size": "16MiB", "intra_op_parallelism": 1},
        {"staging_bytes": "1MiB"},
        {"direct": "never"},
        {"page_cache": False},
        {"durability": "full"},
    ],
    ids=str,
)
def test_every_option_moves_the_same_bytes(gpu: Gpu, path: Path, options: dict[str, Any]) -> None:
    tensor = gpu.bytes((17 << 20) + 77, 4)[3:]
    try:
        handle = forebay.Handle(**options)
    except forebay.ForebayError as error:
        pytest.skip(f"this machine refuses it: {error}")
    with handle:
        handle.store(tensor, path)
        assert path.read_bytes() == contents(tensor)
        target = torch.zeros_like(tensor)
        handle.load(target, path)
        assert torch.equal(target, tensor)


def test_one_call_moves_tensors_of_the_host_and_of_the_device(
    gpu: Gpu, handle: forebay.Handle, tmp_path: Path
) -> None:
    sizes = [5, (2 << 20) + 1, 4096, (1 << 20) - 7]
    tensors = [gpu.bytes(size, seed) for seed, size in enumerate(sizes)]
    tensors = [tensor.cpu() if seed % 2 else tensor for seed, tensor in enumerate(tensors)]
    before = [contents(tensor) for tensor in tensors]
    paths = [tmp_path / str(index) for index in range(len(sizes))]
    handle.store_many(list(zip(tensors, paths, strict=True)))
    assert [path.read_bytes() for path in paths] == before
    for tensor in tensors:
        tensor.zero_()
    handle.load_many(list(zip(tensors, paths, strict=True)))
    assert [contents(tensor) for tensor in tensors] == before


def test_a_shorter_tensor_leaves_no_tail_of_a_longer_one(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    handle.store(gpu.bytes((4 << 20) + 9, 1), path)
    short = gpu.bytes((1 << 20) + 3, 2)
    handle.store(short, path)
    assert path.read_bytes() == contents(short)


def test_views_that_are_not_contiguous_are_exact_or_refused_before_a_byte_moves(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    matrix = gpu.bytes(400 * 8192).reshape(400, 8192)
    before = contents(matrix)
    for view in (matrix[:, 1], matrix.t(), matrix[::2], matrix[:, 100:7000], matrix[3]):
        path.unlink(missing_ok=True)
        wanted = contents(view)
        try:
            handle.store(view, path)
        except InvalidBufferError:
            assert not view.is_contiguous()
            assert not path.exists()
            continue
        assert path.read_bytes() == wanted
        view.zero_()
        handle.load(view, path)
        assert contents(matrix) == before


def test_a_short_file_is_an_error_with_both_sizes_and_the_handle_goes_on(
    gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    path.write_bytes(bytes(1000))
    with pytest.raises(ShortFileError, match=r"1000.*3145728|3145728.*1000"):
        handle.load(gpu.empty(3 << 20), path)
    tensor = gpu.bytes(3 << 20, 5)
    handle.store(tensor, path)
    target = torch.zeros_like(tensor)
    handle.load(target, path)
    assert torch.equal(target, tensor)


@pytest.mark.slow
def test_more_than_the_kernel_moves_at_once_is_exact(
    real_gpu: Gpu, handle: forebay.Handle, path: Path
) -> None:
    free, _ = torch.cuda.mem_get_info(real_gpu.device)
    if free < 3 * LARGE:
        pytest.skip(f"the GPU has {free} bytes free, this takes {3 * LARGE}")
    if shutil.disk_usage(path.parent).free < 2 * LARGE:
        pytest.skip(f"the drive has less than {2 * LARGE} bytes free")
    generator = torch.Generator(real_gpu.device).manual_seed(6)
    tensor = torch.randint(
        0, 256, (LARGE,), dtype=torch.uint8, device=real_gpu.device, generator=generator
    )
    handle.store(tensor, path)
    assert path.stat().st_size == LARGE
    target = torch.zeros_like(tensor)
    handle.load(target, path)
    assert torch.equal(target, tensor)
