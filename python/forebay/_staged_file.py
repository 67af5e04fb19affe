"""Files that are replaced whole or not at all, and streams of bytes into them.

A :class:`StagedFile` is a temporary file beside the one that is meant. Committing syncs it, gives
it the old one's mode and owner (or those of a new file), renames it over the old one, and syncs
the folder. Until then the old file is as it was. Whoever stages a file holds a lock on it, so that
the next one to stage the same file can tell what a killed process has left from what is in use,
and removes the former.

A :class:`FileStream` collects bytes in pinned memory and stores one buffer while the next is
filled, so its memory is fixed. A failed store is kept and raised by :meth:`FileStream.flush` and
:meth:`FileStream.finish`, not by ``write``: between a writer and its caller there may be code, such
as torch's, that would put another error in its place. A ``write`` that is interrupted counts as
failed: part of its bytes may be missing, so the file is never put in its place. What is kept of a
failure has no traceback: its frames would hold the stream, and objects of torch's that the garbage
collector can't look into, so that neither would ever go.

Threads take turns, each with all of its bytes. The stream belongs to the process that made it: one
forked from that can only drop it.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ClosedError, ForebayError, InvalidInputError, IsDirectoryError

if TYPE_CHECKING:
    from forebay.handle import Handle
    from forebay.operation import Operation

__all__ = ["FileStream", "StagedFile"]

_SUFFIX = ".forebay-staged"
_NAME_BYTES_MAX = 160
"""Of the file's name, in that of the temporary one: file systems take 255 bytes in all."""

_ATTEMPTS_MAX = 16


class StagedFile:
    """A file under a temporary name, until it is committed or discarded."""

    def __init__(self, path: str) -> None:
        # A symbolic link stays one; the file that it names is replaced.
        self.path = os.path.realpath(path)
        if path.endswith(os.sep):
            _check_replaceable(self.path, stat.S_IFDIR)
        with contextlib.suppress(FileNotFoundError):
            _check_replaceable(self.path, os.stat(self.path).st_mode)
        self.process = os.getpid()
        folder, name = os.path.split(self.path)
        beginning = os.fsdecode(b"." + os.fsencode(name)[:_NAME_BYTES_MAX] + b".")
        _remove_leftovers(Path(folder), beginning)
        self._temporary, self.descriptor = _create(folder, beginning)

    def commit(self) -> None:
        """Put the file in its place, durably."""
        with contextlib.suppress(FileNotFoundError):
            former = os.stat(self.path)
            # It may have become something else since.
            _check_replaceable(self.path, former.st_mode)
            self._take_after(former)
        os.fsync(self.descriptor)
        os.replace(self._temporary, self.path)
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._close()

    def discard(self) -> None:
        """Remove the temporary file; in a process forked from the one that made it, only close."""
        if self.descriptor < 0:
            return
        if os.getpid() == self.process:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)
        self._close()

    def _take_after(self, former: os.stat_result) -> None:
        own = os.fstat(self.descriptor)
        if (own.st_uid, own.st_gid) != (former.st_uid, former.st_gid):
            # Who isn't root can't give files away: then the new one is theirs.
            with contextlib.suppress(PermissionError):
                os.fchown(self.descriptor, former.st_uid, former.st_gid)
        os.fchmod(self.descriptor, stat.S_IMODE(former.st_mode))

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)


