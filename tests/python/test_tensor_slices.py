"""Slices of tensors in files: what they give, what they refuse, and that they read little else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
import forebay.numpy
import forebay.torch
from forebay._tensor_files.frame import View
from forebay._tensor_files.slices import runs_of
from reference import assert_identical, assert_same_answer, random_tensor

if TYPE_CHECKING:
    from pathlib import Path

ALL = slice(None)

PANIC = (slice(3, 1), 0)
"""What the reference, with numpy, leaves Python by: no error, but a panic."""

INDICES: list[Any] = [
    0, -1, 3, -4, 4, -5, True, False, None, ..., 1.5, "x", 2**70, -(2**70),
    np.int64(1), np.uint8(2), np.bool_(True), torch.tensor(1),
    ALL, slice(1, 3), slice(2, 2), slice(3, 1), slice(0, 0), slice(-2, None), slice(0, -1),
    slice(0, 100), slice(4, 4), slice(5, None), slice(-100, 2), slice(None, None, 2),
    slice(1, 4, 100), slice(None, 4, 3), slice(None, None, -1), slice(None, None, 0),
    slice(1.0, 3), slice(np.int64(1), 3), slice(True, 3), slice(2**70), slice(None, None, 2**40),
    (), (0, 0), (0, 0, 0), (0, 0, 0, 0), (ALL, -1), (ALL, 6), (ALL, ALL), (ALL, slice(2, 4)),
    (slice(1, 3), slice(2, 4)), (ALL, slice(None, None, 3)),
    (slice(None, None, 2), ALL, slice(1, 4, 2)),
    (..., 0), (0, ...), (..., ...), (1, ..., 2), (..., 1, 2), (..., 1, 2, 3, 4), (0, 0, ...),
    (0, 0, 0, ...), (None, 0), (0, None), (ALL, None, slice(1, 2)), (0, slice(2, 2)),
    (slice(2, 2), slice(0, 9)), (slice(2, 2), 9), PANIC,
    [0, 1], [], [-1], [7], [True, False, True, False], [[0]], ([2, 0], ALL), (ALL, [1, 1, 0]),
    np.array([1, 2]), (ALL, torch.tensor([5, 1])), torch.tensor([True, False, False, True]),
    range(2), (0, slice(1, 3), 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Have the reference write tensors of several ranks."""
    path = tmp_path_factory.mktemp("slices") / "slices.safetensors"
    tensors = {
        "cube": random_tensor((4, 6, 5), torch.float32),
        "square": random_tensor((4, 6), torch.bfloat16, 1),
        "row": random_tensor((4,), torch.bool, 2),
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 5),
        "thin": torch.empty(4, 0, 3),
    }
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.mark.parametrize("name", ["cube", "square", "row", "scalar", "empty", "thin"])
@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
def test_slices_in_torch_are_those_of_the_reference(file: Path, name: str, index: Any) -> None:
    with (
        forebay.torch.safe_open(file, "pt") as ours,
        safetensors.safe_open(file, "pt") as theirs,
    ):
        assert_same_answer(
            lambda: ours.get_slice(name)[index], lambda: theirs.get_slice(name)[index]
        )


@pytest.mark.parametrize("name", ["cube", "row", "scalar", "empty", "thin"])
@pytest.mark.parametrize("index", [index for index in INDICES if index is not PANIC], ids=repr)
def test_slices_in_numpy_are_those_of_the_reference(file: Path, name: str, index: Any) -> None:
    with (
        forebay.numpy.safe_open(file, "np") as ours,
        safetensors.safe_open(file, "np") as theirs,
    ):
        assert_same_answer(
            lambda: ours.get_slice(name)[index], lambda: theirs.get_slice(name)[index]
        )


def slices_of(extent: int) -> st.SearchStrategy[slice]:
    return st.builds(
        slice,
        st.none() | st.integers(-extent - 2, extent + 2),
        st.none() | st.integers(-extent - 2, extent + 2),
        st.none() | st.integers(1, extent + 2),
    )


