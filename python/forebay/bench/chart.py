"""Shows the figures as a page: bars with the spread of all rounds, and the tables behind them.

The page needs nothing beside itself, and follows the reader's choice of light or dark.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from forebay.bench.figures import WAYS, parts
from forebay.bench.report import (
    BACKGROUND_HEADINGS,
    GOAL_HEADINGS,
    HEADINGS,
    background_columns,
    columns,
    filled,
    goal_columns,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["page"]

_LABEL_WIDTH = 210
_BAR_WIDTH = 520
_VALUE_WIDTH = 60
_ROW_HEIGHT = 30
_BAR_HEIGHT = 16
_AXIS_HEIGHT = 26
_TICKS = 5

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1f2933; --quiet: #5f6b7a;
  --line: #dde2e8; --ours: #0b7285; --other: #a9b4c0; --spread: #1f2933; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e6eaef; --quiet: #9aa6b2;
  --line: #2d343c; --ours: #3bc1d6; --other: #5b6773; --spread: #e6eaef; } }
body { margin: 2rem auto; max-width: 52rem; padding: 0 1rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p, li { color: var(--quiet); }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .tick { fill: var(--quiet); font-size: 12px; }
.grid { stroke: var(--line); } .ours { fill: var(--ours); } .other { fill: var(--other); }
.spread { stroke: var(--spread); stroke-width: 1.5; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--quiet); font-weight: 500; }
"""


def page(document: dict[str, Any]) -> str:
    """Return the page."""
    titles = [_title(part) for part in parts(document)]
    shown = []
    for part, title in zip(parts(document), titles, strict=True):
        shown += [
            f"<h1>{title}</h1>",
            f"<p>{escape(document['directory'])} ({escape(document['file_system'])}), "
            f"{document['rounds']} rounds in turn; bars are medians, lines reach from the slowest "
            "round to the fastest.</p>",
            *_part(part, title),
        ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>forebay bench: {'; '.join(titles)}</title>\n<style>{_STYLE}</style>\n"
        "</head>\n<body>\n" + "\n".join(shown) + "\n</body>\n</html>\n"
    )


def _title(part: dict[str, Any]) -> str:
    payload = part["payload"]
    return f"{payload['tensors']} tensors, {payload['bytes'] / 1e9:.2f} GB"


def _part(part: dict[str, Any], title: str) -> list[str]:
    shown = []
    for way, (heading, explanation) in WAYS.items():
        rows = [subject for subject in part["subjects"] if subject[way]]
        if rows:
            shown += [
                f"<h2>{heading}, GB/s</h2>",
                f"<p>{explanation}</p>",
                _bars(rows, way, f"{heading}: {title}"),
                _table(HEADINGS, [(row, columns(row[way])) for row in rows]),
            ]
    rows = [subject for subject in part["subjects"] if subject["background"]]
    if rows:
        shown += [
            "<h2>Save in the background</h2>",
            "<p>beside a copy of the tensors, and a loop that computes meanwhile</p>",
            _table(
                BACKGROUND_HEADINGS, [(row, background_columns(row["background"])) for row in rows]
            ),
        ]
    if part.get("goals"):
        rows = [
            ({"title": goal["goal"], "version": None}, goal_columns(goal)) for goal in part["goals"]
        ]
        shown += ["<h2>Goals</h2>", _table(GOAL_HEADINGS, rows)]
    return [*shown, _remarks(part)]


def _bars(rows: list[dict[str, Any]], way: str, title: str) -> str:
    step = _step(max(row[way]["bytes_per_second"]["max"] for row in rows) / 1e9)
    ticks = [step * index for index in range(_TICKS + 1)]
    scale = _BAR_WIDTH / ticks[-1]
    bottom = _ROW_HEIGHT * len(rows)
    width, height = _LABEL_WIDTH + _BAR_WIDTH + _VALUE_WIDTH, bottom + _AXIS_HEIGHT
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img"><title>{escape(title)}</title>']
    for tick in ticks:
        x = _LABEL_WIDTH + tick * scale
        parts += [
            f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}"/>',
            f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">'
            f"{tick:g}</text>",
        ]
    for index, row in enumerate(rows):
        rate = {name: value / 1e9 for name, value in row[way]["bytes_per_second"].items()}
        middle = _ROW_HEIGHT * index + _ROW_HEIGHT / 2
        kind = "ours" if row["name"].startswith("forebay") else "other"
        left, right = (_LABEL_WIDTH + rate[name] * scale for name in ("min", "max"))
        bar = max(1.0, rate["median"] * scale)
        parts += [
            f'<text x="{_LABEL_WIDTH - 10}" y="{middle + 4}" text-anchor="end">'
            f"{escape(row['title'])}</text>",
            f'<rect class="{kind}" x="{_LABEL_WIDTH}" y="{middle - _BAR_HEIGHT / 2}" '
            f'width="{bar:.1f}" height="{_BAR_HEIGHT}" rx="2">'
            f"<title>{escape(row['title'])}: {rate['median']:.2f} GB/s "
            f"({rate['min']:.2f} to {rate['max']:.2f})</title></rect>",
            f'<line class="spread" x1="{left:.1f}" y1="{middle}" x2="{right:.1f}" y2="{middle}"/>',
            f'<text x="{max(right, _LABEL_WIDTH + bar) + 8:.1f}" y="{middle + 4}">'
            f"{rate['median']:.2f}</text>",
        ]
    return "\n".join([*parts, "</svg>"])


def _step(most: float) -> float:
    """Return a round distance of ticks, with which they reach ``most``."""
    size = 1e-6
    while True:
        for factor in (1, 2, 2.5, 4, 5):
            if factor * size * _TICKS >= most:
                return factor * size
        size *= 10


def _table(headings: Sequence[str], rows: Sequence[tuple[dict[str, Any], list[str]]]) -> str:
    names = [
        row["title"] if row["version"] is None else f"{row['title']} {row['version']}"
        for row, _ in rows
    ]
    figures = zip(names, rows, strict=True)
    first, *others = filled([["", *headings], *([name, *cells] for name, (_, cells) in figures)])
    head = "".join(f"<th>{heading}</th>" for heading in first)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in others
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _remarks(part: dict[str, Any]) -> str:
    remarks = [
        f"{subject['title']} failed: {subject['failure']}"
        for subject in part["subjects"]
        if subject["failure"]
    ]
    remarks += [
        f"{subject['title']}: {subject['detail']}"
        for subject in part["subjects"]
        if subject["detail"]
    ]
    remarks += [f"left out: {left['name']}: {left['reason']}" for left in part["left_out"]]
    remarks += part["notes"]
    items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f"<h2>To know</h2>\n<ul>{items}</ul>" if items else ""
