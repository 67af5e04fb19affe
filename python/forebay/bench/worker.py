"""The process of one subject: does what it is told, and says what it took.

``python -m forebay.bench.worker WHAT NAME DESCRIPTOR`` reads a line of JSON for each step on
standard input and answers each with one on what was standard output; what libraries print goes to
standard error. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

from forebay.bench.background import measure_background
from forebay.bench.payload import Layout, SharedTensors
from forebay.bench.subjects import COMPARISONS
from forebay.bench.subjects.subject import Settings, Subject, Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.tensor import Bytes, Tensor

__all__ = ["main"]

_PAGE_BYTES = 4096


class _Work:
    """A subject and its tensors."""

    def __init__(self, what: str, name: str, number: int) -> None:
        self._kind = COMPARISONS[what][name]
        # Files are compared by every byte, since some that map them defer work to each page. What
        # is on a GPU has been copied there.
        self._touch = {"files": read_all, "tensors": touched}.get(what)
        self._sums: list[int] | None = None
        self._number = number
        self._shared: SharedTensors | None = None
        self._subject: Subject | None = None

    def setup(self, step: dict[str, Any]) -> dict[str, Any]:
        """Get ready, or say why that can't be."""
        settings = Settings(step["fio"], step["compile"], step["device"])
        try:
            reason = self._kind.unavailable(settings)
        except Exception as error:
            reason = _first_line(error)
        if reason is not None or step["look"]:
            return {"unavailable": reason}
        self._shared = SharedTensors(self._number, Layout(**step["layout"]))
        subject = self._kind(self._shared.tensors, settings)
        detail = subject.setup(step["directory"])
        self._subject = subject
        return {"unavailable": None, "version": subject.version(), "detail": detail}

    def store(self, step: dict[str, Any]) -> dict[str, Any]:
        """Store all tensors."""
        subject, shared = self._ready()
        size = sum(tensor.data.nbytes for tensor in shared.tensors)
        with _Memory(size) as memory:
            if subject.fill():
                # What it has copied is its one copy.
                shared.let_go()
            else:
                touched([tensor.data for tensor in shared.tensors])
            memory.reset()
            _, took = _timed(subject.store, step["path"])
        self._let_go()
        return {**took, "extra_bytes": memory.extra_bytes}

    def load(self, step: dict[str, Any]) -> dict[str, Any]:
        """Load all tensors, and compare them where that was asked for."""
        subject, shared = self._ready()
        size = sum(tensor.data.nbytes for tensor in shared.tensors)
        touch = self._touch
        # Host memory holds a copy only where tensors are loaded to it.
        with _Memory(0 if touch is None else size) as memory:
            subject.clear()
            loaded, took = _timed(subject.load, step["path"])
            if isinstance(loaded, list) and touch is not None:
                _, more = _timed(touch, loaded)
                took = {name: took[name] + added for name, added in more.items()}
        if isinstance(loaded, list) and touch is not None:
            # Now that all is in memory, it is known how much of that was no loading.
            _, again = _timed(touch, loaded)
            took["touch_seconds"] = again["seconds"]
        if subject.checked:
            took["differs"] = self._difference(loaded, every_byte=step["compare"])
        del loaded
        self._let_go()
        return {**took, "extra_bytes": memory.extra_bytes}

    def _difference(self, loaded: list[Any], *, every_byte: bool) -> str | None:
        """Return the first tensor that came back with different bytes, or None."""
        subject, shared = self._ready()
        if every_byte:
            found = difference(shared.tensors, subject.on_host(loaded))
            self._sums = subject.sums(loaded)
            return found
        if self._sums is None:
            return None
        rows = zip(shared.tensors, subject.sums(loaded) or [], self._sums, strict=True)
        return next((tensor.name for tensor, mine, right in rows if mine != right), None)

    def background(self, step: dict[str, Any]) -> dict[str, Any]:
        """Save all tensors while the program goes on."""
        subject, shared = self._ready()
        took = measure_background(subject, shared.tensors, step["path"])
        self._let_go()
        return took

    def _ready(self) -> tuple[Subject, SharedTensors]:
        if self._subject is None or self._shared is None:
            message = "it isn't set up"
            raise RuntimeError(message)
        return self._subject, self._shared

    def _let_go(self) -> None:
        subject, shared = self._ready()
        subject.release()
        gc.collect()
        shared.let_go()


class _Memory:
    """The most memory that a turn had resident, above what was there and one copy of the tensors.

    ``None`` where the kernel doesn't let its mark be reset (``/proc/self/clear_refs``).
    """

    extra_bytes: int | None = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> _Memory:  # noqa: PYI034 (typing.Self is in 3.11)
        self._before: int | None = None
        self.reset()
        return self

    def reset(self) -> None:
        """Forget the most so far."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
            file.flush()
            if self._before is None:
                self._before = _status("VmRSS")

    def __exit__(self, *_: object) -> None:
        peak = _status("VmHWM")
        if self._before is not None and peak is not None:
            self.extra_bytes = max(0, peak - self._before - self._size)


def _status(field: str) -> int | None:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def _timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, Any]]:
    cpu, start = _cpu_seconds(), time.perf_counter()
    answer = work(*arguments)
    seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
    if isinstance(answer, Timing):
        seconds, cpu = answer.seconds, answer.cpu_seconds
    return answer, {"seconds": seconds, "cpu_seconds": cpu}


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def touched(loaded: Any) -> Any:
    """Touch every page: a way that only maps the file has not loaded it yet."""
    if isinstance(loaded, list):
        for array in loaded:
            array[::_PAGE_BYTES].sum()
    return loaded


def read_all(loaded: Sequence[Bytes]) -> int:
    """Read every byte: return the sum of all words of eight bytes, and of the bytes behind them."""
    import numpy as np

    total = 0
    for array in loaded:
        whole = array.nbytes // 8 * 8
        total += int(array[:whole].view(np.uint64).sum()) + int(array[whole:].sum())
    return total


def difference(tensors: Sequence[Tensor], loaded: Sequence[Bytes]) -> str | None:
    """Return the first tensor that came back with different bytes, or None."""
    import numpy as np

    for tensor, array in zip(tensors, loaded, strict=True):
        if not np.array_equal(tensor.data, array):
            return tensor.name
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main(arguments: Sequence[str]) -> int:
    """Do what standard input says; return the exit code."""
    what, name, number = arguments
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    work = _Work(what, name, int(number))
    for line in sys.stdin:
        step = json.loads(line)
        try:
            answer = getattr(work, step["do"])(step)
        except Exception as error:
            code = error.errno if isinstance(error, OSError) else None
            answer = {"failed": f"{type(error).__name__}: {_first_line(error)}", "errno": code}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
