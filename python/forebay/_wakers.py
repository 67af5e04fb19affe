"""Wakes asyncio event loops when operations finish.

Each loop has one eventfd, which operations of the core signal and on which the loop's selector
sleeps: no thread, no polling, one descriptor however many operations are awaited.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from forebay import _forebay

if TYPE_CHECKING:
    from forebay._forebay import Operation, SaveTicket

__all__ = ["finished"]


class _Waker:
    """The eventfd of one loop and who waits for it."""

    def __init__(self) -> None:
        self._event = _forebay.WakeEvent()
        self._waiting: dict[asyncio.Future[None], Operation | SaveTicket] = {}

    async def finished(self, operation: Operation | SaveTicket) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.add_reader(self._event.fileno(), self._signalled)
        self._waiting[future] = operation
        operation.notify(self._event)
        try:
            await future
        finally:
            self._waiting.pop(future, None)
            if not self._waiting:
                loop.remove_reader(self._event.fileno())

    def _signalled(self) -> None:
        self._event.consume()
        for future, operation in self._waiting.items():
            if operation.done() and not future.done():
                future.set_result(None)


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker] = WeakKeyDictionary()


async def finished(operation: Operation | SaveTicket) -> None:
    """Return once the operation is done, well or badly."""
    loop = asyncio.get_running_loop()
    waker = _wakers.get(loop)
    if waker is None:
        waker = _wakers[loop] = _Waker()
    await waker.finished(operation)
