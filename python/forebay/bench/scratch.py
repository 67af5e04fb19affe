"""The directory that a comparison stores into, which must not outlive the run.

Its name tells which command made it, and in it is a file whose lock the run holds until the
directory is gone. A run that was killed holds its lock no longer, so the next one removes what it
left; directories without that file are somebody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Ended", "ending", "remove_stale", "scratch"]

_TRIES = 10
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Raise `Ended` where a signal would end the process without cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays ignored: nohup does so with SIGHUP.
    taken = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _: FrameType | None) -> None:
        for other in taken:  # a second one mustn't interrupt the cleaning up
            signal.signal(other, signal.SIG_IGN)
        raise Ended(number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def scratch(directory: str, command: str) -> Iterator[str]:
    """Make a directory of a command in ``directory``, and remove it at the end."""
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory(
            prefix=f"forebay-{command}-", dir=directory, ignore_cleanup_errors=True
        ) as path:
            lock = _take_new_lock(path, command)
            if lock is None:
                continue
            try:
                yield path
            finally:
                # The directory goes first, or another run would remove it at the same time.
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
            return
    raise FileExistsError(f"other runs keep removing what is made in {directory}")


def remove_stale(directory: str, command: str) -> None:
    """Remove what killed runs of a command have left; what can't be removed stays."""
    prefix = f"forebay-{command}-"
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                _remove_if_stale(entry.path, command)


def _remove_if_stale(path: str, command: str) -> None:
    lock = os.open(_lock_name(path, command), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(lock)


def _lock_name(path: str, command: str) -> str:
    return os.path.join(path, f".forebay-{command}.lock")


def _take_new_lock(path: str, command: str) -> int | None:
    """Return the lock's descriptor, or None if another run has taken the directory for stale."""
    name = _lock_name(path, command)
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(name):
            return lock
    except BlockingIOError:
        pass
    except OSError:
        return lock  # no locks on this file system, so no other run can take it either
    os.close(lock)
    return None
