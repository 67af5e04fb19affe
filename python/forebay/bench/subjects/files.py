"""Rivals for files of tensors, where what `frameworks` and `loaders` do isn't what is compared.

Those that store nothing are given the safetensors file that all of them load.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING

from forebay.bench.subjects.frameworks import DistributedCheckpoint, StateDict, Torch
from forebay.bench.subjects.subject import Settings, missing

if TYPE_CHECKING:
    from forebay.bench.tensor import Bytes

__all__ = ["HuggingFaceReader", "MappedTorch", "SafetensorsPread"]


class SafetensorsPread(StateDict):
    """The reader of ``safetensors`` that reads where the usual one maps."""

    name = "safetensors-pread"
    title = "safetensors pread"
    package = "safetensors"
    stores = False

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := super().unavailable(settings):
            return reason
        from safetensors.torch import load_file

        known = inspect.signature(load_file).parameters
        return None if "backend" in known else "this version only maps; 0.8 has pread"

    def load(self, path: str) -> list[Bytes]:
        """Load a state dict."""
        from safetensors.torch import load_file

        return self._bytes(load_file(path, backend="pread"))


class MappedTorch(Torch):
    """``torch.load`` that maps what ``torch.save`` wrote."""

    name = "torch-mmap"
    title = "torch.load(mmap)"
    store_is_timed = False

    def load(self, path: str) -> list[Bytes]:
        """Load a state dict."""
        import torch

        return self._bytes(torch.load(path, weights_only=True, mmap=True))


class HuggingFaceReader(DistributedCheckpoint):
    """The reader of safetensors files of ``torch.distributed.checkpoint``, in one process."""

    name = "dcp-hf"
    title = "DCP Hugging Face"
    stores = False

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := super().unavailable(settings) or missing("safetensors"):
            return reason
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: F401

        return None

    def load(self, path: str) -> list[Bytes]:
        """Load the only safetensors file of a directory in place."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        target = self._target or {}
        reader = HuggingFaceStorageReader(os.path.dirname(path))
        load(target, storage_reader=reader, no_dist=True)
        return self._bytes(target)
