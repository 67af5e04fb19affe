"""The checkpointer: saves states into a directory, and loads them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex

from forebay import _forebay
from forebay._arguments import parse_index, parse_seconds, parse_size, parse_target
from forebay._closing import Closing
from forebay._endings import handles
from forebay.checkpoint.encode import encode
from forebay.checkpoint.load import load
from forebay.checkpoint.saving import SaveOperation
from forebay.errors import (
    ClosedError,
    FileMissingError,
    InvalidInputError,
    MismatchError,
    ShortFileError,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from forebay._forebay import CheckpointReader
    from forebay.handle import Durability

__all__ = ["Checkpointer"]

_STEP_END = 1 << 63

_ATTEMPTS_MAX = 16
"""Attempts at reading a checkpoint that other processes replace or remove meanwhile."""

_logger = logging.getLogger("forebay")


class Checkpointer(Closing):
    """Saves states into a directory, in the background, and loads them.

    A state is nested dictionaries, lists and tuples of tensors (torch, numpy), numbers, text,
    bytes and ``None``. What is saved is there whole or not at all, whatever ends the process and,
    with ``durability="full"``, the machine.

    It can be used from several threads at once, and any number of processes can save into one
    directory. What a dead process has left there is removed when the next checkpointer starts.

    Parameters
    ----------
    directory : path
        Where the checkpoints are. It is made if it isn't there.
    keep : int or None
        How many checkpoints to keep: those with the highest steps, and the one that was just saved,
        whatever its step. ``None`` keeps all.
    durability : {"full", "data", "none"}
        What a save waits for: ``fsync`` of every file and directory, ``fdatasync`` of the files,
        or nothing, which a power cut may turn into a damaged checkpoint (that is noticed).
    verify : bool
        Compare what is loaded with its checksums.
    budget : int or str, optional
        Most memory for captured states; half of what is free at the start if not given. What
        doesn't fit is written before :meth:`save_async` returns. It is kept for the next save.
    on_busy : {"wait", "skip", "error"}
        What :meth:`save_async` does while ``in_flight`` saves are under way: wait for one, save
        nothing, or raise an error.
    in_flight : int
        Saves under way at the most.
    shard_size : int or str
        Most bytes of tensors in a file; a larger tensor has one of its own. It is also what is
        loaded at a time.
    allow_pickle : bool
        Save other Python objects too, pickled, and load them. Loading them runs code that the
        checkpoint brings.

    Examples
    --------
    >>> import forebay.checkpoint, numpy, tempfile
    >>> state = {"step": 42, "weights": numpy.arange(6.0).reshape(2, 3)}
    >>> with forebay.checkpoint.Checkpointer(tempfile.mkdtemp(), keep=2) as checkpointer:
    ...     operation = checkpointer.save_async(42, state)
    ...     state["weights"] += 1
    ...     loaded = checkpointer.load()
    >>> loaded["step"], loaded["weights"].sum()
    (42, np.float64(15.0))
    """

    _unheard = "a save failed and nobody waited for it"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        durability: Durability = "full",
        verify: bool = True,
        budget: int | str | None = None,
        on_busy: Literal["wait", "skip", "error"] = "wait",
        *,
        in_flight: int = 1,
        shard_size: int | str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        path = parse_target(directory)
        if not isinstance(path, str):
            raise TypeError("the directory of checkpoints must be a path")
        options: dict[str, Any] = {
            "keep": None if keep is None else _count(keep, "keep"),
            "durability": durability,
            "on_busy": on_busy,
            "in_flight": _count(in_flight, "in_flight"),
        }
        if budget is not None:
            options["budget_bytes"] = parse_size(budget, "budget")
        if shard_size is not None:
            options["shard_bytes"] = parse_size(shard_size, "shard_size")
        self._verify = bool(verify)
        self._allow_pickle = bool(allow_pickle)
        self._core = _forebay.Checkpointer(path, **options)
        self._closed = False
        handles.add(self)

    # Saving

    def save(self, step: SupportsIndex, state: Any) -> None:
        """Save a state, and wait until it is there.

        Saves under way are waited for first, whatever ``on_busy`` says. A checkpoint of the same
        step is replaced, in one moment.

        Parameters
        ----------
        step : int
            Its number, which :meth:`load` finds it by.
        state : nested state
            What to save.

        Raises
        ------
        InvalidInputError
            Something in the state can't be saved; the message says what and where.
        SystemCallError
            The system refused (also an ``OSError``); what was there before is still there.
        """
        number = self._begin(step)
        self._core.wait_idle()
        self._start(number, state, waits=True).wait()

    def save_async(self, step: SupportsIndex, state: Any) -> SaveOperation:
        """Start a :meth:`save`, and return when the state has been captured.

        The state may change at once then. The first save also has the memory mapped that all of
        them use, and takes longer to return. What it met later is raised by waiting for it, or else
        by the next save or :meth:`close`.

        Tensors on CUDA devices are copied to pinned memory of the budget, on streams of Forebay's
        own and behind the current ones. Tensors that aren't contiguous are first copied on their
        device; those on other devices to ordinary memory, beside the budget.

        Returns
        -------
        SaveOperation
            To wait for; it says how long this call took beside the whole save.
        """
        return self._start(self._begin(step), state, waits=False)

    def _begin(self, step: SupportsIndex) -> int:
        self._refuse_closed()
        number = parse_index(step, "step")
        if not 0 <= number < _STEP_END:
            raise InvalidInputError(f"step is {number}, it can be 0 to 2**63 - 1")
        return number

    def _start(self, step: int, state: Any, waits: bool) -> SaveOperation:
        begin = time.perf_counter()
        encoded = encode(state, self._allow_pickle)
        before = time.perf_counter() - begin
        core = self._core.save(step, encoded.tensors, encoded.rest, waits)
        return SaveOperation(step, core, before)

    # Loading

    def load(
        self,
        step: SupportsIndex | None = None,
        into: Any = None,
        device: str | int | None = None,
    ) -> Any:
        """Return a state that was saved.

        Saves under way are waited for first.

        Parameters
        ----------
        step : int, optional
            Which; if not given, the one that was saved last.
        into : nested state, optional
            Tensors to fill, at the places where the checkpoint has tensors of the same shape and
            type; what it has besides is loaded anew. Files are checked and taken one after the
            other: where one is damaged, tensors of those before it have been filled. Without
            ``into``, the tensors of a file share memory, which goes with the last of them. Tensors
            on a CUDA device are read straight into place: of a damaged file, those may have been
            overwritten.
        device : str or int, optional
            Where torch tensors go that aren't in ``into``, such as ``"cuda:1"``: the CPU if not
            given.

        Returns
        -------
        nested state
            Torch tensors come back as torch tensors, numpy arrays as numpy arrays, with the tensors
            of ``into`` in their places. Tensors that shared their memory wholly do so
            again.

        Raises
        ------
        FileMissingError
            There is no such checkpoint, or a file of it is missing (also a ``FileNotFoundError``).
        ShortFileError
            A file of it was cut.
        MismatchError
            Something in it was changed; the message names the file, and the tensor.
        InvalidBufferError
            A tensor of ``into`` can't be filled. None has been then.
        """
        self._refuse_closed()
        number = None if step is None else self._begin(step)
        self._core.wait_idle()
        return self._read(number, self._verify, lambda reader: self._load(reader, into, device))

    def verify(self, step: SupportsIndex | None = None) -> None:
        """Compare everything of a checkpoint with its checksums, within a few MiB of memory.

        Parameters
        ----------
        step : int, optional
            Which; if not given, the one that was saved last.

        Raises
        ------
        ForebayError
            As for :meth:`load`.
        """
        self._refuse_closed()
        number = None if step is None else self._begin(step)
        self._core.wait_idle()
        self._read(number, True, _verify)

    def _load(self, reader: CheckpointReader, into: Any, device: Any) -> Any:
        return load(reader, into, device, self._allow_pickle, self._verify)

    def _read(self, step: int | None, verify: bool, read: Callable[[CheckpointReader], Any]) -> Any:
        """Read a checkpoint; again if another process has replaced or removed it meanwhile."""
        for _ in range(_ATTEMPTS_MAX):
            reader = self._core.open(step, verify)
            try:
                found = read(reader)
            except (FileMissingError, MismatchError, ShortFileError):
                if reader.is_current():
                    raise
                continue
            # Without checksums, shards of two checkpoints look like those of one.
            if verify or reader.is_current():
                return found
        raise MismatchError(
            f"the checkpoint of step {reader.step} was replaced or removed each time while it was "
            "read: keep more of them, or load a step that isn't saved again"
        )

    def latest(self) -> int | None:
        """Return the step that was saved last; ``None`` if there is no checkpoint.

        Saves under way don't count. Where it isn't known which was last, since the file ``latest``
        or what it names is gone, it is the highest.
        """
        self._refuse_closed()
        return self._core.latest()

    def steps(self) -> list[int]:
        """Return the steps of which there is a checkpoint, in the order of their numbers."""
        self._refuse_closed()
        return self._core.steps()

    @property
    def directory(self) -> Path:
        """Where the checkpoints are, as an absolute path."""
        return self._core.directory

    # Ending

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no save is under way; return whether that is so.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        ForebayError
            What a save met that nobody has heard of.
        """
        is_idle = self._core.wait_idle(parse_seconds(timeout))
        self._raise_failures()
        return is_idle

    def close(self) -> None:
        """Wait for saves under way, and let go of the memory that is kept for the next.

        Raises
        ------
        ForebayError
            What a save met that nobody has heard of.
        """
        self._closed = True
        self._core.wait_idle()
        self._core.trim()
        self._raise_failures()

    def forget_pending(self) -> None:
        """Do nothing, in a forked child: the parent's saves are known to be the parent's."""

    def _raise_failures(self) -> None:
        first = self._core.take_failure()
        if first is None:
            return
        while (other := self._core.take_failure()) is not None:
            _logger.error("a further save failed: %s", other)
        raise first

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("the checkpointer is closed: make another")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a checkpointer can't be copied: make one in each process")

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<forebay.checkpoint.Checkpointer of {self.directory}{state}>"


def _verify(reader: CheckpointReader) -> None:
    for index in range(reader.shard_count):
        reader.verify_shard(index)


def _count(value: SupportsIndex, name: str) -> int:
    number = parse_index(value, name)
    if not 0 < number < _STEP_END:
        raise InvalidInputError(f"{name} is {number}, it has to be at least 1")
    return number