LARGE = (3, 70, 1100)
"""Rows of 4400 bytes, planes of 300 KiB: both ways of reading come up."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    path = tmp_path_factory.mktemp("slices") / "large.safetensors"
    tensor = random_tensor(LARGE, torch.float32)
    forebay.torch.save_file({"before": torch.ones(17), "x": tensor}, path)
    return path, tensor


@settings(deadline=None)
@given(data=st.data())
def test_any_slice_has_the_items_that_torch_gives(
    large: tuple[Path, torch.Tensor], data: st.DataObject
) -> None:
    path, tensor = large
    entries = [data.draw(slices_of(extent) | st.integers(-extent, extent - 1)) for extent in LARGE]
    index = tuple(entries[: data.draw(st.integers(0, 3))])
    with forebay.torch.safe_open(path, "pt") as opened:
        assert_identical(opened.get_slice("x")[index], tensor[index].contiguous())


def test_a_slice_that_takes_several_pieces_has_every_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay._tensor_files.slices._PIECE_BYTES", 10_000)
    monkeypatch.setattr("forebay._tensor_files.slices._ITEMS_PER_REQUEST", 3)
    tensor = random_tensor((7, 33, 129), torch.int16)
    path = tmp_path / "x.safetensors"
    forebay.torch.save_file({"x": tensor}, path)
    with forebay.torch.safe_open(path, "pt") as opened:
        part = opened.get_slice("x")
        for index in [(ALL, ALL, slice(1, 100)), (slice(1, 6), slice(3, 30, 2)), (ALL, 5, ALL)]:
            assert_identical(part[index], tensor[index].contiguous())
        monkeypatch.setattr("forebay._tensor_files.slices._GAP_BYTES_MAX", 0)
        for index in [(ALL, slice(0, 9), ALL), (ALL, slice(None, None, 3)), (ALL, ALL, 7)]:
            assert_identical(part[index], tensor[index].contiguous())


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 40_000), min_size=4, max_size=4),
    item=st.sampled_from([1, 2, 4, 8]),
)
def test_runs_hold_every_item_once_and_in_order(
    sizes: list[int], steps: list[int], item: int
) -> None:
    strides = [0] * len(sizes)
    stride = 1
    for axis in reversed(range(len(sizes))):
        # From axis to axis at least as far as the inner one reaches.
        stride *= steps[axis]
        strides[axis] = stride
        stride *= sizes[axis]
    runs = runs_of(View(3, tuple(sizes), tuple(strides)), item, 1000)
    found = [
        start + sum(np.multiply(place, [step for _, step in runs.inner]).tolist()) + byte
        for start in runs.starts()
        for place in np.ndindex(*[size for size, _ in runs.inner])
        for byte in range(0, runs.item_bytes, item)
    ]
    wanted = [1000 + (3 + int(np.dot(place, strides))) * item for place in np.ndindex(*sizes)]
    assert found == wanted


def test_slices_read_what_they_need_and_little_else(tmp_path: Path) -> None:
    rows, columns = 4096, 4096
    tensor = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    path = tmp_path / "x.safetensors"
    forebay.torch.save_file({"x": tensor}, path)
    wanted: list[tuple[Any, int]] = [
        ((slice(1000, 1010),), 10 * columns * 4),
        ((7,), columns * 4),
        ((ALL, slice(0, 64)), rows * columns * 4),
        ((slice(None, None, 512),), rows // 512 * columns * 4),
        ((slice(5, 9), slice(100, 200)), 4 * columns * 4),
        ((3, 17), 4),
    ]
    for index, most in wanted:
        with forebay.Handle() as handle, forebay.torch.safe_open(path, "pt", handle=handle) as file:
            assert_identical(file.get_slice("x")[index], tensor[index].contiguous())
            # Direct reads are of whole pages at either end of a run.
            assert handle.stats()["bytes_read"] <= most + 64 * 4096
