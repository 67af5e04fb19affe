"""Has code that loads through ``safetensors`` load through Forebay, for as long as a block lasts.

Modules take ``safe_open``, ``load_file`` and ``load`` from ``safetensors`` when they are imported,
so each module that holds one of them is changed, and changed back; modules that are imported within
the block take Forebay's, and are changed back as well. Blocks may be nested, and entered in several
threads: the last one to end changes everything back.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch

from forebay import torch as faces
from forebay.transformers.ahead import AheadOpen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.handle import Handle

__all__ = ["loading"]

_THEIRS: dict[str, Any] = {
    "safe_open": safetensors.safe_open,
    "load_file": safetensors.torch.load_file,
    "load": safetensors.torch.load,
}
"""What is swapped, by the name that ``safetensors`` has for it."""


class _Swap:
    """The blocks that are under way, and what they want."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks: list[dict[str, Any]] = []
        self.ours: dict[str, Any] = {
            "safe_open": self._open,
            "load_file": self._load_file,
            "load": self._load,
        }

    def enter(self, options: dict[str, Any]) -> None:
        with self._lock:
            if not self._blocks:
                _replace(_THEIRS, self.ours)
            self._blocks.append(options)

    def leave(self, options: dict[str, Any]) -> None:
        with self._lock:
            self._blocks = [block for block in self._blocks if block is not options]
            if not self._blocks:
                _replace(self.ours, _THEIRS)

    def _options(self) -> dict[str, Any]:
        with self._lock:
            return self._blocks[-1] if self._blocks else {}

    def _open(
        self, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap"
    ) -> Any:
        if framework in {"pt", "torch", "pytorch"}:
            return AheadOpen(filename, framework, device, backend=backend, **self._options())
        return _THEIRS["safe_open"](filename, framework, device, backend=backend)

    def _load(self, data: Any) -> Any:
        return faces.load(data, verify=self._options().get("verify", True))

    def _load_file(self, filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> Any:
        return faces.load_file(filename, device, backend=backend, **self._options())


_swap = _Swap()


@contextlib.contextmanager
def loading(*, verify: bool = True, handle: Handle | None = None) -> Iterator[None]:
    """Load through Forebay what ``transformers`` and others load through ``safetensors``.

    Parameters
    ----------
    verify : bool
        Check the checksums of files that have them.
    handle : Handle, optional
        What to read with; by default, a handle of the process.
    """
    options = {"verify": verify, "handle": handle}
    _swap.enter(options)
    try:
        yield
    finally:
        _swap.leave(options)


def _replace(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Put other functions where modules hold these, under whatever name."""
    by_identity = {id(function): after[name] for name, function in before.items()}
    own = {__name__, faces.__name__}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name in own:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            replacement = by_identity.get(id(value))
            if replacement is not None:
                setattr(module, name, replacement)
