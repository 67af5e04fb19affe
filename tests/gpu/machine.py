"""What the tests ask of a machine: its GPUs, their streams, and what a process holds.

In a dry run, the device is the processor: it has one order of events, so waiting for it and keeping
it busy is nothing, and all of what the tests compare is compared.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

CHILD_SECONDS_MAX = 110
_BUSY_CYCLES = 100_000_000
"""How long a stream is kept busy: some hundredths of a second at the clock rates of GPUs."""


@cache
def missing() -> str | None:
    """Return why there is no GPU to test on, or None."""
    try:
        with warnings.catch_warnings():
            # Installations warn of other packages when torch looks for GPUs.
            warnings.simplefilter("ignore")
            import torch

            if torch.version.hip is not None:
                return f"torch {torch.__version__} is built for ROCm, not for CUDA"
            if torch.version.cuda is None:
                return f"torch {torch.__version__} is built without CUDA"
            if not torch.cuda.is_available():
                return f"torch {torch.__version__} finds no CUDA device"
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return None


def devices(asked: str | None) -> list[str]:
    """Return the devices to test on: what was asked for, else all GPUs there are."""
    if asked is not None:
        return [asked]
    if missing() is not None:
        return []
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


class Gpu:
    """A GPU, or the processor in a dry run."""

    def __init__(self, name: str) -> None:
        import torch

        self.name = name
        self.device = torch.device(name)
        self.is_real = self.device.type == "cuda"

    def bytes(self, length: int, seed: int = 0) -> Any:
        """Return a tensor of random bytes there: a block in the wrong place, or twice, shows."""
        import torch

        return torch.from_numpy(pattern(length, seed)).to(self.device)

    def empty(self, length: int) -> Any:
        """Return a tensor of zeros there."""
        import torch

        return torch.zeros(length, dtype=torch.uint8, device=self.device)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a new stream is the current one."""
        import torch

        return torch.cuda.stream(torch.cuda.Stream(self.device)) if self.is_real else _nothing()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this is the current device."""
        import torch

        return torch.cuda.device(self.device) if self.is_real else _nothing()

    def keep_busy(self) -> None:
        """Keep the current stream busy: what is put there next begins late."""
        import torch

        if self.is_real:
            with self.current():
                torch.cuda._sleep(_BUSY_CYCLES)

    def synchronize(self) -> None:
        """Wait for all that was put on the device."""
        import torch

        if self.is_real:
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Have torch give back the memory that it keeps."""
        import torch

        if self.is_real:
            torch.cuda.empty_cache()

    def used_bytes(self) -> int:
        """Return the memory of the device that is in use, by all of its processes."""
        import torch

        if not self.is_real:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def pattern(length: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random bytes."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def contents(tensor: Any) -> bytes:
    """Return the bytes of a tensor, in the order of the current stream."""
    import torch

    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return bytes(flat.cpu().numpy().tobytes())


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    resident_bytes: int
    descriptors: int
    threads: int


def held() -> Held:
    """Look."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(resident, len(os.listdir("/proc/self/fd")), _thread_count())


def _thread_count() -> int:
    """Count the threads that aren't the kernel's, which come and go with io_uring."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = Path("/proc/self/task", thread, "comm").read_bytes()
            count += not name.startswith(b"iou-")
    return count


def resident_peak(*, reset: bool = False) -> int:
    """Return the most memory that was resident since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def start_child(code: str, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start code in an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish_child(child: subprocess.Popen[str]) -> str:
    """Wait for a child that is to end well; return what it printed."""
    try:
        output, errors = child.communicate(timeout=CHILD_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.communicate()
        raise AssertionError(f"hangs\n{output}\n{errors}") from None
    assert child.returncode == 0, f"exit {child.returncode}\n{output}\n{errors}"
    # What goes wrong while an interpreter ends is told there, and by no exit code.
    assert "Traceback" not in errors, errors
    return output


def run_child(code: str, *arguments: str | Path, **environment: str) -> str:
    """Run code in an interpreter of its own; return what it printed."""
    return finish_child(start_child(code, *arguments, **environment))
