"""Runs programs of the tests, with limits that nothing outlives, and compares what they found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

TRAIN = Path(__file__).with_name("train.py")
SECONDS_MAX = 240
"""For one program with all its processes; a run takes some seconds, on a busy machine more."""

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    # Whoever compiles has to find a compiler first; and libaio is looked for by compiling.
    "CC": "/nonexistent/cc",
    "CXX": "/nonexistent/c++",
}

POLL_SECONDS = 0.02

FOREBAY = ("-m", "forebay.deepspeed")


class Program:
    """A Python program in a process group of its own."""

    def __init__(self, *arguments: str | Path, python: str = sys.executable, **more: str) -> None:
        environment = {**os.environ, **ENVIRONMENT, **more}
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [python, *map(str, arguments)],
            env={name: value for name, value in environment.items() if value},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def finish(self, expected: int = 0) -> str:
        """Wait for it, and return what it printed."""
        finish_all([self], expected)
        return self.output

    def exit_code(self) -> int | None:
        """Return its exit code; none while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End the group, if there is any of it left, and keep what it printed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._output:
            self._output.seek(0)
            self.output = self._output.read()


def finish_all(programs: Sequence[Program], expected: int = 0) -> None:
    """Wait for programs that need each other: the first to fail is the end of all."""
    deadline = time.monotonic() + SECONDS_MAX
    codes: list[int | None] = [None]
    try:
        while None in codes and set(codes) <= {None, expected} and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            codes = [program.exit_code() for program in programs]
    finally:
        for program in programs:
            program.end()
    outputs = "\n".join(program.output for program in programs)
    assert set(codes) == {expected}, f"exit codes {codes}:\n{outputs}"


def run(
    *arguments: str | Path, expected: int = 0, python: str = sys.executable, **more: str
) -> str:
    """Run a Python program, and return what it printed."""
    return Program(*arguments, python=python, **more).finish(expected)


class Training:
    """Runs of the training program in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def losses(
        self,
        world_size: int,
        wanted: dict[str, Any],
        options: Sequence[str] = FOREBAY,
        **more: str,
    ) -> list[list[str]]:
        """Train, and return each rank's losses, to the last bit."""
        return [found["losses"] for found in self.run(world_size, wanted, options, **more)]

    def run(
        self,
        world_size: int,
        wanted: dict[str, Any],
        options: Sequence[str] = FOREBAY,
        **more: str,
    ) -> list[dict[str, Any]]:
        """Train with so many processes, and return what each found."""
        path, output = self.describe(wanted, rendezvous=True)
        programs = [
            Program(
                *options,
                TRAIN,
                path,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(world_size),
                **more,
            )
            for rank in range(world_size)
        ]
        finish_all(programs)
        return self.found(output, world_size)

    def describe(self, wanted: dict[str, Any], *, rendezvous: bool) -> tuple[Path, Path]:
        """Write down what a run is to do; return that file, and where it leaves what it found."""
        self._count += 1
        folder = self.folder / f"run{self._count}"
        folder.mkdir()
        output = folder / "found"
        description = {
            "folder": str(folder),
            "output": str(output),
            "steps": [0, 20],
            "pipeline": False,
            **wanted,
        }
        if rendezvous:
            # No port to choose, so none that somebody else takes first.
            description["rendezvous"] = str(folder / "rendezvous")
        path = folder / "wanted.json"
        path.write_text(json.dumps(description))
        return path, output

    @staticmethod
    def found(output: Path, world_size: int) -> list[dict[str, Any]]:
        """Return what each rank left."""
        return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(world_size)]
