"""DeepNVMe's handle: the names, defaults and return counts of DeepSpeed's ``aio_handle``.

What differs, on purpose:

- Errors raise. There is no ``-1``, and no end of the process.
- Any length, offset, address and parallelism works, pinned or not.
- A write without ``file_offset`` leaves the file exactly as long as the tensor; a write with one,
  0 included, replaces those bytes and leaves the rest.
- ``wait()`` with nothing pending returns 0.
- ``"true"`` and ``"false"``, as configurations have them, are what they say.
- Nothing is printed.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any, Literal, NoReturn

from forebay import _forebay, _pinned
from forebay._arguments import (
    Target,
    parse_index,
    parse_offset,
    parse_size,
    parse_switch,
    parse_target,
)
from forebay._endings import forkable
from forebay.errors import ForebayError, InvalidBufferError, MismatchError
from forebay.handle import Handle

__all__ = ["aio_handle"]

_SECTOR_BYTES = 512


class aio_handle:  # noqa: N801 (DeepNVMe's name)
    """A handle with DeepNVMe's interface.

    Parameters
    ----------
    block_size : int
        Most bytes in one transfer.
    queue_depth : int
        Transfers in flight per worker.
    single_submit : bool
        Hand transfers to the kernel one by one, as in DeepNVMe; costs calls and gains nothing
        that we know of.
    overlap_events : bool
        In DeepNVMe, submit new transfers while waiting for old ones. Forebay always does; the
        value is only reported back.
    intra_op_parallelism : int
        Workers that share the blocks of an operation.

    Notes
    -----
    ``pread`` and ``pwrite`` have an argument ``async``, a keyword in Python: give it by position,
    or as ``**{"async": True}``.

    ``validate`` reads the file again in a plain way and compares every byte; a difference is a
    :class:`forebay.errors.MismatchError` with its offset.

    Examples
    --------
    >>> import forebay, numpy, tempfile
    >>> path = tempfile.mktemp()
    >>> handle = forebay.aio_handle()
    >>> handle.async_pwrite(numpy.arange(1000), path)
    0
    >>> handle.wait()
    1
    """

    _device_route: Literal["auto", "gds", "host"] = "auto"
    """Which way tensors in device memory go."""

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = parse_size(block_size, "block_size")
        self._queue_depth = parse_index(queue_depth, "queue_depth")
        self._single_submit = parse_switch(single_submit, "single_submit")
        self._overlap_events = parse_switch(overlap_events, "overlap_events")
        self._intra_op_parallelism = parse_index(intra_op_parallelism, "intra_op_parallelism")
        self._handle = Handle(
            block_size=self._block_size,
            queue_depth=self._queue_depth,
            single_submit=self._single_submit,
            intra_op_parallelism=self._intra_op_parallelism,
            device_route=self._device_route,
        )
        # Reentrant: a finalizer that runs in between may come back here.
        self._lock = threading.RLock()
        self._pending: list[_Pending] = []
        self._settling: list[list[_Pending]] = []
        forkable.add(self)

    def forget_pending(self) -> None:
        """Forget the parent's operations, in a forked child."""
        self._lock = threading.RLock()
        self._pending = []
        self._settling = []

    def __reduce__(self) -> NoReturn:
        raise TypeError("a handle can't be copied: make one in each process")

    # Settings

    def get_block_size(self) -> int:
        """Return the most bytes in one transfer."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Return the transfers in flight per worker."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Return whether transfers are submitted one by one."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return what was asked for; submission and completion always overlap."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return the number of workers."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Return the multiple to which DeepNVMe's callers pad; Forebay needs none."""
        return _SECTOR_BYTES * self._intra_op_parallelism

    # Reading

    def read(
        self,
        buffer: Any,
        filename: Target,
        validate: bool = False,
        file_offset: int | None = None,
    ) -> int:
        """Fill a tensor from a file. Returns 0, and leaves what is pending to :meth:`wait`."""
        return self._complete_alone(self._read(buffer, filename, validate, file_offset))

    def pread(
        self,
        buffer: Any,
        filename: Target,
        validate: bool = False,
        async_: bool = False,
        file_offset: int | None = None,
        **keyword: bool,
    ) -> int:
        """Fill a tensor; returns the number completed, or 0 at once if asynchronous."""
        asynchronous = _asynchronous(async_, keyword)
        return self._start(self._read(buffer, filename, validate, file_offset), asynchronous)

    def sync_pread(self, buffer: Any, filename: Target, file_offset: int | None = None) -> int:
        """Fill a tensor; completes what is pending too, and returns how many that were."""
        return self._start(self._read(buffer, filename, False, file_offset), False)

    def async_pread(self, buffer: Any, filename: Target, file_offset: int | None = None) -> int:
        """Start filling a tensor. Returns 0; :meth:`wait` counts it."""
        return self._start(self._read(buffer, filename, False, file_offset), True)

    # Writing

    def write(
        self,
        buffer: Any,
        filename: Target,
        validate: bool = False,
        file_offset: int | None = None,
    ) -> int:
        """Write a tensor to a file. Returns 0, and leaves what is pending to :meth:`wait`."""
        return self._complete_alone(self._write(buffer, filename, validate, file_offset))

    def pwrite(
        self,
        buffer: Any,
        filename: Target,
        validate: bool = False,
        async_: bool = False,
        file_offset: int | None = None,
        **keyword: bool,
    ) -> int:
        """Write a tensor; returns the number completed, or 0 at once if asynchronous."""
        asynchronous = _asynchronous(async_, keyword)
        return self._start(self._write(buffer, filename, validate, file_offset), asynchronous)

    def sync_pwrite(self, buffer: Any, filename: Target, file_offset: int | None = None) -> int:
        """Write a tensor; completes what is pending too, and returns how many that were."""
        return self._start(self._write(buffer, filename, False, file_offset), False)

    def async_pwrite(
        self,
        buffer: Any,
        filename: Target | None = None,
        file_offset: int | None = None,
        *,
        fd: int | None = None,
    ) -> int:
        """Start writing a tensor to a path or to an open descriptor (also by the name ``fd``).

        Returns 0; :meth:`wait` counts it.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite takes a filename or an fd")
        target = fd if filename is None else filename
        return self._start(self._write(buffer, target, False, file_offset), True)

    # Both

    def load(self, tensor: Any, fp: Target) -> int:
        """Fill a tensor from the beginning of a file. Returns as :meth:`sync_pread`."""
        return self.sync_pread(tensor, fp)

    def store(self, tensor: Any, fp: Target) -> int:
        """Make a file of a tensor. Returns as :meth:`sync_pwrite`."""
        return self.sync_pwrite(tensor, fp)

    def wait(self) -> int:
        """Complete all asynchronous operations and return how many they were.

        Where several threads wait at once, all wait for all, and each operation is counted by one.
        """
        return self._settle([])

    # Memory

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """Return a pinned tensor of ``num_elem`` items of the example's type.

        The example decides the kind: a numpy array for a numpy array, else a torch tensor.
        """
        count = parse_index(num_elem, "num_elem")
        return _pinned.allocate(self._handle.empty, count, example_tensor)

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """Give up a pinned tensor, and return whether it was one.

        As in DeepNVMe, any handle of the process can do it. A torch tensor is empty afterwards
        and is refused as a buffer; its memory goes back to the pool with the last view of it. A
        numpy array can't be emptied: it is no longer counted as pinned but stays usable, and its
        memory goes back when the array and its views are gone.
        """
        return _pinned.free(tensor)

    def is_pinned(self, tensor: Any) -> bool:
        """Return whether a tensor is, or is part of, one from :meth:`new_cpu_locked_tensor`.

        Any handle of the process knows of it, until it is freed. What torch has pinned counts too.
        """
        return _pinned.is_pinned_anyhow(tensor)

    # Underneath

    def _read(
        self, buffer: Any, filename: Target, validate: bool, file_offset: int | None
    ) -> _Pending:
        return _Pending(self._handle, False, buffer, filename, file_offset, validate)

    def _write(
        self, buffer: Any, filename: Target, validate: bool, file_offset: int | None
    ) -> _Pending:
        return _Pending(self._handle, True, buffer, filename, file_offset, validate)

    def _start(self, operation: _Pending, asynchronous: bool) -> int:
        if asynchronous:
            with self._lock:
                self._pending.append(operation)
            return 0
        return self._complete(operation)

    def _complete_alone(self, operation: _Pending) -> int:
        try:
            operation.complete()
        except BaseException:
            # Interrupted: nobody knows of this one to wait for it. Else it is done already.
            operation.cancel()
            raise
        finally:
            self._handle._log_notices()  # noqa: SLF001
        return 0

    def _complete(self, operation: _Pending) -> int:
        """Complete an operation and all pending ones; return how many they were.

        Each pending operation is counted by exactly one thread, so concurrent blocking calls
        return 1 each.
        """
        try:
            return self._settle([operation])
        except BaseException:
            # Interrupted: nobody knows of this one to wait for it. Else it is done already.
            operation.cancel()
            raise

    def _settle(self, own: list[_Pending]) -> int:
        """Complete all pending operations, and those of a blocking call; return how many."""
        with self._lock:
            pending, self._pending = self._pending, []
            self._settling.append(pending)
        operations = [*pending, *own]
        try:
            failures = [error for error in map(_failure, operations) if error is not None]
            # What other threads complete they count, and hear of its failures.
            with self._lock:
                self._settling = [batch for batch in self._settling if batch is not pending]
                elsewhere = [operation for batch in self._settling for operation in batch]
            for operation in elsewhere:
                operation.wait_finished()
        except BaseException:
            # Interrupted: all are still pending, and the next call hears of their failures.
            with self._lock:
                self._pending[:0] = pending
                self._settling = [batch for batch in self._settling if batch is not pending]
            raise
        self._handle._log_notices()  # noqa: SLF001
        if failures:
            self._handle._raise_first(failures)  # noqa: SLF001
        return len(operations)


class _Pending:
    """An operation under way, with what validating it takes."""

    def __init__(
        self,
        handle: Handle,
        store: bool,
        buffer: Any,
        target: Target,
        file_offset: int | None,
        validate: bool,
    ) -> None:
        if getattr(buffer, "forebay_freed", False):
            raise InvalidBufferError("the tensor was freed by free_cpu_locked_tensor")
        checked = parse_switch(validate, "validate")
        path = parse_target(target)
        offset = parse_offset(file_offset)
        whole_file = store and file_offset is None
        items = [(buffer, path, offset)]
        self._operation = handle._core.submit(  # noqa: SLF001
            store, items, whole_file, "demand", None
        )
        self._validation = (buffer, path, offset) if checked else None

    def cancel(self) -> None:
        self._operation.cancel()

    def wait_finished(self) -> None:
        self._operation.wait_finished()

    def complete(self) -> None:
        self._operation.wait()
        if self._validation is None:
            return
        buffer, path, offset = self._validation
        name = path if isinstance(path, str) else f"/proc/self/fd/{path}"
        position = _differs(buffer, name, offset)
        if position is not None:
            raise MismatchError(
                f"validate: the tensor and {name} differ from offset {position} on",
                filename=name,
                offset=position,
                operation="validate",
            )


def _failure(operation: _Pending) -> ForebayError | None:
    """Complete an operation, and return what it met."""
    try:
        operation.complete()
    except ForebayError as error:
        return error
    return None


def _differs(buffer: Any, name: str, offset: int) -> int | None:
    """Return the offset from which on an array and a file differ, if they do."""
    if _forebay.device_of(buffer) is None:
        return _forebay.compare(buffer, name, offset)
    # By way of a file in memory, which takes arrays of any kind.
    descriptor = os.memfd_create("forebay-validate")
    try:
        with Handle(device_route="host") as handle:
            handle.store(buffer, descriptor)
        if os.fstat(descriptor).st_size == 0:
            return None
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as copy:
            return _forebay.compare(copy, name, offset)
    finally:
        os.close(descriptor)


def _asynchronous(value: bool, keyword: dict[str, bool]) -> bool:
    value = keyword.pop("async", value)
    if keyword:
        raise TypeError(f"unexpected keyword argument {next(iter(keyword))!r}")
    return parse_switch(value, "async")
