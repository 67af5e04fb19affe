"""Loads tensors of files: what a load takes, and how it is made.

What stays as it is in the file is loaded into regions of pinned memory by the core, in few large
reads, and its arrays are views of these. What is cast, or goes to a device, streams through a
window of bounded size, into one region for all that is cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay._arguments import parse_size
from forebay._tensor_files.cast import cast_code, padded, parse_cast
from forebay._tensor_files.frame import byte_count
from forebay._tensor_files.select import parse_source, select
from forebay._tensor_files.shared import core_of, shared_handle
from forebay.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay._tensor_files.frame import Frame
    from forebay._tensor_files.select import Keys, Source
    from forebay.handle import Handle

__all__ = ["LoadPlan", "Wish", "load", "plan", "straight"]

_WINDOW_BYTES = 256 << 20
"""Memory that what is cast or goes to a device streams through, unless one tensor needs more."""


@dataclass(frozen=True)
class LoadPlan:
    """What a load takes, said before it starts.

    Attributes
    ----------
    files : tuple of str
        What is read.
    tensors : int
        How many are loaded.
    tensor_bytes : int
        Their bytes as they are handed out, cast where that is asked for.
    read_bytes : int
        What is read from the files.
    peak_bytes : int
        Most memory that the load holds at any time.
    kept_bytes : int
        What it holds in the end, for as long as the tensors are there.
    """

    files: tuple[str, ...]
    tensors: int
    tensor_bytes: int
    read_bytes: int
    peak_bytes: int
    kept_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors of {self.tensor_bytes} bytes from {len(self.files)} files: "
            f"reads {self.read_bytes} bytes, takes {self.peak_bytes} at the peak and "
            f"{self.kept_bytes} in the end"
        )


@dataclass(frozen=True)
class Wish:
    """What a user asks of a load."""

    keys: Keys = None
    dtype: Any = None
    device: Any = "cpu"
    verify: bool = True
    budget: int | str | None = None


class _Work:
    """A load, planned: what is loaded as it is, what streams, and what both take."""

    def __init__(self, source: Source, frame: Frame, wish: Wish) -> None:
        self.frame = frame
        self.wish = wish
        self.source = parse_source(source)
        self.target = None if wish.dtype is None else parse_cast(frame, wish.dtype)
        self.device = frame.parse_device(wish.device)
        everything = _forebay.plan_load(self.source, None)
        names = select([name for name, _, _ in everything.tensors], wish.keys)
        self.names = names
        wanted = None if names is None else set(names)
        self.streamed: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.straight: list[str] = []
        self.out_bytes = 0
        longest = 0
        for name, dtype, shape in everything.tensors:
            if wanted is not None and name not in wanted:
                continue
            frame.check(dtype)
            code = cast_code(dtype, self.target)
            self.out_bytes += byte_count(code, shape)
            if self.device is not None or code != dtype:
                self.streamed[name] = (code, tuple(shape))
                longest = max(longest, byte_count(dtype, shape))
            else:
                self.straight.append(name)
        self.window_bytes = 0 if not self.streamed else max(_WINDOW_BYTES, 2 * longest)
        self._count(everything)

    def _count(self, everything: Any) -> None:
        everything_is_straight = self.names is None and not self.streamed
        straight = (
            everything
            if everything_is_straight
            else _forebay.plan_load(self.source, self.straight)
        )
        passing = _forebay.plan_load(self.source, list(self.streamed))
        self.cast_bytes = (
            0 if self.device is not None else sum(padded(code, shape) for code, shape in self.streamed.values())
        )
        self.window_bytes = min(self.window_bytes, passing.region_bytes)
        kept = straight.region_bytes + self.cast_bytes
        self.plan = LoadPlan(
            files=tuple(everything.files),
            tensors=len(self.straight) + len(self.streamed),
            tensor_bytes=self.out_bytes,
            read_bytes=straight.read_bytes + passing.read_bytes,
            peak_bytes=max(straight.peak_bytes, kept + self.window_bytes),
            kept_bytes=kept,
        )
        if self.wish.budget is not None:
            refuse_beyond(self.plan, parse_size(self.wish.budget, "budget"))


def plan(source: Source, frame: Frame, wish: Wish) -> LoadPlan:
    """Return what a load takes, without reading more than the headers."""
    return _Work(source, frame, wish).plan


def load(source: Source, frame: Frame, wish: Wish, handle: Handle | None) -> dict[str, Any]:
    """Return the tensors that are asked for, by name, in the order of the files."""
    handle = shared_handle() if handle is None else handle
    plain = wish.keys is None and wish.dtype is None and wish.budget is None
    if plain and frame.parse_device(wish.device) is None:
        return dict(straight(parse_source(source), frame, None, wish.verify, handle))
    work = _Work(source, frame, wish)
    found: dict[str, Any] = {}
    if work.straight:
        found.update(straight(work.source, frame, work.straight, wish.verify, handle))
    if work.streamed:
        found.update(_streamed(work, handle))
    return found


def straight(
    source: str | list[str], frame: Frame, names: list[str] | None, verify: bool, handle: Handle
) -> Iterable[tuple[str, Any]]:
    """Return tensors as they are in the files, over regions that few large reads have filled."""
    import numpy as np

    regions, tensors = _forebay.load_tensors(core_of(handle), source, names, verify)
    memories = [np.asarray(region) for region in regions]
    for name, dtype, shape, region, offset in tensors:
        extents = tuple(shape)
        memory = memories[region][offset : offset + byte_count(dtype, extents)]
        yield name, frame.over(memory, dtype, extents)


def _streamed(work: _Work, handle: Handle) -> Iterable[tuple[str, Any]]:
    import numpy as np

    frame = work.frame
    room = None if work.device is not None else handle.empty(work.cast_bytes)
    begin = 0
    stream = _forebay.TensorStream(
        core_of(handle), work.source, list(work.streamed), work.window_bytes, work.wish.verify
    )
    for name, dtype, shape, buffer, offset in stream:
        extents = tuple(shape)
        memory = np.asarray(buffer)[offset : offset + byte_count(dtype, extents)]
        array = frame.over(memory, dtype, extents)
        code, _ = work.streamed[name]
        if room is None:
            yield name, frame.move(array, work.device, code)
        else:
            target = frame.over(room[begin : begin + byte_count(code, extents)], code, extents)
            frame.copy(target, array)
            begin += padded(code, extents)
            yield name, target
        # Before the next is asked for: the window has room for it then.
        del array, memory, buffer


def refuse_beyond(planned: LoadPlan, budget_bytes: int) -> None:
    """Refuse a load that takes more than its budget, with the numbers."""
    if planned.peak_bytes > budget_bytes:
        raise OutOfMemoryError(
            f"the load takes {planned.peak_bytes} bytes at the peak ({planned.tensors} tensors of "
            f"{planned.tensor_bytes} bytes), the budget is {budget_bytes}: raise it, load fewer "
            "keys, or stream",
            wanted=planned.peak_bytes,
        )
