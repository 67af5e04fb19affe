"""From what turns took to figures: the document that ``--json`` prints.

Its form is ``forebay.bench/1``, documented in ``docs/bench.md``.
"""

from __future__ import annotations

import os
import platform
import statistics
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay.bench.place import file_system
from forebay.bench.subjects import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.measure import Result, Turn
    from forebay.bench.payload import Layout

__all__ = ["document", "spread"]

_GIB = 1 << 30


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def document(
    results: Sequence[Result],
    layout: Layout,
    directory: str,
    options: dict[str, Any],
    left_out: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Return all figures; the first result that is Forebay's is what others are compared with."""
    size = sum(layout.sizes)
    baseline = results[0] if results and results[0].name == "forebay" else None
    facts = _forebay.file_facts(directory)
    return {
        "options": {name: options[name] for name in options if name != "json"},
        "directory": os.path.realpath(directory),
        "file_system": file_system(directory),
        "direct": {"available": facts["direct"], "reason": facts["reason"]},
        "machine": {"kernel": platform.release(), "cpus": len(os.sched_getaffinity(0))},
        "payload": {"bytes": size, "tensors": len(layout.sizes)},
        "rounds": options["rounds"],
        "baseline": baseline and baseline.name,
        "subjects": [_subject(result, baseline, size) for result in results],
        "left_out": [{"name": name, "reason": reason} for name, reason in left_out],
        "notes": _notes(results),
    }


def _subject(result: Result, baseline: Result | None, size: int) -> dict[str, Any]:
    load = _way(result.load, baseline.load if baseline else None, size)
    if load is not None:
        load["cached_before_bytes"] = result.cached_before_bytes
    return {
        "name": result.name,
        "title": SUBJECTS[result.name].title,
        "version": result.version,
        "detail": result.detail,
        "store": _way(result.store, baseline.store if baseline else None, size),
        "load": load,
        "checked": result.checked,
        "failure": result.failure,
    }


def _way(
    turns: Sequence[Turn], baseline: Sequence[Turn] | None, size: int
) -> dict[str, Any] | None:
    if not turns:
        return None
    extras = [turn.extra_bytes for turn in turns if turn.extra_bytes is not None]
    return {
        "seconds": [turn.seconds for turn in turns],
        "bytes_per_second": spread([size / turn.seconds for turn in turns]),
        "cpu_seconds_per_gib": statistics.median(turn.cpu_seconds for turn in turns) / size * _GIB,
        "peak_extra_bytes": max(extras) if extras else None,
        "time_ratio": _ratio(turns, baseline),
    }


def _ratio(turns: Sequence[Turn], baseline: Sequence[Turn] | None) -> dict[str, float] | None:
    """Compare turns of the same round, which met the same moods of the drive."""
    theirs = {turn.round: turn.seconds for turn in baseline or ()}
    ratios = [turn.seconds / theirs[turn.round] for turn in turns if turn.round in theirs]
    return spread(ratios) if ratios else None


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    warm = {result.name: result.cached_before_bytes for result in results if result.load}
    stays = max((bytes_ or 0 for bytes_ in warm.values()), default=0)
    if stays:
        notes.append(
            f"up to {stays / 1e6:.1f} MB of a file stayed in the page cache, which this file "
            "system doesn't drop when asked: loads of them are partly from memory"
        )
    if None in warm.values():
        notes.append("this kernel can't say whether the page cache was cold (cachestat, Linux 6.5)")
    if any(result.name == "fio" and (result.store or result.load) for result in results):
        notes.append("fio moves bytes of its own, which aren't compared")
    return notes
