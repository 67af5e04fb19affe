"""What a load to a GPU can't beat: the drive, and a copy between page-locked memory and the GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.on_device import OnDevice, settled
from forebay.bench.subjects.ours import Pinned
from forebay.bench.subjects.subject import Timing, no_device, sizes_of

if TYPE_CHECKING:
    from forebay.bench.subjects.subject import Settings

__all__ = ["HostMemory", "PinnedCopy"]

_COPY_BYTES = 1 << 30


class PinnedCopy(OnDevice):
    """Copies of 1 GiB by torch, from page-locked memory to the device and back.

    Their time is scaled to the bytes of the tensors.
    """

    name = "pinned-copy"
    title = "copy of pinned memory"
    package = "torch"
    checked = False
    has_file = False
    _host: Any = None
    _there_block: Any = None

    def setup(self, directory: str) -> str:
        """Have memory on both sides; return the name of the device."""
        import torch

        super().setup(directory)
        device = torch.device(self._device)
        is_cuda = device.type == "cuda"
        self._host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        return torch.cuda.get_device_name(device) if is_cuda else self._device

    def fill(self) -> bool:
        """Have memory on the device."""
        self.clear()
        return False

    def clear(self) -> None:
        """Have memory on the device."""
        import torch

        self._there_block = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._device)
        settled(self._device)

    def store(self, path: str) -> Timing:  # noqa: ARG002 (no file has a part in it)
        """Copy from the device."""
        return self._timed(self._host, self._there_block)

    def load(self, path: str) -> Timing:  # noqa: ARG002 (no file has a part in it)
        """Copy to the device."""
        return self._timed(self._there_block, self._host)

    def release(self) -> None:
        """Let go of the device's memory."""
        self._there_block = None
        super().release()

    def _timed(self, target: Any, source: Any) -> Timing:
        cpu, start = time.process_time(), time.perf_counter()
        target.copy_(source, non_blocking=True)
        settled(self._device)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        share = sum(sizes_of(self._tensors)) / _COPY_BYTES
        return Timing(seconds * share, cpu * share)


class HostMemory(Pinned):
    """Forebay between the drive and pinned memory of the host: the drive, where fio isn't here."""

    name = "host-memory"
    title = "forebay, to host memory"

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        return super().unavailable(settings) or no_device(settings.device)
