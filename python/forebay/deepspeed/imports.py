"""Waits for DeepSpeed to be imported, and has it changed when it is.

A finder at the front of ``sys.meta_path`` finds DeepSpeed's modules as the other finders do. It
lets the modules of operator builders be changed right after they have run, before anything else
sees them. Under ``python -O`` it also compiles the modules whose ``assert`` statements do work
(``assert handle.wait() == count``) with their asserts in.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from forebay.deepspeed import builders
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["install", "is_installed"]

_KEEPING_ASSERTS = ("deepspeed.runtime.swap_tensor", "deepspeed.io", "deepspeed.nvme")
"""Packages in which submitting and waiting is done inside of assert statements."""


def install() -> None:
    """Have DeepSpeed use Forebay in this process, and in those forked from it.

    Before DeepSpeed is imported, or after; handles that DeepSpeed has already made stay as they
    are. Doing it twice is doing it once.

    Raises
    ------
    UnsupportedError
        Under ``python -O``, if DeepSpeed has been imported already.
    """
    if is_installed():
        return
    if not __debug__ and any(_keeps_asserts(name) for name in list(sys.modules)):
        raise UnsupportedError(
            "DeepSpeed does its I/O inside of assert statements, which python -O leaves out, and "
            "it has been imported: call forebay.deepspeed.install() before that"
        )
    sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        if builders.concerns(name):
            builders.change(module)


def is_installed() -> bool:
    """Return whether DeepSpeed uses Forebay in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder:
    """Finds DeepSpeed's modules by the other finders, and has them changed."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not builders.concerns(name) and (__debug__ or not _keeps_asserts(name)):
            return None
        spec = self._found_by_others(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        if builders.concerns(name):
            _run_then(spec.loader, name, builders.change)
        elif isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _AssertingLoader(spec.loader.name, spec.loader.path)
        return spec

    def _found_by_others(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                return spec
        return None


class _AssertingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module with its assert statements in, whatever Python was told to leave out."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        # Not from the cache, which has been compiled without.
        code: types.CodeType = compile(
            self.get_data(path), path, "exec", dont_inherit=True, optimize=0
        )
        return code


def _keeps_asserts(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in _KEEPING_ASSERTS)


def _run_then(loader: Any, name: str, after: Any) -> None:
    """Have a loader call ``after`` when it has run the module of that name."""
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        run(module)
        if module.__name__ == name:
            after(module)

    loader.exec_module = exec_module
