"""Has DeepSpeed's operator builders load Forebay's modules.

DeepSpeed makes its compiled operators by builder classes, which each accelerator has its own of
and hands out by name. The methods of those classes are replaced in place, so that it doesn't
matter who has imported them already; where an accelerator has none (the CPU's lacks two), it is
given the general one.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from forebay import gds

if TYPE_CHECKING:
    import types

__all__ = ["change", "concerns"]

_PACKAGE = "deepspeed.ops.op_builder"
_OPERATORS = {
    "AsyncIOBuilder": "async_io",
    "PinMemoryBuilder": "pin_memory",
    "GDSBuilder": "gds",
    "UtilsBuilder": "tensor_cast",
}
"""DeepSpeed's builders, and the modules of this package that they load."""

_GENERAL_MODULES = {
    "AsyncIOBuilder": "async_io",
    "PinMemoryBuilder": "pin_memory",
    "GDSBuilder": "gds",
    "UtilsBuilder": "utils",
}
"""The modules of DeepSpeed's that have the builders for accelerators without their own."""

_ONLY_WHERE_MISSING = "UtilsBuilder"
"""DeepSpeed's own does what it should, where there is one."""


def concerns(name: str) -> bool:
    """Return whether a module of that name has builders."""
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


def change(module: types.ModuleType) -> None:
    """Change the builders that a module defines; the package's, for its accelerator as well."""
    for name in _OPERATORS:
        builder = getattr(module, name, None)
        if name != _ONLY_WHERE_MISSING and getattr(builder, "__name__", None) == name:
            _change_class(builder, name)
    if module.__name__ == _PACKAGE:
        _change_accelerator(module)


def _change_class(builder: Any, name: str) -> None:
    def load(self: Any, verbose: bool = True) -> types.ModuleType:
        """Return Forebay's module; nothing is compiled."""
        del self, verbose
        return importlib.import_module(f"forebay.deepspeed.{_OPERATORS[name]}")

    def is_compatible(self: Any, verbose: bool = False) -> bool:
        """Return True: the module can be loaded here, since nothing is compiled.

        What a handle for GPUDirect Storage lacks is said when one is made, and here if asked for.
        """
        reasons = gds.missing() if name == "GDSBuilder" else []
        if reasons and verbose:
            self.warning(f"{self.NAME}: {'; '.join(reasons)}")
        return True

    builder.load = load
    builder.is_compatible = is_compatible


def _change_accelerator(package: types.ModuleType) -> None:
    """Have the accelerator hand out the builders that it has none of."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind: Any = type(accelerator)
    if getattr(kind, "forebay_builders", None) is None:
        _wrap(kind)
    for name in _OPERATORS:
        builder = accelerator.get_op_builder(name)
        if builder is None:
            continue
        former = getattr(package, name, None)
        setattr(package, name, builder)
        # Whoever has the placeholder already.
        for module in list(sys.modules.values()):
            if former is not None and vars(module).get(name) is former:
                setattr(module, name, builder)


def _wrap(kind: Any) -> None:
    own_class, own_instance = kind.get_op_builder, kind.create_op_builder
    general: dict[str, Any] = {}

    def get_op_builder(self: Any, class_name: str) -> Any:
        found = own_class(self, class_name)
        if class_name not in _OPERATORS or getattr(found, "__name__", None) == class_name:
            return found
        if class_name not in general:
            general[class_name] = _general(class_name)
        return general[class_name] or found

    def create_op_builder(self: Any, class_name: str) -> Any:
        if class_name not in _OPERATORS:
            return own_instance(self, class_name)
        builder = get_op_builder(self, class_name)
        return None if builder is None else builder()

    kind.forebay_builders = general
    kind.get_op_builder = get_op_builder
    kind.create_op_builder = create_op_builder


def _general(name: str) -> Any:
    """Return the builder for an accelerator without its own; none if DeepSpeed has none."""
    try:
        module = importlib.import_module(f"{_PACKAGE}.{_GENERAL_MODULES[name]}")
    except ModuleNotFoundError:
        return None
    builder = getattr(module, name)
    if name == _ONLY_WHERE_MISSING:
        builder = type(name, (builder,), {"__module__": __name__})
    _change_class(builder, name)
    return builder
