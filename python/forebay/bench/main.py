"""The order of events: look at the directory, make tensors, start processes, measure, show."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from forebay.bench.chart import page
from forebay.bench.choice import device, files_at_once, layouts, names, phases
from forebay.bench.crew import Lost, crew
from forebay.bench.figures import gpu_part, head, part, parts
from forebay.bench.hardware import describe
from forebay.bench.measure import GIVEN, Result, measure
from forebay.bench.output import complain, fitting, say, say_object
from forebay.bench.payload import Layout, SharedTensors, make, write_safetensors
from forebay.bench.place import check_directory, check_memory, check_space
from forebay.bench.problem import EXIT_DIRECTORY, EXIT_FAILED, Problem, explain
from forebay.bench.report import table
from forebay.bench.scratch import remove_stale, scratch
from forebay.bench.subjects.fio import parse_setting
from forebay.errors import ForebayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.crew import Member

    Pairs = list[tuple[Member, Result]]

__all__ = ["run"]

_COPY = "pinned-copy"
_SCHEMAS = {"tensors": "bench", "files": "bench.files", "gpu": "bench.gpu"}
_COPIES = 3.5
"""Copies of all tensors in memory at the most: the shared one, a subject's two, half to spare."""


def run(options: dict[str, Any]) -> int:
    """Run the subcommand with its options; return the exit code."""
    directory = options["dir"]
    try:
        chosen = names(options)
        if options["fio"] is not None:
            parse_setting(options["fio"])
        if options["list"]:
            return _list(chosen, options)
        payloads = layouts(options)
        check_directory(directory)
        remove_stale(directory, "bench")
        chart = options["output"]
        if chart is not None:
            _check_chart(chart)
        if options["what"] == "gpu":
            _check_gpu(options)
        size = options["size"]
        check_memory(size, _COPIES)
        check_space(directory, files_at_once(options) * size)
        return _compare(chosen, payloads, options)
    except Problem as problem:
        return _give_up(problem, json=options["json"])
    except BrokenPipeError:
        raise  # whoever read the output has seen enough, which is no fault of the directory
    except OSError as error:
        return _give_up(explain(error, directory), json=options["json"])
    except ForebayError as error:
        return _give_up(Problem(str(error), EXIT_FAILED), json=options["json"])


def _give_up(problem: Problem, *, json: bool) -> int:
    complain(f"forebay bench: {problem}")
    if json:
        # The output may be what failed; the complaint is on standard error already.
        with contextlib.suppress(Problem):
            say_object("error", {"message": str(problem), "exit": problem.code})
    return problem.code


def _check_chart(path: str) -> None:
    """Refuse a chart that can't be written before anything is measured."""
    exists = os.path.lexists(path)
    try:
        if exists and not os.path.isfile(path):
            text = f"cannot write {path}: there is something else than a file"
            raise Problem(text, EXIT_DIRECTORY)
        with open(path, "ab"):
            pass
        if not exists:
            os.unlink(path)
    except OSError as error:
        raise _no_chart(path, error) from error


def _no_chart(path: str, error: OSError) -> Problem:
    return Problem(f"cannot write {path}: {error.strerror}; pass another --output", EXIT_DIRECTORY)


def _compare(chosen: Sequence[str], payloads: Sequence[Layout], options: dict[str, Any]) -> int:
    turns = sum(2 + options["rounds"] * len(ways) for ways in phases(options))
    with _Progress(len(payloads) * len(chosen) * (1 + turns)) as progress:
        found = [_part(chosen, layout, options, progress) for layout in payloads]
    several = found[0] if options["what"] == "tensors" else {"files": found}
    hardware = {"hardware": describe(options["dir"])} if options["what"] == "gpu" else {}
    return _show({**head(options), **hardware, **several}, options)


def _part(
    chosen: Sequence[str], layout: Layout, options: dict[str, Any], progress: _Progress
) -> dict[str, Any]:
    """Compare with one set of tensors."""
    directory = options["dir"]
    number = make(layout)
    try:
        with (
            scratch(directory, "bench") as path,
            crew(options["what"], chosen, number, directory) as members,
        ):
            pairs, left_out = _set_up(members, layout, options, path, progress)
            if not pairs:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
                raise Problem(f"none of these can be compared here: {reasons}", EXIT_DIRECTORY)
            for ways in phases(options):
                going = [pair for pair in pairs if _goes(pair[1], ways)]
                if not going:
                    continue
                if any(not result.kind.stores for _, result in going):
                    shared = SharedTensors(number, layout)
                    write_safetensors(os.path.join(path, GIVEN), shared.tensors)
                measure(going, path, options["rounds"], ways, progress.step)
    finally:
        os.close(number)
    figures = gpu_part if options["what"] == "gpu" else part
    return figures([result for _, result in pairs], layout, left_out)


