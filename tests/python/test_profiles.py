"""What is stored for drives, as handles take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import forebay

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
