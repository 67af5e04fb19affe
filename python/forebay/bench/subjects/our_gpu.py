"""Forebay between drives and GPUs: files of tensors, and handles by each route."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any, Literal

from forebay.bench.subjects.on_device import InPlace, OnDevice
from forebay.bench.subjects.subject import Settings, sizes_of
from forebay.errors import ForebayError
from forebay.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.tensor import Tensor

__all__ = ["AutoRoute", "FileToGpu", "ForeignToGpu", "GdsRoute", "HostRoute", "UnverifiedToGpu"]

_TRIAL_BYTES = 4 << 20


class FileToGpu(OnDevice):
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

    def setup(self, directory: str) -> str:
        """Bring the device up; return what is done about checksums."""
        super().setup(directory)
        return "checksums verified" if self._checksums else "no checksums"

    def store(self, path: str) -> None:
        """Save a state dict."""
        from forebay.torch import save_file

        save_file(self._there, path, durability="data", checksums=self._checksums)

    def load(self, path: str) -> list[Any]:
        """Load a state dict."""
        from forebay.torch import load_file

        return self._loaded(load_file(path, device=self._device, verify=self._checksums))


class UnverifiedToGpu(FileToGpu):
    """The same without checksums, which tells what they cost."""

    name = "forebay-unverified"
    title = "forebay, no checksums"
    _checksums = False


class ForeignToGpu(FileToGpu):
    """Loads the file that other loaders are given, which has no checksums."""

    name = "forebay-foreign"
    title = "forebay, others' file"
    stores = False

    def setup(self, directory: str) -> str:
        """Bring the device up; return what is done about checksums."""
        super().setup(directory)
        return "the file has no checksums, and data at no multiple of a page"


class AutoRoute(InPlace):
    """A handle that takes the best route there is: all tensors as one operation."""

    name = "forebay-auto"
    title = "forebay handle, auto"
    package = "forebay"
    _route: Literal["auto", "gds", "host"] = "auto"

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        super().__init__(tensors, settings)
        self._handle = Handle(device_route=self._route)
        self._offsets = list(itertools.accumulate(sizes_of(tensors), initial=0))[:-1]

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:
        """Return why it can't be compared here, or None."""
        if reason := super().unavailable(settings):
            return reason
        try:
            Handle(device_route=cls._route).close()
        except ForebayError as error:
            return str(error)
        return None

    def setup(self, directory: str) -> str:
        """Move a few bytes; return which way they went."""
        import torch

        super().setup(directory)
        path = os.path.join(directory, f"{self.name}-trial")
        trial = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, device=self._device)
        try:
            self._handle.store(trial, path)
        finally:
            if os.path.exists(path):
                os.unlink(path)
        stats = self._handle.stats()
        ways = {way["route"] for way in stats["device_routes"].values()}
        return f"engine {stats['engine']}, route {', '.join(sorted(ways)) or 'none'}"

    def store(self, path: str) -> None:
        """Write all tensors as one operation."""
        tensors = (self._there[name] for name in self._names)
        items = zip(tensors, itertools.repeat(path), self._offsets, strict=False)
        self._handle.store_many(items, whole_file=True, durability="data")

    def load(self, path: str) -> list[Any]:
        """Read all tensors as one operation."""
        tensors = (self._target[name] for name in self._names)
        self._handle.load_many(zip(tensors, itertools.repeat(path), self._offsets, strict=False))
        return self._loaded(self._target)


class HostRoute(AutoRoute):
    """The same by way of the host's memory."""

    name = "forebay-host"
    title = "forebay handle, host route"
    _route = "host"


class GdsRoute(AutoRoute):
    """The same by GPUDirect Storage, where that is really direct."""

    name = "forebay-gds"
    title = "forebay handle, GDS"
    _route = "gds"
