"""What a checkpoint costs a training loop: ``make bench-checkpoints``.

In turns, medians of ratios:

- how long ``save_async`` keeps its caller, beside a copy of the state into memory that is there;
- how fast a compute loop runs on while a save is under way, beside itself alone;
- how long a synced save takes, beside ``torch.save`` and ``fsync``, where torch is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from forebay.checkpoint import Checkpointer

_TENSORS = 40
_ALONE_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=".", help="where to save")
    parser.add_argument("--size", type=int, default=1024, help="MiB of tensors")
    parser.add_argument("--pairs", type=int, default=7, help="turns")
    arguments = parser.parse_args()
    count = (arguments.size << 20) // 4 // _TENSORS
    random = np.random.default_rng(0)
    state = {str(index): random.random(count, dtype=np.float32) for index in range(_TENSORS)}
    directory = Path(tempfile.mkdtemp(prefix="forebay-checkpoints-", dir=arguments.dir))
    try:
        run(state, directory, arguments.pairs)
    finally:
        shutil.rmtree(directory)


def run(state: dict[str, Any], directory: Path, pairs: int) -> None:
    """Measure, and print what it came to."""
    copies = {key: np.ones_like(array) for key, array in state.items()}
    blocked: list[float] = []
    kept: list[float] = []
    total: list[float] = []
    budget = sum(array.nbytes for array in state.values()) * 5 // 4
    with Checkpointer(directory / "forebay", keep=1, budget=max(budget, 64 << 20)) as saver:
        first = saver.save_async(0, state)
        first.wait()
        first_blocked = first.blocked_seconds / copy(state, copies)
        for pair in range(1, pairs + 1):
            copying = copy(state, copies)
            alone = compute_for(_ALONE_SECONDS)
            operation = saver.save_async(pair, state)
            beside = compute(operation.done)
            operation.wait()
            blocked.append(operation.blocked_seconds / copying)
            kept.append(beside / alone)
            theirs = save_with_torch(state, directory / "torch.pt")
            if theirs is not None:
                total.append(theirs / operation.total_seconds)
    show("the first save_async, into fresh memory, × a copy", [first_blocked])
    show("save_async returns in, × a copy", blocked)
    show("compute loop beside a save, × alone", kept)
    if total:
        show("save to the end, × as fast as torch.save and fsync", total)


def copy(state: dict[str, Any], copies: dict[str, Any]) -> float:
    """Return the seconds that copying the state takes."""
    begin = time.perf_counter()
    for key, array in state.items():
        np.copyto(copies[key], array)
    return time.perf_counter() - begin


def compute_for(seconds: float) -> float:
    """Return the same as :func:`compute`, over a time."""
    end = time.monotonic() + seconds
    return compute(lambda: time.monotonic() >= end)


def compute(is_over: Any) -> float:
    """Return how often a second a loop on one core goes round until it is over."""
    matrix = np.random.default_rng(1).random((32, 32))
    rounds = 0
    begin = time.perf_counter()
    while rounds == 0 or not is_over():
        for _ in range(50):
            matrix = np.tanh(matrix)
            rounds += 1
    return rounds / (time.perf_counter() - begin)


def save_with_torch(state: dict[str, Any], path: Path) -> float | None:
    """Return the seconds that torch takes to save the state and sync the file."""
    try:
        import torch
    except ImportError:
        return None
    tensors = {key: torch.from_numpy(array) for key, array in state.items()}
    begin = time.perf_counter()
    torch.save(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def show(what: str, ratios: list[float]) -> None:
    """Print a median and its spread."""
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"{what:52} {middle:5.2f}  ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
