"""The stand-in's arrays as tensors of checkpoints: a framework beside torch and numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from forebay._tensor_files.rooms import Room
from forebay.checkpoint import arrays, decode, encode, load
from forebay.checkpoint.arrays import Plain
from standin_frame import Array, Bytes, StandinFrame

if TYPE_CHECKING:
    from collections.abc import Hashable

    import pytest


class StandinState:
    """What a checkpoint asks of a framework."""

    name = "stand-in"

    def __init__(self, frame: StandinFrame) -> None:
        self._frame = frame
        self.filled = 0

    def join(self, patch: pytest.MonkeyPatch) -> None:
        """Have checkpoints know it."""
        of, named = arrays.framework_of, arrays.framework_named

        def framework_of(value: Any) -> Any:
            return self if isinstance(value, Array) else of(value)

        def framework_named(name: str) -> Any:
            return self if name == self.name else named(name)

        for module in (encode, decode, load):
            patch.setattr(module, "framework_of", framework_of)
        patch.setattr(load, "framework_named", framework_named)

    def plain(self, tensor: Array) -> Plain:
        return Plain(tensor.dtype, tensor.shape, None)

    def identity(self, tensor: Array) -> Hashable:
        return (tensor.memory.address, tensor.dtype, tensor.shape)

    def contiguous(self, tensor: Array) -> Bytes:
        return tensor.memory

    def parse_device(self, device: Any) -> int | None:
        return None if device is None else self._frame.parse_device(device)

    def reaches(self, device: int) -> bool:
        return self._frame.reaches(device)

    def device(self, tensor: Array) -> int | None:
        return tensor.memory.allocation.device

    def move(self, tensor: Any, device: int) -> Any:
        raise AssertionError((tensor, device))

    def room(self, tensor: Array) -> Room:
        return Room(tensor.memory, tensor.memory.address, tensor.memory.nbytes)

    def empty(self, length: int, device: int) -> Bytes:
        return self._frame.empty(length, device)

    def clone(self, memory: Bytes) -> Bytes:
        return self._frame.clone(memory)

    def build(self, memory: Any, plain: Plain) -> Any:
        if isinstance(memory, Bytes):
            return Array(memory, plain.dtype, plain.shape)
        return self._frame.over(np.asarray(memory), plain.dtype, plain.shape)

    def refuse_target(self, tensor: Array) -> None:
        del tensor

    def fill(self, tensor: Array, source: Any) -> None:
        self.filled += 1
        tensor.memory.write(source.memory.read())
