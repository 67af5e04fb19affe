"""What can keep a comparison from running, with the exit code of the command."""

from __future__ import annotations

import errno

EXIT_FAILED = 1
"""Something went wrong on the way: bytes differ, or the drive failed."""
EXIT_USAGE = 2
"""The arguments can't be used: no such file, not a safetensors file, not a size."""
EXIT_DIRECTORY = 3
"""The directory or the machine can't take it: full, read-only, in memory, too little memory."""


class Problem(Exception):  # noqa: N818 (it is what a person is told, not an error of a program)
    """A sentence for the user, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def explain(error: OSError, directory: str) -> Problem:
    """Return what an error of the system means for the run."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        text = f"{directory} is full: {error}; free some space, or pass a smaller --size"
        return Problem(text, EXIT_DIRECTORY)
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        text = f"cannot write in {directory}: {error}; pass another --dir"
        return Problem(text, EXIT_DIRECTORY)
    return Problem(str(error), EXIT_FAILED)
