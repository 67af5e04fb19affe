"""The handle that loads and saves go through when the user gives none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.errors import ClosedError
from forebay.handle import Handle
from forebay.memory import Pool

if TYPE_CHECKING:
    import numpy as np

    from forebay import _forebay

__all__ = ["core_of", "given_or_shared", "room", "shared_handle", "tell"]

_handles: dict[str, Handle] = {}
"""The one that is shared, once there is one."""


def shared_handle() -> Handle:
    """Return the process's handle, with the options that suit each drive."""
    handle = _handles.get("shared")
    if handle is None:
        # Under no lock, which a forked child may find taken by a thread that it doesn't have. If
        # two threads make one each, the first is kept.
        handle = _handles.setdefault("shared", Handle())
    return handle


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
