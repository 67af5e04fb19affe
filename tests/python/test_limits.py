"""The kernel's own obstacles: full and read-only drives, limits on files."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import need_root, pattern, run_python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENGINES = ["uring", "aio", "threads"]


def handle_for(engine: str, **options: Any) -> forebay.Handle:
    try:
        return forebay.Handle(engine, **options)
    except NotImplementedError as error:
        pytest.skip(str(error))
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_tmpfs_is_enospc_with_path_offset_and_bytes(
    mount: Callable[..., Path], engine: str
) -> None:
    directory = mount("-t", "tmpfs", "-o", "size=64k", "none")
    with handle_for(engine) as handle:
        with pytest.raises(OSError, match="No space left") as caught:
            handle.store(pattern(1 << 20), directory / "w")
        error: Any = caught.value
        assert error.errno == errno.ENOSPC
        assert error.filename == str(directory / "w")
        assert error.wanted == 1 << 20
        assert error.done < 1 << 20
        assert not (directory / "w").exists()
        data = pattern(20_000)
        handle.store(data, directory / "v")
        assert (directory / "v").read_bytes() == data.tobytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_drive_is_enospc_and_the_next_operation_works(small_ext4: Path, engine: str) -> None:
    path = small_ext4 / "w"
    with handle_for(engine) as handle:
        with pytest.raises(OSError, match="No space left") as caught:
            handle.store(pattern(16 << 20), path)
        assert caught.value.errno == errno.ENOSPC
        operation = handle.store_async(pattern(16 << 20), path)
        with pytest.raises(OSError, match="No space left"):
            operation.wait()
        data = pattern(1 << 20)
        handle.store(data, path)
        assert path.read_bytes() == data.tobytes()


def test_a_drive_that_fills_up_in_place_keeps_what_was_there(small_ext4: Path) -> None:
    path = small_ext4 / "w"
    before = pattern(1 << 20)
    path.write_bytes(before.tobytes())
    with forebay.Handle() as handle:
        with pytest.raises(OSError, match="No space left"):
            handle.store(pattern(16 << 20), path, offset=1 << 20)
        back = np.zeros_like(before)
        handle.load(back, path)
    assert np.array_equal(back, before)


def test_a_read_only_file_system_is_erofs(mount: Callable[..., Path]) -> None:
    directory = mount("-t", "tmpfs", "-o", "size=1m", "none")
    (directory / "r").write_bytes(b"here")
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    with forebay.Handle() as handle:
        for target in (directory / "w", directory / "r"):
            with pytest.raises(OSError, match="Read-only") as caught:
                handle.store(b"x", target)
            assert caught.value.errno == errno.EROFS
        back = bytearray(4)
        handle.load(back, directory / "r")
        assert back == b"here"


def test_no_permission_is_a_permission_error(tmp_path: Path) -> None:
    need_root()
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0)
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    run_python(
        f"""
        import os, forebay
        os.setgid(65534); os.setuid(65534)
        with forebay.Handle() as handle:
            for work in (handle.load, handle.store):
                try:
                    work(bytearray(1), {str(secret)!r})
                except PermissionError as error:
                    assert error.errno == 13 and error.filename == {str(secret)!r}
                else:
                    raise AssertionError("it was allowed")
        """
    )


def test_the_file_size_limit_is_efbig(path: Path) -> None:
    run_python(
        f"""
        import errno, resource, signal, forebay
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with forebay.Handle() as handle:
            for size in ((4 << 20), (1 << 20) + 1):
                try:
                    handle.store(bytes(size), {str(path)!r})
                except OSError as error:
                    assert error.errno == errno.EFBIG, error
                else:
                    raise AssertionError("it was written")
            handle.store(bytes(1 << 20), {str(path)!r})
        """
    )
    assert path.stat().st_size == 1 << 20


def test_running_out_of_descriptors_is_emfile(tmp_path: Path) -> None:
    run_python(
        f"""
        import errno, os, resource, forebay
        handle = forebay.Handle()
        handle.store(b"x", {str(tmp_path / "a")!r})
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            handle.store(b"x", {str(tmp_path / "b")!r})
        except OSError as error:
            assert error.errno == errno.EMFILE, error
        else:
            raise AssertionError("there was a descriptor left")
        for descriptor in held:
            os.close(descriptor)
        handle.store(b"y", {str(tmp_path / "b")!r})
        handle.close()
        """
    )
    assert (tmp_path / "b").read_bytes() == b"y"


def test_a_device_that_is_always_full_is_an_error_not_a_success() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with forebay.Handle() as handle, pytest.raises((OSError, ValueError)):
        handle.store(pattern(8192), "/dev/full", offset=0)
