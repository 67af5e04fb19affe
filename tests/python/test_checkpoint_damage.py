"""Damaged checkpoints are refused, and what is damaged is named."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from forebay._forebay import crc32c
from forebay.checkpoint import Checkpointer
from forebay.errors import (
    FileMissingError,
    ForebayError,
    MismatchError,
    ShortFileError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PIECE_BYTES = 16 << 20


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    checkpointer = Checkpointer(tmp_path, budget="64MiB", shard_size="20MiB")
    big = np.arange(5 << 20, dtype=np.uint32)  # 20 MiB: more than a piece
    checkpointer.save(1, {"old": np.arange(3)})
    checkpointer.save(2, {"big": big, "small": np.arange(1000.0), "bytes": b"x", "n": 5})
    return checkpointer


def newest(checkpointer: Checkpointer) -> Path:
    return checkpointer.directory / "step-00000002"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def refuse(checkpointer: Checkpointer, kind: type[ForebayError], path: Path, said: str) -> None:
    """Check that both ways of reading name the damage, and that the older step still loads."""
    for read in (checkpointer.load, checkpointer.verify):
        with pytest.raises(kind, match=said) as caught:
            read()
        assert caught.value.filename == str(path)
    assert checkpointer.load(1)["old"].tolist() == [0, 1, 2]
    checkpointer.verify(1)


@pytest.mark.parametrize("offset", [4096, 4096 + PIECE_BYTES, 4096 + (20 << 20) - 1])
def test_a_flipped_bit_in_a_tensor_names_the_tensor(
    checkpointer: Checkpointer, offset: int
) -> None:
    shard = newest(checkpointer) / "shard-00001.safetensors"
    flip(shard, offset)
    refuse(checkpointer, MismatchError, shard, 'tensor "big" differs from its checksum')
    found = Checkpointer(checkpointer.directory, budget="64MiB", verify=False).load()
    assert (found["big"] != np.arange(5 << 20, dtype=np.uint32)).sum() == 1


@pytest.mark.parametrize("offset", [0, 20, 4095])
def test_a_flipped_bit_in_the_header_or_its_padding_is_noticed(
    checkpointer: Checkpointer, offset: int
) -> None:
    shard = newest(checkpointer) / "shard-00002.safetensors"
    flip(shard, offset)
    refuse(checkpointer, MismatchError, shard, "belong to no tensor")


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "state.json", "manifest.json"])
def test_a_missing_file_is_named(checkpointer: Checkpointer, name: str) -> None:
    path = newest(checkpointer) / name
    path.unlink()
    if name == "manifest.json":
        # Without it, it isn't a checkpoint: `latest` names nothing, and the older one is newest.
        assert checkpointer.steps() == [1]
        with pytest.raises(FileMissingError) as caught:
            checkpointer.load(2)
        assert caught.value.filename == str(path)
    else:
        refuse(checkpointer, FileMissingError, path, "missing")


@pytest.mark.parametrize("name", ["shard-00002.safetensors", "state.json"])
def test_a_file_that_was_cut_or_grew_is_named_with_both_sizes(
    checkpointer: Checkpointer, name: str
) -> None:
    path = newest(checkpointer) / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    sizes = f"{len(content) - 1} bytes, and had {len(content)}"
    refuse(checkpointer, ShortFileError, path, sizes)
    path.write_bytes(content + b" ")
    refuse(checkpointer, MismatchError, path, f"{len(content) + 1} bytes")
    path.write_bytes(content)
    checkpointer.verify()


def test_a_flipped_bit_in_the_rest_of_the_state_is_noticed(checkpointer: Checkpointer) -> None:
    path = newest(checkpointer) / "state.json"
    flip(path, path.stat().st_size - 2)
    refuse(checkpointer, MismatchError, path, "differs from its checksum")


def test_a_flipped_bit_anywhere_in_the_manifest_is_noticed(checkpointer: Checkpointer) -> None:
    path = newest(checkpointer) / "manifest.json"
    content = path.read_bytes()
    for offset in range(0, len(content), 7):
        flip(path, offset)
        with pytest.raises((MismatchError, UnsupportedError)) as caught:
            checkpointer.load()
        assert caught.value.filename == str(path)
        path.write_bytes(content)
    checkpointer.verify()


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, and give it a checksum that fits."""
    manifest = json.loads(path.read_bytes())
    change(manifest)
    del manifest["crc32c"]
    head = json.dumps(manifest)[:-1] + ',\n"crc32c": "'
    tail = '"\n}\n'
    checksum = crc32c((head + "0" * 8 + tail).encode())
    path.write_text(f"{head}{checksum:08x}{tail}")


