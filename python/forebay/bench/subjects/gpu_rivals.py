"""How people load weights to GPUs today, and store tensors from there.

Loaders that store nothing are given a safetensors file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.native import HANDLE, DeepNvme, kvikio_threads, moved, no_kvikio
from forebay.bench.subjects.on_device import InPlace, OnDevice, settled
from forebay.bench.subjects.subject import Settings, missing, no_device, pieces_of, sync

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.bench.tensor import Bytes, Tensor

__all__ = [
    "AioThroughHost",
    "FastSafetensorsGds",
    "FastSafetensorsHost",
    "GdsHandle",
    "InstantTensorGpu",
    "KvikioGpu",
    "RunaiGpu",
    "SafetensorsGpu",
    "TorchGpu",
    "TorchThenCuda",
]


_BY_HOST = "by way of the host"
_BY_CUFILE = "by cuFile, which may go there too"
_CUFILE_COPIER = "GdsFileCopier"


class TorchGpu(OnDevice):
    """``torch.save``, and ``torch.load`` with ``map_location``."""

    name = "torch"
    title = "torch.load(map_location)"
    package = "torch"

    def store(self, path: str) -> None:
        """Save a state dict."""
        import torch

        with open(path, "wb") as file:
            torch.save(self._there, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Any]:
        """Load a state dict."""
        import torch

        return self._loaded(torch.load(path, map_location=self._device, weights_only=True))


class TorchThenCuda(TorchGpu):
    """``torch.load`` to the host, then ``.cuda()`` for each tensor."""

    name = "torch-cuda"
    title = "torch.load, .cuda()"
    store_is_timed = False

    def load(self, path: str) -> list[Any]:
        """Load a state dict."""
        import torch

        state = torch.load(path, map_location="cpu", weights_only=True)
        return self._loaded({name: tensor.to(self._device) for name, tensor in state.items()})


class SafetensorsGpu(OnDevice):
    """``save_file`` and ``load_file`` with a device."""

    name = "safetensors"
    title = "safetensors"
    package = "safetensors"

    def store(self, path: str) -> None:
        """Save a state dict."""
        from safetensors.torch import save_file

        save_file(self._there, path)
        sync(path)  # its writer doesn't

    def load(self, path: str) -> list[Any]:
        """Load a state dict."""
        from safetensors.torch import load_file

        return self._loaded(load_file(path, device=self._device))


class FastSafetensorsHost(OnDevice):
    """``fastsafetensors``, by way of the host."""

    name = "fastsafetensors"
    title = "fastsafetensors"
    package = "fastsafetensors"
    stores = False
    _without_gds = True
    _buffer: Any = None

    def load(self, path: str) -> list[Any]:
        """Load all tensors."""
        loader = self._loader()
        try:
            loader.add_filenames({0: [path]})
            self._buffer = loader.copy_files_to_device()
        finally:
            loader.close()
        return self._loaded({name: self._buffer.get_tensor(name) for name in self._names})

    def release(self) -> None:
        """Let go of the memory that the tensors are views of."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        super().release()

    def _loader(self) -> Any:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        return SafeTensorsFileLoader(SingleGroup(), device=self._device, nogds=self._without_gds)


class FastSafetensorsGds(FastSafetensorsHost):
    """``fastsafetensors`` by cuFile, where it takes that.

    It goes by way of the host, with a warning only, where there is no ``/dev/nvidia-fs0``.
    """

    name = "fastsafetensors-gds"
    title = "fastsafetensors, cuFile"
    _without_gds = False

    def setup(self, directory: str) -> str:
        """Bring the device up, and say whether cuFile is used."""
        super().setup(directory)
        loader = self._loader()
        copier = getattr(loader, "copier_class", None)
        loader.close()
        if copier is None:
            return "by cuFile, or by way of the host: this version doesn't tell"
        return _BY_CUFILE if copier.__name__ == _CUFILE_COPIER else _BY_HOST


class RunaiGpu(OnDevice):
    """Run:ai's Model Streamer."""

    name = "runai"
    title = "Run:ai Model Streamer"
    package = "runai-model-streamer"
    stores = False

    def load(self, path: str) -> list[Any]:
        """Stream all tensors, each to the device when it is here."""
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path, device=self._device)
            state = {name: tensor.to(self._device) for name, tensor in streamer.get_tensors()}
            return self._loaded(state)


class InstantTensorGpu(OnDevice):
    """InstantTensor."""

    name = "instanttensor"
    title = "InstantTensor"
    package = "instanttensor"
    stores = False

    def load(self, path: str) -> list[Any]:
        """Load all tensors."""
        from instanttensor import safe_open

        with safe_open(path, framework="pt", device=self._device) as file:
            return self._loaded(dict(file.tensors()))


