"""FastFileWriter: every byte or the old file, whatever happens on the way."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import os
import re
import signal
import stat
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import need_strace, pattern, run_python
from forebay.errors import ClosedError, ForebayError, InvalidInputError

torch: Any = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))

if TYPE_CHECKING:
    from pathlib import Path


def state(items: int = 100_003) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(items)
    base = torch.randn(items, generator=generator)
    return {
        "float": base,
        "view": base[7:5003],
        "half": base.to(torch.bfloat16),
        "bytes": torch.arange(255, dtype=torch.uint8),
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "text": "äöü" * 1000,
    }


def assert_same(path: Path, expected: dict[str, Any]) -> None:
    found = torch.load(path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, str):
            assert found[name] == value
        else:
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)


def config_with(buffer_bytes: int, **more: Any) -> forebay.FastFileWriterConfig:
    return forebay.FastFileWriterConfig(
        pinned_tensor=torch.zeros(buffer_bytes, dtype=torch.uint8), **more
    )


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("buffer_bytes", [1, 2, 4097, 65_536, 1_000_003])
def test_torch_loads_what_torch_saved(
    path: Path, buffer_bytes: int, double: bool, zip_format: bool
) -> None:
    expected = state(100_003 if buffer_bytes > 2 else 11)
    if buffer_bytes <= 2:
        expected.pop("text")
        expected["view"] = expected["float"][7:9]
    writer = forebay.FastFileWriter(path, config_with(buffer_bytes, double_buffer=double))
    torch.save(expected, writer, _use_new_zipfile_serialization=zip_format)
    assert not path.exists()
    writer.close()
    assert_same(path, expected)
    assert names_in(path.parent) == [path.name]


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 4095, 4097, 16_383, 16_384, 100_001])
def test_a_file_is_exactly_what_was_written(path: Path, length: int) -> None:
    data = pattern(length).tobytes()
    path.write_bytes(b"\xaa" * 200_000)
    writer = forebay.FastFileWriter(path, config_with(8192))
    position = 0
    for piece in (1, 7, 4096, 0, length):
        assert writer.write(data[position : position + piece]) == len(
            data[position : position + piece]
        )
        position += piece
    writer.close()
    assert path.read_bytes() == data


def test_memory_of_any_kind_can_be_written(path: Path) -> None:
    numbers = np.arange(1000, dtype=np.float64).reshape(10, 100)
    with forebay.FastFileWriter(str(path)) as writer:
        assert writer.write(numbers) == 8000
        assert writer.write(bytearray(b"abc")) == 3
        assert writer.write(memoryview(b"defg")[1:]) == 3
        with pytest.raises(TypeError):
            writer.write(numbers[:, 1])
        with pytest.raises(TypeError):
            writer.write("text")
    assert path.read_bytes() == numbers.tobytes() + b"abcefg"


def test_the_mode_of_an_existing_file_is_kept_and_a_new_one_follows_the_umask(path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o604)
    other = path.with_name("new")
    former = os.umask(0o027)
    try:
        for one in (path, other):
            with forebay.FastFileWriter(one) as writer:
                writer.write(b"new")
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert stat.S_IMODE(other.stat().st_mode) == 0o640


def test_an_exception_leaves_the_old_file(path: Path) -> None:
    path.write_bytes(b"old")

    def interrupted() -> None:
        with forebay.FastFileWriter(path, config_with(4096)) as writer:
            writer.write(pattern(100_000))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert names_in(path.parent) == [path.name]


def test_a_writer_that_is_dropped_leaves_the_old_file_and_says_so(path: Path) -> None:
    path.write_bytes(b"old")
    writer = forebay.FastFileWriter(path)
    writer.write(b"new")
    with pytest.warns(forebay.ForebayWarning, match=r"without close.*tensor\.bin"):
        del writer
    assert path.read_bytes() == b"old"
    assert names_in(path.parent) == [path.name]


def test_a_full_disk_is_enospc_and_leaves_the_old_file(small_ext4: Path) -> None:
    path = small_ext4 / "state.pt"
    torch.save({"old": torch.ones(10)}, path)
    large = {"new": torch.zeros(16 << 20, dtype=torch.uint8)}
    writer = forebay.FastFileWriter(path, config_with(1 << 20))
    with pytest.raises(OSError, match="No space") as caught:
        torch.save(large, writer)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match="No space"):
        writer.close()
    with (
        pytest.raises(OSError, match="No space"),
        forebay.FastFileWriter(path, config_with(1 << 20)) as writer,
    ):
        writer.write(large["new"].numpy())
    assert torch.equal(torch.load(path)["old"], torch.ones(10))
    assert [name for name in names_in(small_ext4) if name != "lost+found"] == ["state.pt"]


def test_a_failure_comes_before_what_it_leads_to(small_ext4: Path) -> None:
    def fails() -> None:
        with forebay.FastFileWriter(small_ext4 / "a", config_with(1 << 20)) as writer:
            writer.write(bytes(16 << 20))
            raise RuntimeError("the count doesn't match")

    with pytest.raises(OSError, match="No space") as caught:
        fails()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_tidies_up(path: Path) -> None:
    path.write_bytes(b"old")
    killed = run_python(
        f"""
        import forebay, os, signal
        writer = forebay.FastFileWriter({str(path)!r})
        writer.write(b"new" * 10_000_000)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(names_in(path.parent)) == 2
    with forebay.FastFileWriter(path.with_name("other")) as writer:
        writer.write(b"other")
    assert len(names_in(path.parent)) == 3
    with forebay.FastFileWriter(path) as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"new"
    assert names_in(path.parent) == ["other", path.name]


