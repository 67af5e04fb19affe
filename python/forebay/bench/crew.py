"""The processes of the subjects, started, spoken to, and ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from forebay.bench.problem import Problem, explain
from forebay.bench.subjects import COMPARISONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.bench.subjects.subject import Subject

__all__ = ["Lost", "Member", "crew"]

_LINES = 3
"""Lines of what a process complained about that are shown."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Lost(Exception):  # noqa: N818 (what became of a subject, not an error of a program)
    """A subject that can't go on, and why."""


class Member:
    """The process of one subject."""

    def __init__(self, what: str, name: str, number: int, directory: str) -> None:
        self.name = name
        self._what = what
        self._directory = directory
        self._complaints = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed by `end`)
        # A session of its own: Ctrl-C reaches the command alone, which then ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay.bench.worker", what, name, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            encoding="utf-8",
            pass_fds=[number],
            # cuFile would leave its log where the command was started.
            env={"CUFILE_LOGFILE_PATH": os.devnull, **os.environ},
            start_new_session=True,
        )

    @property
    def kind(self) -> type[Subject]:
        """The subject."""
        return COMPARISONS[self._what][self.name]

    def ask(self, **step: Any) -> None:
        """Have it begin a step."""
        assert self._process.stdin is not None  # noqa: S101 (it is a pipe)
        with contextlib.suppress(BrokenPipeError):  # told by its silence
            self._process.stdin.write(json.dumps(step) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the end of a step; raise `Lost` if it failed."""
        assert self._process.stdout is not None  # noqa: S101 (it is a pipe)
        line = self._process.stdout.readline()
        if not line:
            raise Lost(self._ending())
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            if answer["errno"] in _FULL:
                number = answer["errno"]
                raise explain(OSError(number, os.strerror(number)), self._directory)
            raise Lost(answer["failed"])
        return answer

    def do(self, **step: Any) -> dict[str, Any]:
        """Have it do a step."""
        self.ask(**step)
        return self.answer()

    def end(self) -> None:
        """End the process, whatever it is doing."""
        with contextlib.suppress(ProcessLookupError):
            # What it has started, such as fio, is in its session.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._complaints.close()

    def _ending(self) -> str:
        code = self._process.wait()
        how = f"ended with code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
        self._complaints.seek(0)
        text = self._complaints.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_LINES:]
        return f"its process {how}" + (f": {' / '.join(lines)}" if lines else "")


@contextlib.contextmanager
def crew(what: str, names: Sequence[str], number: int, directory: str) -> Iterator[list[Member]]:
    """Start a process for each subject of a comparison; end them all at the end."""
    members: list[Member] = []
    try:
        for name in names:
            try:
                members.append(Member(what, name, number, directory))
            except OSError as error:
                raise Problem(f"cannot start a process for {name}: {error}", 3) from error
        yield members
    finally:
        for member in members:
            member.end()
