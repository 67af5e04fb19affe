"""Loads tensors of files: what a load takes, and how it is made.

What stays as it is in the file is loaded into regions of memory by the core, in few large reads, or
is mapped there from the page cache, and its arrays are views of these. What goes to a device that
the core reaches is loaded there, and cast there. What is cast on the host, or goes to another
device, streams through a window of bounded size, into one region for all that is cast.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay._arguments import parse_size
from forebay._tensor_files.cast import cast_code, padded, parse_cast
from forebay._tensor_files.device import DeviceLoad
from forebay._tensor_files.frame import byte_count
from forebay._tensor_files.shared import core_of, given_or_shared, room, tell
from forebay._tensor_files.source import OpenSource
from forebay.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forebay._tensor_files.frame import Frame
    from forebay._tensor_files.select import Keys, Source
    from forebay.handle import Handle

__all__ = ["LoadPlan", "Wish", "load", "plan", "straight"]

_WINDOW_BYTES = 256 << 20
"""Memory that what is cast or goes to another device streams through; more for a long tensor."""

_TENSORS_AHEAD = 2
"""How many of the longest tensor the window has room for: one is cast while the next is read."""


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
        Most memory of the host that the load holds at any time.
    kept_bytes : int
        What it holds of that in the end, for as long as the tensors are there.
    """

    files: tuple[str, ...]
    tensors: int
    tensor_bytes: int
    read_bytes: int
    peak_bytes: int
    kept_bytes: int

    def __str__(self) -> str:
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return (
            f"{self.tensors} tensors of {self.tensor_bytes} bytes from {files}: "
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
    mapped: bool = True


class _Work:
    """A load, planned: what is loaded as it is, what streams, and what both take."""

    def __init__(self, source: Source, frame: Frame, wish: Wish, handle: Handle) -> None:
        self.frame = frame
        self.wish = wish
        self.core = core_of(handle)
        self.device = frame.parse_device(wish.device)
        self.reached = self.device is not None and frame.reaches(self.device)
        self.target = None if wish.dtype is None else parse_cast(frame, wish.dtype)
        self.source = OpenSource(source)
        self.entries = self.source.entries(wish.keys)
        self.straight: list[str] = []
        self.codes: dict[str, str] = {}
        longest = 0
        for entry in self.entries:
            frame.check(entry.dtype, entry.shape)
            code = cast_code(entry.dtype, self.target)
            if self.device is None and code == entry.dtype:
                self.straight.append(entry.name)
            else:
                self.codes[entry.name] = code
                longest = max(longest, byte_count(entry.dtype, entry.shape))
        self.cast_bytes = 0 if self.device is not None else self._out_bytes(self.codes, padded)
        self.stream_bytes = max(_WINDOW_BYTES, _TENSORS_AHEAD * longest)
        self.plan = self._plan()

    def _plan(self) -> LoadPlan:
        straight = self._core_plan(self.straight)
        passing = self._core_plan(list(self.codes))
        staging_bytes = straight["peak_bytes"] - straight["region_bytes"]
        self.stream_bytes += staging_bytes
        window_bytes = min(self.stream_bytes - staging_bytes, passing["region_bytes"])
        if self.reached:
            window_bytes, staging_bytes = 0, straight["device_staging_bytes"]
        kept = straight["region_bytes"] + self.cast_bytes
        planned = LoadPlan(
            files=tuple(self.source.paths),
            tensors=len(self.entries),
            tensor_bytes=self._out_bytes(None, byte_count),
            read_bytes=straight["read_bytes"] + passing["read_bytes"],
            peak_bytes=kept + window_bytes + staging_bytes,
            kept_bytes=kept,
        )
        if self.wish.budget is not None:
            refuse_beyond(planned, parse_size(self.wish.budget, "budget"))
        return planned

    def _core_plan(self, names: list[str]) -> dict[str, int]:
        return _forebay.plan_load(self.core, self.source.core, names, None)

    def _out_bytes(self, names: Any, count: Callable[[str, tuple[int, ...]], int]) -> int:
        """Return what tensors take as they are handed out."""
        return sum(
            count(cast_code(entry.dtype, self.target), entry.shape)
            for entry in self.entries
            if names is None or entry.name in names
        )


def plan(source: Source, frame: Frame, wish: Wish, handle: Handle | None) -> LoadPlan:
    """Return what a load takes, without reading more than the headers."""
    return _Work(source, frame, wish, given_or_shared(handle)).plan


def load(source: Source, frame: Frame, wish: Wish, handle: Handle | None) -> dict[str, Any]:
    """Return the tensors that are asked for, by name, in the order of the files."""
    handle = given_or_shared(handle)
    if wish == Wish(verify=wish.verify, mapped=wish.mapped):
        # Nothing to choose or to convert: no need to look at each tensor first.
        return dict(straight(OpenSource(source), frame, None, wish, handle))
    work = _Work(source, frame, wish, handle)
    found: dict[str, Any] = {}
    if work.straight:
        found.update(straight(work.source, frame, work.straight, wish, handle))
    if work.codes:
        found.update(_to_device(work, handle) if work.reached else _streamed(work, handle))
    return {entry.name: found[entry.name] for entry in work.entries}


def straight(
    source: OpenSource, frame: Frame, names: list[str] | None, wish: Wish, handle: Handle
) -> Iterable[tuple[str, Any]]:
    """Return tensors as they are in the files, over regions that few large reads have filled."""
    import numpy as np

    regions, tensors = _forebay.load_tensors(
        core_of(handle), source.core, names, wish.verify, None, wish.mapped
    )
    tell(handle)
    memories = [np.asarray(region) for region in regions]
    for name, dtype, extents, region, offset in tensors:
        shape = tuple(extents)
        memory = memories[region][offset : offset + byte_count(dtype, shape)]
        yield name, frame.over(memory, dtype, shape)


def _to_device(work: _Work, handle: Handle) -> Iterable[tuple[str, Any]]:
    frame = work.frame
    arrays = DeviceLoad(work.source, frame, work.device, work.entries, work.wish.verify, handle)
    with contextlib.closing(arrays):
        for entry, array in arrays:
            code = work.codes[entry.name]
            yield entry.name, array if code == entry.dtype else frame.cast(array, code)


def _streamed(work: _Work, handle: Handle) -> Iterable[tuple[str, Any]]:
    import numpy as np

    frame = work.frame
    casts = None if work.device is not None else room(handle, work.cast_bytes)
    begin = 0
    stream = _forebay.TensorStream(
        work.core, work.source.core, list(work.codes), work.stream_bytes, work.wish.verify, None
    )
    for name, dtype, extents, buffer, offset in stream:
        shape = tuple(extents)
        memory = np.asarray(buffer)[offset : offset + byte_count(dtype, shape)]
        array = frame.over(memory, dtype, shape)
        code = work.codes[name]
        if casts is None:
            yield name, frame.move(array, work.device, code)
        else:
            target = frame.over(casts[begin : begin + byte_count(code, shape)], code, shape)
            frame.copy(target, array)
            begin += padded(code, shape)
            yield name, target
        # Before the next is asked for: the window has room for it then.
        del array, memory, buffer
    tell(handle)


def refuse_beyond(planned: LoadPlan, budget_bytes: int) -> None:
    """Refuse a load that takes more than its budget, with the numbers."""
    if planned.peak_bytes > budget_bytes:
        raise OutOfMemoryError(
            f"the load takes {planned.peak_bytes} bytes at the peak ({planned.tensors} tensors of "
            f"{planned.tensor_bytes} bytes), the budget is {budget_bytes}: raise it, load fewer "
            "keys, or stream",
            wanted=planned.peak_bytes,
        )