def test_two_writers_of_one_file_leave_one_of_the_two(path: Path) -> None:
    first, second = (forebay.FastFileWriter(path, config_with(8192)) for _ in range(2))
    for _ in range(10):
        first.write(b"1" * 5000)
        second.write(b"2" * 3000)
    second.close()
    assert path.read_bytes() == b"2" * 30_000
    first.close()
    assert path.read_bytes() == b"1" * 50_000
    assert names_in(path.parent) == [path.name]


def test_memory_is_the_same_for_any_file(path: Path) -> None:
    run_python(
        f"""
        import forebay
        with forebay.FastFileWriter({str(path)!r}) as writer:
            for number in range(128):
                writer.write(bytes([number]) * (1 << 20))
            stats = forebay.memory.Pool._over(forebay._forebay.Pool.shared()).stats()
            assert 0 < stats["peak_bytes"] <= 32 << 20, stats
        assert forebay._forebay.Pool.shared().stats()["used_bytes"] == 0
        """
    )
    data = np.fromfile(path, np.uint8).reshape(128, -1)
    assert data.shape[1] == 1 << 20
    assert all((row == number).all() for number, row in enumerate(data))


def test_a_forked_child_leaves_the_parents_file_alone(path: Path) -> None:
    run_python(
        f"""
        import forebay, os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        writer = forebay.FastFileWriter({str(path)!r})
        writer.write(b"parent" * 1000)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        writer.close()
        """
    )
    assert path.read_bytes() == b"parent" * 1000


