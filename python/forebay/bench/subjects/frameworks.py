"""How people store state dicts today: torch.save, safetensors, torch's distributed checkpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.subject import Settings, Subject, missing, sync

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.tensor import Bytes, Tensor

__all__ = [
    "TORCH_TYPES",
    "DistributedCheckpoint",
    "Safetensors",
    "StateDict",
    "Tensorizer",
    "Torch",
    "bytes_of",
]

TORCH_TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I16": "int16", "U16": "uint16",
    "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""The names that torch has for the types of safetensors."""


class StateDict(Subject):
    """A subject that takes tensors of torch by their names."""

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._names = [tensor.name for tensor in tensors]
        self._state = {tensor.name: _torch_tensor(tensor) for tensor in tensors}

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := missing("torch"):
            return f"torch is {reason}" if cls.package != "torch" else reason
        return super().unavailable(settings)

    def _bytes(self, state: Any) -> list[Bytes]:
        return [bytes_of(state[name]) for name in self._names]


class Torch(StateDict):
    """``torch.save`` and ``torch.load``."""

    name = "torch"
    title = "torch.save/load"
    package = "torch"

    def store(self, path: str) -> None:
        """Save a state dict."""
        import torch

        with open(path, "wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: str) -> list[Bytes]:
        """Load a state dict."""
        import torch

        return self._bytes(torch.load(path, weights_only=True))


class Safetensors(StateDict):
    """``save_file`` and ``load_file``."""

    name = "safetensors"
    title = "safetensors"
    package = "safetensors"

    def store(self, path: str) -> None:
        """Save a state dict."""
        from safetensors.torch import save_file

        save_file(self._state, path)
        sync(path)  # its writer doesn't

    def load(self, path: str) -> list[Bytes]:
        """Load a state dict."""
        from safetensors.torch import load_file

        return self._bytes(load_file(path))


class DistributedCheckpoint(StateDict):
    """``torch.distributed.checkpoint`` in one process, which loads into tensors that are there."""

    name = "dcp"
    title = "torch DCP"
    package = "torch"
    _target: dict[str, Any] | None = None

    def store(self, path: str) -> None:
        """Save a state dict."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state, checkpoint_id=path, no_dist=True)
        sync(path)

    def clear(self) -> None:
        """Have wiped tensors."""
        import torch

        if self._target is None:
            self._target = {name: torch.empty_like(self._state[name]) for name in self._names}
        for tensor in self._target.values():
            tensor.zero_()

    def load(self, path: str) -> list[Bytes]:
        """Load a state dict in place."""
        from torch.distributed.checkpoint.state_dict_loader import load

        target = self._target or {}
        load(target, checkpoint_id=path, no_dist=True)
        return self._bytes(target)

    def release(self) -> None:
        """Let go of the tensors."""
        self._target = None


class Tensorizer(StateDict):
    """CoreWeave's ``tensorizer``."""

    name = "tensorizer"
    title = "tensorizer"
    package = "tensorizer"

    def store(self, path: str) -> None:
        """Serialize a state dict."""
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(path)
        serializer.write_state_dict(self._state)
        serializer.close()
        sync(path)

    def load(self, path: str) -> list[Bytes]:
        """Deserialize a state dict."""
        from tensorizer import TensorDeserializer

        with TensorDeserializer(path, device="cpu") as state:
            return self._bytes(dict(state.items()))


def _torch_tensor(tensor: Tensor) -> Any:
    import torch

    dtype = getattr(torch, TORCH_TYPES[tensor.dtype])
    if not tensor.data.nbytes:
        # An array of no bytes has a stride that torch won't view as a wider type.
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.from_numpy(tensor.data).view(dtype).reshape(tensor.shape)


def bytes_of(tensor: Any) -> Bytes:
    """Return the bytes of a tensor of torch."""
    import torch

    array: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return array
