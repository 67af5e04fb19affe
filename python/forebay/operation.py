"""Tickets of asynchronous operations: wait for them, await them, cancel them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from forebay._arguments import parse_seconds
from forebay.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Generator

    from forebay import _forebay
    from forebay.handle import Handle

__all__ = ["Operation"]


class Operation:
    """One load or store under way.

    It keeps its arrays alive until the last byte has moved, whatever becomes of other references
    to them, and lets go of them when :meth:`done` or a wait says that it is finished, or soon after
    when the handle starts others. Waiting for it, in any of the ways below, raises its error; an
    error that nobody waits for is raised by :meth:`Handle.wait` or :meth:`Handle.close`.

    Examples
    --------
    >>> import forebay, numpy, tempfile
    >>> handle = forebay.Handle()
    >>> path = tempfile.mktemp()
    >>> operation = handle.store_async(numpy.arange(1000), path)
    >>> operation.wait()
    >>> operation.done(), operation.bytes_done == operation.bytes_total
    (True, True)
    """

    __slots__ = ("_core", "_handle")

    def __init__(self, core: _forebay.Operation, handle: Handle) -> None:
        self._core = core
        # While somebody can wait for it, the handle isn't dropped: a dropped handle warns of
        # failures that nobody waited for.
        self._handle = handle

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is done.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        WaitTimeoutError
            It isn't done yet (also a ``TimeoutError``). It goes on.
        ForebayError
            What it met.
        """
        if not self._core.wait(parse_seconds(timeout)):
            raise WaitTimeoutError(
                f"the operation isn't done after {timeout} s; it goes on",
                wanted=self.bytes_total,
                done=self.bytes_done,
            )
        self._handle._log_notices()  # noqa: SLF001

    def done(self) -> bool:
        """Return whether it is finished, well or badly. If so, its arrays are free again."""
        if not self._core.done():
            return False
        self._core.release()
        return True

    def cancel(self) -> None:
        """Start no further block.

        What the kernel has in hand is still waited for, so memory stays safe. Waiting for it then
        raises :class:`OperationCancelledError`, unless everything had moved already.
        """
        self._core.cancel()

    @property
    def bytes_done(self) -> int:
        """Bytes moved so far."""
        return self._core.bytes_done

    @property
    def bytes_total(self) -> int:
        """Bytes to move."""
        return self._core.bytes_total

    @property
    def checksums(self) -> list[int] | None:
        """The CRC32C of each array's bytes as they were moved, in the order of the items.

        ``None`` unless they were asked for and all bytes have moved.
        """
        return self._core.checksums

    def __await__(self) -> Generator[object, None, None]:
        """Wait in an asyncio event loop, which sleeps meanwhile.

        Cancelling the task that awaits it doesn't cancel the operation: see :meth:`cancel`.
        """
        # In a forked child, where nothing will finish it, this raises.
        if not self._core.wait(0):
            # Only where asyncio runs already: importing it takes 30 ms.
            from forebay import _wakers

            yield from _wakers.finished(self._core).__await__()
        self.wait()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an operation can't be copied: wait for it in the process that started it")

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        return f"<forebay.Operation {state}, {self.bytes_done} of {self.bytes_total} bytes>"
