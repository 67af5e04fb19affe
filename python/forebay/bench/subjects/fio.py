"""fio: what the drive can do, with bytes of its own.

Its time is that of its I/O alone, without its start; what it wrote is synced on top. The bytes
aren't those of the tensors, so there is nothing to compare.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from forebay.bench.problem import EXIT_USAGE, Problem
from forebay.bench.subjects.subject import Settings, Subject, Timing, sizes_of

__all__ = ["Fio", "Setting", "parse_setting"]

_SECTOR_BYTES = 4096
_TRIAL_BYTES = 256 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Setting:
    """How fio asks the kernel."""

    engine: str
    block_bytes: int
    depth: int
    jobs: int

    def __str__(self) -> str:
        text = f"{self.engine}, {self.block_bytes >> 10} KiB × {self.depth}"
        return f"{text} in {self.jobs} jobs" if self.jobs > 1 else text


_CHOICES = [
    Setting("io_uring", 1 << 20, 32, 1),
    Setting("io_uring", 2 << 20, 32, 2),
    Setting("libaio", 1 << 20, 32, 1),
    Setting("libaio", 2 << 20, 32, 2),
]


def parse_setting(text: str) -> Setting:
    """Return the setting that ``ENGINE:BLOCK:DEPTH``, and perhaps ``:JOBS``, means."""
    try:
        engine, block, depth, jobs = [*text.split(":"), "1"][:4]
        if text.count(":") > 3:
            raise ValueError(text)
        number = block.rstrip("KMGkmg")
        size = int(number) * _UNITS[block[len(number) :].upper()]
        setting = Setting(engine, size, int(depth), int(jobs))
    except (ValueError, KeyError) as error:
        message = f"--fio {text!r} is not of the form ENGINE:BLOCK:DEPTH, such as io_uring:1M:32"
        raise Problem(message, EXIT_USAGE) from error
    if not engine or size < 1 or size % 512 or min(setting.depth, setting.jobs) < 1:
        message = (
            f"--fio {text!r}: blocks are multiples of 512 bytes, depth and jobs are at least 1"
        )
        raise Problem(message, EXIT_USAGE)
    return setting


def _block(wanted: int, stripe: int) -> int:
    """Return the block size for a stripe; a smaller one if much of the stripe would be left over.

    fio moves whole blocks only.
    """
    block = min(wanted, stripe)
    if stripe % block * 10 <= stripe:
        return block
    blocks = -(-stripe // block)
    return stripe // blocks // _SECTOR_BYTES * _SECTOR_BYTES


class Fio(Subject):
    """One file, by the best of a few settings for each way, or by the one given."""

    name = "fio"
    title = "fio"
    checked = False
    _best: dict[str, Setting]

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:  # noqa: ARG003 (none matters)
        """Return why it can't be compared here, or None."""
        return None if shutil.which("fio") else "not installed (apt-get install fio)"

    def version(self) -> str | None:
        """Return what fio says of itself."""
        said = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False)
        return said.stdout.strip().removeprefix("fio-") or None

    def setup(self, directory: str) -> str:
        """Choose the settings."""
        if self._settings.fio is not None:
            given = parse_setting(self._settings.fio)
            self._best = {"write": given, "read": given}
            return str(given)
        size = min(self._size(), _TRIAL_BYTES)
        path = os.path.join(directory, "fio-trial")
        found: dict[str, list[tuple[float, int]]] = {"write": [], "read": []}
        refusals = []
        try:
            for index, setting in enumerate(_CHOICES):
                try:
                    for way, times in found.items():
                        times.append((self._run(way, path, setting, size).seconds, index))
                except ChildProcessError as error:
                    refusals.append(str(error))
        finally:
            if os.path.exists(path):
                os.unlink(path)
        if not all(found.values()):
            raise ChildProcessError("; ".join(refusals))
        self._best = {way: _CHOICES[min(times)[1]] for way, times in found.items()}
        return f"write: {self._best['write']}; read: {self._best['read']}; direct"

    def store(self, path: str) -> Timing:
        """Write as many bytes as the tensors have."""
        timing = self._run("write", path, self._best["write"], self._size())
        start, cpu = time.perf_counter(), time.process_time()
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return Timing(
            timing.seconds + time.perf_counter() - start,
            timing.cpu_seconds + time.process_time() - cpu,
        )

    def load(self, path: str) -> Timing:
        """Read the file."""
        return self._run("read", path, self._best["read"], self._size())

    def _size(self) -> int:
        size = sum(sizes_of(self._tensors))
        return -(-size // _SECTOR_BYTES) * _SECTOR_BYTES

    @staticmethod
    def _run(way: str, path: str, setting: Setting, size: int) -> Timing:
        # Jobs have a stripe of the file each.
        stripe = -(-size // setting.jobs // _SECTOR_BYTES) * _SECTOR_BYTES
        block = _block(setting.block_bytes, stripe)
        # Registered once, as Forebay's are.
        extra = ["--fixedbufs=1"] if setting.engine == "io_uring" else []
        # fio reads a colon in a file name as a separator; it takes a backslash before it.
        name = path.replace(":", "\\:")
        command = [
            "fio", "--name=bench", "--output-format=json", "--direct=1", "--thread",
            "--scramble_buffers=0", "--group_reporting", f"--filename={name}", f"--rw={way}",
            f"--bs={block}", f"--ioengine={setting.engine}", f"--iodepth={setting.depth}",
            f"--numjobs={setting.jobs}", f"--size={stripe}", f"--offset_increment={stripe}",
            *extra,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            message = f"fio ({setting}) failed: {said[0] if said else done.returncode}"
            if "No space left" in done.stderr + done.stdout:
                raise OSError(28, os.strerror(28), path)
            raise ChildProcessError(message)
        # Warnings come before the JSON, on the same stream.
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = job[way]["io_bytes"]
        if moved * 10 < size * 9:
            message = f"fio ({setting}) moved {moved} of {size} bytes"
            raise ChildProcessError(message)
        share = size / moved
        seconds = max(1.0, job[way]["runtime"]) / 1e3 * share
        busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Timing(seconds, busy * share)