def _goes(result: Result, ways: Sequence[str]) -> bool:
    """Whether a subject has a part in a phase."""
    kind = result.kind
    return "load" in ways or (kind.stores and kind.store_is_timed)


def _set_up(
    members: Sequence[Member],
    layout: Layout,
    options: dict[str, Any],
    path: str,
    progress: _Progress,
) -> tuple[Pairs, list[tuple[str, str]]]:
    """Get the subjects ready, one after the other: some of them measure while they do."""
    pairs, left_out = [], []
    for member in members:
        progress.step(f"{member.name}: set up")
        result = Result(member.kind)
        try:
            answer = _look(member, options, layout=vars(layout), directory=path, look=False)
        except Lost as lost:
            left_out.append((member.name, str(lost)))
            continue
        if answer["unavailable"] is not None:
            left_out.append((member.name, answer["unavailable"]))
            continue
        result.version, result.detail = answer["version"], answer["detail"]
        if any(_goes(result, ways) for ways in phases(options)):
            pairs.append((member, result))
        else:
            left_out.append((member.name, "only its loading is measured, and --no-read forbids it"))
    return pairs, left_out


def _look(member: Member, options: dict[str, Any], **step: Any) -> dict[str, Any]:
    chosen = {name: options[name] for name in ("fio", "compile")}
    return member.do(do="setup", device=device(options), **chosen, **step)


def _check_gpu(options: dict[str, Any]) -> None:
    """Refuse a machine without the GPU, before anything is measured."""
    number = os.memfd_create("forebay-bench")
    try:
        # The copy of pinned memory takes what all others take of a machine.
        with crew(options["what"], [_COPY], number, options["dir"]) as (member,):
            reason = _look(member, options, look=True)["unavailable"]
    except Lost as lost:
        reason = str(lost)
    finally:
        os.close(number)
    if reason is not None:
        raise Problem(f"nothing can be compared on a GPU here: {reason}", EXIT_DIRECTORY)


def _list(chosen: Sequence[str], options: dict[str, Any]) -> int:
    """Say what can be compared here, and why others can't."""
    rows = []
    number = os.memfd_create("forebay-bench")
    try:
        with crew(options["what"], chosen, number, options["dir"]) as members:
            for member in members:
                try:
                    reason = _look(member, options, look=True)["unavailable"]
                except Lost as lost:
                    reason = str(lost)
                rows.append((member.name, member.kind.title, reason))
    finally:
        os.close(number)
    if options["json"]:
        found = [dict(zip(("name", "title", "unavailable"), row, strict=True)) for row in rows]
        say_object("bench.list", {"subjects": found})
    else:
        width = max(len(name) for name, _, _ in rows)
        for name, title, reason in rows:
            say(f"{name.ljust(width)}  {reason or f'here ({title})'}")
    return 0


def _show(figures: dict[str, Any], options: dict[str, Any]) -> int:
    chart = options["output"]
    if chart is not None:
        try:
            with open(chart, "w", encoding="utf-8") as file:
                file.write(page(figures))
        except OSError as error:
            raise _no_chart(chart, error) from error
    if options["json"]:
        say_object(_SCHEMAS[options["what"]], figures)
    else:
        for found in figures.get("hardware", ()):
            say(f"{found['title']}: {found['detail']}")
        if figures.get("hardware"):
            say("")
        for index, found in enumerate(parts(figures)):
            if index:
                say("\n")
            payload = found["payload"]
            say(
                f"{payload['tensors']} tensors, {payload['bytes'] / 1e9:.2f} GB, "
                f"{figures['rounds']} rounds, in {figures['directory']} "
                f"({figures['file_system']})\n"
            )
            say(table(found))
        if chart is not None:
            say(f"\nchart: {chart}")
    failed = any(subject["failure"] for found in parts(figures) for subject in found["subjects"])
    return EXIT_FAILED if failed else 0


class _Progress:
    """How far the run is, on the terminal; nothing where there is none."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def step(self, what: str) -> None:
        """Say what is done next."""
        if self._shown:
            sys.stderr.write(fitting(f"\r\033[K{self._done}/{self._steps} {what}", sys.stderr))
            sys.stderr.flush()
        self._done += 1

    def __enter__(self) -> _Progress:  # noqa: PYI034 (typing.Self is in 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
