"""``forebay io``: one workload, every byte, clear answers where it can't be done."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import need_root, undocumented_keys

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND = [sys.executable, "-m", "forebay", "io"]
LONG = ("--io-size", "1M", "--loops", "1000000")


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        **options,
    )


def run_json(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def start(directory: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a long run, and return it with its scratch directory once a loop is under way."""
    before = set(directory.glob("forebay-io-*"))
    child = subprocess.Popen(
        [*COMMAND, "--dir", str(directory), *(arguments or LONG)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(6000):
        found = {path.parent for path in directory.glob("forebay-io-*/file-*")} - before
        if found:
            return child, found.pop()
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.kill()
    raise AssertionError(child.communicate())


@pytest.mark.parametrize("size", ["1", "4097", "1000003"])
@pytest.mark.parametrize("request_size", ["513", "64K"])
def test_odd_sizes_come_back_right_both_ways(tmp_path: Path, size: str, request_size: str) -> None:
    found = run_json(
        *("--dir", tmp_path, "--write", "--read", "--validate", "--loops", "2", "--offset", "77"),
        *("--io-size", size, "--request-size", request_size, "--in-flight", "5"),
        *("--order", "random", "--memory", "ordinary", "--shift", "3"),
    )
    assert found["valid"] is True
    assert [run["way"] for run in found["runs"]] == ["write", "read"]
    for way in found["runs"]:
        assert way["bytes"] == 2 * int(size)
        assert way["latency_us"]["request"]["count"] == 2 * -(
            -int(size) // (513 if request_size == "513" else 65536)
        )
    assert os.listdir(tmp_path) == []


def test_processes_share_a_file_or_have_their_own(tmp_path: Path) -> None:
    for more in ([], ["--shared-file"]):
        found = run_json(
            *("--dir", tmp_path, "--processes", "3", "--io-size", "100001", "--loops", "2"),
            *("--write", "--read", "--validate", *more),
        )
        assert found["processes"] == 3
        assert found["valid"] is True
        assert [run["bytes"] for run in found["runs"]] == [600006, 600006]


def test_directories_are_dealt_out_and_mapped(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    found = run_json("--dir", one, "--dir", other, "--io-size", "64K", "--loops", "1")
    assert found["processes"] == 2
    assert [Path(place["path"]).name for place in found["directories"]] == ["one", "other"]
    found = run_json("--folder_to_device_mapping", f"{other}:1", f"{one}:0", "--io_size", "64K")
    assert [Path(place["path"]).name for place in found["directories"]] == ["one", "other"]


def test_the_json_has_every_key_that_the_docs_name(tmp_path: Path) -> None:
    found = run_json("--dir", tmp_path, "--io-size", "64K", "--read")
    assert next(iter(found)) == "schema"
    assert found["schema"] == "forebay.io/1"
    assert not undocumented_keys(found, "bench.md", "forebay.io/1")


def test_the_text_has_what_a_person_looks_for(tmp_path: Path) -> None:
    done = run("--dir", tmp_path, "--io-size", "1M", "--validate")
    assert done.returncode == 0, done.stderr
    for words in ("GB/s", "p99.9", "CPU", "s/GiB", "over time", "memory", "every byte checked"):
        assert words in done.stdout
    assert "\x1b" not in done.stdout


def test_a_byte_that_is_flipped_meanwhile_is_found(tmp_path: Path) -> None:
    child, scratch = start(tmp_path, "--read", "--validate", "--io-size", "1M", "--loops", "1000")
    path = scratch / "file-0-0"
    while path.stat().st_size < 1 << 20:
        time.sleep(0.01)
    # Its process ends the loop under way, and waits to be told of the next.
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    number = os.open(path, os.O_RDWR)
    byte = os.pread(number, 1, 70_001)
    os.pwrite(number, bytes([byte[0] ^ 4]), 70_001)
    os.fsync(number)
    os.close(number)
    child.send_signal(signal.SIGCONT)
    output, errors = child.communicate(timeout=100)
    assert (child.returncode, errors) == (1, "")
    assert "at offset 70001" in output
    assert "DIFFERS: read" in output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    child, _ = start(tmp_path)
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert (child.returncode, output, errors) == (128 + number, "", "")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_left_is_removed_by_the_next_and_a_live_ones_is_not(
    tmp_path: Path,
) -> None:
    killed, dead = start(tmp_path)
    live, owned = start(tmp_path)
    try:
        killed.kill()
        killed.communicate()
        assert dead.exists()
        run_json("--dir", tmp_path, "--io-size", "64K", "--loops", "1")
        assert not dead.exists()
        assert owned.exists()
        assert live.poll() is None
    finally:
        live.terminate()
        live.communicate(timeout=60)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_left_takes_no_room_from_the_next(small_ext4: Path) -> None:
    dead = small_ext4 / "forebay-io-1-2-0"
    dead.mkdir()
    (dead / ".forebay.lock").touch()
    (dead / "file-0-0").write_bytes(bytes(5 << 20))
    run_json("--dir", small_ext4, "--io-size", "4M", "--loops", "1")
    assert os.listdir(small_ext4) == ["lost+found"]


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    child, _ = start(tmp_path, *LONG, "--processes", "2")
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert errors.startswith("forebay: process 1 was killed by signal 9")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "option", ["--gpu", "--use_gds", "--slow_bounce_buffer", "--use_accelerator_pin_memory"]
)
def test_what_takes_a_gpu_has_its_own_code(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("--dir", tmp_path, option)
    assert done.returncode == 3
    assert option.replace("_", "-")[2:] in done.stderr
    assert os.listdir(tmp_path) == []


def test_wrong_use_is_said_to_be_so(tmp_path: Path) -> None:
    for words in (["--io-size", "0"], ["--engine", "warp"], ["--nonsense"], ["--shift", "8"]):
        done = run("--dir", tmp_path, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr


def test_what_is_no_place_to_measure_in_is_refused(
    tmp_path: Path, mount: Callable[..., Path]
) -> None:
    done = run("--dir", tmp_path / "none")
    assert (done.returncode, done.stdout) == (3, "")
    assert "is not a directory" in done.stderr
    memory = mount("-t", "tmpfs", "-o", "size=64k", "none")
    done = run("--dir", memory)
    assert done.returncode == 3
    assert "tmpfs, which is memory" in done.stderr


def test_too_little_room_is_told_in_numbers(tmp_path: Path, small_ext4: Path) -> None:
    done = run("--dir", small_ext4, "--io-size", "20M")
    assert done.returncode == 3
    assert "20 MiB are needed" in done.stderr
    done = run("--dir", tmp_path, "--io-size", "20M", "--request-size", "4K", "--in-flight", "600",
               preexec_fn=few_descriptors)  # fmt: skip
    assert done.returncode == 3
    assert "1236 open files are needed, 256 may be" in done.stderr


def few_descriptors() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def test_a_drive_that_fills_up_on_the_way_is_said_to_be_full(small_ext4: Path) -> None:
    # Each loop has a file of its own: there is room for all of them until the filler comes.
    child, scratch = start(
        small_ext4, "--io-size", "1K", "--loops", "3000", "--different-file-each-iteration"
    )
    with (small_ext4 / "filler").open("wb", buffering=0) as file:
        fill(file)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 3
    assert "the drive is full" in errors
    assert str(scratch) in errors
    assert set(os.listdir(small_ext4)) == {"filler", "lost+found"}


def fill(file: Any) -> None:
    for size in (1 << 16, 1 << 10):
        with contextlib.suppress(OSError):
            while file.write(bytes(size)):
                pass


def test_a_read_only_directory_is_said_to_be_so(small_ext4: Path) -> None:
    need_root()
    subprocess.run(["mount", "-o", "remount,ro", str(small_ext4)], check=True)
    done = run("--dir", small_ext4, "--io-size", "4K")
    assert done.returncode == 3
    assert "cannot write in" in done.stderr


def test_a_reader_that_goes_away_is_taken_in_silence(tmp_path: Path) -> None:
    script = '"$@" | true; exit "${PIPESTATUS[0]}"'
    arguments = [*COMMAND, "--dir", str(tmp_path), "--io-size", "64K"]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
