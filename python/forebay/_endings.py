"""What becomes of handles when a program ends or forks."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING, TypeVar

from forebay import _forebay

if TYPE_CHECKING:
    from typing import Protocol

    class Closable(Protocol):
        """What has to be closed before a program ends."""

        def close_and_warn(self) -> None:
            """Finish what is under way, and warn of failures that nobody heard of."""

        def forget_pending(self) -> None:
            """Forget the parent's operations, in a forked child."""

    class Forkable(Protocol):
        """What has operations that a forked child must forget."""

        def forget_pending(self) -> None:
            """Forget the parent's operations."""


__all__ = ["forkable", "handles", "living", "report_unraisable"]

_Member = TypeVar("_Member")

handles: weakref.WeakSet[Closable] = weakref.WeakSet()
"""The handles and checkpointers of this process that are still there."""

forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()
"""What else has to be told of a fork."""

_told_multiprocessing: list[bool] = []
"""Not empty once multiprocessing knows what to do at the end of its children."""


def _at_exit() -> None:
    """Finish what is under way, and warn of failures that nobody heard of."""
    try:
        for handle in living(handles):
            try:
                handle.close_and_warn()
            except Exception as error:  # noqa: PERF203 (a warning may be an error: others go on)
                report_unraisable(error, handle)
    finally:
        _forebay.drain_all()


def living(members: weakref.WeakSet[_Member]) -> list[_Member]:
    """Return what is in a set to which other threads may add."""
    while True:
        try:
            return list(members)
        except RuntimeError:  # noqa: PERF203 (it has grown meanwhile)
            continue


def report_unraisable(error: BaseException, about: object) -> None:
    """Report an error where none can be raised, as Python does for those of ``__del__``."""
    _forebay.write_unraisable(error, about)


def _before_fork() -> None:
    """Have the processes that multiprocessing forks finish what they began, too.

    They end without what is registered with :mod:`atexit`, and forget multiprocessing's own
    finalizers when they start.
    """
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _told_multiprocessing:
        _told_multiprocessing.append(True)
        util.register_after_fork(_at_exit, _finalize_at_exit)


def _finalize_at_exit(_: object) -> None:
    from multiprocessing.util import Finalize

    Finalize(None, _at_exit, exitpriority=0)


def _after_fork() -> None:
    for one in [*handles, *forkable]:
        one.forget_pending()


atexit.register(_at_exit)
os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
