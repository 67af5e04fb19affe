"""Pinned memory: pools with a budget, and arrays in them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from forebay import _forebay
from forebay._arguments import parse_index, parse_seconds, parse_size
from forebay._pending import release_finished
from forebay.errors import InvalidInputError, OutOfMemoryError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from forebay._types import PoolStats

__all__ = ["Pool", "empty", "register_with_cuda"]

_ALIGNMENT_BYTES = 4096
"""Where arrays begin: a page, the most that direct I/O asks for."""


class Pool:
    """Memory with a budget, pinned unless asked otherwise.

    Sizes are exact (no rounding to powers of two), memory is given back with the last reference
    to an array in it, unless ``retain`` has the pool keep it.

    Parameters
    ----------
    budget : int or str, optional
        Most bytes to hold; by default, what the machine has free.
    retain : int or str
        Most bytes to keep when their last array goes, for arrays of the same size or up to an
        eighth less: loads into such memory take least, since it is mapped, touched and registered
        already. An array in it holds what the last one left there. What is kept counts against
        the budget and goes when that lacks room, the oldest first, or with :meth:`trim`.
    lock : bool
        Keep it from being swapped out, where the limits of the host allow that; ``stats()`` says
        if they don't.
    huge_pages : bool
        Ask for huge pages.
    touch : bool
        Touch the pages of long arrays (128 MiB and more) ahead of the loads into them, on a
        thread of the pool's that lives while there are any.
    pinned : bool
        Memory for transfers: registered with engines, and with CUDA once a device has a context,
        and not there in forked children. Without it, memory is like any other, which costs
        transfers more processor time.

    Examples
    --------
    >>> import forebay
    >>> pool = forebay.Pool(budget="1MiB")
    >>> array = pool.empty((3, 5), dtype="float32")
    >>> array.shape, pool.stats()["used_bytes"]
    ((3, 5), 60)
    """

    def __init__(
        self,
        budget: int | str | None = None,
        retain: int | str = 0,
        *,
        lock: bool = True,
        huge_pages: bool = True,
        touch: bool = True,
        pinned: bool = True,
    ) -> None:
        budget_bytes = None if budget is None else parse_size(budget, "budget")
        retain_bytes = parse_size(retain, "retain")
        self._core = _forebay.Pool(budget_bytes, retain_bytes, lock, huge_pages, touch, pinned)

    @classmethod
    def _over(cls, core: _forebay.Pool) -> Pool:
        pool = cls.__new__(cls)
        pool._core = core  # noqa: SLF001 (its own)
        return pool

    def empty(
        self,
        shape: SupportsIndex | Iterable[SupportsIndex],
        dtype: Any = "uint8",
        like: Any = None,
        *,
        timeout: float | None = 0,
    ) -> Any:
        """Return an array in pinned memory: zeros, or anything in a pool that retains memory.

        Parameters
        ----------
        shape : int or sequence of int
            Its shape.
        dtype : str, numpy.dtype or torch.dtype
            Its type. ``bfloat16`` and ``float8_*`` in numpy take the package ``ml_dtypes``.
        like : optional
            What to return: a torch tensor for ``"torch"``, the module or a tensor, else a numpy
            array.
        timeout : float, optional
            Seconds to wait for others to give back memory when the budget is used up; ``None``
            is for ever.

        Raises
        ------
        OutOfMemoryError
            The budget, the machine or the control group has no room for it, with the numbers
            (also a ``MemoryError``).
        WaitTimeoutError
            There was no room in time.
        """
        extents = _extents(shape)
        if _is_torch(like):
            from forebay import torch

            kind: Any = torch.parse_dtype(dtype)
            make: Any = torch.tensor_over
        else:
            kind = parse_dtype(dtype)
            make = _array_over
        length = math.prod(extents) * kind.itemsize
        if length >= 1 << 63:
            raise OutOfMemoryError(
                f"shape {extents} of {kind} takes {length} bytes, more than memory can have",
                wanted=length,
            )
        seconds = parse_seconds(timeout)
        buffer = self._core.allocate(length, _ALIGNMENT_BYTES, seconds, release_finished)
        return make(buffer, kind, extents)

    def trim(self) -> int:
        """Let go of the memory that ``retain`` has kept, and return how many bytes that was."""
        return self._core.trim()

    def stats(self) -> PoolStats:
        """Return what it holds now."""
        return self._core.stats()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool can't be copied: make one in each process")

    def __repr__(self) -> str:
        stats = self.stats()
        budget = stats["budget_bytes"]
        limit = "" if budget is None else f" of {budget}"
        return f"<forebay.Pool {stats['used_bytes']}{limit} bytes in use>"


def empty(
    shape: SupportsIndex | Iterable[SupportsIndex],
    dtype: Any = "uint8",
    like: Any = None,
    *,
    timeout: float | None = 0,
) -> Any:
    """Return an array in pinned memory of the process's pool: see :meth:`Pool.empty`."""
    return Pool._over(_forebay.Pool.shared()).empty(  # noqa: SLF001
        shape, dtype, like, timeout=timeout
    )


