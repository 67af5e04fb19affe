"""Tensors that are on a device: what subjects share that store from there and load to there.

Storing begins with the tensors on the device, and loading ends with them there: a subject waits for
the device before it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.frameworks import StateDict, bytes_of
from forebay.bench.subjects.subject import Settings, no_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.tensor import Bytes, Tensor

__all__ = ["InPlace", "OnDevice", "settled"]

_WORD_BYTES = 8


class OnDevice(StateDict):
    """A subject whose tensors are on a device."""

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._device = settings.device
        self._there: dict[str, Any] = {}

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        return super().unavailable(settings) or no_device(settings.device)

    def setup(self, directory: str) -> str | None:  # noqa: ARG002 (the same everywhere)
        """Bring the device up, which is no part of a store or a load, and make it the current one.

        InstantTensor waits for the current device only, and DeepNVMe allocates on it.
        """
        import torch

        if torch.device(self._device).type == "cuda":
            torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)
        settled(self._device)
        return None

    def fill(self) -> bool:
        """Copy the tensors to the device."""
        self._there = {name: tensor.to(self._device) for name, tensor in self._state.items()}
        settled(self._device)
        return True

    def release(self) -> None:
        """Let go of the device's memory, which others need."""
        import torch

        self._there = {}
        if torch.device(self._device).type == "cuda":
            torch.cuda.empty_cache()

    def on_host(self, loaded: list[Any]) -> list[Bytes]:
        """Return the bytes of what was loaded."""
        return [bytes_of(tensor.cpu()) for tensor in loaded]

    def sums(self, loaded: list[Any]) -> list[int]:
        """Return the sum of each tensor's words of eight bytes, and of the bytes behind them."""
        return [_sum(tensor) for tensor in loaded]

    def _loaded(self, state: Any) -> list[Any]:
        settled(self._device)
        return [state[name] for name in self._names]


class InPlace(OnDevice):
    """A subject that loads into memory of the device that is there."""

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._target: dict[str, Any] = {}

    def clear(self) -> None:
        """Have wiped tensors."""
        import torch

        for name, tensor in self._state.items():
            self._target[name] = torch.zeros_like(tensor, device=self._device)
        settled(self._device)

    def release(self) -> None:
        """Let go of the device's memory."""
        self._target = {}
        super().release()


def settled(device: str) -> None:
    """Wait for all that was put on a device."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _sum(tensor: Any) -> int:
    import torch

    flat = tensor.reshape(-1).view(torch.uint8)
    whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
    # A copy: words begin at multiples of their size, which tensors of a file needn't.
    words = flat[:whole].clone().view(torch.int64)
    return int(words.sum()) + int(flat[whole:].sum(dtype=torch.int64))