class KvikioGpu(InPlace):
    """NVIDIA's ``kvikio`` between files and the device's memory."""

    name = "kvikio"
    title = "kvikio"
    package = "kvikio"

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        return no_kvikio() or super().unavailable(settings)

    def setup(self, directory: str) -> str:
        """Bring the device up, and say whether cuFile is used."""
        super().setup(directory)
        from kvikio import defaults

        way = _BY_HOST if defaults.is_compat_mode_preferred() else _BY_CUFILE
        return f"{way}; {kvikio_threads()}"

    def store(self, path: str) -> None:
        """Write all tensors."""
        import kvikio

        with kvikio.CuFile(path, "w") as file:
            for tensor, offset in self._placed(self._there):
                moved(file.write(tensor, file_offset=offset), tensor, path)
        sync(path)

    def load(self, path: str) -> list[Any]:
        """Read all tensors."""
        import kvikio

        with kvikio.CuFile(path, "r") as file:
            for tensor, offset in self._placed(self._target):
                moved(file.read(tensor, file_offset=offset), tensor, path)
        return self._loaded(self._target)

    def _placed(self, state: dict[str, Any]) -> list[tuple[Any, int]]:
        """Return each tensor with its place in the file."""
        placed, offset = [], 0
        for name in self._names:
            placed.append((state[name], offset))
            offset += state[name].nbytes
        return placed


class _Whole(OnDevice):
    """All tensors in one block of the device, padded as DeepNVMe's files are."""

    package = "deepspeed"

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._host = DeepNvme(tensors, settings)
        self._block: Any = None

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        return DeepNvme.unavailable(settings) or no_device(settings.device)

    def fill(self) -> bool:
        """Copy the tensors to the block."""
        import torch

        self.clear()
        for piece, tensor in zip(self._pieces(), self._tensors, strict=True):
            piece.copy_(torch.from_numpy(tensor.data))
        settled(self._device)
        return True

    def clear(self) -> None:
        """Have a wiped block."""
        import torch

        if self._block is None:
            self._block = torch.empty(
                self._host.padded_bytes(), dtype=torch.uint8, device=self._device
            )
        self._block.zero_()
        settled(self._device)

    def on_host(self, loaded: list[Any]) -> list[Bytes]:
        """Return the bytes of what was loaded."""
        return [piece.cpu().numpy() for piece in loaded]

    def release(self) -> None:
        """Let go of the block."""
        self._block = None
        super().release()

    def _pieces(self) -> list[Any]:
        return pieces_of(self._block, self._tensors)


class AioThroughHost(_Whole):
    """DeepSpeed's ``aio_handle`` and its page-locked memory, and a copy from or to the device."""

    name = "deepnvme"
    title = "DeepNVMe aio_handle, copy"

    def setup(self, directory: str) -> str | None:
        """Bring the device up, and make a handle."""
        super().setup(directory)
        return self._host.setup(directory)

    def fill(self) -> bool:
        """Copy the tensors to the device, and have page-locked memory."""
        self._host.clear()
        return super().fill()

    def store(self, path: str) -> None:
        """Copy the block to the host, and write it."""
        self._host.block.copy_(self._block, non_blocking=True)
        settled(self._device)
        self._host.store(path)

    def clear(self) -> None:
        """Have wiped blocks on both sides."""
        self._host.clear()
        super().clear()

    def load(self, path: str) -> list[Any]:
        """Read the block, and copy it to the device."""
        self._host.load(path)
        self._block.copy_(self._host.block, non_blocking=True)
        settled(self._device)
        return self._pieces()

    def release(self) -> None:
        """Let go of both blocks."""
        self._host.release()
        super().release()


class GdsHandle(_Whole):
    """DeepSpeed's ``gds_handle`` with its registered device memory."""

    name = "deepnvme-gds"
    title = "DeepNVMe gds_handle"
    _handle: Any = None

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := missing("deepspeed") or missing("torch") or no_device(settings.device):
            return reason
        from forebay.deepspeed import hook

        if hook.status()["enabled"]:
            return "DeepSpeed takes Forebay's own here: forebay deepspeed disable"
        return None if settings.compile else "it may have to be compiled: pass --compile"

    def setup(self, directory: str) -> str | None:
        """Load, or compile, the operator, and make a handle."""
        super().setup(directory)
        from deepspeed.ops.op_builder import GDSBuilder

        operator = GDSBuilder().load(verbose=False)
        # It leaves a local_cufile.json where the process is.
        with tempfile.TemporaryDirectory(dir=directory) as path, _working_in(path):
            self._handle = operator.gds_handle(*HANDLE)
        return "its own registered memory; the host where cuFile is in compatibility mode"

    def clear(self) -> None:
        """Have a wiped block that cuFile knows."""
        import torch

        if self._block is None:
            like = torch.empty(0, dtype=torch.uint8, device=self._device)
            size = self._host.padded_bytes()
            self._block = self._handle.new_pinned_device_tensor(size, like)
        super().clear()

    def store(self, path: str) -> None:
        """Write the block."""
        self._handle.sync_pwrite(self._block, path)
        sync(path)

    def load(self, path: str) -> list[Any]:
        """Read the block."""
        self._handle.sync_pread(self._block, path)
        settled(self._device)
        return self._pieces()

    def release(self) -> None:
        """Let go of the block."""
        if self._block is not None:
            self._handle.free_pinned_device_tensor(self._block)
        super().release()


@contextlib.contextmanager
def _working_in(path: str) -> Iterator[None]:
    """Have a working directory for a while."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