def register_with_cuda() -> bool:
    """Register the memory of all pools with CUDA now, if somebody has brought that up.

    Torch then copies from it asynchronously, and ``tensor.is_pinned()`` is true. Allocations in
    pinned memory and transfers look by themselves, every 20 ms at most, and what is allocated later
    is registered as it comes; so this is for arrays that were made before CUDA came up, where
    nothing of Forebay's is called between that and the copy. It is also for forked children, which
    don't look before they are asked to here. CUDA is neither loaded nor started by it.

    Returns
    -------
    bool
        Whether a device has a context in this process.
    """
    return _forebay.notice_cuda()


def dtype_name(dtype: Any) -> str:
    """Return what numpy and torch both call a type, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy type for a name, a numpy type or a torch type."""
    import numpy as np

    name = dtype if isinstance(dtype, str) else None
    if type(dtype).__module__.partition(".")[0] == "torch":
        name = dtype_name(dtype)
    try:
        parsed = np.dtype(dtype if name is None else name)
    except TypeError:
        parsed = _extended_dtype(np, name or str(dtype))
    if parsed.hasobject:
        raise InvalidInputError(f"items of type {parsed} are objects, not plain bytes")
    return parsed


def _extended_dtype(np: Any, name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedError(
            f"numpy has no type {name!r}: if it is a bfloat16 or a float8, install ml_dtypes, or "
            'ask for a torch tensor (like="torch")'
        ) from None
    scalar = getattr(ml_dtypes, name, None)
    if not isinstance(scalar, type):
        raise InvalidInputError(f"neither numpy nor ml_dtypes has a type {name!r}")
    return np.dtype(scalar)  # type: ignore[no-any-return]


def _extents(shape: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    listed: Any = (
        [shape] if not hasattr(shape, "__iter__") or getattr(shape, "ndim", 1) == 0 else shape
    )
    wanted = "an integer or integers"
    if isinstance(listed, str | bytes):
        raise TypeError(f"shape must be {wanted}, not {type(listed).__name__}")
    extents = tuple(parse_index(extent, "shape", wanted) for extent in listed)
    if any(extent < 0 for extent in extents):
        raise InvalidInputError(f"shape {extents} has a negative extent")
    if any(extent >= 1 << 63 for extent in extents):
        raise InvalidInputError(f"shape {extents} has an extent of 2**63 or more")
    return extents


def _is_torch(like: Any) -> bool:
    if isinstance(like, str):
        if like not in {"torch", "numpy"}:
            raise InvalidInputError(f'like is {like!r}, it can be "numpy", "torch" or an array')
        return like == "torch"
    module = getattr(like, "__name__", None) or type(like).__module__
    return str(module).partition(".")[0] == "torch"


def _array_over(
    buffer: _forebay.PinnedBuffer, dtype: np.dtype[Any], extents: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    import numpy as np

    # The array's base is the buffer: the memory is given back with the last view.
    return np.asarray(buffer).view(dtype).reshape(extents)
