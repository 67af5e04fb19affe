"""What Forebay is to reach between drives and GPUs, and what of it a run has shown.

A way is limited by the slower of the drive and the copy between page-locked memory and the GPU, as
both were in the same round; a load of what is in the page cache, by the copy alone.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.measure import Result, Turn

__all__ = ["GOALS", "Goal", "judge", "limits"]

_COPY = "pinned-copy"
_DRIVES = ("fio", "host-memory")
"""The better of both is what the drive can do."""


@dataclass(frozen=True)
class Goal:
    """A share of something that one way of one subject is to reach."""

    text: str
    subject: str
    way: str
    wanted: float
    beside: str | None = None
    """The subject whose rate it is a share of; that of the limit if None."""


GOALS = (
    Goal("drive → GPU, host route, of the limit", "forebay-host", "load", 0.95),
    Goal("GPU → drive, host route, of the limit", "forebay-host", "store", 0.95),
    Goal("file → GPU, beside torch.load(map_location)", "forebay", "load", 1.0, "torch"),
    Goal("cached file → GPU, beside torch.load(map_location)", "forebay", "warm", 1.0, "torch"),
    Goal("cached bytes → GPU, host route, of the copy", "forebay-host", "warm", 0.8),
    Goal("cached file → GPU, of the copy", "forebay", "warm", 0.8),
)


def limits(results: Sequence[Result], way: str) -> dict[int, float]:
    """Return the seconds that a way takes at least in each round, where that was measured."""
    known = {result.name: result for result in results}
    copy = _seconds(known, _COPY, "load" if way == "warm" else way)
    if way == "warm":
        return copy
    drives = [_seconds(known, name, way) for name in _DRIVES]
    found = {}
    for number, seconds in copy.items():
        theirs = [drive[number] for drive in drives if number in drive]
        if theirs:
            found[number] = max(seconds, min(theirs))
    return found


def judge(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return each goal with what was measured of it, and whether it was reached."""
    return [_judged(goal, results) for goal in GOALS]


def _judged(goal: Goal, results: Sequence[Result]) -> dict[str, Any]:
    known = {result.name: result for result in results}
    mine = _seconds(known, goal.subject, goal.way)
    if goal.beside is None:
        theirs = limits(results, goal.way)
    else:
        theirs = _seconds(known, goal.beside, goal.way)
    shares = [theirs[number] / mine[number] for number in mine if number in theirs]
    measured = None
    if shares:
        measured = {
            "median": statistics.median(shares),
            "min": min(shares),
            "max": max(shares),
        }
    return {
        "goal": goal.text,
        "subject": goal.subject,
        "way": goal.way,
        "wanted": goal.wanted,
        "measured": measured,
        "reached": None if measured is None else measured["median"] >= goal.wanted,
    }


def _seconds(known: dict[str, Result], name: str, way: str) -> dict[int, float]:
    result = known.get(name)
    turns: Sequence[Turn] = getattr(result, way) if result is not None else ()
    return {turn.round: turn.seconds for turn in turns}
