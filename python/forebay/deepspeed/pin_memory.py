"""What ``PinMemoryBuilder().load()`` returns: pinned tensors from the process's pool."""

from __future__ import annotations

from typing import Any

from forebay import _pinned
from forebay._arguments import parse_index
from forebay.memory import empty

__all__ = ["pin_handle"]


class pin_handle:  # noqa: N801 (DeepSpeed's name)
    """Gives out pinned tensors; all handles of the process know of them.

    The memory is the pool's: exact sizes, locked where the limits of the host allow it
    (``forebay.Pool.stats`` says if they don't), given back with the last reference to it. Freeing
    says that a tensor isn't pinned any more, and never takes memory away from a view of it.
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """Return a pinned tensor of ``num_elem`` items of the example's type."""
        return _pinned.allocate(empty, parse_index(num_elem, "num_elem"), example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: Any) -> bool:
        """Give up a pinned tensor, and return whether it was one."""
        return _pinned.free(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Give up the pinned tensor that begins at an address, and return whether one did."""
        return _pinned.free_at(parse_index(address, "address"))

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a tensor is, or is part of, a pinned one; torch's own count too."""
        return _pinned.is_pinned_anyhow(buffer)
