"""Turns what users write (``"1MiB"``, paths, open files) into what the core takes."""

from __future__ import annotations

import math
import operator
import os
import re
from typing import Any, SupportsIndex, TypeAlias

from forebay.errors import InvalidInputError

Target: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes] | int | Any"
"""A path, an open descriptor, or an object with ``fileno()``."""

_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*", re.IGNORECASE | re.ASCII)


def parse_size(value: SupportsIndex | str, name: str = "size") -> int:
    """Return a number of bytes.

    Parameters
    ----------
    value : int or str
        Bytes, or a number with a unit. ``"1k"`` and ``"1KiB"`` are 1024 bytes, ``"1KB"`` is 1000,
        as ``dd`` has it.
    name : str
        What an error calls it.

    Examples
    --------
    >>> parse_size("1.5MiB"), parse_size("2KB"), parse_size(4096)
    (1572864, 2000, 4096)
    """
    if not isinstance(value, str):
        return _within(parse_index(value, name, "a number of bytes or text"), name)
    match = _SIZE.fullmatch(value)
    if match is None:
        raise InvalidInputError(f'{name} is {value!r}: write a size as 4096, "64k" or "1MiB"')
    amount, unit, suffix = match.groups()
    power = _UNITS[unit.lower()]
    if unit == "":
        power = 0
    base = 1000 if suffix.lower() == "b" and unit else 1024
    factor: int = base**power
    try:
        number = round(float(amount) * factor) if "." in amount else int(amount) * factor
    except (OverflowError, ValueError):
        raise InvalidInputError(f"{name} has {len(amount)} digits, it's too large") from None
    return _within(number, name)


def parse_index(value: SupportsIndex, name: str, wanted: str = "an integer") -> int:
    """Return an integer of any make, numpy's included; an error names the argument."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}") from None


def parse_switch(value: Any, name: str) -> bool:
    """Return a boolean: one, numpy's, 0 or 1, or the text of one as configurations have it.

    Examples
    --------
    >>> parse_switch("False", "single_submit"), parse_switch(1, "single_submit")
    (False, True)
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if type(value).__module__ == "numpy" and getattr(value, "dtype", None) == "bool":
        return bool(value)
    if isinstance(value, int) and value in {0, 1}:
        return bool(value)
    shown = repr(value) if isinstance(value, str | int) else type(value).__name__
    raise TypeError(f"{name} must be True or False, not {shown}")


def parse_seconds(value: float | None, name: str = "timeout") -> float | None:
    """Return a time in seconds; ``None`` is for ever."""
    if value is None:
        return None
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be seconds or None, not {type(value).__name__}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidInputError(f"{name} isn't a number of seconds that can be waited for")
    return seconds


def _within(number: int, name: str) -> int:
    if not 0 <= number < 1 << 63:
        raise InvalidInputError(f"{name} is {number}, it can be 0 to 2**63 - 1")
    return number


def parse_target(target: Target) -> str | int:
    """Return the path as text, or the descriptor."""
    if isinstance(target, str):
        path = target
    elif isinstance(target, bytes | os.PathLike):
        path = os.fsdecode(target)
    else:
        return _descriptor(target)
    if "\0" in path:
        raise InvalidInputError(f"the path {path!r} has a null character")
    if not path:
        raise InvalidInputError("the path is empty")
    return path


def _descriptor(target: Any) -> int:
    if isinstance(target, bool):
        raise TypeError("a path or a descriptor is needed, not a bool")
    if hasattr(target, "fileno"):
        # What Python has buffered of the file comes before what Forebay writes.
        flush = getattr(target, "flush", None)
        if flush is not None and not getattr(target, "closed", False):
            flush()
        target = target.fileno()
    try:
        number = operator.index(target)
    except TypeError:
        kind = type(target).__name__
        raise TypeError(f"a path, a descriptor or an open file is needed, not {kind}") from None
    if not 0 <= number < 1 << 31:
        raise InvalidInputError(f"descriptor {number} isn't open")
    return number


def parse_offset(offset: SupportsIndex | None) -> int:
    """Return a file offset in bytes; none is 0."""
    if offset is None:
        return 0
    return _within(parse_index(offset, "offset"), "offset")
