"""Writes to standard output and standard error, whatever those can take.

A reader that went away is ``BrokenPipeError``, which the command takes in silence; any other
failure of the output is a `Problem`, so that it isn't taken for one of the directory. A closed
stream takes everything.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from forebay.bench.problem import EXIT_FAILED, Problem

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["complain", "discard", "fitting", "printable", "say", "say_object"]

_STEERING = re.compile(
    "[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
)
"""Control characters but the end of a line, and those that turn the direction of writing."""

_ASCII = str.maketrans({"×": "x", "─": "-", "█": "#", "░": "."})


def say(text: str) -> None:
    """Write a line to standard output."""
    stream = sys.stdout
    if stream is None:
        return
    try:
        stream.write(fitting(f"{printable(text)}\n", stream))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(stream)
        text = f"cannot write to standard output: {error.strerror}"
        raise Problem(text, EXIT_FAILED) from error


def say_object(name: str, fields: dict[str, Any]) -> None:
    """Write a JSON object of the schema ``forebay.NAME/1`` to standard output."""
    say(json.dumps({"schema": f"forebay.{name}/1", **fields}, indent=2))


def complain(text: str) -> None:
    """Write a line to standard error, if that can be done: there's nowhere else to say so."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.write(fitting(f"{printable(text)}\n", stream))
        stream.flush()
    except OSError:
        discard(stream)


def printable(text: str) -> str:
    """Return the text without what would steer the terminal: names of files can hold anything."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def fitting(text: str, stream: TextIO) -> str:
    """Return the text in characters that the stream's encoding has."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        # Names of files can hold anything, so the ASCII signs needn't be all.
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def discard(stream: TextIO | None) -> None:
    """Throw away what the stream still holds and gets: Python would complain at exit."""
    if stream is None:
        return
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a stream in memory
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
