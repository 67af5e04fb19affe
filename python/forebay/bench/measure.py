"""Takes the subjects in turn, from a cold cache, and keeps what each turn took."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay.bench.crew import Lost
from forebay.bench.subjects import SUBJECTS
from forebay.bench.subjects.subject import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.crew import Member

__all__ = ["Result", "Turn", "measure"]

_WARM_UP = -1
"""The round that isn't measured."""


@dataclass(frozen=True)
class Turn:
    """What one way of one round took."""

    round: int
    seconds: float
    cpu_seconds: float
    extra_bytes: int | None


@dataclass
class Result:
    """What one subject took, and what became of it."""

    name: str
    version: str | None = None
    detail: str | None = None
    store: list[Turn] = field(default_factory=list)
    load: list[Turn] = field(default_factory=list)
    checked: bool = False
    cached_before_bytes: int | None = 0
    """The most of its file that was in the page cache before a load; None if that isn't known."""
    failure: str | None = None

    def note_cached(self, cached: int | None) -> None:
        """Take note of what was in the page cache before a load."""
        known = self.cached_before_bytes
        self.cached_before_bytes = None if None in {cached, known} else max(known or 0, cached or 0)


def measure(
    pairs: Sequence[tuple[Member, Result]],
    directory: str,
    rounds: int,
    ways: Sequence[str],
    progress: Callable[[str], None],
) -> None:
    """Have each subject store and load in each round, and drop those that can't go on.

    Who is first changes: a drive slows down and recovers. The round before the first one isn't
    measured: libraries get ready when they are first used. In it, every byte is compared.
    """
    for number in range(_WARM_UP, rounds):
        start = number % len(pairs)
        for member, result in [*pairs[start:], *pairs[:start]]:
            if result.failure is None:
                try:
                    _turn(member, result, directory, number, ways, progress)
                except Lost as lost:
                    result.failure = str(lost)
                except FileNotFoundError as error:
                    result.failure = f"stored no file: {error.filename}"


def _turn(
    member: Member,
    result: Result,
    directory: str,
    number: int,
    ways: Sequence[str],
    progress: Callable[[str], None],
) -> None:
    kind = SUBJECTS[member.name]
    path = os.path.join(directory, member.name if kind.stores else "model.safetensors")
    is_warm_up = number == _WARM_UP
    # What isn't to be measured is stored once, to be loaded in all rounds.
    if kind.stores and ("store" in ways or is_warm_up):
        progress(f"{member.name}: store")
        took = member.do(do="store", path=path)
        if not is_warm_up:
            result.store.append(_turn_of(number, took))
    if "load" in ways or is_warm_up:
        cached = make_cold(path)
        progress(f"{member.name}: load")
        took = member.do(do="load", path=path, compare=is_warm_up)
        if took.get("differs"):
            raise Lost(f"tensor {took['differs']!r} came back with different bytes")
        result.checked = kind.checked
        if not is_warm_up:
            result.load.append(_turn_of(number, took))
            result.note_cached(cached)
    if kind.stores and "store" in ways:
        _remove(path)


def _turn_of(number: int, took: dict[str, Any]) -> Turn:
    return Turn(number, took["seconds"], took["cpu_seconds"], took["extra_bytes"])


def make_cold(path: str) -> int | None:
    """Drop what was stored from the page cache; return how much of it stays, where known."""
    stays: int | None = 0
    for name in files_of(path):
        _forebay.drop_cached(name)
        cached = _forebay.cached_bytes(name)
        stays = None if cached is None or stays is None else stays + cached
    return stays


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