def test_a_link_stays_one(path: Path) -> None:
    path.write_bytes(b"old")
    link = path.with_name("link")
    link.symlink_to(path.name)
    with forebay.FastFileWriter(link) as writer:
        writer.write(b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


def test_the_longest_names_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    with forebay.FastFileWriter(path) as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"new"


def test_what_cant_be_replaced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        forebay.FastFileWriter(tmp_path)
    with pytest.raises(FileNotFoundError):
        forebay.FastFileWriter(tmp_path / "none" / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInputError, match="pipe"):
        forebay.FastFileWriter(tmp_path / "pipe")
    with pytest.raises(TypeError, match="path"):
        forebay.FastFileWriter(3)


def test_storages_are_written_one_after_the_other(path: Path) -> None:
    tensors = [torch.arange(1003, dtype=torch.int16), torch.randn(17), torch.zeros(0)]
    storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in tensors]
    typed = torch.tensor([True, False])
    storages.append(
        torch.storage.TypedStorage(
            wrap_storage=typed.untyped_storage(), dtype=typed.dtype, _internal=True
        )
    )
    expected = b"".join(
        len(items).to_bytes(8, "little") + items.numpy().tobytes() for items in [*tensors, typed]
    )
    with forebay.FastFileWriter(path, config_with(1024)) as writer:
        assert writer.save_torch_storage_object_list(storages, save_size=True) == len(expected)
        assert writer.save_torch_storage_object_list(storages[:1], "false") == 2006
    assert path.read_bytes() == expected + tensors[0].numpy().tobytes()
    with forebay.FastFileWriter(path) as writer, pytest.raises(TypeError, match="storage"):
        writer.save_torch_storage_object_list([torch.zeros(1)], False)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_parallel_writers_share_the_storages(tmp_path: Path, count: int) -> None:
    tensors = [torch.randn(length) for length in (1, 250, 3)]
    storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in tensors]
    shares = []
    for rank in range(count):
        config = config_with(64, num_parallel_writers=count, writer_rank=rank)
        with forebay.FastFileWriter(tmp_path / str(rank), config) as writer:
            written = writer.save_torch_storage_object_list(storages, False)
        shares.append((tmp_path / str(rank)).read_bytes())
        assert written == len(shares[-1])
    assert b"".join(shares) == b"".join(tensor.numpy().tobytes() for tensor in tensors)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_configuration_and_handles_of_other_makes_do(path: Path) -> None:
    foreign = types.SimpleNamespace(
        get_block_size=lambda: 65_536,
        get_queue_depth=lambda: 4,
        get_intra_op_parallelism=lambda: 2,
    )
    for handle in (None, forebay.Handle(), forebay.aio_handle(), foreign):
        config = types.SimpleNamespace(
            dnvme_handle=handle,
            pinned_tensor=torch.zeros(1000, dtype=torch.float32),
            double_buffer="true",
            num_parallel_writers=1,
            writer_rank=0,
            global_rank=0,
        )
        with forebay.FastFileWriter(path, config) as writer:
            writer.write(pattern(100_000))
        assert path.read_bytes() == pattern(100_000).tobytes()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dnvme_handle": "aio"}, TypeError),
        ({"pinned_tensor": b"memory"}, TypeError),
        ({"pinned_tensor": torch.zeros(0)}, InvalidInputError),
        ({"pinned_tensor": torch.zeros(1, device="meta")}, InvalidInputError),
        ({"writer_rank": 1}, InvalidInputError),
        ({"writer_rank": "0"}, TypeError),
        ({"num_parallel_writers": 2.0}, TypeError),
        ({"double_buffer": "twice"}, TypeError),
    ],
)
def test_a_wrong_configuration_is_refused_and_leaves_nothing(
    path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        forebay.FastFileWriter(path, forebay.FastFileWriterConfig(**change))
    with pytest.raises(TypeError, match="config"):
        forebay.FastFileWriter(path, {"double_buffer": True})
    assert names_in(path.parent) == []


def test_the_interface_is_deepspeeds(path: Path) -> None:
    writer = forebay.FastFileWriter(path)
    assert writer.fileno() == -1
    assert writer.file_path() == str(path)
    assert writer.flush() is None
    assert not writer.closed
    writer.close()
    writer.close()
    assert writer.closed
    assert path.read_bytes() == b""
    with pytest.raises(ClosedError):
        writer.write(b"more")


def test_threads_lose_nothing_of_what_they_write(path: Path) -> None:
    writer = forebay.FastFileWriter(path, config_with(1000))

    def write(sign: bytes) -> None:
        for _ in range(300):
            writer.write(sign * 777)

    threads = [threading.Thread(target=write, args=(sign,)) for sign in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    pieces = np.fromfile(path, np.uint8).reshape(900, 777)
    assert (pieces == pieces[:, :1]).all()
    assert sorted(pieces[:, 0].tobytes()) == sorted(b"abc" * 300)


@pytest.mark.parametrize("buffer_bytes", [4096, 1 << 20])
def test_a_forked_child_can_neither_write_nor_close_the_parents_file(
    path: Path, buffer_bytes: int
) -> None:
    run_python(
        f"""
        import forebay, os, torch, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        memory = torch.zeros({buffer_bytes}, dtype=torch.uint8)
        config = forebay.FastFileWriterConfig(pinned_tensor=memory)
        writer = forebay.FastFileWriter({str(path)!r}, config)
        writer.write(b"parent" * 1000)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: writer.write(b"child"), writer.flush, writer.close):
                try:
                    call()
                except forebay.errors.ClosedError as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        writer.write(b"parent" * 1000)
        writer.close()
        """
    )
    assert path.read_bytes() == b"parent" * 2000
    assert names_in(path.parent) == [path.name]


def interrupted_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a writer whose first store is interrupted, as by Ctrl-C."""
    handle = forebay.Handle()
    store = handle.store_async
    stores = []

    def store_async(*arguments: Any) -> Any:
        stores.append(arguments)
        if len(stores) == 1:
            raise KeyboardInterrupt
        return store(*arguments)

    monkeypatch.setattr(handle, "store_async", store_async)
    return forebay.FastFileWriter(path, config_with(4096, dnvme_handle=handle))


def test_a_write_that_was_interrupted_never_becomes_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"old")
    writer = interrupted_writer(path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        writer.write(pattern(10_000))
    writer.write(pattern(10_000))
    with pytest.raises(ForebayError, match="KeyboardInterrupt"):
        writer.close()
    with pytest.raises(KeyboardInterrupt), interrupted_writer(path, monkeypatch) as writer:
        writer.write(pattern(10_000))
    assert path.read_bytes() == b"old"
    assert names_in(path.parent) == [path.name]


def test_an_interrupt_of_torch_is_told_as_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), interrupted_writer(path, monkeypatch) as writer:
        torch.save(state(), writer)
    assert names_in(path.parent) == []


@pytest.mark.parametrize("within_block", [False, True])
def test_a_save_that_failed_holds_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, within_block: bool
) -> None:
    weights = torch.ones(100_000)
    writer = interrupted_writer(path, monkeypatch)
    held = [weakref.ref(writer), weakref.ref(weights)]
    with contextlib.suppress(KeyboardInterrupt, RuntimeError), contextlib.ExitStack() as block:
        if within_block:
            block.enter_context(writer)
        torch.save({"weights": weights}, writer)
    del weights, block
    with contextlib.nullcontext() if within_block else pytest.warns(forebay.ForebayWarning):
        del writer
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert names_in(path.parent) == []


def test_a_full_disk_under_torch_holds_nothing(small_ext4: Path) -> None:
    weights = torch.zeros(16 << 20, dtype=torch.uint8)
    writer = forebay.FastFileWriter(small_ext4 / "state.pt", config_with(1 << 20))
    held = [weakref.ref(writer), weakref.ref(weights)]
    with contextlib.suppress(OSError, RuntimeError):
        torch.save({"weights": weights}, writer)
    del weights
    with pytest.warns(forebay.ForebayWarning):
        del writer
    assert [reference() for reference in held] == [None, None]
    assert names_in(small_ext4) == ["lost+found"]


def test_a_path_that_has_become_a_pipe_is_not_replaced(path: Path) -> None:
    writer = forebay.FastFileWriter(path)
    os.mkfifo(path)
    with pytest.raises(InvalidInputError, match="pipe"):
        writer.close()
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert names_in(path.parent) == [path.name]


def test_a_path_that_ends_as_a_folder_is_one(path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        forebay.FastFileWriter(f"{path}/")
    assert not path.exists()


def test_a_writer_cant_be_copied(path: Path) -> None:
    with forebay.FastFileWriter(path) as writer, pytest.raises(TypeError, match="copied"):
        copy.copy(writer)


# By threads: io_uring syncs files without a call of its own, which strace doesn't see.
DURABLE = {
    "FastFileWriter": """
        import forebay
        writer = forebay.FastFileWriter({path!r})
        writer.write(b"new" * 1_000_000)
        writer.close()
        """,
    "store": """
        import forebay
        data = bytearray(b"new" * 1_000_000)
        forebay.Handle(engine="threads").store(data, {path!r}, durability="full")
        """,
}


@pytest.mark.parametrize("way", DURABLE)
def test_data_are_synced_before_the_name_and_the_name_before_the_end(path: Path, way: str) -> None:
    need_strace()
    log = path.parent.parent / "calls"
    calls = (
        "openat,write,pwrite64,io_uring_enter,io_submit,fsync,fdatasync,rename,renameat,renameat2"
    )
    wrapper = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={calls}"]
    run_python(DURABLE[way].format(path=str(path)), *wrapper)
    lines = log.read_text(errors="replace").splitlines()
    steps = []
    for line in lines:
        call = re.search(r"\b(fsync|fdatasync|rename\w*)\((.*)", line)
        if call is None or str(path.parent) not in line:
            continue
        if call[1].startswith("rename"):
            assert f'"{path}"' in line
            steps.append("rename")
        else:
            steps.append("folder" if f"<{path.parent}>" in call[2] else "file")
    expected = ["file", "rename", "folder"] if way == "FastFileWriter" else ["file", "folder"]
    assert steps == expected, "\n".join(lines)
    assert path.read_bytes() == b"new" * 1_000_000
