"""Takes the subjects in turn, and keeps what each turn took.

The ways: ``store``; ``load`` from a cold page cache, ``warm`` from one that has the file;
``background``, a save while the program goes on.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay.bench.crew import Lost
from forebay.bench.subjects.subject import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.crew import Member
    from forebay.bench.subjects.subject import Subject

__all__ = ["GIVEN", "Result", "Turn", "measure"]

GIVEN = "model.safetensors"
"""The file that is given to subjects that store none."""

_WARM_UP = -1
"""The round that isn't measured."""
_CHUNK_BYTES = 1 << 20
_READS = 3
"""How often a file is read to have it in the page cache: a kernel short of memory drops parts."""


@dataclass(frozen=True)
class Turn:
    """What one way of one round took."""

    round: int
    seconds: float
    cpu_seconds: float
    extra_bytes: int | None
    touch_seconds: float = 0.0
    """How long touching takes what is in memory, which is part of the time of a load."""


@dataclass
class Result:
    """What one subject took, and what became of it."""

    kind: type[Subject]
    version: str | None = None
    detail: str | None = None
    store: list[Turn] = field(default_factory=list)
    load: list[Turn] = field(default_factory=list)
    warm: list[Turn] = field(default_factory=list)
    background: list[dict[str, float]] = field(default_factory=list)
    checked: bool = False
    cached_before_bytes: int | None = 0
    """The most of its file that was in the page cache before a load; None if that isn't known."""
    missing_before_bytes: int | None = 0
    """The most of its file that was not there before a warm load; None if that isn't known."""
    failure: str | None = None

    @property
    def name(self) -> str:
        """What the subject is called."""
        return self.kind.name


def measure(
    pairs: Sequence[tuple[Member, Result]],
    directory: str,
    rounds: int,
    ways: Sequence[str],
    progress: Callable[[str], None],
) -> None:
    """Have each subject go its ways in each round, and drop those that can't go on.

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
    _empty(directory)


def _turn(
    member: Member,
    result: Result,
    directory: str,
    number: int,
    ways: Sequence[str],
    progress: Callable[[str], None],
) -> None:
    kind = result.kind
    path = os.path.join(directory, kind.name if kind.stores else GIVEN)
    is_warm_up = number == _WARM_UP
    # What isn't to be measured is stored once, to be loaded in all rounds.
    if kind.stores and ("store" in ways or is_warm_up):
        progress(f"{kind.name}: store")
        took = member.do(do="store", path=path)
        if not is_warm_up:
            result.store.append(_turn_of(number, took))
    if "load" in ways or is_warm_up:
        cached = make_cold(path) if kind.has_file else 0
        progress(f"{kind.name}: load")
        took = _load(member, path, compare=is_warm_up)
        result.checked = kind.checked
        if not is_warm_up:
            result.load.append(_turn_of(number, took))
            result.cached_before_bytes = _most(result.cached_before_bytes, cached)
    # What isn't checked is fio, which goes around the cache.
    if "warm" in ways and kind.checked and not is_warm_up:
        absent = make_warm(path)
        progress(f"{kind.name}: load, warm")
        result.warm.append(_turn_of(number, _load(member, path, compare=False)))
        result.missing_before_bytes = _most(result.missing_before_bytes, absent)
        make_cold(path)
    if "background" in ways and kind.in_background:
        progress(f"{kind.name}: save in the background")
        took = member.do(do="background", path=f"{path}-background")
        if not is_warm_up:
            result.background.append(took)
    if kind.stores and kind.has_file and "store" in ways:
        _remove(path)


def _load(member: Member, path: str, *, compare: bool) -> dict[str, Any]:
    took = member.do(do="load", path=path, compare=compare)
    if took.get("differs"):
        raise Lost(f"tensor {took['differs']!r} came back with different bytes")
    return took


def _turn_of(number: int, took: dict[str, Any]) -> Turn:
    fields = ("seconds", "cpu_seconds", "extra_bytes", "touch_seconds")
    return Turn(number, **{name: took[name] for name in fields if name in took})


def _most(known: int | None, found: int | None) -> int | None:
    return None if known is None or found is None else max(known, found)


def make_cold(path: str) -> int | None:
    """Drop what was stored from the page cache; return how much of it stays, where known."""
    stays: int | None = 0
    for name in files_of(path):
        _forebay.drop_cached(name)
        cached = _forebay.cached_bytes(name)
        stays = None if cached is None or stays is None else stays + cached
    return stays


def make_warm(path: str) -> int | None:
    """Have what was stored in the page cache; return how much of it isn't, where known."""
    absent: int | None = None
    for _ in range(_READS):
        for name in files_of(path):
            _read(name)
        absent = _absent(path)
        if not absent:
            break
    return absent


def _read(name: str) -> None:
    chunk = bytearray(_CHUNK_BYTES)
    with open(name, "rb", buffering=0) as file:
        while file.readinto(chunk):
            pass


def _absent(path: str) -> int | None:
    absent = 0
    for name in files_of(path):
        cached = _forebay.cached_bytes(name)
        if cached is None:
            return None
        # What is cached is counted in whole pages.
        absent += max(0, os.path.getsize(name) - cached)
    return absent


def _empty(directory: str) -> None:
    """Remove what is left, such as what was stored for all rounds; the lock stays."""
    for name in os.listdir(directory):
        if not name.startswith("."):
            _remove(os.path.join(directory, name))


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
