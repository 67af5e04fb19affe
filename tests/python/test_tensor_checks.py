"""What files of tensors promise: checksums, all or nothing, modes, and that others read them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import safetensors
import safetensors.torch
import torch

import forebay
import forebay.torch
from forebay._tensor_files.into import IntoPlan
from forebay._tensor_files.load import Wish
from forebay.errors import ForebayError, MismatchError, ShortFileError, TensorFileError
from forebay.torch import model
from forebay.torch.frame import FRAME
from reference import (
    answer,
    assert_identical,
    data_start,
    flip_bit,
    place_of,
    random_tensor,
    read_json,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

THEIRS = safetensors.torch
OURS = forebay.torch


def tensors() -> dict[str, torch.Tensor]:
    return {
        "first": random_tensor((1000, 3), torch.float32),
        "second": random_tensor((777,), torch.bfloat16, 1),
        "third": random_tensor((5,), torch.uint8, 2),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    OURS.save_file(tensors(), path, {"who": "me"})
    return path


def opened(path: Path, verify: bool) -> Any:
    return OURS.safe_open(path, "pt", verify=verify)


def zeros(dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in tensors().items()}


Load: TypeAlias = "Callable[[Path, str, bool], Any]"

WAYS: dict[str, Load] = {
    "load_file": lambda path, _, verify: OURS.load_file(path, verify=verify),
    "keys": lambda path, name, verify: OURS.load_file(path, keys=name, verify=verify),
    "cast": lambda path, _, verify: OURS.load_file(path, dtype="float64", verify=verify),
    "directory": lambda path, _, verify: OURS.load_file(path.parent, verify=verify),
    "stream": lambda path, _, verify: list(OURS.stream(path, verify=verify)),
    "get_tensor": lambda path, name, verify: opened(path, verify).get_tensor(name),
    "get_tensors": lambda path, _, verify: opened(path, verify).get_tensors(),
    "a whole slice": lambda path, name, verify: opened(path, verify).get_slice(name)[:],
    "bytes": lambda path, _, verify: OURS.load(path.read_bytes(), verify=verify),
    "load_into": lambda path, _, verify: OURS.load_into(zeros(), path, verify=verify),
    "load_into, cast": lambda path, _, verify: OURS.load_into(
        zeros(torch.float64), path, verify=verify
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_a_flipped_bit_is_found_by_every_way_of_loading(file: Path, way: str, name: str) -> None:
    WAYS[way](file, name, True)
    end = read_json(file)[name]["data_offsets"][1]
    # The last byte, and not the first: every byte counts.
    flip_bit(file, data_start(file) + end - 1)
    with pytest.raises(MismatchError, match=name) as caught:
        WAYS[way](file, name, True)
    if way != "bytes":
        assert "model.safetensors" in str(caught.value)
    WAYS[way](file, name, False)


def test_a_flipped_bit_elsewhere_is_no_concern_of_what_is_asked_for(file: Path) -> None:
    flip_bit(file, place_of(file, "second"))
    assert_identical(OURS.load_file(file, keys="first")["first"], tensors()["first"])
    with opened(file, True) as again:
        assert_identical(again.get_tensor("third"), tensors()["third"])


def test_a_flipped_bit_in_any_byte_of_the_header_is_found(file: Path) -> None:
    start = data_start(file)
    text = file.read_bytes()[:start]
    end = 8 + len(text[8:].rstrip(b" "))
    for offset in range(end):
        shutil.copy(file, file.with_suffix(".bad"))
        flip_bit(file.with_suffix(".bad"), offset, 0x01)
        well, found = answer(lambda: OURS.load_file(file.with_suffix(".bad")))
        assert not well, f"byte {offset} of {text[8:end]!r} gave {found}"
        assert isinstance(found, ForebayError)


def test_a_file_that_was_cut_is_refused_with_both_sizes(file: Path) -> None:
    size = file.stat().st_size
    for cut in (1, 5, 4000, size - data_start(file), size - 100, size - 7):
        shutil.copy(file, file.with_suffix(".cut"))
        os.truncate(file.with_suffix(".cut"), size - cut)
        with pytest.raises(ShortFileError) as caught:
            OURS.load_file(file.with_suffix(".cut"))
        assert str(file.with_suffix(".cut")) in str(caught.value)
        assert str(size - cut) in str(caught.value)


def test_what_the_reference_saves_again_with_our_metadata_isnt_taken_for_corrupt(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with safetensors.safe_open(file, "pt") as theirs:
        metadata = theirs.metadata()
    assert "forebay.crc32c" in metadata
    changed = {name: tensor.clone().fill_(1) for name, tensor in tensors().items()}
    again = file.with_name("again.safetensors")
    THEIRS.save_file(changed, again, metadata)
    with forebay.Handle() as handle, caplog.at_level("WARNING", "forebay"):
        assert_identical(OURS.load_file(again, handle=handle), THEIRS.load_file(again))
        assert "again.safetensors" in caplog.text
    with opened(again, True) as ours:
        assert ours.metadata() == {"who": "me"}
    # Ours in turn takes what theirs read, and puts checksums of its own in the place of the old.
    OURS.save_file(changed, file, metadata)
    assert_identical(OURS.load_file(file), THEIRS.load_file(file))
    flip_bit(file, place_of(file, "first"))
    with pytest.raises(MismatchError, match="first"):
        OURS.load_file(file)


def test_a_file_without_checksums_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    OURS.save_file(tensors(), path, checksums=False)
    assert "__metadata__" not in read_json(path)
    assert_identical(OURS.load_file(path), THEIRS.load_file(path))
    flip_bit(path, place_of(path, "third"))
    assert not torch.equal(OURS.load_file(path)["third"], tensors()["third"])


def test_a_checksum_that_is_missing_or_not_ours_is_refused(file: Path) -> None:
    header = read_json(file)
    sums = header["__metadata__"]["forebay.crc32c"]
    data = file.read_bytes()[data_start(file) :]
    for wrong in (sums.rsplit(" ", 1)[0], "", sums.replace(" ", "  ", 1), sums + " 00000000"):
        header["__metadata__"]["forebay.crc32c"] = wrong
        text = json.dumps(header, separators=(",", ":")).encode()
        write_file(file, text, data, padding=4088 - len(text))
        with pytest.raises(TensorFileError):
            OURS.load_file(file)


# What is written


def test_data_begins_at_a_page_and_tensors_where_the_reference_has_them(tmp_path: Path) -> None:
    many = {f"{'x' * length}": random_tensor((length,), torch.int16) for length in range(1, 200)}
    many["wide"] = random_tensor((3,), torch.float64)
    OURS.save_file(many, tmp_path / "a")
    THEIRS.save_file(many, tmp_path / "b")
    assert data_start(tmp_path / "a") % 4096 == 0
    ours, theirs = read_json(tmp_path / "a"), read_json(tmp_path / "b")
    del ours["__metadata__"]
    assert ours == theirs


def test_the_umask_and_the_mode_of_a_file_that_is_there_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for umask in (0o022, 0o077, 0o002):
        old = os.umask(umask)
        try:
            path.unlink(missing_ok=True)
            OURS.save_file(tensors(), path)
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    for mode in (0o640, 0o400, 0o755):
        path.chmod(mode)
        OURS.save_file(tensors(), path)
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_shorter_file_in_the_place_of_a_longer_one_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": torch.ones(100_000)}, path)
    OURS.save_file({"x": torch.ones(3)}, path)
    assert path.stat().st_size == 4096 + 12
    assert_identical(OURS.load_file(path), {"x": torch.ones(3)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    real = tmp_path / "real.safetensors"
    link = tmp_path / "link.safetensors"
    OURS.save_file({"x": torch.ones(3)}, real)
    link.symlink_to(real)
    OURS.save_file({"x": torch.ones(4)}, link)
    assert link.is_symlink()
    assert OURS.load_file(real)["x"].numel() == 4


def test_tensors_that_were_loaded_stay_when_their_file_is_saved_anew(file: Path) -> None:
    found = OURS.load_file(file)
    OURS.save_file({"other": torch.zeros(9)}, file)
    for name, tensor in tensors().items():
        assert_identical(found[name], tensor)


def test_a_full_disk_leaves_the_file_as_it_was(small_ext4: Path) -> None:
    path = small_ext4 / "x.safetensors"
    OURS.save_file(tensors(), path)
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"x\.safetensors"):
        OURS.save_file({"x": torch.ones(4 << 20)}, path)
    assert path.read_bytes() == before
    assert {entry.name for entry in small_ext4.iterdir()} <= {"x.safetensors", "lost+found"}


def test_a_killed_save_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    code = f"""
import sys, torch, forebay.torch
sizes = [3 << 20, 5 << 20]
print("ready", flush=True)
for turn in range(10_000):
    value = turn % 2
    tensor = torch.full((sizes[value],), value, dtype=torch.uint8)
    forebay.torch.save_file({{"x": tensor}}, {str(path)!r}, durability="none")
    print(turn, flush=True)
