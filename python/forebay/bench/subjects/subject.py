"""What is compared: a way to store and load tensors, and how to tell whether it is here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.tensor import Bytes, Tensor

__all__ = [
    "Save",
    "Settings",
    "Subject",
    "Timing",
    "files_of",
    "missing",
    "no_device",
    "pieces_of",
    "sizes_of",
    "sync",
]


@dataclass(frozen=True)
class Settings:
    """What a user can choose about subjects."""

    fio: str | None = None
    compile: bool = False
    device: str = "cpu"
    """Where tensors are stored from and loaded to, as torch calls it."""


@dataclass(frozen=True)
class Timing:
    """What a subject says it took, where the clock of its process would be unfair to it."""

    seconds: float
    cpu_seconds: float


class Save(Protocol):
    """A save under way in the background."""

    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> Any:
        """Wait for its end; raise what went wrong."""


class Subject:
    """One way. ``store`` returns when the bytes are on the drive, ``load`` when all are here."""

    name: str
    """What ``--only`` and ``--skip`` call it."""
    title: str
    """What tables and charts call it."""
    package: str | None = None
    """The package whose version is shown."""
    stores = True
    """It can store; what can't is given a safetensors file to load."""
    store_is_timed = True
    """Its storing is measured; it isn't where another subject stores in the same way."""
    in_background = False
    """It can save while the program goes on."""
    checked = True
    """Its bytes are those of the tensors, so that they can be compared."""
    has_file = True
    """It stores and loads a file; what hasn't one is there for others to be compared with."""

    def __init__(self, tensors: Sequence[Tensor], settings: Settings) -> None:
        self._tensors = tensors
        self._settings = settings

    @classmethod
    def unavailable(cls, settings: Settings) -> str | None:  # noqa: ARG003 (for those that need it)
        """Return why it can't be compared here, or None."""
        if cls.package is None:
            return None
        reason = missing(cls.package)
        if reason is None:
            # What it needs may be missing: the error says so.
            import_module(cls.package.replace("-", "_"))
        return reason

    def version(self) -> str | None:
        """Return its version, where it has one."""
        if self.package is None:
            return None
        try:
            return version(self.package)
        except PackageNotFoundError:
            # A package may be called otherwise than its module, such as kvikio-cu13.
            module = import_module(self.package.replace("-", "_"))
            return getattr(module, "__version__", None)

    def setup(self, directory: str) -> str | None:
        """Get ready, and return how the bytes are going to be moved, in words."""

    def fill(self) -> bool:
        """Put the tensors where ``store`` takes them from; return whether that is a copy."""
        return False

    def store(self, path: str) -> Timing | None:
        """Write all tensors to the drive."""
        raise NotImplementedError

    def save_async(self, path: str) -> Save:
        """Begin to save all tensors, and return once they may change."""
        raise NotImplementedError

    def clear(self) -> None:
        """Have wiped memory ready for the next ``load``, if that doesn't make its own."""

    def load(self, path: str) -> list[Any] | Timing:
        """Read all tensors; return the bytes of each, or the tensors on their device."""
        raise NotImplementedError

    def on_host(self, loaded: list[Any]) -> list[Bytes]:
        """Return the bytes of what was loaded."""
        return loaded

    def sums(self, loaded: list[Any]) -> list[int] | None:  # noqa: ARG002 (for those that have them)
        """Return sums of what was loaded, made where it is; None if it is compared just once."""
        return None

    def release(self) -> None:
        """Let go of memory between two turns."""


def missing(package: str) -> str | None:
    """Return how to get a package that isn't installed, or None."""
    try:
        found = find_spec(package.replace("-", "_")) is not None
    except (ImportError, ValueError):
        found = False
    return None if found else f"not installed (pip install {package})"


def no_device(name: str) -> str | None:
    """Return why nothing can be loaded to a device, which has the name that torch gives it."""
    import torch

    device = torch.device(name)
    if device.type != "cuda":
        return None
    if torch.version.cuda is None:
        return f"needs a CUDA device, and torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a CUDA device, there is none"
    count = torch.cuda.device_count()
    if (device.index or 0) < count:
        return None
    return f"needs GPU {device.index}, and there are {count}, counted from 0"


def sync(path: str) -> None:
    """Have on the drive what is in a file, or in the files of a directory."""
    for name in files_of(path):
        number = os.open(name, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def files_of(path: str) -> list[str]:
    """Return a file, or the files in a directory."""
    if not os.path.isdir(path):
        return [path]
    found: list[str] = []
    for folder, _, names in os.walk(path):
        found += [os.path.join(folder, name) for name in names]
    return found


def sizes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes of each tensor."""
    return [tensor.data.nbytes for tensor in tensors]


def pieces_of(block: Any, tensors: Sequence[Tensor]) -> list[Bytes]:
    """Return the tensors' bytes in a block that has them one behind the other."""
    pieces, offset = [], 0
    for size in sizes_of(tensors):
        pieces.append(block[offset : offset + size])
        offset += size
    return pieces
