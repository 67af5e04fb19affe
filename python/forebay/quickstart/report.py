"""Shows the figures: a table for the terminal, bars as SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.quickstart.measure import Result, Samples

__all__ = ["bars", "figures", "table"]

_COLUMNS = ("", "store GB/s", "CPU s/GiB", "forebay is", "load GB/s", "CPU s/GiB", "forebay is")

_ROW_HEIGHT = 22
_LABEL_WIDTH = 170
_BAR_WIDTH = 420
_MARGIN = 16


def table(results: Sequence[Result], size: int) -> str:
    """Return the results as text; the first is the one that the others are compared with."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for result in results:
        cells = [result.name]
        for samples, best in (
            (result.store, results[0].store),
            (result.load, results[0].load),
        ):
            ratio = samples.seconds() / best.seconds()
            cells += [
                f"{samples.rate(size):.2f}",
                f"{samples.cpu_per_gib(size):.2f}",
                "" if samples is best else f"{ratio:.1f} × as fast",
            ]
        rows.append(tuple(cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    lines.insert(1, "─" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


def figures(results: Sequence[Result], size: int) -> list[dict[str, Any]]:
    """Return the results as they go into JSON."""

    def of(samples: Samples) -> dict[str, Any]:
        return {
            "seconds": samples.wall,
            "cpu_seconds": samples.cpu,
            "gb_per_second": samples.rate(size),
            "cpu_seconds_per_gib": samples.cpu_per_gib(size),
        }

    return [
        {"name": result.name, "store": of(result.store), "load": of(result.load)}
        for result in results
    ]


def bars(results: Sequence[Result], size: int, title: str) -> str:
    """Return the results as an SVG image: GB/s, a group of bars for storing, one for loading."""
    groups = [
        ("store, on the drive", [(result.name, result.store.rate(size)) for result in results]),
        ("load, cold cache", [(result.name, result.load.rate(size)) for result in results]),
    ]
    longest = max(rate for _, rows in groups for _, rate in rows)
    parts: list[str] = []
    y = 2 * _MARGIN + 12
    for heading, rows in groups:
        y += _ROW_HEIGHT
        parts.append(f'<text x="{_MARGIN}" y="{y}" font-weight="bold">{heading} (GB/s)</text>')
        y += 8
        for index, (name, rate) in enumerate(rows):
            width = max(1, round(_BAR_WIDTH * rate / longest))
            x = _MARGIN + _LABEL_WIDTH
            colour = "#0b7285" if index == 0 else "#adb5bd"
            parts += [
                f'<text x="{x - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{x}" y="{y + 2}" width="{width}" height="{_ROW_HEIGHT - 5}" '
                f'rx="2" fill="{colour}"/>',
                f'<text x="{x + width + 6}" y="{y + 15}">{rate:.2f}</text>',
            ]
            y += _ROW_HEIGHT
    width, height = 2 * _MARGIN + _LABEL_WIDTH + _BAR_WIDTH + 50, y + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" '
        f'fill="#212529" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<text x="{_MARGIN}" y="{_MARGIN + 12}" font-size="15">{escape(title)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
