"""Handles: what a user holds to move arrays between files and memory."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, TypeAlias

from forebay import _cufile, _forebay
from forebay._arguments import Target, parse_offset, parse_seconds, parse_size, parse_target
from forebay._closing import Closing
from forebay._endings import handles
from forebay._pending import Pending
from forebay.errors import (
    ClosedError,
    ForebayError,
    InvalidInputError,
    OperationCancelledError,
    WaitTimeoutError,
)
from forebay.memory import Pool
from forebay.operation import Operation
from forebay.stripe import Stripe, parse_name, parse_stripe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forebay._types import Stats

__all__ = ["Durability", "Handle", "Item", "Priority"]

Durability: TypeAlias = Literal["none", "data", "full"]
Priority: TypeAlias = Literal["demand", "prefetch"]
Item: TypeAlias = "tuple[Any, Target] | tuple[Any, Target, int | None]"
"""An array, the file it is in, and its offset there."""

_logger = logging.getLogger("forebay")

_LOGGED_MAX = 1024
"""Texts that are remembered, so that each is logged once however many handles there are."""

_UNFINISHED = "some operations aren't done in time; they go on"

_logged: set[str] = set()


class Handle(Closing):
    """Moves arrays between files and memory.

    A handle can be used from any number of threads at once. Closing it, dropping it and the end
    of the program wait for what is under way.

    Parameters
    ----------
    engine : {"auto", "uring", "aio", "threads"}
        How the kernel is asked. ``"auto"`` is the first of the others that works here.
    block_size : int or str, optional
        Most bytes in one transfer; 2 MiB if not given.
    queue_depth : int, optional
        Transfers in flight per worker; 32 if not given.
    intra_op_parallelism : int, optional
        Workers, which share the blocks of all operations; 2 if not given.
    durability : {"none", "data", "full"}
        What a store waits for, unless it says otherwise itself: nothing, ``fdatasync``, or
        ``fsync`` of the file and its directory.
    direct : {"auto", "never", "always"}
        Whether transfers go around the page cache: where the file system can do it, never, or
        else it is an error.
    drop_behind : bool
        Leave nothing in the page cache where transfers have to go through it.
    page_cache : bool
        Load from the page cache what is there already.
    staging_bytes : int or str, optional
        Most memory for bytes that can't move straight between the array and the drive; 8 MiB if
        not given.
    device_staging_bytes : int or str, optional
        As ``staging_bytes``, for arrays on devices, whose bytes all go through such memory, in
        blocks of ``block_size`` or a quarter of a worker's share; 64 MiB if not given. It is taken
        when the first such array comes.
    single_submit : bool
        Hand transfers to the kernel one by one.
    sqpoll, iopoll : bool
        io_uring's polling modes.
    throttle : int or str, optional
        Most bytes per second.
    pool : Pool, optional
        Where memory comes from; else the pool of the process.
    device_route : {"auto", "gds", "host"}
        Which way arrays in device memory go: by GPUDirect Storage for files that it moves
        directly and through the host's memory for others; by GPUDirect Storage or else it is an
        error; through the host's memory. ``stats()["device_routes"]`` says which it was.
    stripe : list of directories or Stripe, optional
        Stripe files over these directories, best on a drive each. Every path that the handle is
        given is then the name of a striped file: relative, without ``..``. A load checks that all
        parts are there and of one store.
    stripe_size : int or str, optional
        Bytes that go to one drive before the next has its turn; 1 MiB if not given.

    Notes
    -----
    A handle that is given none of ``engine``, ``block_size``, ``queue_depth``,
    ``intra_op_parallelism``, ``device_staging_bytes``, ``single_submit``, ``sqpoll`` and ``iopoll``
    takes what ``forebay tune`` stored for a drive, for files on that drive.

    Files hold the bytes of arrays and nothing else: dtype and shape aren't stored.

    Whole-file stores to one file through one handle take effect in the order of submission. Loads
    aren't ordered with stores: wait for the store first. The position of an open file is neither
    used nor moved.

    A forked child can use the handle, with workers of its own, but not touch arrays that came from
    a pool before the fork.

    Examples
    --------
    >>> import forebay, numpy, tempfile
    >>> path = tempfile.mktemp()
    >>> weights = numpy.arange(1000, dtype="float32")
    >>> with forebay.Handle() as handle:
    ...     handle.store(weights, path)
    ...     back = handle.empty(1000, dtype="float32")
    ...     handle.load(back, path)
    >>> bool((back == weights).all())
    True
    """

    _unheard = "an operation failed and nobody waited for it"

    def __init__(
        self,
        engine: str = "auto",
        *,
        block_size: int | str | None = None,
        queue_depth: int | None = None,
        intra_op_parallelism: int | None = None,
        durability: Durability = "none",
        direct: Literal["auto", "never", "always"] = "auto",
        drop_behind: bool = False,
        page_cache: bool = True,
        staging_bytes: int | str | None = None,
        device_staging_bytes: int | str | None = None,
        single_submit: bool = False,
        sqpoll: bool = False,
        iopoll: bool = False,
        throttle: int | str | None = None,
        pool: Pool | None = None,
        device_route: Literal["auto", "gds", "host"] = "auto",
        stripe: Stripe | Iterable[Any] | None = None,
        stripe_size: int | str | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "engine": engine,
            "durability": durability,
            "direct": direct,
            "drop_behind": drop_behind,
            "page_cache": page_cache,
            "single_submit": single_submit,
            "sqpoll": sqpoll,
            "iopoll": iopoll,
            "device_route": device_route,
        }
        if device_route != "host":
            _cufile.announce()
        numbers = {
            "block_size": (block_size, "block_size"),
            "queue_depth": (queue_depth, "queue_depth"),
            "parallelism": (intra_op_parallelism, "intra_op_parallelism"),
            "staging_bytes": (staging_bytes, "staging_bytes"),
            "device_staging_bytes": (device_staging_bytes, "device_staging_bytes"),
            "throttle_bytes_per_second": (throttle, "throttle"),
        }
        for option, (value, name) in numbers.items():
            if value is not None:
                options[option] = parse_size(value, name)
        # What `forebay tune` stored for a drive holds where nothing it finds is given here.
        chosen = engine != "auto" or single_submit or sqpoll or iopoll
        options["tuned"] = not chosen and not options.keys() & {
            "block_size",
            "queue_depth",
            "parallelism",
            "device_staging_bytes",
        }
        if pool is not None:
            if not isinstance(pool, Pool):
                raise TypeError(f"pool must be a forebay.Pool, not {type(pool).__name__}")
            options["pool"] = pool._core  # noqa: SLF001
        self._parse_target: Callable[[Any], str | int] = parse_target
        if stripe is not None:
            stripe = parse_stripe(stripe, stripe_size)
            options["stripe"] = stripe._core  # noqa: SLF001
            self._parse_target = parse_name
        elif stripe_size is not None:
            raise InvalidInputError("stripe_size is given without stripe, the directories")
        self._stripe = stripe
        self._pending = Pending()
        self._core = _forebay.Handle(**options)
        self._closed = False
        handles.add(self)
        self._log_notices()
        if stripe is not None:
            _log_once(stripe._core.notices())  # noqa: SLF001

    # Whole arrays

    def load(
        self, array: Any, path: Target, offset: int = 0, *, priority: Priority = "demand"
    ) -> None:
        """Fill an array with the bytes of a file.

        Parameters
        ----------
        array : tensor, ndarray or buffer
            Any torch tensor (CPU or CUDA), numpy array, or object with DLPack, an array interface
            (that for CUDA too) or the buffer protocol, that is writable. All of it is filled. One
            that isn't contiguous, such as a slice of columns, has runs of 4 KiB or more.
        path : path, descriptor or open file
            Where the bytes are.
        offset : int
            Where they begin in the file.
        priority : {"demand", "prefetch"}
            Prefetches leave the way to others.

        Raises
        ------
        ShortFileError
            The file ends before the array is full.
        InvalidBufferError
            The array can't be filled as it is (also a ``ValueError``).
        SystemCallError
            The system refused (also an ``OSError``: ``FileNotFoundError``, …).
        """
        self._run(False, [self._item(array, path, offset)], False, priority, None)

    def store(
        self,
        array: Any,
        path: Target,
        offset: int | None = None,
        *,
        durability: Durability | None = None,
        priority: Priority = "demand",
    ) -> None:
        """Write the bytes of an array to a file.

        Parameters
        ----------
        array : tensor, ndarray or buffer
            As for :meth:`load`; it may be read-only.
        path : path, descriptor or open file
            Where to. A new file has the mode that the umask leaves of 0666; that of an existing
            one stays.
        offset : int, optional
            Without it, the file is then exactly the array. With it, the bytes from there on are
            replaced, and the rest of the file stays.
        durability : {"none", "data", "full"}, optional
            What to wait for, in place of the handle's own.
        priority : {"demand", "prefetch"}
            Prefetches leave the way to others.
        """
        self._run(True, [self._item(array, path, offset)], offset is None, priority, durability)

    def load_async(
        self, array: Any, path: Target, offset: int = 0, *, priority: Priority = "demand"
    ) -> Operation:
        """Start a :meth:`load`. The file is opened before it returns.

        Until the operation is done, the array's memory must not be resized or freed by hand
        (``untyped_storage().resize_``): Forebay keeps it alive but can't keep it in place.
        """
        return self._submit(False, [self._item(array, path, offset)], False, priority, None)

    def store_async(
        self,
        array: Any,
        path: Target,
        offset: int | None = None,
        *,
        durability: Durability | None = None,
        priority: Priority = "demand",
    ) -> Operation:
        """Start a :meth:`store`.

        Until the operation is done, the array must not change, and its memory must not be resized
        or freed by hand (``untyped_storage().resize_``): Forebay keeps it alive but can't keep it
        in place.
        """
        items = [self._item(array, path, offset)]
        return self._submit(True, items, offset is None, priority, durability)

    # Many at once

    def load_many(self, items: Iterable[Item], *, priority: Priority = "demand") -> None:
        """Fill many arrays, in one submission.

        Parameters
        ----------
        items : iterable of (array, path) or (array, path, offset)
            What to load from where. Each file is opened once.
        priority : {"demand", "prefetch"}
            Prefetches leave the way to others.
        """
        self._run(False, self._items(items)[0], False, priority, None)

    def store_many(
        self,
        items: Iterable[Item],
        *,
        whole_file: bool | None = None,
        durability: Durability | None = None,
        priority: Priority = "demand",
    ) -> None:
        """Write many arrays, in one submission.

        Parameters
        ----------
        items : iterable of (array, path) or (array, path, offset)
            What to store where. Either all have an offset or none has.
        whole_file : bool, optional
            Whether each file then ends where its furthest array ends. By default, it does if the
            items have no offsets, and keeps its other bytes if they have. Bytes between arrays stay
            as they were in the file, and are zero where it was shorter.
        durability : {"none", "data", "full"}, optional
            What to wait for, in place of the handle's own.
        priority : {"demand", "prefetch"}
            Prefetches leave the way to others.
        """
        listed, whole = self._items_to_store(items, whole_file)
        self._run(True, listed, whole, priority, durability)

    def load_many_async(
        self,
        items: Iterable[Item],
        *,
        priority: Priority = "demand",
        checksums: bool = False,
    ) -> Operation:
        """Start a :meth:`load_many`, as one operation.

        With ``checksums``, the CRC32C of each array's bytes is computed while they pass, wherever
        the array is: see :attr:`Operation.checksums`.
        """
        return self._submit(False, self._items(items)[0], False, priority, None, checksums)

    def store_many_async(
        self,
        items: Iterable[Item],
        *,
        whole_file: bool | None = None,
        durability: Durability | None = None,
        priority: Priority = "demand",
        checksums: bool = False,
    ) -> Operation:
        """Start a :meth:`store_many`, as one operation; checksums as for a load."""
        listed, whole = self._items_to_store(items, whole_file)
        return self._submit(True, listed, whole, priority, durability, checksums)

    # Waiting, looking, ending

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all asynchronous operations.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Returns
        -------
        int
            How many finished since the last call; 0 if there were none. Where several threads
            wait at once, all wait for all, and each operation counts, and fails, for one of them.

        Raises
        ------
        WaitTimeoutError
            Some aren't done yet. They go on, and the next call counts all of them.
        ForebayError
            The first failure. Further ones are logged.
        """
        seconds = parse_seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        count, failures = self._finish(deadline)
        failures += self._core.take_unseen_failures()
        self._log_notices()
        if failures:
            self._raise_first(failures)
        return count

    def close(self) -> None:
        """Wait for everything under way and give back threads and rings.

        Calling it again does nothing.

        Raises
        ------
        ForebayError
            The first failure that nobody waited for. Further ones are logged.
        """
        if self._closed:
            return
        _, failures = self._finish(None)
        failures += self._core.take_unseen_failures()
        # Only now: until here an interrupt leaves it open, to be closed again.
        self._closed = True
        try:
            self._core.close()
        except ForebayError as error:
            failures.append(error)
        self._log_notices()
        if failures:
            self._raise_first(failures)

    def stats(self) -> Stats:
        """Return what the handle did so far: bytes by route, latencies, fallbacks."""
        return self._core.stats()

    @property
    def engine(self) -> str:
        """The engine in use: ``"uring"``, ``"aio"`` or ``"threads"``."""
        return self._core.engine

    @property
    def stripe(self) -> Stripe | None:
        """What its files are striped over: ask it for sizes, remove files by it."""
        return self._stripe

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def empty(
        self,
        shape: SupportsIndex | Iterable[SupportsIndex],
        dtype: Any = "uint8",
        like: Any = None,
        *,
        timeout: float | None = 0,
    ) -> Any:
        """Return an array in pinned memory of the handle's pool: see :meth:`Pool.empty`."""
        if self._closed:
            raise ClosedError("the handle is closed: make another")
        # What finished operations still hold is room in the pool.
        self._pending.release()
        return Pool._over(self._core.pool()).empty(  # noqa: SLF001
            shape, dtype, like, timeout=timeout
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a handle can't be copied: make one in each process")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._core.pending()} operations under way"
        return f"<forebay.Handle engine={self.engine} {state}>"

    # Underneath

    def _item(self, array: Any, path: Target, offset: int | None) -> tuple[Any, str | int, int]:
        return (array, self._parse_target(path), parse_offset(offset))

    def _items(self, items: Iterable[Item]) -> tuple[list[tuple[Any, str | int, int]], set[bool]]:
        """Return the items as the core takes them, and whether they have offsets."""
        listed: list[tuple[Any, str | int, int]] = []
        with_offset = set()
        last: object = listed
        target: str | int = ""
        for item in items:
            array, path, offset = _parts(item)
            with_offset.add(offset is not None)
            # Thousands of tensors of one file mostly come with the same path object.
            if path is not last or hasattr(path, "fileno"):
                last, target = path, self._parse_target(path)
            listed.append((array, target, parse_offset(offset)))
        return listed, with_offset

    def _items_to_store(
        self, items: Iterable[Item], whole_file: bool | None
    ) -> tuple[list[tuple[Any, str | int, int]], bool]:
        listed, with_offset = self._items(items)
        if len(with_offset) == 2 and whole_file is None:
            raise InvalidInputError(
                "some items have an offset and some have none: give all of them one, or say "
                "whether whole files are meant (whole_file)"
            )
        if False in with_offset:
            targets = [target for _, target, _ in listed]
            if len(set(targets)) < len(targets) and True not in with_offset:
                raise InvalidInputError("several items name the same file: give them offsets")
        return listed, False in with_offset if whole_file is None else whole_file

    def _run(
        self,
        store: bool,
        items: list[tuple[Any, str | int, int]],
        whole_file: bool,
        priority: Priority,
        durability: Durability | None,
    ) -> None:
        self._core.run(store, items, whole_file, priority, durability)
        self._log_notices()

    def _submit(
        self,
        store: bool,
        items: list[tuple[Any, str | int, int]],
        whole_file: bool,
        priority: Priority,
        durability: Durability | None,
        checksums: bool = False,
    ) -> Operation:
        core = self._core.submit(store, items, whole_file, priority, durability, checksums)
        self._pending.add(core)
        return Operation(core, self)

    def _finish(self, deadline: float | None) -> tuple[int, list[ForebayError]]:
        """Wait for the pending operations; return how many finished, and what they met."""
        count, operations, failures = self._pending.take()
        waited = 0
        try:
            for operation in operations:
                failure = _outcome(operation, _left(deadline))
                waited += 1
                if failure is not None:
                    failures.append(failure)
            self._pending.settle(operations)
            # What other threads wait for they count, and hear of its failures.
            for operation in self._pending.others():
                if not operation.wait_finished(_left(deadline)):
                    raise WaitTimeoutError(_UNFINISHED)
        except BaseException:
            self._pending.put_back(count + waited, operations[waited:], failures)
            raise
        finally:
            self._pending.settle(operations)
        return count + waited, failures

    def _raise_first(self, failures: list[ForebayError]) -> None:
        first, *others = failures
        for other in others:
            _logger.error("a further operation failed: %s", other)
        raise first

    def forget_pending(self) -> None:
        """Forget the parent's operations, in a forked child."""
        self._pending.reset()

    def _log_notices(self) -> None:
        _log_once(self._core.notices())


def _log_once(notices: Iterable[str]) -> None:
    for notice in notices:
        if notice not in _logged and len(_logged) < _LOGGED_MAX:
            _logged.add(notice)
            _logger.warning("%s", notice)


def _parts(item: Item) -> tuple[Any, Target, int | None]:
    try:
        array, path, *rest = item
    except (TypeError, ValueError):
        rest = [None, None]
    if len(rest) > 1:
        raise TypeError("each item must be (array, path) or (array, path, offset)")
    return array, path, rest[0] if rest else None


def _outcome(operation: _forebay.Operation, timeout: float | None) -> ForebayError | None:
    """Wait for an operation, and return its failure unless somebody knows of it."""
    try:
        finished = operation.wait_unheard(timeout)
    except OperationCancelledError:
        return None
    except ForebayError as error:
        return error
    if not finished:
        raise WaitTimeoutError(_UNFINISHED)
    return None


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
