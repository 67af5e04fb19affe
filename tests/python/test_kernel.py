"""The real kernel being difficult: large sectors, injected errors, slow and shared drives."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import forebay
from conftest import need_root, need_strace, pattern, run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGINES = ["uring", "aio", "threads"]
SECTOR_BYTES = 4096
CACHESTAT = 451


@pytest.fixture
def large_sectors(tmp_path: Path) -> Iterator[str]:
    """Make a loop device of 64 MiB with sectors of 4096 bytes."""
    need_root()
    if shutil.which("losetup") is None:
        pytest.skip("losetup is not installed")
    image = tmp_path / "sectors.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    make = ["losetup", "--find", "--show", "--sector-size", str(SECTOR_BYTES), str(image)]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no loop device with large sectors: {done.stderr.strip()}")
    device = done.stdout.strip()
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def large_sector_directory(large_sectors: str, mount: Callable[..., Path]) -> Path:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", large_sectors], check=True, capture_output=True)
    return mount(large_sectors)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_drive_with_large_sectors_keeps_every_byte(
    large_sector_directory: Path, engine: str
) -> None:
    facts = forebay.file_facts(large_sector_directory)
    assert facts["direct"], facts
    assert facts["memory_alignment"] in {512, SECTOR_BYTES}
    path = large_sector_directory / "tensor.bin"
    with forebay.Handle(engine=engine, block_size="64KiB") as handle:
        for length in (0, 1, 511, 512, 4095, 4096, 4097, 300_001):
            for shift in (0, 1, 64, 512, 4096):
                block = pattern(length + 2 * SECTOR_BYTES, length + shift)
                start = -block.ctypes.data % SECTOR_BYTES + shift % SECTOR_BYTES
                data = block[start : start + length]
                handle.store(data, path)
                assert path.read_bytes() == data.tobytes()
                back = np.zeros_like(block)[start : start + length]
                handle.load(back, path)
                assert np.array_equal(back, data)
        handle.store(pattern(512), path, offset=512)
        assert path.read_bytes()[512:1024] == pattern(512).tobytes()
        assert handle.stats()["bytes_direct"] > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_block_device_holds_tensors_at_offsets(large_sectors: str, engine: str) -> None:
    data = pattern(100_003)
    with forebay.Handle(engine=engine) as handle:
        for offset in (0, 1, 4096, 1 << 20):
            handle.store(data, large_sectors, offset=offset)
            back = np.zeros_like(data)
            handle.load(back, large_sectors, offset=offset)
            assert np.array_equal(back, data)
        with pytest.raises(forebay.errors.ShortFileError):
            handle.load(back, large_sectors, offset=(64 << 20) - 10)


STORE_AND_LOAD = """
    import forebay
    data = bytes(range(256)) * 4096 * 3 + b"odd"
    path, engine, direct = {arguments!r}
    with forebay.Handle(engine=engine, direct=direct, block_size=65536, queue_depth=4) as handle:
        for durability in ("none", "full"):
            handle.store(data, path, durability=durability)
        back = bytearray(len(data))
        handle.load(back, path)
        assert back == data
