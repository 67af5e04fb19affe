"""Checksums of arrays that are computed while their bytes pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import forebay
from conftest import pattern
from forebay._forebay import crc32c
from forebay.errors import OperationCancelledError, ShortFileError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path


def test_loads_and_stores_give_the_checksum_of_each_array(tmp_path: Path) -> None:
    lengths = [0, 1, 511, 4096, 4097, (3 << 20) + 5, 100_000]
    arrays = [pattern(length, seed) for seed, length in enumerate(lengths)]
    offsets = np.cumsum([0, *lengths]).tolist()[:-1]
    wanted = [crc32c(array) for array in arrays]
    path = tmp_path / "tensors"
    with forebay.Handle() as handle:
        items = [(array, path, offset) for array, offset in zip(arrays, offsets, strict=True)]
        stored = handle.store_many_async(items, whole_file=True, checksums=True)
        stored.wait()
        assert stored.checksums == wanted
        found = [np.zeros_like(array) for array in arrays]
        items = [(array, path, offset) for array, offset in zip(found, offsets, strict=True)]
        loaded = handle.load_many_async(items, checksums=True)
        loaded.wait()
        assert loaded.checksums == wanted
        silent = handle.load_many_async(items)
        silent.wait()
        assert silent.checksums is None


def test_an_array_of_several_runs_has_one_checksum(tmp_path: Path) -> None:
    matrix = pattern(40 * 20_000).reshape(40, 20_000)
    columns = matrix[:, 3000:15_000]
    plain = pattern(777, 2)
    path, other = tmp_path / "columns", tmp_path / "plain"
    with forebay.Handle() as handle:
        stored = handle.store_many_async([(columns, path), (plain, other)], checksums=True)
        stored.wait()
    assert path.read_bytes() == columns.tobytes()
    assert stored.checksums == [crc32c(np.ascontiguousarray(columns)), crc32c(plain)]


def test_what_did_not_move_has_no_checksums(tmp_path: Path) -> None:
    path = tmp_path / "tensor"
    path.write_bytes(bytes(10))
    with forebay.Handle() as handle:
        with pytest.raises(ShortFileError):
            handle.load_many_async([(bytearray(11), path)], checksums=True)
        cancelled = handle.store_many_async([(pattern(200 << 20), path)], checksums=True)
        cancelled.cancel()
        try:
            cancelled.wait()
        except OperationCancelledError:
            assert cancelled.checksums is None
        else:
            assert cancelled.checksums == [crc32c(pattern(200 << 20))]


def test_striped_files_have_none(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    with (
        forebay.Handle(stripe=directories) as handle,
        pytest.raises(UnsupportedError, match="checksums of striped files"),
    ):
        handle.store_many_async([(pattern(100), "tensor")], checksums=True)
