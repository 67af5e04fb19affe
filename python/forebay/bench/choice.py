"""What follows from the options alone: who is compared, with which tensors, in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.bench.payload import Layout
from forebay.bench.problem import EXIT_USAGE, Problem
from forebay.bench.subjects import COMPARISONS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["device", "files_at_once", "layouts", "names", "phases"]

_TENSORS_MAX = 1 << 16
_TENSOR_BYTES_MIN = 16
"""With ``--tensor-count``, on average."""
_BACKGROUND_FILES = 2
"""The checkpoint that is kept and the one being saved."""


def names(options: dict[str, Any]) -> list[str]:
    """Return who is compared."""
    subjects, only, skip = COMPARISONS[options["what"]], options["only"], options["skip"]
    unknown = [name for name in (*only, *skip) if name not in subjects]
    if unknown:
        text = f"{unknown[0]!r} is not known; these are: {', '.join(subjects)}"
        raise Problem(text, EXIT_USAGE)
    chosen = [name for name in subjects if name not in skip and (not only or name in only)]
    if not chosen:
        raise Problem("there is nothing left to compare: --skip fewer", EXIT_USAGE)
    return chosen


def device(options: dict[str, Any]) -> str:
    """Return where tensors are stored from and loaded to, as torch calls it."""
    return f"cuda:{options['gpu']}" if options["what"] == "gpu" else "cpu"


def layouts(options: dict[str, Any]) -> list[Layout]:
    """Return the tensors, for one comparison after the other."""
    size, sizes, counts = options["size"], options["tensor_size"], options["tensor_count"]
    if options["what"] != "tensors":
        return _files(size, sizes, counts)
    if counts:
        text = "--tensor-count goes with --what files and --gpu: pass --tensor-size"
        raise Problem(text, EXIT_USAGE)
    if size < 1 or not all(one > 0 for one in sizes):
        raise Problem("--size and each --tensor-size must be at least 1 byte", EXIT_USAGE)
    _check_count(size // sum(sizes) * len(sizes), "larger --tensor-size")
    return [Layout.of(sizes, size)]


def _files(size: int, sizes: Sequence[int], counts: Sequence[int]) -> list[Layout]:
    if sizes:
        text = "--tensor-size goes with --what tensors: pass --tensor-count"
        raise Problem(text, EXIT_USAGE)
    most = max(counts)
    _check_count(most, "a smaller --tensor-count")
    if size < most * _TENSOR_BYTES_MIN:
        text = f"{most} tensors of {_TENSOR_BYTES_MIN} bytes are more than {size}: pass more --size"
        raise Problem(text, EXIT_USAGE)
    return [Layout.split(size, count) for count in counts]


def _check_count(count: int, instead: str) -> None:
    if count > _TENSORS_MAX:
        text = f"these are {count} tensors, {_TENSORS_MAX} are the most: pass {instead}"
        raise Problem(text, EXIT_USAGE)


def phases(options: dict[str, Any]) -> list[list[str]]:
    """Return the ways that are measured, in rounds of their own for each list.

    A load of a file isn't to depend on what was written just before, so files are stored once for
    all loads, and what storing takes is measured after that.
    """
    stores, loads = not options["no_write"], not options["no_read"]
    if options["what"] != "tensors":
        after = ["store", "background"] if options["what"] == "files" else ["store"]
        both = ((["load", "warm"], loads), (after, stores))
        return [ways for ways, wanted in both if wanted]
    return [[way for way, wanted in (("store", stores), ("load", loads)) if wanted]]


def files_at_once(options: dict[str, Any]) -> int:
    """Return how many files with all tensors there are at the most."""
    kinds = [COMPARISONS[options["what"]][name] for name in names(options)]
    # With stores, one subject's file at a time; without, all of them; and the one that is given.
    most = 0
    for ways in phases(options):
        stored = 1 if "store" in ways else sum(kind.stores for kind in kinds)
        saved = _BACKGROUND_FILES if "background" in ways else 0
        most = max(most, stored + saved + 1)
    return most
