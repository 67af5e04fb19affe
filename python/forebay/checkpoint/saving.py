"""Tickets of saves: wait for them, await them, ask what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from forebay._arguments import parse_seconds
from forebay.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Generator

    from forebay._forebay import SaveTicket

__all__ = ["SaveOperation"]


class SaveOperation:
    """One save, under way or done.

    Waiting for it, in any of the ways below, raises its error. An error that nobody waits for is
    raised by the next save, or by :meth:`Checkpointer.close`.

    Attributes
    ----------
    step : int
        The step that is saved.
    skipped : bool
        Nothing is saved, since earlier saves were under way and ``on_busy="skip"`` holds.
    """

    __slots__ = ("_before_seconds", "_core", "skipped", "step")

    def __init__(self, step: int, core: SaveTicket | None, before_seconds: float) -> None:
        self._core = core
        self._before_seconds = before_seconds
        self.step = step
        self.skipped = core is None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is there.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        WaitTimeoutError
            It isn't done yet (also a ``TimeoutError``). It goes on.
        ForebayError
            What it met; the message names the step.
        """
        seconds = parse_seconds(timeout)
        if self._core is not None and not self._core.wait(seconds):
            raise WaitTimeoutError(f"saving step {self.step} isn't done after {timeout} s")

    def done(self) -> bool:
        """Return whether it is finished, well or badly."""
        return self._core is None or self._core.done()

    @property
    def blocked_seconds(self) -> float:
        """Seconds that the call took: until the state was captured, and could change again."""
        blocked = 0.0 if self._core is None else self._core.blocked_seconds
        return self._before_seconds + blocked

    @property
    def total_seconds(self) -> float:
        """Seconds from the call until it was done, or so far."""
        total = 0.0 if self._core is None else self._core.total_seconds
        return self._before_seconds + total

    def __await__(self) -> Generator[object, None, None]:
        """Wait in an asyncio event loop, which sleeps meanwhile."""
        if self._core is not None and not self._core.done():
            # Only where asyncio runs already: importing it takes 30 ms.
            from forebay import _wakers

            yield from _wakers.finished(self._core).__await__()
        self.wait()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a save can't be copied: wait for it in the process that started it")

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "done" if self.done() else "under way"
        return f"<forebay.checkpoint.SaveOperation of step {self.step}, {state}>"