def test_a_missing_checksum_is_refused_and_named(checkpointer: Checkpointer) -> None:
    path = newest(checkpointer) / "manifest.json"
    content = path.read_bytes()
    rewrite(path, lambda manifest: manifest)
    checkpointer.verify()
    changes: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
        ('no checksum of tensor "small" in shard-00002', lambda m: m["tensors"][1].pop("crc32c")),
        ("shard-00001.safetensors has 0 checksums", lambda m: m["shards"][0].pop("pieces")),
        ("shard-00001.safetensors has 1 checksums of 2", lambda m: m["shards"][0]["pieces"].pop()),
        ("no checksum of state.json", lambda m: m["state"].pop("crc32c")),
    ]
    for said, change in changes:
        path.write_bytes(content)
        rewrite(path, change)
        for lenient in (False, True):
            again = Checkpointer(checkpointer.directory, budget="64MiB", verify=not lenient)
            with pytest.raises(MismatchError, match=said):
                again.load()
    path.write_bytes(content.replace(b'\n"crc32c"', b'\n"no32c"'))
    with pytest.raises(MismatchError, match="no checksum of itself"):
        checkpointer.load()


def test_a_manifest_of_another_step_or_version_is_refused(checkpointer: Checkpointer) -> None:
    shutil.copytree(newest(checkpointer), checkpointer.directory / "step-00000009")
    with pytest.raises(MismatchError, match="of step 2"):
        checkpointer.load(9)
    rewrite(newest(checkpointer) / "manifest.json", lambda m: m.update(version=2))
    with pytest.raises(UnsupportedError, match="version 2"):
        checkpointer.load()


def test_names_in_a_manifest_lead_nowhere_else(checkpointer: Checkpointer) -> None:
    path = newest(checkpointer) / "manifest.json"
    rewrite(path, lambda m: m["shards"][0].update(file="../step-00000001/shard-00001.safetensors"))
    with pytest.raises(MismatchError, match="called"):
        checkpointer.load()


def test_a_state_that_names_tensors_that_are_not_there_is_refused(
    checkpointer: Checkpointer,
) -> None:
    path = newest(checkpointer) / "state.json"
    text = path.read_bytes().replace(b'"$tensor":"small"', b'"$tensor":"smell"')
    path.write_bytes(text)
    manifest = newest(checkpointer) / "manifest.json"
    rewrite(manifest, lambda m: m["state"].update(crc32c=f"{crc32c(text):08x}"))
    with pytest.raises(MismatchError, match="smell"):
        checkpointer.load()


def test_what_is_no_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "new", budget="64MiB")
    for read in (checkpointer.load, checkpointer.verify):
        with pytest.raises(FileMissingError, match="there is no checkpoint in"):
            read()
    for name in ("step-7", "step-000000007", "step-0000000x", "other"):
        (tmp_path / "new" / name).mkdir()
        (tmp_path / "new" / name / "manifest.json").write_text("{}")
    (tmp_path / "new" / "latest").write_text("step-00000007\n")
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    checkpointer.save(5, {})
    with pytest.raises(FileMissingError, match=r"no checkpoint of step 6 .*it has 1"):
        checkpointer.load(6)


def test_the_newest_checkpoint_without_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, budget="64MiB") as checkpointer:
        checkpointer.save(1, {"n": 1})
        checkpointer.save(2, {"n": 2})
        (tmp_path / "step-00000002" / "manifest.json").unlink()
        for read in (checkpointer.load, checkpointer.verify):
            with pytest.raises(FileMissingError, match=r"step-00000002/manifest\.json"):
                read()
        assert checkpointer.load(1) == {"n": 1}


@pytest.mark.parametrize("text", ["", "nonsense", "step-00000099\n", "../etc\n", "x" * 10_000])
def test_without_a_valid_latest_the_highest_step_is_the_newest(
    checkpointer: Checkpointer, text: str
) -> None:
    checkpointer.save(1, {"again": 1})
    assert checkpointer.latest() == 1
    (checkpointer.directory / "latest").write_text(text)
    assert checkpointer.latest() == 2
    assert checkpointer.load()["n"] == 5
    (checkpointer.directory / "latest").unlink()
    assert checkpointer.latest() == 2
