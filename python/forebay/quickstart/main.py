"""The order of events: look at the directory, get tensors, measure, show."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from forebay import _forebay
from forebay.bench.output import complain, fitting, say, say_object
from forebay.bench.place import check_directory, check_memory, check_space
from forebay.bench.problem import EXIT_DIRECTORY, EXIT_FAILED, EXIT_USAGE, Problem, explain
from forebay.bench.scratch import remove_stale, scratch
from forebay.errors import ForebayError
from forebay.quickstart.measure import measure
from forebay.quickstart.report import bars, figures, table
from forebay.quickstart.tensors import default_tensors, file_tensors
from forebay.quickstart.ways import ways

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.quickstart.tensors import Tensor
    from forebay.quickstart.ways import Forebay

__all__ = ["run"]

_CHART = "forebay-quickstart.svg"
_PROGRESS_WIDTH = 30
_STEPS = 3
"""Steps of one way in one turn: store, load, compare."""
_COPIES = 4.5
"""Copies of all tensors in memory at the most, with half of one to spare."""


def run(
    files: Sequence[str], directory: str, size: int, repeats: int, *, json: bool = False
) -> int:
    """Run the quickstart; return the exit code. With `json`, print one object and no text."""
    try:
        check_directory(directory)
        remove_stale(directory, "quickstart")
        _check_chart(directory)
        check_memory(_payload(files, size), _COPIES)
        tensors = file_tensors(files) if files else default_tensors(size)
        if not any(tensor.data.nbytes for tensor in tensors):
            raise Problem("there is nothing to store: no tensor has any bytes", EXIT_USAGE)
        check_space(directory, sum(tensor.data.nbytes for tensor in tensors))
        _compare_ways(tensors, directory, repeats, json=json)
    except Problem as problem:
        return _give_up(problem, json=json)
    except BrokenPipeError:
        raise  # whoever read the output has seen enough, which is no fault of the directory
    except OSError as error:
        return _give_up(explain(error, directory), json=json)
    except ForebayError as error:
        return _give_up(Problem(str(error), EXIT_FAILED), json=json)
    return 0


def _give_up(problem: Problem, *, json: bool) -> int:
    complain(f"forebay quickstart: {problem}")
    if json:
        # The output may be what failed; the complaint is on standard error already.
        with contextlib.suppress(Problem):
            say_object("error", {"message": str(problem), "exit": problem.code})
    return problem.code


def _compare_ways(tensors: Sequence[Tensor], directory: str, repeats: int, *, json: bool) -> None:
    size = sum(tensor.data.nbytes for tensor in tensors)
    title = f"{len(tensors)} tensors, {size / 1e9:.2f} GB"
    forebay, all_ways, left_out = ways(tensors)
    if not json:
        say(
            f"{len(tensors)} tensors, {size / 1e9:.2f} GB, {repeats} times each way, in {directory}"
        )
    with forebay.handle, _Progress(len(all_ways) * repeats * _STEPS) as progress:
        with scratch(directory, "quickstart") as path:
            results = measure(all_ways, tensors, path, repeats, progress.step)
        progress.close()
        stats = forebay.handle.stats()
        if not json:
            say(_how(forebay, directory))
    if not json:
        for reason in left_out:
            say(f"left out: {reason}")
        say("every byte compared: all the same\n")
        say(table(results, size))
    chart = os.path.join(directory, _CHART)
    try:
        with open(chart, "w", encoding="utf-8") as file:
            file.write(bars(results, size, title))
    except OSError as error:
        raise _no_chart(chart, error.strerror) from error
    if not json:
        say(f"\nbars: {chart}")
        return
    say_object(
        "quickstart",
        {
            "tensors": len(tensors),
            "bytes": size,
            "repeats": repeats,
            "directory": directory,
            "chart": chart,
            "stats": stats,
            "left_out": left_out,
            "ways": figures(results, size),
        },
    )


def _how(forebay: Forebay, directory: str) -> str:
    """Say which engine ran, direct or not, and why."""
    stats = forebay.handle.stats()
    lines = []
    for name, available, detail in _forebay.probe_engines():
        if name == stats["engine"]:
            lines.append(f"engine: {name} ({detail})")
            break
        lines.append(
            f"engine {name} not used: {detail}" if not available else f"engine {name} not used"
        )
    facts = _forebay.file_facts(directory)
    if facts["direct"]:
        memory, offset = facts["memory_alignment"], facts["offset_alignment"]
        lines.append(f"direct I/O: yes (memory at multiples of {memory}, offsets of {offset})")
    else:
        lines.append(f"direct I/O: no ({facts['reason']})")
    parts = [
        (stats["bytes_direct"], "straight between the drive and the tensors"),
        (stats["bytes_staged"], "by staging memory, the tensors' addresses being what they are"),
        (stats["bytes_buffered"], "by the page cache"),
        (stats["bytes_cached"], "from the page cache, being there already"),
    ]
    total = max(1, sum(part for part, _ in parts))
    moved = (f"{100 * part / total:.0f} % {how}" for part, how in parts if part)
    lines.append("moved: " + ", ".join(moved))
    lines += [f"note: {text} ({count} times)" for text, count in stats["fallbacks"].items()]
    return "\n".join(lines)


def _check_chart(directory: str) -> None:
    """Refuse a chart that can't be written before anything is measured."""
    chart = os.path.join(directory, _CHART)
    exists = os.path.lexists(chart)
    if os.path.exists(chart) and not os.path.isfile(chart):
        raise _no_chart(chart, "there is something else than a file")
    try:
        with open(chart, "ab"):
            pass
        if not exists:
            os.unlink(chart)
    except OSError as error:
        raise _no_chart(chart, error.strerror) from error


def _no_chart(chart: str, reason: str | None) -> Problem:
    text = f"cannot write the bars to {chart}: {reason}; remove it, or pass another --dir"
    return Problem(text, EXIT_DIRECTORY)


def _payload(files: Sequence[str], size: int) -> int:
    if not files:
        return size
    try:
        return sum(os.stat(path).st_size for path in files)
    except OSError as error:
        text = f"cannot read {error.filename}: {error.strerror}"
        raise Problem(text, EXIT_USAGE) from error


class _Progress:
    """A bar on the terminal; nothing where there is none."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = -1
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def step(self, what: str) -> None:
        self._done += 1
        if self._shown:
            full = _PROGRESS_WIDTH * self._done // self._steps
            bar = "█" * full + "░" * (_PROGRESS_WIDTH - full)
            line = f"\r\033[K{bar} {self._done}/{self._steps} {what}"
            sys.stderr.write(fitting(line, sys.stderr))
            sys.stderr.flush()

    def close(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
            self._shown = False

    def __enter__(self) -> _Progress:  # noqa: PYI034 (typing.Self is in 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
