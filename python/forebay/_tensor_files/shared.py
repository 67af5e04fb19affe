"""The handle that loads and saves go through when the user gives none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from forebay.errors import ClosedError
from forebay.handle import Handle
from forebay.memory import Pool

if TYPE_CHECKING:
    import numpy as np

    from forebay import _forebay

__all__ = ["core_of", "given_or_shared", "room", "shared_handle", "tell"]

_lock = threading.Lock()
_handles: list[Handle] = []


def shared_handle() -> Handle:
    """Return the process's handle, with the options that suit each drive."""
    with _lock:
        if not _handles:
            _handles.append(Handle())
        return _handles[0]


def given_or_shared(handle: Handle | None) -> Handle:
    """Return what the user gave as ``handle=``, or else the process's handle."""
    if handle is None:
        return shared_handle()
    if not isinstance(handle, Handle):
        raise TypeError(f"handle must be a forebay.Handle, not {type(handle).__name__}")
    return handle


def core_of(handle: Handle) -> _forebay.Handle:
    """Return the core of a handle.

    Raises
    ------
    ClosedError
        It is closed.
    """
    if handle.closed:
        raise ClosedError("the handle is closed: make another")
    return handle._core  # noqa: SLF001


def room(handle: Handle, length: int) -> np.ndarray[Any, Any]:
    """Return memory for results, as bytes: of the handle's pool if it was given one.

    Else it is ordinary memory, which forked children have too: it belongs to the program, which
    may start a data loader's workers.
    """
    pool = Pool._over(core_of(handle).result_pool())  # noqa: SLF001
    return pool.empty(length)  # type: ignore[no-any-return]


def tell(handle: Handle) -> None:
    """Log what the core had to do otherwise than asked, such as not to verify a file."""
    handle._log_notices()  # noqa: SLF001
