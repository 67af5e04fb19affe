"""Arrays that aren't contiguous: moved in place by their runs, or refused with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import pattern
from forebay.errors import InvalidBufferError, ShortFileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS, COLUMNS = 37, 9001
"""Of bytes: no row begins at a page, or ends at one."""


def _matrix(seed: int = 1) -> np.ndarray[Any, Any]:
    return pattern(ROWS * COLUMNS, seed).reshape(ROWS, COLUMNS)


VIEWS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "columns": lambda matrix: matrix[:, 100:4301],
    "every third row": lambda matrix: matrix[::3],
    "rows backwards": lambda matrix: matrix[::-1],
    "a block of a cube": lambda matrix: matrix[:36].reshape(4, 9, COLUMNS)[1:3, 2:7, 1:],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("direct", ["auto", "never"])
def test_a_view_is_stored_by_its_values_and_loaded_into_its_place(
    path: Path, name: str, direct: Any
) -> None:
    source, target = _matrix(), _matrix(seed=2)
    view, into = VIEWS[name](source), VIEWS[name](target)
    expected = target.copy()
    VIEWS[name](expected)[...] = view
    assert not view.flags.c_contiguous
    with forebay.Handle(direct=direct) as handle:
        path.write_bytes(bytes(source.nbytes * 2))
        handle.store(view, path)
        assert path.read_bytes() == view.tobytes()
        handle.load(into, path)
        assert (target == expected).all(), "other bytes of the matrix are as they were"
        handle.store(view, path, offset=77)
        assert path.read_bytes()[77:] == view.tobytes()
        target[...] = 0
        handle.load_async(into, path, offset=77).wait()
        assert (into == view).all()
        assert np.count_nonzero(target) == np.count_nonzero(view)


def test_a_torch_slice_of_columns_is_moved_in_place(path: Path) -> None:
    torch = pytest.importorskip("torch")
    matrix = torch.arange(11 * 6000, dtype=torch.int32).reshape(11, 6000)
    shard = matrix[1:, 3000:5001]
    with forebay.Handle() as handle:
        handle.store(shard, path)
        assert path.read_bytes() == shard.contiguous().numpy().tobytes()
        target = torch.zeros_like(matrix)
        handle.load(target[1:, 3000:5001], path)
        assert (target[1:, 3000:5001] == shard).all()
        assert target.count_nonzero() == shard.count_nonzero()
        halves = [(matrix[:, :2000], path, 0), (matrix[:, 2000:], path, 11 * 8000)]
        handle.store_many(halves)
    stored = torch.from_file(str(path), size=11 * 6000, dtype=torch.int32)
    assert (stored[: 11 * 2000].reshape(11, 2000) == matrix[:, :2000]).all()
    assert (stored[11 * 2000 :].reshape(11, 4000) == matrix[:, 2000:]).all()


class OnlyDLPack:
    """An array that is known by DLPack alone."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_strides_of_dlpack_count_items(path: Path) -> None:
    source = pattern(9 * 12_000).view(np.int32).reshape(9, 3000)
    target = np.zeros_like(source)
    with forebay.Handle() as handle:
        handle.store(OnlyDLPack(source[::2, 5:2005]), path)
        assert path.read_bytes() == source[::2, 5:2005].tobytes()
        handle.load(OnlyDLPack(target[::2, 5:2005]), path)
    assert (target[::2, 5:2005] == source[::2, 5:2005]).all()
    assert np.count_nonzero(target) == np.count_nonzero(source[::2, 5:2005])


def test_views_that_share_memory_are_stored_and_not_loaded_into(path: Path) -> None:
    row = pattern(5000)
    repeated = np.broadcast_to(row, (6, 5000))
    with forebay.Handle() as handle:
        handle.store(repeated, path)
        assert path.read_bytes() == row.tobytes() * 6
        shared = np.lib.stride_tricks.as_strided(pattern(20_000), (6, 5000), (2500, 1))
        with pytest.raises(InvalidBufferError, match="share memory"):
            handle.load(shared, path)


def test_what_is_too_scattered_is_refused_with_its_runs_and_advice(path: Path) -> None:
    matrix = _matrix()
    with forebay.Handle() as handle:
        with pytest.raises(InvalidBufferError, match=r"37 runs of 4095 bytes.*ascontiguousarray"):
            handle.store(matrix[:, :4095], path)
        with pytest.raises(InvalidBufferError, match=r"C order.*ascontiguousarray"):
            handle.store(matrix.T, path)
    assert not path.exists()


def test_a_file_that_is_too_short_for_the_runs_is_told(path: Path) -> None:
    matrix = _matrix()
    path.write_bytes(bytes(ROWS * 5000 - 1))
    before = matrix.copy()
    with forebay.Handle() as handle, pytest.raises(ShortFileError, match=f"{ROWS * 5000 - 1}"):
        handle.load(matrix[:, :5000], path)
    assert (matrix == before).all()


def test_striped_files_take_views_too(tmp_path: Path) -> None:
    matrix = _matrix()
    view = matrix[:, 1:8200]
    drives = [tmp_path / str(number) for number in range(3)]
    for drive in drives:
        drive.mkdir()
    with forebay.Handle(stripe=drives, stripe_size=8192) as handle:
        handle.store(view, "view")
        target = np.zeros_like(matrix)
        handle.load(target[:, 1:8200], "view")
    assert (target[:, 1:8200] == view).all()
    assert np.count_nonzero(target) == np.count_nonzero(view)


def test_what_needs_bytes_in_one_piece_still_refuses_views(path: Path) -> None:
    torch = pytest.importorskip("torch")
    from forebay.torch import save_file

    shard = torch.zeros(8, 9000)[:, :5000]
    with pytest.raises(ValueError, match="contiguous"):
        save_file({"shard": shard}, path)
