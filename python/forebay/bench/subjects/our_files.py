"""Forebay's files of tensors: safetensors files with and without checksums, and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.bench.subjects.frameworks import StateDict
from forebay.bench.subjects.subject import Save, Settings, missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.tensor import Bytes, Tensor

__all__ = ["Checkpoint", "Foreign", "Unverified", "Verified"]


class Verified(StateDict):
    """``forebay.torch``: checksums are written, and verified when loading."""

    name = "forebay"
    title = "forebay"
    package = "forebay"
    _checksums = True

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := super().unavailable(settings):
            return reason
        from forebay.torch import load_file, save_file  # noqa: F401

        return None

    def setup(self, directory: str) -> str:  # noqa: ARG002 (the same everywhere)
        """Return what is done about checksums."""
        return "checksums verified" if self._checksums else "no checksums"

    def store(self, path: str) -> None:
        """Save a state dict."""
        from forebay.torch import save_file

        save_file(self._state, path, durability="full", checksums=self._checksums)

    def load(self, path: str) -> list[Bytes]:
        """Load a state dict."""
        from forebay.torch import load_file

        return self._bytes(load_file(path, verify=self._checksums))


class Unverified(Verified):
    """The same without checksums, which tells what they cost."""

    name = "forebay-unverified"
    title = "forebay, no checksums"
    _checksums = False


class Foreign(Verified):
    """Loads the file that other loaders are given, which has no checksums."""

    name = "forebay-foreign"
    title = "forebay, others' file"
    stores = False

    def setup(self, directory: str) -> str:  # noqa: ARG002 (the same everywhere)
        """Return what is done about checksums."""
        return "the file has no checksums, and data at no multiple of a page"


class Checkpoint(StateDict):
    """``forebay.checkpoint``, which also saves in the background."""

    name = "forebay-checkpoint"
    title = "forebay checkpoint"
    package = "forebay"
    in_background = True

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._step = 0
        self._checkpoints: Any = None

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := super().unavailable(settings):
            return reason
        if missing("forebay.checkpoint"):
            return "this forebay has no checkpoints"
        from forebay.checkpoint import Checkpointer  # noqa: F401

        return None

    def store(self, path: str) -> None:
        """Save a checkpoint."""
        from forebay.checkpoint import Checkpointer

        with Checkpointer(path, keep=1, durability="full") as checkpoints:
            checkpoints.save(self._next_step(), self._state)

    def save_async(self, path: str) -> Save:
        """Begin to save a checkpoint, by a checkpointer that stays for the next."""
        from forebay.checkpoint import Checkpointer

        if self._checkpoints is None:
            self._checkpoints = Checkpointer(path, keep=1, durability="full")
        save: Save = self._checkpoints.save_async(self._next_step(), self._state)
        return save

    def load(self, path: str) -> list[Bytes]:
        """Load a checkpoint."""
        from forebay.checkpoint import Checkpointer

        with Checkpointer(path) as checkpoints:
            return self._bytes(checkpoints.load())

    def _next_step(self) -> int:
        self._step += 1
        return self._step
