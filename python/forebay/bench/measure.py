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


def measure(
    pairs: Sequence[tuple[Member, Result]],
    directory: str,
    rounds: int,
    ways: Sequence[str],
    progress: Callable[[str], None],
) -> None:
    """Have each subject store and load in each round, and drop those that can't go on.

    Who is first changes: a drive slows down and recovers.
    """
    for number in range(rounds):
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
    stores = SUBJECTS[member.name].stores
    path = os.path.join(directory, member.name if stores else "model.safetensors")
    # What isn't to be measured is stored once, to be loaded in all rounds.
    if stores and ("store" in ways or number == 0):
        progress(f"{member.name}: store")
        took = member.do(do="store", path=path)
        if "store" in ways:
            result.store.append(_turn_of(number, took))
    if "load" in ways:
        cached = make_cold(path)
        known = result.cached_before_bytes
        result.cached_before_bytes = None if cached is None or known is None else max(known, cached)
        progress(f"{member.name}: load")
        took = member.do(do="load", path=path, compare=not result.checked)
        result.load.append(_turn_of(number, took))
        if took.get("differs"):
            raise Lost(f"tensor {took['differs']!r} came back with different bytes")
        result.checked = SUBJECTS[member.name].checked
    elif stores and not result.checked:
        # Every byte is compared once, measured or not.
        took = member.do(do="load", path=path, compare=True)
        if took.get("differs"):
            raise Lost(f"tensor {took['differs']!r} came back with different bytes")
        result.checked = SUBJECTS[member.name].checked
    if stores and "store" in ways:
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
