"""Shows the figures as a table for the terminal."""

from __future__ import annotations

from typing import Any

__all__ = ["columns", "table"]


def table(document: dict[str, Any]) -> str:
    """Return a table for each way, with what was left out and what to know."""
    parts = []
    for way, heading in (("store", "store, on the drive"), ("load", "load, cold cache")):
        rows = [row for row in document["subjects"] if row[way]]
        if rows:
            parts.append(_way(rows, way, heading))
    failed = [row for row in document["subjects"] if row["failure"]]
    lines = [f"FAILED: {row['title']}: {row['failure']}" for row in failed]
    lines += [f"left out: {row['name']}: {row['reason']}" for row in document["left_out"]]
    lines += [f"note: {note}" for note in document["notes"]]
    checked = [row["title"] for row in document["subjects"] if row["checked"]]
    if checked:
        lines.append(f"every byte compared: {', '.join(checked)}")
    if lines:
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def columns(figures: dict[str, Any]) -> list[str]:
    """Return what is shown of one way of one subject."""
    rate, ratio = figures["bytes_per_second"], figures["time_ratio"]
    extra = figures["peak_extra_bytes"]
    return [
        f"{rate['median'] / 1e9:.2f}",
        f"{rate['min'] / 1e9:.2f} to {rate['max'] / 1e9:.2f}",
        f"{figures['cpu_seconds_per_gib']:.2f}",
        "" if extra is None else f"{extra / (1 << 20):.0f}",
        "" if ratio is None else f"{ratio['median']:.1f} ×",
        "" if ratio is None else f"{ratio['min']:.1f} to {ratio['max']:.1f}",
    ]


def _way(subjects: list[dict[str, Any]], way: str, heading: str) -> str:
    rows = [[heading, "GB/s", "spread", "CPU s/GiB", "MiB more", "forebay is", "spread"]]
    for subject in subjects:
        cells = columns(subject[way])
        is_baseline = subject[way]["time_ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
        rows.append([subject["title"], *(cells[:4] if is_baseline else cells)])
    width = len(rows[0])
    rows = [row + [""] * (width - len(row)) for row in rows]
    if not any(row[5] for row in rows[1:]):
        rows = [row[:5] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "─" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)
