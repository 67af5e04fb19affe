"""Errors are the right class, say what happened, and leave the handle usable."""

from __future__ import annotations

import copy
import errno
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import pattern
from forebay import errors

if TYPE_CHECKING:
    from pathlib import Path


def assert_usable(handle: forebay.Handle, path: Path) -> None:
    """Do what works, on a handle that has just failed."""
    data = pattern(5000)
    handle.store(data, path)
    back = np.zeros_like(data)
    handle.load(back, path)
    assert np.array_equal(back, data)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_missing_file_is_a_file_not_found_error(
    handle: forebay.Handle, path: Path, asynchronous: bool
) -> None:
    load = handle.load_async if asynchronous else handle.load
    with pytest.raises(FileNotFoundError) as caught:
        load(bytearray(4), path)
    error = caught.value
    assert isinstance(error, errors.FileMissingError)
    assert isinstance(error, forebay.ForebayError)
    assert error.errno == errno.ENOENT
    assert error.filename == str(path)
    assert error.strerror == "No such file or directory"
    assert str(path) in str(error)
    assert_usable(handle, path)


def test_large_loads_of_missing_files_fail_too(handle: forebay.Handle, path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        handle.load(bytearray(1 << 20), path)
    with pytest.raises(FileNotFoundError):
        handle.store(bytearray(1 << 20), path / "below")
    assert_usable(handle, path)


def test_a_directory_is_an_is_a_directory_error(handle: forebay.Handle, tmp_path: Path) -> None:
    for size in (4, 1 << 20):
        with pytest.raises(IsADirectoryError) as caught:
            handle.store(bytes(size), tmp_path)
        assert caught.value.filename == str(tmp_path)
    assert_usable(handle, tmp_path / "x")


def test_a_file_in_place_of_a_directory_is_a_not_a_directory_error(
    handle: forebay.Handle, path: Path
) -> None:
    path.write_bytes(b"x")
    with pytest.raises(NotADirectoryError):
        handle.store(b"x", path / "below")
    assert_usable(handle, path)


@pytest.mark.parametrize("size", [2000, 2 << 20])
def test_a_file_shorter_than_the_array_is_an_error_with_both_sizes(
    handle: forebay.Handle, path: Path, size: int
) -> None:
    path.write_bytes(pattern(1000).tobytes())
    with pytest.raises(errors.ShortFileError) as caught:
        handle.load(bytearray(size), path)
    assert caught.value.wanted == size
    assert caught.value.file_size == 1000
    assert str(size) in str(caught.value)
    assert "1000" in str(caught.value)
    assert_usable(handle, path)


def test_a_load_behind_the_end_is_an_error(handle: forebay.Handle, path: Path) -> None:
    path.write_bytes(bytes(1000))
    with pytest.raises(EOFError):
        handle.load(bytearray(1), path, offset=1000)
    handle.load(bytearray(1), path, offset=999)


def test_the_first_failure_of_several_is_raised_and_the_others_are_logged(
    handle: forebay.Handle, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(bytes(1 << 20))
    operations = [handle.load_async(bytearray(1 << 20), path) for _ in range(3)]
    with pytest.raises(errors.ShortFileError):
        handle.load_many([(bytearray(10), path), (bytearray(2 << 20), path)])
    assert handle.wait() == 3
    assert all(operation.done() for operation in operations)
    assert not caplog.records


def test_what_has_been_cancelled_says_so(path: Path) -> None:
    path.write_bytes(bytes(8 << 20))
    options: Any = {"block_size": "4k", "queue_depth": 1, "intra_op_parallelism": 1}
    with forebay.Handle(throttle="1MiB", page_cache=False, **options) as handle:
        operation = handle.load_async(bytearray(8 << 20), path)
        operation.cancel()
        with pytest.raises(errors.OperationCancelledError):
            operation.wait()
        assert operation.done()
        assert operation.bytes_done < operation.bytes_total
        assert handle.wait() == 1
        assert handle.stats()["cancelled"] == 1


def test_a_wait_that_runs_out_of_time_leaves_the_operation_going(path: Path) -> None:
    data = pattern(1 << 20)
    path.write_bytes(data.tobytes())
    target = np.zeros_like(data)
    with forebay.Handle(throttle="4MiB", page_cache=False, block_size="64k") as handle:
        operation = handle.load_async(target, path)
        with pytest.raises(TimeoutError) as caught:
            operation.wait(timeout=0)
        assert isinstance(caught.value, errors.WaitTimeoutError)
        with pytest.raises(errors.WaitTimeoutError):
            handle.wait(timeout=0.001)
        assert handle.wait() == 1
        operation.wait()
    assert np.array_equal(target, data)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "libaio"},
        {"queue_depth": 0},
        {"block_size": 5},
        {"block_size": "1 parsec"},
        {"intra_op_parallelism": 0},
        {"durability": "sometimes"},
        {"direct": "maybe"},
        {"staging_bytes": -1},
        {"throttle": 0},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_a_value_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).removeprefix("intra_op_")) as caught:
        forebay.Handle(**options)
    assert isinstance(caught.value, errors.InvalidInputError)


def test_a_closed_handle_refuses_and_can_be_closed_again(path: Path) -> None:
    handle = forebay.Handle()
    handle.close()
    handle.close()
    assert handle.closed
    for work in (handle.store, handle.store_async):
        with pytest.raises(errors.ClosedError):
            work(b"x", path)
    assert not path.exists()
    assert handle.wait() == 0


ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, forebay.ForebayError)
]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_can_be_pickled_and_copied(kind: type[forebay.ForebayError], again: Any) -> None:
    error = kind("it failed", errno.ENOSPC, "/x", 4096, 8192, 100, "uring", "store")
    twin = again(error)
    assert type(twin) is kind
    assert str(twin) == "it failed"
    fields = ("errno", "filename", "offset", "wanted", "done", "engine", "operation")
    assert [getattr(twin, name) for name in fields] == [getattr(error, name) for name in fields]
    assert twin.errno == errno.ENOSPC
    assert twin.filename == "/x"
    bare = again(kind("just words"))
    assert str(bare) == "just words"
    assert bare.errno is None


def fail_in_child(path: str) -> None:
    with forebay.Handle() as handle:
        handle.load(bytearray(4), path)


def test_errors_cross_processes(path: Path) -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(FileNotFoundError) as caught,
    ):
        pool.submit(fail_in_child, str(path)).result()
    assert caught.value.filename == str(path)


def test_the_tree_of_errors_has_one_root() -> None:
    assert len(ALL) > 15
    assert issubclass(errors.FileMissingError, FileNotFoundError)
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert issubclass(errors.InvalidBufferError, ValueError)
    assert issubclass(errors.WaitTimeoutError, TimeoutError)
