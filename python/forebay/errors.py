"""Everything that Forebay raises: one tree under :class:`ForebayError`.

An error that has a counterpart in Python is also that: a missing file is a
``FileNotFoundError`` with ``errno``, ``strerror`` and ``filename``, a full disk an ``OSError``
with ``ENOSPC``, a wrong argument a ``ValueError``. All can be pickled and copied, so they cross
process boundaries (``multiprocessing``, ``concurrent.futures``) with their fields.
"""

from __future__ import annotations

import contextlib
import errno as codes
import os
from typing import Any

__all__ = [
    "AccessError",
    "ClosedError",
    "DeviceError",
    "FileMissingError",
    "FileThereError",
    "ForebayError",
    "ForebayWarning",
    "InvalidBufferError",
    "InvalidInputError",
    "IsDirectoryError",
    "MismatchError",
    "NotDirectoryError",
    "OperationCancelledError",
    "OutOfMemoryError",
    "ShortFileError",
    "SystemCallError",
    "TensorFileError",
    "UnsupportedBufferError",
    "UnsupportedError",
    "WaitTimeoutError",
]


class ForebayError(Exception):
    """Base of everything that Forebay raises.

    Attributes
    ----------
    filename : str or None
        The file it is about.
    errno : int or None
        The operating system's code.
    offset : int or None
        File offset in bytes at which it happened.
    wanted : int or None
        Bytes that were asked for.
    done : int or None
        Bytes that had moved.
    engine : str or None
        The engine that met it.
    operation : str or None
        What was being done, such as ``"store"``.
    """

    filename: Any
    errno: int | None
    strerror: str | None

    def __init__(
        self,
        message: str = "",
        errno: int | None = None,
        filename: str | None = None,
        offset: int | None = None,
        wanted: int | None = None,
        done: int | None = None,
        engine: str | None = None,
        operation: str | None = None,
    ) -> None:
        strerror = None if errno is None else os.strerror(errno)
        if isinstance(self, OSError):
            # OSError keeps its own fields, and fills them from its arguments.
            if errno is None:
                OSError.__init__(self, message)
                self.filename = filename
            elif filename is None:
                OSError.__init__(self, errno, strerror)
            else:
                OSError.__init__(self, errno, strerror, filename)
        else:
            super().__init__(message)
            self.errno = errno
            self.strerror = strerror
            self.filename = filename
        self.message = message
        self.offset = offset
        self.wanted = wanted
        self.done = done
        self.engine = engine
        self.operation = operation

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (
            self.message,
            self.errno,
            self.filename,
            self.offset,
            self.wanted,
            self.done,
            self.engine,
            self.operation,
        )
        return (type(self), fields, self.__dict__)


class SystemCallError(ForebayError, OSError):
    """The operating system refused or failed a call; ``errno`` says how."""


class FileMissingError(SystemCallError, FileNotFoundError):
    """There is no such file or directory."""


class FileThereError(SystemCallError, FileExistsError):
    """The file is there already."""


class AccessError(SystemCallError, PermissionError):
    """The permissions forbid it."""


class IsDirectoryError(SystemCallError, IsADirectoryError):
    """The path is a directory."""


class NotDirectoryError(SystemCallError, NotADirectoryError):
    """A parent in the path isn't a directory."""


class ShortFileError(ForebayError, EOFError):
    """The file ends before the array is full; the message has both sizes.

    Attributes
    ----------
    wanted : int
        Bytes that the array takes.
    file_size : int or None
        Bytes that the file has, unless it is gone by now.
    """

    file_size: int | None = None

    def __init__(self, message: str = "", errno: int | None = None, *fields: Any) -> None:
        super().__init__(message, errno, *fields)
        if self.filename is not None:
            with contextlib.suppress(OSError):
                self.file_size = os.stat(self.filename).st_size


class InvalidInputError(ForebayError, ValueError):
    """An argument is out of range or of the wrong sort."""


class InvalidBufferError(InvalidInputError):
    """The array can't be moved as it is; the message says what to do."""


class OutOfMemoryError(ForebayError, MemoryError):
    """The pool's budget, the machine's memory or the control group's limit is too small."""


class UnsupportedError(ForebayError, NotImplementedError):
    """What was asked for isn't there on this host: an engine, direct I/O, a kernel feature."""


class UnsupportedBufferError(InvalidBufferError, UnsupportedError):
    """The array's memory is on a device that Forebay doesn't reach."""


class OperationCancelledError(ForebayError):
    """The operation was cancelled before its last byte moved."""


class WaitTimeoutError(ForebayError, TimeoutError):
    """The time given to a wait ran out; what was waited for goes on."""


class ClosedError(ForebayError, ValueError):
    """The handle is closed, or belongs to the process that this one was forked from."""


class MismatchError(ForebayError):
    """What was read back differs from what was written."""


class TensorFileError(ForebayError):
    """A file of tensors breaks the rules of its format."""


class DeviceError(ForebayError, RuntimeError):
    """A device's library refused or failed a call; the message has its code by name."""


class ForebayWarning(RuntimeWarning):
    """An operation failed and nobody waited for it. Shown by default."""


_BY_KIND: dict[str, type[ForebayError]] = {
    "os": SystemCallError,
    "short_file": ShortFileError,
    "invalid_input": InvalidInputError,
    "out_of_memory": OutOfMemoryError,
    "unsupported": UnsupportedError,
    "cancelled": OperationCancelledError,
    "timed_out": WaitTimeoutError,
    "closed": ClosedError,
    "mismatch": MismatchError,
    "corrupt": TensorFileError,
    "device": DeviceError,
}

_BY_CODE: dict[int, type[SystemCallError]] = {
    codes.ENOENT: FileMissingError,
    codes.EEXIST: FileThereError,
    codes.EACCES: AccessError,
    codes.EPERM: AccessError,
    codes.EISDIR: IsDirectoryError,
    codes.ENOTDIR: NotDirectoryError,
}


def class_for(kind: str, errno: int | None) -> type[ForebayError]:
    """Return the class for an error of the core."""
    if kind == "os" and errno is not None:
        return _BY_CODE.get(errno, SystemCallError)
    return _BY_KIND.get(kind, ForebayError)