def _check_replaceable(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsDirectoryError(
            f"a file was to be written at {path}, which is a directory", errno.EISDIR, path
        )
    if not stat.S_ISREG(mode):
        raise InvalidInputError(
            f"{path} is a device, a pipe or a socket: only plain files can be replaced",
            filename=path,
        )


def _create(folder: str, beginning: str) -> tuple[str, int]:
    """Create a temporary file with the mode of a new file, and lock it."""
    for _ in range(_ATTEMPTS_MAX):
        path = os.path.join(folder, f"{beginning}{secrets.token_hex(8)}{_SUFFIX}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # Some network file systems have no locks: then leftovers stay.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink > 0:
                return path, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Somebody took it for a leftover, in between.
        os.close(descriptor)
    raise ForebayError(f"a temporary file beside {folder}/{beginning} is removed again and again")


def _remove_leftovers(folder: Path, beginning: str) -> None:
    try:
        names = [name for name in os.listdir(folder) if name.startswith(beginning)]
    except OSError:
        return
    for name in names:
        if name.endswith(_SUFFIX):
            with contextlib.suppress(OSError):
                _remove_unless_locked(folder / name)


def _remove_unless_locked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


def _interrupted(error: BaseException) -> ForebayError:
    kind = type(error).__name__
    return ForebayError(f"a write was broken off ({kind}): bytes may be missing, write it anew")


class FileStream:
    """Bytes on their way into a staged file, through buffers that take turns.

    Parameters
    ----------
    path : str
        The file to replace.
    handle : Handle
        What stores them.
    buffers : list of numpy.ndarray
        Bytes in host memory, at least one; more than one overlap filling and storing.
    owns_handle : bool
        Whether to close the handle at the end.
    """

    def __init__(self, path: str, handle: Handle, buffers: list[Any], owns_handle: bool) -> None:
        self._staged = StagedFile(path)
        self.process = self._staged.process
        self._handle = handle
        self._owns_handle = owns_handle
        self._buffers = buffers
        self._operations: list[Operation | None] = [None] * len(buffers)
        self._index = 0
        self._filled = 0
        self._stored = 0
        self._failure: ForebayError | None = None
        self.interruption: type[BaseException] | None = None
        # Reentrant: a signal's handler may close what it has interrupted.
        self._lock = threading.RLock()
        self.closed = False

    def write(self, data: Any) -> int:
        """Take bytes, and return how many they were; a failed store is raised later."""
        import numpy as np

        self._check_process()
        view = memoryview(data)
        source = np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)
        with self._lock:
            if self.closed:
                raise ClosedError("the writer is closed: make another")
            try:
                self._take(source)
            except BaseException as error:
                self.interruption = type(error)
                self._fail(_interrupted(error))
                raise
        return len(source)

    def _take(self, source: Any) -> None:
        done = 0
        while done < len(source) and self._failure is None:
            buffer = self._buffers[self._index]
            count = min(len(source) - done, len(buffer) - self._filled)
            buffer[self._filled : self._filled + count] = source[done : done + count]
            self._filled += count
            done += count
            if self._filled == len(buffer):
                self._drain()

    def flush(self) -> None:
        """Wait for what is on its way, and raise what went wrong."""
        self._check_process()
        with self._lock:
            for index in range(len(self._buffers)):
                self._wait(index)
            if not self.closed:
                self._raise_failure()

    def finish(self) -> None:
        """Store the rest and put the file in its place; if anything fails, leave the old one."""
        self._check_process()
        with self._lock:
            if self.closed:
                return
            try:
                if self._filled and self._failure is None:
                    self._drain()
                self.flush()
                self._staged.commit()
            except OSError as error:
                error.filename = self._staged.path
                raise
            finally:
                self.discard()

    def discard(self) -> None:
        """Leave the old file as it was, wait for what is on its way, and let go of everything."""
        if self.closed:
            return
        self.closed = True
        for operation in self._operations:
            if operation is not None:
                operation.cancel()
                with contextlib.suppress(ForebayError):
                    operation.wait()
        self._operations = []
        self._buffers = []
        self._staged.discard()
        if self._owns_handle:
            self._handle.close_and_warn()

    @property
    def failure(self) -> ForebayError | None:
        """What went wrong first, if anything did: a copy, which can be raised."""
        return copy.copy(self._failure)

    def _check_process(self) -> None:
        if os.getpid() != self.process:
            raise ClosedError(
                f"the writer of {self._staged.path} belongs to the process that this one was "
                "forked from: make another here"
            )

    def _drain(self) -> None:
        """Store what the present buffer has, and turn to the next."""
        index, filled = self._index, self._filled
        self._index = (index + 1) % len(self._buffers)
        self._filled = 0
        try:
            self._operations[index] = self._handle.store_async(
                self._buffers[index][:filled], self._staged.descriptor, self._stored
            )
        except ForebayError as error:
            self._fail(error)
        self._stored += filled
        self._wait(self._index)

    def _wait(self, index: int) -> None:
        operation = self._operations[index]
        if operation is None:
            return
        try:
            operation.wait()
        except ForebayError as error:
            self._fail(error)
        self._operations[index] = None

    def _fail(self, error: ForebayError) -> None:
        if self._failure is None:
            self._failure = copy.copy(error)
            self._failure.filename = self._staged.path

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)
