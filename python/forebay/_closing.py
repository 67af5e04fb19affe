"""What handles and checkpointers do when they are left, closed or dropped."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, ClassVar, TypeVar

from forebay._endings import report_unraisable
from forebay.errors import ForebayError, ForebayWarning

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Closing"]

_Own = TypeVar("_Own", bound="Closing")


class Closing:
    """Something with operations under way, as a context manager: leaving it closes it.

    Where that can't raise an error, since another is on its way or it was only dropped, a failure
    that nobody waited for is warned of.
    """

    _unheard: ClassVar[str]
    """What to say of such a failure."""

    _closed = True
    """Whether there is nothing to close: also until ``__init__`` has made what is."""

    def close(self) -> None:
        """Finish what is under way, and raise the first failure that nobody waited for."""
        raise NotImplementedError

    def close_and_warn(self) -> None:
        """Close, and warn of a failure that nobody waited for instead of raising it."""
        try:
            self.close()
        except ForebayError as error:
            warnings.warn(f"{self._unheard}: {error}", ForebayWarning, stacklevel=3, source=self)

    def __enter__(self: _Own) -> _Own:  # noqa: PYI019 (typing.Self is in 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # The exception on its way is the one to see; failures of its own are warned of.
        try:
            self.close_and_warn()
        except ForebayWarning as warning:
            # Warnings are errors here.
            report_unraisable(warning, self)

    def __del__(self) -> None:
        if not self._closed:
            self.close_and_warn()
