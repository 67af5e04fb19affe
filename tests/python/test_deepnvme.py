"""DeepNVMe's interface: names, defaults, counts, and exactness where the original has none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import pattern, run_python
from forebay.errors import InvalidBufferError, MismatchError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def aio() -> forebay.aio_handle:
    return forebay.aio_handle()


def test_the_defaults_are_deepnvmes(aio: forebay.aio_handle) -> None:
    assert aio.get_block_size() == 1 << 20
    assert aio.get_queue_depth() == 128
    assert aio.get_single_submit() is False
    assert aio.get_overlap_events() is False
    assert aio.get_intra_op_parallelism() == 1
    assert aio.get_alignment() == 512


def test_settings_are_positional_and_reported_back(path: Path) -> None:
    aio = forebay.aio_handle(8192, 4, True, True, 3)
    assert aio.get_block_size() == 8192
    assert aio.get_queue_depth() == 4
    assert aio.get_single_submit() is True
    assert aio.get_overlap_events() is True
    assert aio.get_intra_op_parallelism() == 3
    assert aio.get_alignment() == 3 * 512
    data = pattern(1_000_003)
    assert aio.sync_pwrite(data, str(path)) == 1
    assert path.read_bytes() == data.tobytes()


def test_two_asynchronous_calls_and_a_blocking_one_are_three(
    aio: forebay.aio_handle, tmp_path: Path
) -> None:
    data = pattern(5000)
    assert aio.async_pwrite(data, str(tmp_path / "a")) == 0
    assert aio.async_pwrite(data, str(tmp_path / "b")) == 0
    assert aio.sync_pwrite(data, str(tmp_path / "c")) == 3
    assert aio.wait() == 0
    backs = [np.zeros_like(data) for _ in range(3)]
    assert aio.async_pread(backs[0], str(tmp_path / "a")) == 0
    assert aio.pread(backs[1], str(tmp_path / "b"), False, True) == 0
    assert aio.pread(backs[2], str(tmp_path / "c"), False, False) == 3
    assert all(np.array_equal(back, data) for back in backs)


def test_wait_returns_the_number_completed(aio: forebay.aio_handle, tmp_path: Path) -> None:
    assert aio.wait() == 0
    for count in (1, 5):
        for index in range(count):
            aio.async_pwrite(pattern(100), str(tmp_path / str(index)))
        assert aio.wait() == count
    assert aio.wait() == 0


def test_read_and_write_return_zero(aio: forebay.aio_handle, path: Path) -> None:
    data = pattern(5000)
    assert aio.write(data, str(path), True) == 0
    back = np.zeros_like(data)
    assert aio.read(back, str(path), True) == 0
    assert np.array_equal(back, data)


def test_read_and_write_leave_pending_operations_to_wait(
    aio: forebay.aio_handle, tmp_path: Path
) -> None:
    data, back = pattern(5000), np.zeros(5000, np.uint8)
    assert aio.async_pwrite(data, str(tmp_path / "a")) == 0
    assert aio.write(data[::-1].copy(), str(tmp_path / "b")) == 0
    assert aio.read(back, str(tmp_path / "b")) == 0
    assert np.array_equal(back, data[::-1])
    with pytest.raises(FileNotFoundError):
        aio.read(back, str(tmp_path / "missing"))
    assert aio.wait() == 1
    assert (tmp_path / "a").read_bytes() == data.tobytes()


def test_a_forked_child_forgets_the_parents_operations(tmp_path: Path) -> None:
    run_python(
        f"""
        import os, warnings, forebay
        warnings.simplefilter("ignore", DeprecationWarning)
        aio = forebay.aio_handle()
        aio.async_pwrite(b"p" * 5000, {str(tmp_path / "parent")!r})
        aio._lock.acquire()
        child = os.fork()
        if child == 0:
            try:
                assert aio.wait() == 0
                aio.async_pwrite(b"c" * 5000, {str(tmp_path / "child")!r})
                assert aio.wait() == 1
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        aio._lock.release()
        assert os.waitpid(child, 0)[1] == 0
        assert aio.wait() == 1
        """
    )
    assert (tmp_path / "parent").read_bytes() == b"p" * 5000
    assert (tmp_path / "child").read_bytes() == b"c" * 5000


def slow_aio() -> forebay.aio_handle:
    """Return one that hands out few blocks at a time, and those slowly."""
    aio = forebay.aio_handle(block_size=65536, queue_depth=2)
    aio._handle = forebay.Handle(
        throttle="8MiB",
        page_cache=False,
        block_size="64k",
        queue_depth=2,
        intra_op_parallelism=1,
    )
    return aio


def test_who_waits_beside_another_thread_waits_for_all(path: Path) -> None:
    aio = slow_aio()
    data = pattern(2 << 20)
    aio.async_pwrite(data, path)
    operation = aio._pending[0]._operation
    counts: list[int] = []
    other = threading.Thread(target=lambda: counts.append(aio.wait()))
    other.start()
    while aio._pending:
        pass
    counts.append(aio.wait())
    assert operation.done()
    other.join()
    assert sorted(counts) == [0, 1]
    assert path.read_bytes() == data.tobytes()


def test_a_failure_before_an_interrupt_is_raised_by_the_next_wait(path: Path) -> None:
    done = run_python(
        f"""
        import os, signal, threading, time, forebay
        aio = forebay.aio_handle(block_size=65536, queue_depth=2)
        aio._handle = forebay.Handle(
            throttle="2MiB", page_cache=False, block_size="64k", queue_depth=2,
            intra_op_parallelism=1,
        )
        path = {str(path)!r}
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))
        aio.async_pread(bytearray(1 << 20), path)
        os.truncate(path, 0)
        aio.async_pwrite(bytes(3 << 20), path + ".slow")
        first, second = (pending._operation for pending in aio._pending)

        def interrupt():
            while not first.done():
                pass
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            aio.wait()
        except KeyboardInterrupt:
            print("interrupted")
        assert not second.done()
        try:
            aio.wait()
        except EOFError:
            print("heard")
        assert second.done()
        assert aio.wait() == 0
        """
    )
    assert done.stdout == "interrupted\nheard\n"
    assert done.stderr == ""


def test_concurrent_blocking_calls_return_one_each(aio: forebay.aio_handle, tmp_path: Path) -> None:
    counts: list[int] = []

    def work(number: int) -> None:
        data = pattern(100_000, number)
        for _ in range(20):
            counts.append(aio.sync_pwrite(data, str(tmp_path / str(number))))
            counts.append(aio.sync_pread(np.zeros_like(data), str(tmp_path / str(number))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 240


def test_the_word_async_can_be_given_by_name(aio: forebay.aio_handle, path: Path) -> None:
    named: Any = {"async": True}
    assert aio.pwrite(pattern(10), str(path), validate=False, **named) == 0
    assert aio.wait() == 1
    with pytest.raises(TypeError, match="asink"):
        aio.pwrite(pattern(10), str(path), False, asink=True)


def test_a_write_without_an_offset_leaves_the_exact_size(
    aio: forebay.aio_handle, path: Path
) -> None:
    path.write_bytes(bytes(9000))
    assert aio.sync_pwrite(pattern(4097), str(path)) == 1
    assert path.read_bytes() == pattern(4097).tobytes()


@pytest.mark.parametrize("offset", [0, 100, 4096])
def test_a_write_with_an_offset_keeps_the_rest(
    aio: forebay.aio_handle, path: Path, offset: int
) -> None:
    path.write_bytes(b"\xaa" * 20_000)
    data = pattern(4096)
    aio.sync_pwrite(data, str(path), offset)
    expected = b"\xaa" * offset + data.tobytes() + b"\xaa" * (20_000 - 4096 - offset)
    assert path.read_bytes() == expected
    back = np.zeros_like(data)
    aio.sync_pread(back, str(path), offset)
    assert np.array_equal(back, data)


def test_an_open_descriptor_can_be_written_to(aio: forebay.aio_handle, path: Path) -> None:
    data = pattern(10_000)
    with path.open("w+b") as file:
        assert aio.async_pwrite(data[:5000], file.fileno(), 0) == 0
        assert aio.async_pwrite(data[5000:], fd=file.fileno(), file_offset=5000) == 0
        assert aio.wait() == 2
    assert path.read_bytes() == data.tobytes()
    with pytest.raises(TypeError):
        aio.async_pwrite(data)


def test_load_and_store_take_tensor_and_fp(aio: forebay.aio_handle, path: Path) -> None:
    data = pattern(777)
    aio.store(tensor=data, fp=str(path))
    back = np.zeros_like(data)
    aio.load(tensor=back, fp=path)
    assert np.array_equal(back, data)
    with path.open("r+b") as file:
        aio.store(tensor=data[:10], fp=file)
    assert path.read_bytes() == data[:10].tobytes()


def test_validation_finds_a_difference_and_names_its_offset(
    aio: forebay.aio_handle, path: Path
) -> None:
    data = pattern(2_000_000)
    aio.pwrite(data, str(path), True, True)
    aio._pending[0]._operation.wait()
    with path.open("r+b") as file:
        file.seek(1_234_567)
        file.write(bytes([data[1_234_567] ^ 1]))
    with pytest.raises(MismatchError, match="1234567") as caught:
        aio.wait()
    assert caught.value.offset == 1_234_567
    assert caught.value.filename == str(path)
    assert aio.wait() == 0


def test_validation_takes_whatever_is_stored_and_loaded(
    aio: forebay.aio_handle, path: Path
) -> None:
    data = pattern(64 * 9001).reshape(64, 9001)
    view, back = data[:, 100:5001], np.zeros_like(data)[::2]
    assert aio.write(view, str(path), True) == 0
    assert path.read_bytes() == view.tobytes()
    assert aio.read(back[:, :4901], str(path), True) == 0
    assert np.array_equal(back[:, :4901], view[:32])
    aio.pwrite(view, str(path), True, True)
    aio._pending[0]._operation.wait()
    spoiled = bytearray(view.tobytes())
    spoiled[7 * 4901 + 5] ^= 1
    path.write_bytes(spoiled)
    with pytest.raises(MismatchError) as caught:
        aio.wait()
    assert caught.value.offset == 7 * 4901 + 5


def test_errors_raise_and_the_handle_goes_on(aio: forebay.aio_handle, path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        aio.async_pread(np.zeros(10), str(path))
    path.write_bytes(b"short")
    with pytest.raises(EOFError):
        aio.sync_pread(np.zeros(10), str(path))
    aio.async_pwrite(pattern(10), str(path))
    assert aio.wait() == 1


def test_locked_tensors_come_and_go(aio: forebay.aio_handle, path: Path) -> None:
    torch = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))
    example = torch.zeros(1, dtype=torch.bfloat16)
    locked = aio.new_cpu_locked_tensor(1003, example)
    assert locked.shape == (1003,)
    assert locked.dtype == torch.bfloat16
    assert aio.is_pinned(locked)
    assert not aio.is_pinned(example)
    locked.fill_(2)
    aio.sync_pwrite(locked, str(path))
    assert path.stat().st_size == 2006
    view = locked[10:20]
    assert aio.free_cpu_locked_tensor(locked) is True
    assert aio.free_cpu_locked_tensor(locked) is False
    assert aio.free_cpu_locked_tensor(example) is False
    assert (view == 2).all()
    with pytest.raises(InvalidBufferError, match="freed"):
        aio.async_pread(locked, str(path))


def test_a_locked_array_can_be_numpys(aio: forebay.aio_handle) -> None:
    locked = aio.new_cpu_locked_tensor(10, np.zeros(1, np.float32))
    assert isinstance(locked, np.ndarray)
    assert locked.shape == (10,)
    assert aio.free_cpu_locked_tensor(locked) is True
    locked[:] = 3
    assert aio.free_cpu_locked_tensor(locked) is False
    assert (locked == 3).all()


@pytest.mark.parametrize("kind", ["requires_grad", "parameter", "inference"])
def test_locked_tensors_of_every_kind_can_be_freed(
    aio: forebay.aio_handle, path: Path, kind: str
) -> None:
    torch = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))
    example = torch.zeros(1)
    if kind == "inference":
        with torch.inference_mode():
            locked = tensor = aio.new_cpu_locked_tensor(100, example)
    else:
        locked = aio.new_cpu_locked_tensor(100, example)
        wrapped = kind == "parameter"
        tensor = torch.nn.Parameter(locked) if wrapped else locked.requires_grad_()
    assert aio.is_pinned(tensor)
    assert aio.free_cpu_locked_tensor(tensor) is True
    assert aio.free_cpu_locked_tensor(tensor) is False
    assert tensor.numel() == locked.numel() == 0
    with pytest.raises(InvalidBufferError, match="freed"):
        aio.async_pwrite(tensor, str(path))


@pytest.mark.parametrize("like", ["torch", "numpy"])
def test_empty_locked_tensors_are_told_apart(aio: forebay.aio_handle, like: str) -> None:
    if like == "torch":
        torch = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))
        example, other = torch.zeros(1), torch.empty(0)
    else:
        example, other = np.zeros(1), np.empty(0)
    locked, second = (aio.new_cpu_locked_tensor(0, example) for _ in range(2))
    assert not aio.is_pinned(other)
    assert aio.free_cpu_locked_tensor(other) is False
    assert aio.free_cpu_locked_tensor(locked) is True
    assert aio.free_cpu_locked_tensor(locked) is False
    assert aio.is_pinned(second)


def test_what_isnt_a_tensor_is_named(aio: forebay.aio_handle) -> None:
    for wrong in (None, "text"):
        with pytest.raises(TypeError, match="example_tensor"):
            aio.new_cpu_locked_tensor(1, wrong)
        with pytest.raises(TypeError, match="tensor must be"):
            aio.free_cpu_locked_tensor(wrong)
        with pytest.raises(TypeError, match="num_elem"):
            aio.new_cpu_locked_tensor(wrong, np.zeros(1))  # type: ignore[arg-type]


def test_fallbacks_are_logged(aio: forebay.aio_handle, path: Path) -> None:
    seen: list[int] = []
    aio._handle._log_notices = lambda: seen.append(1)  # type: ignore[method-assign]
    aio.async_pwrite(pattern(100), str(path))
    aio.wait()
    aio.read(np.zeros(100, np.uint8), str(path))
    assert len(seen) == 2
