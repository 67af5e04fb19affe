"""What the report says of Python: versions of what is installed, and what is switched on.

Everything is read from the metadata and the text of packages: importing torch would take seconds,
and DeepSpeed has effects of its own.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

__all__ = ["Facts", "gather", "in_unicode", "installed_version"]

_PACKAGES = ("forebay", "numpy", "torch", "deepspeed", "safetensors")
_LIBRARIES = re.compile(r"^lib(cuda|cufile)\.so\.\d+$")


class Facts(TypedDict):
    """What the report takes."""

    version: str
    """Of the interpreter."""
    executable: str
    packages: dict[str, str]
    """Versions by name, of those that are installed."""
    torch_cuda: str | None
    """The CUDA that torch was built for."""
    libraries: list[str]
    """CUDA's and cuFile's libraries in NVIDIA's packages."""
    deepspeed_hook: bool | None
    """Whether a Python started now has DeepSpeed use Forebay; None if there is no hook."""


def gather() -> Facts:
    """Return what is installed; imports neither frameworks nor anything of theirs."""
    versions = {package: installed_version(package) for package in _PACKAGES}
    return {
        "version": platform.python_version(),
        "executable": in_unicode(sys.executable or ""),
        "packages": {name: found for name, found in versions.items() if found is not None},
        "torch_cuda": _torch_cuda(),
        "libraries": _libraries(),
        "deepspeed_hook": _deepspeed_hook(),
    }


def installed_version(package: str) -> str | None:
    """Return a package's version, if it is installed.

    What an installation that was broken off has left, a folder without metadata, isn't one.
    """
    for found in distributions(name=package):
        metadata = found.metadata
        if metadata is not None and "Version" in metadata:
            return metadata["Version"]
    return None


def in_unicode(path: str | Path) -> str:
    """Return a path in characters that JSON has."""
    return os.fsencode(path).decode("utf-8", "replace")


def _torch_cuda() -> str | None:
    """Read the CUDA version from the file in which torch's build has put it."""
    with contextlib.suppress(PackageNotFoundError, OSError):
        torch: Distribution = distribution("torch")
        text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
        found = re.search(r"""^cuda\b[^=]*=\s*['"]([\d.]+)['"]""", text, re.MULTILINE)
        return found.group(1) if found else None
    return None


def _libraries() -> list[str]:
    """Find what NVIDIA's packages have brought: they share the folder ``nvidia``."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    found = []
    for folder in folders or ():
        with contextlib.suppress(OSError):
            libraries = Path(folder).glob("*/lib/lib*.so.*")
            found += [in_unicode(path) for path in libraries if _LIBRARIES.match(path.name)]
    return sorted(found)


def _deepspeed_hook() -> bool | None:
    if find_spec("forebay.deepspeed") is None:
        return None
    from forebay.deepspeed import hook

    state = hook.status()
    return state["enabled"] and state["works"]