"""


def inject(rule: str, path: Path, engine: str, *, direct: str = "auto") -> str:
    """Run a round trip under an injected fault; return what it printed as an error.

    Faults of calls that name a file or descriptor are only injected for the tensor's file.
    """
    need_strace()
    code = STORE_AND_LOAD.format(arguments=[str(path), engine, direct])
    path.touch()
    only = ["-P", str(path)] if rule.startswith(OF_FILES) else []
    wrapper = ["strace", "-f", "-qq", "-o", "/dev/null", *only, "-e", f"inject={rule}"]
    done = run_python(code, *wrapper, check=False)
    return done.stderr


OF_FILES = ("pread64", "pwrite64", "fallocate", "fsync", "fdatasync")

SURVIVED = [
    ("io_uring_enter:error=EINTR:when=1+3", "uring", "auto"),
    ("io_uring_enter:error=EAGAIN:when=2+7", "uring", "auto"),
    ("io_uring_enter:error=EBUSY:when=3+7", "uring", "auto"),
    ("io_submit:error=EAGAIN:when=1+3", "aio", "auto"),
    ("io_getevents:error=EINTR:when=1+3", "aio", "auto"),
    ("pread64:error=EINTR:when=1+3", "threads", "auto"),
    ("pwrite64:error=EINTR:when=1+2", "threads", "never"),
    ("pwrite64:error=EAGAIN:when=1+4", "threads", "auto"),
    ("fallocate:error=EOPNOTSUPP", "threads", "auto"),
    ("fallocate:error=EINTR:when=1", "threads", "auto"),
    ("mlock2:error=ENOSYS", "auto", "auto"),
    ("mlock2,mlock:error=EPERM", "auto", "auto"),
]


@pytest.mark.parametrize(
    ("rule", "engine", "direct"), SURVIVED, ids=[rule for rule, *_ in SURVIVED]
)
def test_what_the_kernel_may_answer_costs_no_bytes(
    path: Path, rule: str, engine: str, direct: str
) -> None:
    assert inject(rule, path, engine, direct=direct) == ""
    assert path.read_bytes() == bytes(range(256)) * 4096 * 3 + b"odd"


FAILED = [
    ("pwrite64:error=EIO:when=3", "os error 5"),
    ("pwrite64:error=EDQUOT:when=5", "os error 122"),
    ("pwrite64:error=ENOSPC:when=2", "os error 28"),
    ("fsync:error=EIO:when=1", "os error 5"),
    ("fallocate:error=ENOSPC:when=1", "os error 28"),
]


@pytest.mark.parametrize(("rule", "expected"), FAILED, ids=[rule for rule, _ in FAILED])
def test_an_error_of_the_drive_is_that_error_and_no_file_looks_whole(
    path: Path, rule: str, expected: str
) -> None:
    said = inject(rule, path, "threads")
    assert expected in said, said
    assert str(path) in said
    # After a failed fsync all bytes may be there, or not: an old file is left to its owner.
    assert rule.startswith("fsync") or path.stat().st_size == 0


@pytest.mark.parametrize("code", [38, 1], ids=["ENOSYS", "EPERM"])
def test_a_kernel_that_cannot_tell_what_is_cached_is_no_hindrance(
    deny_syscalls: str, path: Path, code: int
) -> None:
    code_text = STORE_AND_LOAD.format(arguments=[str(path), "auto", "auto"])
    run_python(code_text, deny_syscalls, "--errno", str(code), str(CACHESTAT))
    assert path.read_bytes() == bytes(range(256)) * 4096 * 3 + b"odd"


def test_a_slow_drive_is_waited_for(path: Path) -> None:
    assert inject("pwrite64:delay_exit=300000:when=1..3", path, "threads") == ""
    assert path.read_bytes() == bytes(range(256)) * 4096 * 3 + b"odd"


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_that_write_ragged_neighbours_lose_nothing(path: Path, engine: str) -> None:
    """Each process stores every fourth run of an odd length."""
    each, writers, rounds = 10_007, 4, 12
    code = f"""
        import sys, forebay, numpy as np
        content = np.random.default_rng(7).integers(0, 256, {each * writers * rounds}, np.uint8)
        with forebay.Handle(engine={engine!r}, block_size=4096) as handle:
            for part in range({rounds}):
                start = (part * {writers} + int(sys.argv[1])) * {each}
                handle.store(content[start:start + {each}], {str(path)!r}, offset=start)
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(writer)])
        for writer in range(writers)
    ]
    assert [process.wait(60) for process in processes] == [0] * writers
    expected = np.random.default_rng(7).integers(0, 256, each * writers * rounds, np.uint8)
    assert path.read_bytes() == expected.tobytes()


def test_aio_contexts_that_run_out_are_named_with_the_sysctl(path: Path) -> None:
    need_root()
    limit = Path("/proc/sys/fs/aio-max-nr")
    before = limit.read_text()
    used = Path("/proc/sys/fs/aio-nr").read_text().strip()
    try:
        limit.write_text(used)
    except OSError as error:
        pytest.skip(f"the limit can't be set here: {error}")
    try:
        with pytest.raises(forebay.ForebayError, match=r"aio-max-nr"):
            forebay.Handle(engine="aio")
        with forebay.Handle() as handle:
            handle.store(b"still here", path)
    finally:
        limit.write_text(before)
    assert path.read_bytes() == b"still here"
