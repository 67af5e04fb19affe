"""What is stored for drives, as handles take it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import forebay
from conftest import pattern

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("text", ["", "{", '{"version": 999, "profiles": {}}'])
def test_profiles_that_cannot_be_understood_are_told_of_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    profiles = tmp_path / "profiles.json"
    profiles.write_text(text)
    monkeypatch.setenv("FOREBAY_PROFILES", str(profiles))
    with pytest.warns(forebay.ForebayWarning, match=r"default options are used.*profiles\.json"):
        handle = forebay.Handle()
    with handle:
        handle.store(b"weights", tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == b"weights"
    assert profiles.read_text() == text


def test_a_handle_with_options_of_its_own_does_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = tmp_path / "profiles.json"
    profiles.write_text("{")
    monkeypatch.setenv("FOREBAY_PROFILES", str(profiles))
    forebay.Handle(queue_depth=4).close()
    forebay.Handle("threads").close()
    forebay.aio_handle()


def test_a_handle_moves_files_of_a_drive_as_was_found_best_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_PROFILES", str(tmp_path / "profiles.json"))
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"block_size": ["64K"], "queue_depth": [4], "io_parallel": [1]}))
    command = [sys.executable, "-m", "forebay", "tune", "--nvme-dir", str(tmp_path)]
    arguments = ["--io-size", "4M", "--sweep-config", str(sweep), "--log-dir", str(tmp_path)]
    subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=100)
    array = forebay.empty(1 << 20, "uint8")
    array[:] = pattern(1 << 20)

    def transfers(**options: int) -> int:
        with forebay.Handle(**options, page_cache=False) as handle:
            handle.store(array, tmp_path / "w")
            before = handle.stats()["transfers"]
            back = forebay.empty(1 << 20, "uint8")
            handle.load(back, tmp_path / "w")
            assert (back == array).all()
            return handle.stats()["transfers"] - before

    assert transfers() == 16, "blocks of 64 KiB"
    assert transfers(queue_depth=8) < 16, "options of its own"
