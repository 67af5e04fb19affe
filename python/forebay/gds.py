"""The handle for GPUDirect Storage, and what is missing for it.

Forebay moves device memory through host memory. Until it uses GPUDirect Storage as well, making a
handle raises, with everything that is missing on this host; nothing else happens: no library is
loaded, no file written, no variable set.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from forebay.errors import UnsupportedError

__all__ = ["gds_handle", "missing"]

_DRIVER = "/proc/driver/nvidia/version"
_STORAGE_MODULE = "/proc/driver/nvidia-fs"


class gds_handle:  # noqa: N801 (DeepNVMe's name)
    """A handle with the interface of DeepNVMe's ``gds_handle``; takes what ``aio_handle`` takes.

    Raises
    ------
    UnsupportedError
        Always, for now; the message names what is missing (also a ``NotImplementedError``).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        del arguments, options
        self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise UnsupportedError(
            f"a gds_handle was asked for, but {'; '.join(missing())}; use forebay.aio_handle with "
            'tensors in host memory (in a DeepSpeed configuration: "use_gds": false)'
        )


def missing() -> list[str]:
    """Return what stands in the way of GPUDirect Storage here; empty if nothing does."""
    reasons = ["this version of Forebay doesn't use GPUDirect Storage"]
    if not os.path.exists(_DRIVER):
        reasons.append("there is no NVIDIA driver here")
    elif not os.path.exists(_STORAGE_MODULE):
        reasons.append("the kernel module nvidia-fs isn't loaded")
    return reasons
