"""What a directory must be to compare in it: on a drive, writable, with room."""

from __future__ import annotations

import os
import tempfile

from forebay.bench.problem import EXIT_DIRECTORY, Problem, explain

__all__ = ["check_directory", "check_memory", "check_space", "file_system"]

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


def check_directory(directory: str) -> None:
    """Refuse what isn't a writable directory on a drive."""
    if not os.path.isdir(directory):
        raise Problem(f"{directory} is not a directory; pass another --dir", EXIT_DIRECTORY)
    kind = file_system(directory)
    if kind in _IN_MEMORY:
        text = f"{directory} is on {kind}, which is memory, not a drive: pass a --dir on a drive"
        raise Problem(text, EXIT_DIRECTORY)
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise explain(error, directory) from error


def file_system(directory: str) -> str:
    """Return the kind of file system that a directory is on."""
    device = os.stat(directory).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                mount, _, source = line.partition(" - ")
                if mount.split(" ", 3)[2] == name:
                    return source.split(" ", 1)[0]
    except OSError:
        pass
    return "unknown"


def check_space(directory: str, size: int) -> None:
    """Refuse a directory with less room than ``size`` bytes and a little more."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free < size + size // 50:
        text = f"{directory} has {free / 1e9:.2f} GB free, {size / 1e9:.2f} GB are needed"
        raise Problem(f"{text}: free some space, or pass a smaller --size", EXIT_DIRECTORY)


def check_memory(size: int, copies: float) -> None:
    """Refuse tensors of which so many copies don't fit in memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return
    if copies * size > available:
        text = f"{size / 1e9:.2f} GB of tensors take {copies * size / 1e9:.2f} GB of memory"
        text = f"{text}, {available / 1e9:.2f} GB are available: pass a smaller --size"
        raise Problem(text, EXIT_DIRECTORY)
