"""Loaders of safetensors files: they store nothing, and are given a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.frameworks import StateDict
from forebay.bench.subjects.subject import Settings, no_device

if TYPE_CHECKING:
    from forebay.bench.tensor import Bytes

__all__ = ["FastSafetensors", "InstantTensor", "RunaiStreamer"]

_DEVICE = "cuda:0"
"""Where InstantTensor loads to: it takes no device without a number."""


class FastSafetensors(StateDict):
    """``fastsafetensors``, without GPUDirect Storage."""

    name = "fastsafetensors"
    title = "fastsafetensors"
    package = "fastsafetensors"
    stores = False
    _buffer: Any = None

    def load(self, path: str) -> list[Bytes]:
        """Load all tensors to the CPU."""
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        try:
            loader.add_filenames({0: [path]})
            self._buffer = loader.copy_files_to_device()
        finally:
            loader.close()
        return self._bytes({name: self._buffer.get_tensor(name) for name in self._names})

    def release(self) -> None:
        """Let go of the memory that the tensors are views of."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class RunaiStreamer(StateDict):
    """Run:ai's Model Streamer."""

    name = "runai"
    title = "Run:ai Model Streamer"
    package = "runai-model-streamer"
    stores = False

    def load(self, path: str) -> list[Bytes]:
        """Stream all tensors."""
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            return self._bytes(dict(streamer.get_tensors()))


class InstantTensor(StateDict):
    """``instanttensor``, which loads to a GPU."""

    name = "instanttensor"
    title = "InstantTensor"
    package = "instanttensor"
    stores = False

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        return super().unavailable(settings) or no_device(_DEVICE)

    def load(self, path: str) -> list[Bytes]:
        """Load all tensors to the GPU, and copy them from there."""
        from instanttensor import safe_open

        with safe_open(path, framework="pt", device=_DEVICE) as file:
            return self._bytes({name: tensor.cpu() for name, tensor in file.tensors()})
