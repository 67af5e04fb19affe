"""What users say of files and keys: paths, sharded models, patterns."""

from __future__ import annotations

import fnmatch
import os
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay._arguments import parse_target
from forebay.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Keys", "Path", "Source", "parse_path", "parse_source", "select"]

Path: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = "Path | list[Path] | tuple[Path, ...]"
"""A file, several, an index, or the directory of a model."""

Keys: TypeAlias = "str | Iterable[str] | Callable[[str], bool] | None"
"""Which tensors: a pattern as of a shell, several, or a function of the name; None is all."""

_SHOWN = 5
"""Names that an error lists."""


def parse_path(path: Any, name: str = "filename") -> str:
    """Return the path of a file as text."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a path, not {type(path).__name__}")
    found = os.fspath(path)
    if not isinstance(found, str):
        raise TypeError(f"{name} must be a path of text, not of {type(found).__name__}")
    return str(parse_target(found))


def parse_source(source: Any) -> str | list[str]:
    """Return what the core takes for a file, a list of files, an index or a directory."""
    if isinstance(source, list | tuple):
        if not source:
            raise InvalidInputError("the list of files is empty")
        return [parse_path(path) for path in source]
    return parse_path(source)


def select(names: Sequence[str], keys: Keys) -> list[str] | None:
    """Return the names that are asked for, in their order, or None for all.

    Raises
    ------
    InvalidInputError
        A pattern, or the function, picks none: most likely it is misspelt.

    Examples
    --------
    >>> names = ["experts.0.w", "experts.1.w", "norm"]
    >>> select(names, "experts.1.*"), select(names, ["norm", "*.0.*"])
    (['experts.1.w'], ['experts.0.w', 'norm'])
    >>> select(names, lambda name: not name.startswith("experts"))
    ['norm']
    """
    if keys is None:
        return None
    if callable(keys):
        chosen = [name for name in names if keys(name)]
        if not chosen:
            raise InvalidInputError(f"the function picks none of {_sample(names)}")
        return chosen
    patterns = [keys] if isinstance(keys, str) else list(keys)
    if not patterns:
        raise InvalidInputError(f"no pattern is given for {_sample(names)}")
    known = set(names)
    wanted: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"keys must be patterns of text, not {type(pattern).__name__}")
        # A name with brackets in it is itself first, and a pattern second.
        found = {pattern} & known or set(fnmatch.filter(names, pattern))
        if not found:
            raise InvalidInputError(f"the pattern {pattern!r} matches none of {_sample(names)}")
        wanted |= found
    return [name for name in names if name in wanted]


def _sample(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"the {len(names)} names ({listed}{f', and {more} more' if more > 0 else ''})"
