"""One file over several drives: sets of directories to stripe over.

What is where, and what happens when a drive is missing, is in ``docs/stripe.md``. Moving arrays is
a handle's: ``forebay.Handle(stripe=[...])``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay import _forebay
from forebay._arguments import parse_size, parse_target
from forebay.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Name", "Stripe", "parse_name", "parse_stripe"]

Name: TypeAlias = "str | os.PathLike[str]"
"""What a striped file is called: a path relative to every directory of its set."""

STRIPE_SIZE = "1MiB"
"""Bytes of a stripe if nothing else is said: a block that keeps an NVMe drive busy."""


class Stripe:
    """Directories, best on a drive each, over which files are striped.

    There is no redundancy: a file is lost with any of its drives.

    Parameters
    ----------
    directories : iterable of paths
        1 to 64 directories that are there. Their order counts for new files only: a file knows
        which part of it is where.
    stripe_size : int or str
        Bytes that go to one drive before the next has its turn: a multiple of 4096, up to 1 GiB.
        It counts for new files only.

    Raises
    ------
    InvalidInputError
        A directory is given twice, under whatever name, or the stripe size is out of bounds (also
        a ``ValueError``).
    SystemCallError
        A directory isn't there (also a ``FileNotFoundError``).

    Examples
    --------
    >>> import forebay, numpy, tempfile
    >>> stripe = forebay.Stripe([tempfile.mkdtemp(), tempfile.mkdtemp()], stripe_size="64KiB")
    >>> with forebay.Handle(stripe=stripe) as handle:
    ...     handle.store(numpy.arange(100_000, dtype="int32"), "weights.bin")
    >>> stripe.size("weights.bin")
    400000
    >>> stripe.remove("weights.bin")
    >>> stripe.exists("weights.bin")
    False
    """

    def __init__(self, directories: Iterable[Any], stripe_size: int | str = STRIPE_SIZE) -> None:
        if isinstance(directories, str | bytes | os.PathLike):
            raise TypeError("a list of directories is needed, not one path")
        paths = [os.fspath(directory) for directory in directories]
        self._core = _forebay.Stripe(paths, parse_size(stripe_size, "stripe_size"))

    @property
    def directories(self) -> list[Path]:
        """The directories, in the order given, as absolute paths."""
        return self._core.directories

    @property
    def stripe_size(self) -> int:
        """Bytes of a stripe of a new file."""
        return self._core.stripe_bytes

    def exists(self, name: Name) -> bool:
        """Return whether there is something striped of that name, whole or not."""
        return self._core.exists(parse_name(name))

    def size(self, name: Name) -> int:
        """Return the bytes of a file, which is whole: see :meth:`verify`."""
        return self._core.size(parse_name(name))

    def verify(self, name: Name) -> None:
        """Check that a file is whole, as every load does. Contents aren't read.

        Raises
        ------
        FileMissingError
            The file, a part of it or a directory isn't there; ``filename`` says which (also a
            ``FileNotFoundError``).
        MismatchError
            Parts of different stores, a part that is too short, or a store that never finished.
        """
        self._core.verify(parse_name(name))

    def remove(self, name: Name) -> None:
        """Remove a file, whole or not, from all directories."""
        self._core.remove(parse_name(name))

    def __repr__(self) -> str:
        paths = [str(path) for path in self.directories]
        return f"forebay.Stripe({paths}, stripe_size={self.stripe_size})"


def parse_stripe(stripe: Stripe | Iterable[Any], stripe_size: int | str | None) -> Stripe:
    """Return the set that a handle's options describe."""
    if not isinstance(stripe, Stripe):
        return Stripe(stripe, STRIPE_SIZE if stripe_size is None else stripe_size)
    if stripe_size is not None:
        raise InvalidInputError("the stripe set has a stripe size already: leave stripe_size out")
    return stripe


def parse_name(name: Any) -> str:
    """Return a striped file's name as text. What it may be is checked by the core."""
    target = parse_target(name)
    if isinstance(target, int):
        raise InvalidInputError(
            "a striped file has a name, relative to its directories, and no descriptor: give the "
            "name, or use a handle without stripe"
        )
    return target
