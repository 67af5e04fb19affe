"""Shows the figures as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.bench.figures import WAYS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BACKGROUND_HEADINGS",
    "GOAL_HEADINGS",
    "HEADINGS",
    "background_columns",
    "columns",
    "filled",
    "goal_columns",
    "table",
]

HEADINGS = (
    "GB/s", "spread", "CPU s/GiB", "MiB more", "forebay is", "spread", "of fio", "of the limit",
)  # fmt: skip
"""What `columns` are."""
BACKGROUND_HEADINGS = ("blocked s", "copy s", "ratio", "in all s", "computing lost", "spread")
"""What `background_columns` are."""
GOAL_HEADINGS = ("wanted", "measured", "spread", "reached")
"""What `goal_columns` are."""
_WAYS = {"store": "store, on the drive", "load": "load, cold cache", "warm": "load, warm cache"}


def table(part: dict[str, Any]) -> str:
    """Return a table for each way, with what was left out and what to know."""
    shown = []
    for way in WAYS:
        rows = [row for row in part["subjects"] if row[way]]
        if rows:
            cells = [(row["title"], columns(row[way])) for row in rows]
            shown.append(_rows(_WAYS[way], HEADINGS, cells))
    rows = [row for row in part["subjects"] if row["background"]]
    if rows:
        cells = [(row["title"], background_columns(row["background"])) for row in rows]
        shown.append(_rows("save in the background", BACKGROUND_HEADINGS, cells))
    if part.get("goals"):
        goals = [(goal["goal"], goal_columns(goal)) for goal in part["goals"]]
        shown.append(_rows("goals", GOAL_HEADINGS, goals))
    failed = [row for row in part["subjects"] if row["failure"]]
    lines = [f"FAILED: {row['title']}: {row['failure']}" for row in failed]
    lines += [f"left out: {row['name']}: {row['reason']}" for row in part["left_out"]]
    lines += [f"note: {note}" for note in part["notes"]]
    checked = [row["title"] for row in part["subjects"] if row["checked"]]
    if checked:
        lines.append(f"every byte compared: {', '.join(checked)}")
    if lines:
        shown.append("\n".join(lines))
    return "\n\n".join(shown)


def columns(figures: dict[str, Any]) -> list[str]:
    """Return what is shown of one way of one subject; nothing where it is compared with itself."""
    rate, ratio, fio = (
        figures[name] for name in ("bytes_per_second", "time_ratio", "fio_time_ratio")
    )
    extra, share = figures["peak_extra_bytes"], figures.get("limit_share")
    return [
        f"{rate['median'] / 1e9:.2f}",
        f"{rate['min'] / 1e9:.2f} to {rate['max'] / 1e9:.2f}",
        f"{figures['cpu_seconds_per_gib']:.2f}",
        "" if extra is None else f"{extra / (1 << 20):.0f}",
        "" if _is_itself(ratio) else f"{ratio['median']:.2f} ×",
        "" if _is_itself(ratio) else f"{ratio['min']:.2f} to {ratio['max']:.2f}",
        "" if _is_itself(fio) else f"{100 / fio['median']:.0f} %",
        "" if share is None else f"{100 * share['median']:.0f} %",
    ]


def background_columns(figures: dict[str, Any]) -> list[str]:
    """Return what is shown of one subject's saves in the background."""
    loss = figures["compute_loss"]
    return [
        *(f"{figures[name]['median']:.2f}" for name in ("blocked_seconds", "copy_seconds")),
        f"{figures['blocked_copy_ratio']['median']:.2f} ×",
        f"{figures['total_seconds']['median']:.2f}",
        f"{100 * loss['median']:.0f} %",
        f"{100 * loss['min']:.0f} to {100 * loss['max']:.0f} %",
    ]


def goal_columns(goal: dict[str, Any]) -> list[str]:
    """Return what is shown of a goal."""
    measured = goal["measured"]
    if measured is None:
        return [f"{goal['wanted']:.2f}", "", "", "not measured"]
    return [
        f"{goal['wanted']:.2f}",
        f"{measured['median']:.2f}",
        f"{measured['min']:.2f} to {measured['max']:.2f}",
        "yes" if goal["reached"] else "no",
    ]


def filled(rows: Sequence[list[str]]) -> list[list[str]]:
    """Return rows, of which the first has the headings, without columns that nobody has."""
    kept = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    return [[row[index] for index in kept] for row in rows]


def _is_itself(ratio: dict[str, float] | None) -> bool:
    return ratio is None or set(ratio.values()) == {1.0}


def _rows(heading: str, headings: Sequence[str], subjects: Sequence[tuple[str, list[str]]]) -> str:
    rows = filled([[heading, *headings], *([title, *cells] for title, cells in subjects)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "─" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)
