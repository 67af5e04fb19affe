"""Torch tensors: every type, every view, every refusal."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import pattern
from forebay.errors import InvalidBufferError

torch: Any = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))

if TYPE_CHECKING:
    from pathlib import Path

TYPES = [
    "bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def tensor(dtype: Any, count: int = 1003) -> Any:
    raw = pattern(count * dtype.itemsize) & (1 if dtype == torch.bool else 255)
    return torch.from_numpy(raw).view(dtype)


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("name", TYPES)
def test_every_torch_type_keeps_every_bit(handle: forebay.Handle, path: Path, name: str) -> None:
    data = tensor(getattr(torch, name))
    handle.store(data, path)
    back = torch.zeros_like(data)
    handle.load(back, path)
    assert bytes_of(back) == bytes_of(data) == path.read_bytes()


@pytest.mark.parametrize("name", [*TYPES, "float32"])
def test_pinned_tensors_have_the_shape_and_type_asked_for(
    handle: forebay.Handle, path: Path, name: str
) -> None:
    dtype = getattr(torch, name)
    for like in ("torch", torch, torch.zeros(1)):
        pinned = handle.empty((3, 5, 7), dtype=name, like=like)
        assert pinned.shape == (3, 5, 7)
        assert pinned.dtype == dtype
    data = tensor(dtype, 105)
    handle.store(data, path)
    handle.load(pinned, path)
    assert bytes_of(pinned) == bytes_of(data)
    assert handle.empty((0, 5), dtype, like="torch").shape == (0, 5)
    assert handle.empty((), np.dtype("float32"), like="torch").shape == ()


@pytest.mark.parametrize("shift", [1, 64, 511])
def test_a_view_of_a_storage_is_exact(handle: forebay.Handle, path: Path, shift: int) -> None:
    storage = torch.from_numpy(pattern(1 << 20))
    view = storage[shift : shift + 100_001]
    handle.store(view, path)
    assert path.read_bytes() == bytes_of(view)
    target = torch.full((1 << 20,), 0xAA, dtype=torch.uint8)
    handle.load(target[shift : shift + 100_001], path)
    assert torch.equal(target[shift : shift + 100_001], view)
    assert int((target[:shift] != 0xAA).sum()) == 0
    assert int((target[shift + 100_001 :] != 0xAA).sum()) == 0


def freed() -> Any:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.zeros(8, 8)[:, 1], r"\.contiguous\(\)"),
        (lambda: torch.zeros(8, 8).T, r"\.contiguous\(\)"),
        (lambda: torch.zeros(1).expand(8), r"\.contiguous\(\)"),
        (
            lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
            r"\.contiguous\(\)",
        ),
        (lambda: torch.zeros(8).to_sparse(), r"\.to_dense\(\)"),
        (lambda: torch.zeros(8, device="meta"), "meta"),
        (lambda: torch.zeros(8, dtype=torch.complex64).conj(), r"\.resolve_conj\(\)"),
        (lambda: torch.zeros(8, dtype=torch.complex64).conj().imag, r"resolve_neg|contiguous"),
        (freed, "memory of its own|resized"),
    ],
    ids=[
        "column",
        "transposed",
        "expanded",
        "channels last",
        "sparse",
        "meta",
        "conj",
        "neg",
        "freed",
    ],
)
def test_tensors_whose_bytes_are_not_their_values_are_refused(
    handle: forebay.Handle, path: Path, make: Any, advice: str
) -> None:
    with pytest.raises(InvalidBufferError, match=advice):
        handle.store(make(), path)
    with pytest.raises(ValueError, match=advice):
        handle.load(make(), path)
    assert not path.exists()


def test_a_parameter_keeps_its_old_storage_alive_while_it_is_stored(path: Path) -> None:
    data = tensor(torch.float32, 500_000)
    expected = bytes_of(data)
    parameter = torch.nn.Parameter(data.clone())
    with forebay.Handle(throttle="16MiB") as handle:
        operation = handle.store_async(parameter, path)
        parameter.data = torch.empty(0)
        del data
        gc.collect()
        # What was freed would be given out again here.
        junk = [torch.full((500_000,), 7.0) for _ in range(4)]
        operation.wait()
    assert len(junk) == 4
    assert path.read_bytes() == expected


def test_a_storage_is_an_array_too(handle: forebay.Handle, path: Path) -> None:
    data = tensor(torch.float32)
    handle.store(data.untyped_storage(), path)
    assert path.read_bytes() == bytes_of(data)
