"""Files of tensors through the compiled module: the kernel's obstacles, lifetimes, interrupts."""

from __future__ import annotations

import errno
import gc
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import descriptor_count, descriptors_fall_to, pattern, run_python
from forebay import _forebay
from forebay.errors import (
    AccessError,
    InvalidInputError,
    MismatchError,
    OutOfMemoryError,
    ShortFileError,
    SystemCallError,
    TensorFileError,
    UnsupportedError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20


def save(
    handle: forebay.Handle, path: Path, tensors: dict[str, Any], *, checksums: bool = True
) -> None:
    items = [(name, "U8", [len(array)], array) for name, array in tensors.items()]
    _forebay.save_tensors(handle._core, path, items, None, "full", checksums)


def load(
    handle: forebay.Handle,
    path: Path | list[Path],
    names: list[str] | None = None,
    *,
    verify: bool = True,
) -> dict[str, np.ndarray[Any, Any]]:
    source = _forebay.TensorSource(path)
    buffers, tensors = _forebay.load_tensors(handle._core, source, names, verify, None, True)
    arrays = [np.asarray(buffer) for buffer in buffers]
    return {
        name: arrays[region][offset : offset + shape[0]]
        for name, _, shape, region, offset in tensors
    }


def made(count: int, length: int) -> dict[str, np.ndarray[Any, Any]]:
    return {f"t{index:03}": pattern(length + index, index) for index in range(count)}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


def fill(directory: Path) -> None:
    """Leave no room for a file of 4 MiB."""
    with (directory / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65536)
        except OSError:
            pass
        file.truncate(max(0, file.tell() - MIB))


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_full_disk_is_an_error_and_the_old_file_stays(
    kind: str, request: pytest.FixtureRequest, mount: Callable[..., Path], handle: forebay.Handle
) -> None:
    if kind == "ext4":
        directory: Path = request.getfixturevalue("small_ext4")
    else:
        directory = mount("-t", "tmpfs", "-o", "size=8m", "none")
    path = directory / "m.safetensors"
    before = {"a": pattern(5000)}
    save(handle, path, before)
    fill(directory)
    names = sorted(os.listdir(directory))
    with pytest.raises(SystemCallError) as caught:
        save(handle, path, {"a": pattern(4 * MIB)})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert caught.value.wanted is not None
    assert caught.value.wanted > 4 * MIB
    assert sorted(os.listdir(directory)) == names
    assert_same(load(handle, path), before)
    (directory / "filler").unlink()
    after = {"a": pattern(4 * MIB)}
    save(handle, path, after)
    assert_same(load(handle, path), after)


def test_a_file_larger_than_the_limit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    run_python(
        f"""
        import errno, os, signal
        import forebay
        from forebay import _forebay
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path = {str(tmp_path / "m.safetensors")!r}
        with forebay.Handle() as handle:
            for length, fits in [(5 << 20, False), (1 << 20, True)]:
                items = [("w", "U8", [length], bytes(length))]
                try:
                    _forebay.save_tensors(handle._core, path, items, None, "full", True)
                    assert fits
                except OSError as error:
                    assert not fits and error.errno == errno.EFBIG, error
                    assert error.filename == path
                    assert os.listdir({str(tmp_path)!r}) == []
        """,
        "prlimit",
        "--fsize=3000000",
    )


def test_a_directory_that_may_not_be_written_to_is_an_access_error(tmp_path: Path) -> None:
    directory = tmp_path / "closed"
    directory.mkdir(mode=0o555)
    code = f"""
        import forebay
        from forebay import _forebay
        with forebay.Handle() as handle:
            try:
                items = [("w", "U8", [1], b"x")]
                _forebay.save_tensors(
                    handle._core, {str(directory / "m")!r}, items, None, "full", True
                )
            except PermissionError as error:
                assert isinstance(error, forebay.errors.AccessError)
                print(error.filename)
        """
    if os.geteuid() == 0:
        dropped = "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override"
        done = run_python(code, "setpriv", *dropped)
    else:
        done = run_python(code)
    assert done.stdout == f"{directory / 'm'}\n"
    assert issubclass(AccessError, PermissionError)


def test_tensors_behind_more_than_a_gigabyte_are_loaded_and_nothing_before_them(
    tmp_path: Path, handle: forebay.Handle
) -> None:
    path = tmp_path / "m.safetensors"
    hole, tail = (5 << 28) + 3, pattern(100_003)
    entries = {
        "hole": {"dtype": "U8", "shape": [hole], "data_offsets": [0, hole]},
        "tail": {"dtype": "U8", "shape": [len(tail)], "data_offsets": [hole, hole + len(tail)]},
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(8 + len(header) + hole)
        file.write(tail.tobytes())
    source = _forebay.TensorSource(path)
    plan = _forebay.plan_load(handle._core, source, ["tail"], None)
    assert plan["read_bytes"] < len(tail) + 2 * 4096
    assert_same(load(handle, path, ["tail"]), {"tail": tail})
    with pytest.raises(OutOfMemoryError, match=str(hole + len(tail))):
        _forebay.plan_load(handle._core, source, None, 1 << 30)


def test_what_was_loaded_stays_when_the_source_and_the_handle_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    wanted = made(20, 100_001)
    with forebay.Handle() as handle:
        save(handle, path, wanted)
        found = load(handle, path)
    del handle
    gc.collect()
    path.write_bytes(b"")
    assert_same(found, wanted)


def test_memory_goes_back_with_the_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    pool = forebay.Pool()
    with forebay.Handle(pool=pool) as handle:
        save(handle, path, made(20, 100_001))
        found = load(handle, path)
        kept = found["t007"]
        del found
        gc.collect()
        used = pool.stats()["used_bytes"]
        assert np.array_equal(kept, pattern(100_008, 7))
        del kept
        gc.collect()
        # Workers keep their staging memory.
        assert used - pool.stats()["used_bytes"] >= 20 * 100_001


def test_a_load_takes_no_more_than_its_plan_says(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    pool = forebay.Pool()
    with forebay.Handle(pool=pool) as handle:
        save(handle, path, made(30, 1_000_003))
        core = handle._core
        plan = _forebay.plan_load(core, _forebay.TensorSource(path), None, None)
        before = pool.stats()["peak_bytes"]
        found = load(handle, path)
        stats = pool.stats()
        assert stats["mapped_bytes"] <= plan["peak_bytes"]
        assert plan["region_bytes"] <= stats["mapped_bytes"]
        assert stats["peak_bytes"] <= max(before, plan["peak_bytes"])
        assert_same(found, made(30, 1_000_003))


def test_saving_takes_little_memory_beside_the_tensors(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import forebay
        from forebay import _forebay
        def resident(name):
            for line in open("/proc/self/status"):
                if line.startswith(name):
                    return int(line.split()[1]) << 10
        weights = bytearray(b"w") * (512 << 20)
        with forebay.Handle() as handle:
            open("/proc/self/clear_refs", "w").write("5")
            before = resident("VmRSS")
            items = [(f"t{{index}}", "U8", [8 << 20], memoryview(weights)[index << 23:][: 8 << 20])
                     for index in range(64)]
            path = {str(tmp_path / "m.safetensors")!r}
            _forebay.save_tensors(handle._core, path, items, None, "full", True)
            print(resident("VmHWM") - before)
        """
    )
    assert 0 < int(done.stdout) <= 128 * MIB


@pytest.mark.parametrize("call", ["load", "stream", "verify", "save"])
def test_an_interrupt_ends_a_call_and_the_next_one_works(tmp_path: Path, call: str) -> None:
    path = tmp_path / "m.safetensors"
    with forebay.Handle() as handle:
        save(handle, path, {"w": pattern(64 * MIB)})
    done = run_python(
        f"""
        import os, signal, threading
        import numpy as np
        import forebay
        from forebay import _forebay
        signal.signal(signal.SIGINT, signal.default_int_handler)
        path = {str(path)!r}
        source = _forebay.TensorSource(path)
        weights = np.zeros(64 << 20, np.uint8)

        def run(handle):
            core = handle._core
            if {call!r} == "load":
                _forebay.load_tensors(core, source, None, True, None, True)
            elif {call!r} == "stream":
                next(_forebay.TensorStream(core, source, None, 128 << 20, True, None))
            elif {call!r} == "verify":
                _forebay.verify_tensors(core, source)
            else:
                items = [("w", "U8", [64 << 20], weights)]
                _forebay.save_tensors(core, path + ".new", items, None, "none", True)

        options = {{"block_size": "64k", "queue_depth": 1, "page_cache": False}}
        slow = forebay.Handle(throttle="1MiB", intra_op_parallelism=1, **options)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            run(slow)
        except KeyboardInterrupt:
            print("interrupted")
        slow.close()
        print(sorted(os.listdir({str(tmp_path)!r})))
        with forebay.Handle() as handle:
            run(handle)
        """
    )
    assert done.stdout == "interrupted\n['m.safetensors']\n"


def test_a_stream_that_is_full_says_how_much_is_held(
    tmp_path: Path, handle: forebay.Handle
) -> None:
    path = tmp_path / "m.safetensors"
    wanted = made(20, 2 * MIB)
    save(handle, path, wanted)
    source = _forebay.TensorSource(path)
    stream = _forebay.TensorStream(handle._core, source, None, 16 * MIB, True, 0.05)
    held: list[Any] = []
    with pytest.raises(WaitTimeoutError, match=r"held by tensors that are still alive") as caught:
        held.extend(stream)
    assert str(stream.held_bytes) in str(caught.value)
    assert 0 < len(held) < 20
    found = {}
    while True:
        for name, _, shape, buffer, offset in held:
            found[name] = np.asarray(buffer)[offset : offset + shape[0]].copy()
        held.clear()
        del buffer
        gc.collect()
        try:
            held.append(next(stream))
        except StopIteration:
            break
    assert_same(found, wanted)
    assert stream.held_bytes == 0


def test_a_stream_can_be_dropped_or_closed_at_any_moment(
    tmp_path: Path, handle: forebay.Handle
) -> None:
    path = tmp_path / "m.safetensors"
    save(handle, path, made(50, MIB))
    for count in range(5):
        source = _forebay.TensorSource(path)
        stream = _forebay.TensorStream(handle._core, source, None, 32 * MIB, True, 1.0)
        items = [next(stream) for _ in range(count)]
        if count % 2:
            stream.close()
            with pytest.raises(ValueError, match="closed"):
                next(stream)
        del stream, source
        for name, _, shape, buffer, offset in items:
            wanted = pattern(shape[0], int(name[1:]))
            assert np.array_equal(np.asarray(buffer)[offset : offset + shape[0]], wanted)
    handle.wait()


def test_descriptors_stay_flat_over_good_and_failing_calls(
    tmp_path: Path, handle: forebay.Handle
) -> None:
    path, broken = tmp_path / "m.safetensors", tmp_path / "broken.safetensors"
    wanted = made(5, 10_001)
    save(handle, path, wanted)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    broken.write_bytes(damaged)
    load(handle, path)
    count = descriptor_count()
    for _ in range(100):
        save(handle, path, wanted)
        load(handle, path)
        with pytest.raises(MismatchError):
            load(handle, broken)
        with pytest.raises(InvalidInputError):
            load(handle, path, ["none"])
        with pytest.raises(TensorFileError):
            _forebay.read_header(__file__)
    gc.collect()
    assert descriptors_fall_to(count)


def test_errors_have_the_file_and_the_sizes(tmp_path: Path, handle: forebay.Handle) -> None:
    path = tmp_path / "m.safetensors"
    save(handle, path, {"w": pattern(10_000)})
    length = path.stat().st_size
    os.truncate(path, length - 1)
    with pytest.raises(ShortFileError) as caught:
        _forebay.read_header(path)
    error = caught.value
    assert (error.filename, error.wanted, error.done) == (str(path), length, length - 1)
    path.write_bytes(b"no tensors at all")
    with pytest.raises(TensorFileError, match="allowed"):
        _forebay.TensorSource(path)
    with pytest.raises(FileNotFoundError):
        _forebay.TensorSource(tmp_path / "gone")
    with pytest.raises(IsADirectoryError):
        _forebay.read_header(tmp_path)


def test_checksums_are_those_of_the_iscsi_polynomial(handle: forebay.Handle, path: Path) -> None:
    assert _forebay.crc32c(b"123456789") == 0xE3069283
    assert _forebay.crc32c(b"") == 0
    array = pattern(5000)
    save(handle, path, {"w": array})
    header = _forebay.read_header(path)
    assert header.checksums == "ours"
    assert header.checksum("w") == _forebay.crc32c(array)
    save(handle, path, {"w": array}, checksums=False)
    assert _forebay.read_header(path).checksums == "absent"
    assert [
        found[3] for found in _forebay.verify_tensors(handle._core, _forebay.TensorSource(path))
    ] == ["unknown"]


def test_a_striped_handle_is_refused(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    with (
        forebay.Handle(stripe=directories) as handle,
        pytest.raises(UnsupportedError, match="stripe"),
    ):
        save(handle, tmp_path / "m.safetensors", {"w": pattern(10)})
