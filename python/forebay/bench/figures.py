"""From what turns took to figures: the documents that ``--json`` prints.

Their forms are ``forebay.bench/1``, ``forebay.bench.files/1`` and ``forebay.bench.gpu/1``,
documented in ``docs/bench.md``. A document is made of a head and of one part, or of several.
"""

from __future__ import annotations

import os
import platform
import statistics
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay.bench.goals import judge, limits
from forebay.bench.place import file_system

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.measure import Result, Turn
    from forebay.bench.payload import Layout

__all__ = ["WAYS", "gpu_part", "head", "part", "parts", "spread"]

_GIB = 1 << 30

WAYS = {
    "store": ("Store", "until the bytes are on the drive"),
    "load": ("Load", "with a cold page cache"),
    "warm": ("Load, warm", "with the file in the page cache"),
}
"""What has a rate, with a heading and an explanation of it."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def head(options: dict[str, Any]) -> dict[str, Any]:
    """Return what doesn't follow from what turns took."""
    directory = options["dir"]
    facts = _forebay.file_facts(directory)
    return {
        "options": {name: options[name] for name in options if name != "json"},
        "directory": os.path.realpath(directory),
        "file_system": file_system(directory),
        "direct": {"available": facts["direct"], "reason": facts["reason"]},
        "machine": {"kernel": platform.release(), "cpus": len(os.sched_getaffinity(0))},
        "rounds": options["rounds"],
    }


def part(
    results: Sequence[Result], layout: Layout, left_out: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return all figures; the first result that is Forebay's is what others are compared with."""
    size = sum(layout.sizes)
    baseline = results[0] if results and results[0].name == "forebay" else None
    fio = next((result for result in results if result.name == "fio"), None)
    return {
        "payload": {"bytes": size, "tensors": len(layout.sizes)},
        "baseline": baseline and baseline.name,
        "subjects": [_subject(result, baseline, fio, size) for result in results],
        "left_out": [{"name": name, "reason": reason} for name, reason in left_out],
        "notes": _notes(results),
    }


def gpu_part(
    results: Sequence[Result], layout: Layout, left_out: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Return all figures of a comparison with a GPU: beside the limits, and as goals."""
    found = part(results, layout, left_out)
    for subject, result in zip(found["subjects"], results, strict=True):
        for way in WAYS:
            if subject[way] is not None:
                shares = _shares(getattr(result, way), limits(results, way))
                subject[way]["limit_share"] = shares
    return {**found, "goals": judge(results)}


def _shares(turns: Sequence[Turn], limit: dict[int, float]) -> dict[str, float] | None:
    shares = [limit[turn.round] / turn.seconds for turn in turns if turn.round in limit]
    return spread(shares) if shares else None


def parts(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a document."""
    several: list[dict[str, Any]] = document.get("files", [document])
    return several


def _subject(
    result: Result, baseline: Result | None, fio: Result | None, size: int
) -> dict[str, Any]:
    ways = {
        way: _way(
            getattr(result, way),
            getattr(baseline, way) if baseline else (),
            getattr(fio, way) if fio else (),
            size,
        )
        for way in WAYS
    }
    if ways["load"] is not None:
        ways["load"]["cached_before_bytes"] = result.cached_before_bytes
    if ways["warm"] is not None:
        ways["warm"]["missing_before_bytes"] = result.missing_before_bytes
    return {
        "name": result.name,
        "title": result.kind.title,
        "version": result.version,
        "detail": result.detail,
        **ways,
        "background": _background(result.background),
        "checked": result.checked,
        "failure": result.failure,
    }


def _way(
    turns: Sequence[Turn], baseline: Sequence[Turn], fio: Sequence[Turn], size: int
) -> dict[str, Any] | None:
    if not turns:
        return None
    extras = [turn.extra_bytes for turn in turns if turn.extra_bytes is not None]
    return {
        "seconds": [turn.seconds for turn in turns],
        "bytes_per_second": spread([size / turn.seconds for turn in turns]),
        "touch_seconds": statistics.median(turn.touch_seconds for turn in turns),
        "cpu_seconds_per_gib": statistics.median(turn.cpu_seconds for turn in turns) / size * _GIB,
        "peak_extra_bytes": max(extras) if extras else None,
        "time_ratio": _ratio({turn.round: turn.seconds for turn in turns}, baseline),
        "fio_time_ratio": _ratio(
            {turn.round: turn.seconds - turn.touch_seconds for turn in turns}, fio
        ),
    }


def _ratio(seconds: dict[int, float], others: Sequence[Turn]) -> dict[str, float] | None:
    """Compare turns of the same round, which met the same moods of the drive."""
    theirs = {turn.round: turn.seconds for turn in others}
    ratios = [seconds[number] / theirs[number] for number in seconds if number in theirs]
    return spread(ratios) if ratios else None


def _background(costs: Sequence[dict[str, float]]) -> dict[str, Any] | None:
    if not costs:
        return None
    ratios = [cost["blocked_seconds"] / cost["copy_seconds"] for cost in costs]
    found = {name: spread([cost[name] for cost in costs]) for name in costs[0]}
    return {**found, "blocked_copy_ratio": spread(ratios)}


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    cold = {result.name: result.cached_before_bytes for result in results if result.load}
    stays = max((bytes_ or 0 for bytes_ in cold.values()), default=0)
    if stays:
        notes.append(
            f"up to {stays / 1e6:.1f} MB of a file stayed in the page cache, which this file "
            "system doesn't drop when asked: loads of them are partly from memory"
        )
    absent = max((result.missing_before_bytes or 0 for result in results), default=0)
    if absent:
        notes.append(
            f"up to {absent / 1e6:.1f} MB of a file weren't in the page cache before a warm load: "
            "memory is short"
        )
    if None in cold.values():
        notes.append("this kernel can't say what is in the page cache (cachestat, Linux 6.5)")
    if any(result.name == "fio" and (result.store or result.load) for result in results):
        notes.append("fio moves bytes of its own, which aren't compared")
    return notes