"""
    for kill in range(6):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(3 + kill):
            process.stdout.readline()
        time.sleep(0.003 * kill)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = OURS.load_file(path)["x"]
        value = int(found[0])
        assert found.numel() == [3 << 20, 5 << 20][value]
        assert bool((found == value).all())


def test_a_save_tells_of_an_interrupt_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file(tensors(), path)
    before = path.read_bytes()
    code = f"""
import os, signal, threading, torch, forebay, forebay.torch
handle = forebay.Handle(throttle="20MiB")
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    forebay.torch.save_file({{"x": torch.ones(40 << 20)}}, {str(path)!r}, handle=handle)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("change", ["written to", "cut"])
@pytest.mark.parametrize("way", ["whole", "slice", "into", "stream"])
def test_a_file_that_changes_while_it_is_open_is_named(
    tmp_path: Path, way: str, change: str
) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": torch.arange(9000)}, path, checksums=False)
    target = {"x": torch.empty(9000, dtype=torch.int64)}
    plan = IntoPlan(model._Places(target), path, FRAME, Wish())
    opened, stream = OURS.safe_open(path, "pt"), OURS.stream(path)
    if change == "cut":
        os.truncate(path, 5000)
    else:
        with path.open("r+b") as file:
            file.seek(60_000)
            file.write(b"changed")
    with pytest.raises((MismatchError, ShortFileError), match=r"x\.safetensors"):
        {
            "whole": lambda: opened.get_tensor("x"),
            "slice": lambda: opened.get_slice("x")[8990:],
            "into": lambda: plan.run(None),
            "stream": lambda: next(stream),
        }[way]()


def test_a_killed_save_leaves_its_file_to_the_next_one_to_remove(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    code = f"""
import os, signal, threading, torch, forebay, forebay.torch
handle = forebay.Handle(throttle="20MiB")
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
forebay.torch.save_file({{"x": torch.ones(40 << 20)}}, {str(path)!r}, handle=handle)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    OURS.save_file({"x": torch.ones(3)}, tmp_path / "other.safetensors")
    assert left.exists()
    OURS.save_file({"x": torch.ones(3)}, path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"other.safetensors", "x.safetensors"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_root_replaces_stays_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    path.chmod(0o640)
    os.chown(path, 12345, 12346)
    OURS.save_file(tensors(), path)
    facts = path.stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (12345, 12346, 0o640)
