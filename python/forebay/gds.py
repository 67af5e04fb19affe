"""The handle for GPUDirect Storage, and what is missing for it.

A handle can be made where the machine has what GPUDirect Storage takes; whether a file has it is
found when it is used. No file is written for it and no variable set; cuFile writes its log where it
is told to, and otherwise to the directory of temporary files.
"""

from __future__ import annotations

from typing import Any

from forebay import _cufile, _forebay
from forebay._arguments import parse_index
from forebay.deepnvme import aio_handle
from forebay.errors import UnsupportedError

__all__ = ["gds_handle", "missing"]


class gds_handle(aio_handle):  # noqa: N801 (DeepNVMe's name)
    """A handle with the interface of DeepNVMe's ``gds_handle``; takes what ``aio_handle`` takes.

    Tensors on a GPU are moved between it and the drive, never through the host's memory but for
    ragged ends; tensors in host memory go as they do with ``aio_handle``.

    Raises
    ------
    UnsupportedError
        There is no GPUDirect Storage here; the message names what is missing (also a
        ``NotImplementedError``). For a file that it can't move directly, reading and writing raise
        it.
    DeviceError
        cuFile's driver doesn't open; the message has its code by name.

    Notes
    -----
    Pinned memory is known to the whole process: any handle moves it as it is registered, and any
    handle can unpin it.
    """

    _device_route = "gds"

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        try:
            super().__init__(
                block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
            )
        except UnsupportedError as error:
            reasons = "; ".join(missing()) or str(error)
            raise UnsupportedError(
                f"a gds_handle was asked for, but {reasons}; forebay.aio_handle does without, with "
                'tensors on a GPU too (in a DeepSpeed configuration: "use_gds": false)'
            ) from error

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """Return a new tensor on a GPU, of the example's type, that is pinned.

        It is on the example's GPU, or on the current one if the example is on none.
        """
        count = parse_index(num_elem, "num_elem")
        make = getattr(example_tensor, "new_empty", None)
        if make is None:
            kind = type(example_tensor).__name__
            raise TypeError(
                f"example_tensor must be a torch tensor, not {kind}; pin_device_tensor takes any "
                "array on a GPU"
            )
        device = example_tensor.device
        tensor = make((count,), device=device if device.type == "cuda" else "cuda")
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: Any) -> bool:
        """Unpin a tensor, whose memory then goes with it; return whether it was pinned."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: Any) -> bool:
        """Register the memory of a tensor on a GPU with cuFile. Returns True.

        The tensor is kept until it is unpinned, so that its memory isn't freed before.

        Raises
        ------
        InvalidBufferError
            It isn't on a GPU (also a ``ValueError``).
        DeviceError
            cuFile can't register it, for one because too much is registered already.
        """
        _forebay.pin_device_memory(tensor)
        return True

    def unpin_device_tensor(self, tensor: Any) -> bool:
        """End what :meth:`pin_device_tensor` began; return whether it was pinned.

        Operations under way go on; the registration ends with the last of them.
        """
        return _forebay.unpin_device_memory(tensor)

    def is_pinned(self, tensor: Any) -> bool:
        """Return whether a tensor is pinned, in host memory or on a GPU."""
        if _forebay.device_of(tensor) is None:
            return super().is_pinned(tensor)
        return _forebay.is_device_memory_pinned(tensor)


def missing() -> list[str]:
    """Return what stands in the way of GPUDirect Storage here; empty if nothing does.

    CUDA and cuFile are loaded only if the machine has the drivers for them.
    """
    _cufile.announce()
    return _forebay.gds_missing()
