"""Where cuFile may be, beside where the system's loader looks: in NVIDIA's Python packages.

``nvidia-cufile`` has it in ``nvidia/cu13/lib`` (and ``cu12`` and so on), ``nvidia-cufile-cu12`` in
``nvidia/cufile/lib``. Nothing of them is imported, nor loaded before it is needed.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from forebay import _forebay

__all__ = ["announce", "folders"]


def folders() -> list[str]:
    """Return the folders of installed packages that have the library."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    if found is None or found.submodule_search_locations is None:
        return []
    places = [Path(place) for place in found.submodule_search_locations]
    libraries = (library for place in places for library in place.glob("*/lib/libcufile.so*"))
    return sorted({str(library.parent) for library in libraries})


@functools.cache
def announce() -> None:
    """Tell the core of them, once."""
    _forebay.cufile_is_in(folders())
