"""Loading, saving and streaming safetensors files as torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._tensor_files import load as loading
from forebay._tensor_files import save as saving
from forebay._tensor_files.load import LoadPlan, Wish
from forebay._tensor_files.opened import is_mapped
from forebay._tensor_files.stream import DEFAULT_BUDGET, DEFAULT_TIMEOUT, TensorStream
from forebay.torch.frame import FRAME, dtype_code
from forebay.torch.sharing import refuse_shared
from forebay.torch.tensors import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._tensor_files.select import Keys, Path, Source
    from forebay.handle import Durability, Handle

__all__ = ["load", "load_file", "plan_load", "save", "save_file", "stream"]


def load_file(
    filename: Source,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    keys: Keys = None,
    dtype: Any = None,
    verify: bool = True,
    budget: int | str | None = None,
    handle: Handle | None = None,
) -> dict[str, torch.Tensor]:
    """Load tensors: all of a file, or some; cast or not; of one file or of a sharded model.

    On the CPU, tensors are views of few regions of memory, which stay for as long as one of them
    does.

    Parameters
    ----------
    filename : path or list of paths
        A file, a ``model.safetensors.index.json``, the directory of a model, or several files,
        which are read at the same time, best from a drive each.
    device : str or int
        Where to: ``"cpu"``, ``"cuda:1"``, the number of a GPU. To a CUDA device, tensors go
        straight from the drive through staging blocks of bounded size; small neighbours in a file
        share memory there, of 4 MiB at the most.
    backend : {"mmap", "pread"}
        ``"mmap"`` takes what the page cache has from there, without a copy, as ``safetensors``
        does; the rest is read. Other programs that write to the file in place change the tensors
        then, and those that cut it end this one (``SIGBUS``); files that are replaced, as those
        that Forebay saves, are safe. ``"pread"`` always reads.
    keys : str, iterable of str or callable, optional
        Which tensors: a name or a pattern as of a shell (``"*.experts.3.*"``), several of these,
        or a function that is true for a name. The rest isn't read.
    dtype : torch.dtype or str, optional
        Cast tensors of floats to this one of float16, bfloat16, float32 and float64. Integers, and
        floats of 8 bits and less, stay as they are.
    verify : bool
        Check the checksums of files that have them, as those that Forebay wrote do.
    budget : int or str, optional
        Refuse the load if it takes more memory of the host than this.
    handle : Handle, optional
        What to read with; by default, a handle of the process.

    Returns
    -------
    dict of str to torch.Tensor
        By name, in the order in which they are in the files.

    Raises
    ------
    TensorFileError
        A file isn't as the format has it.
    MismatchError
        The bytes of a tensor aren't those that were saved; the message names it and the file.
    OutOfMemoryError
        It takes more than the budget, with the numbers (also a ``MemoryError``).
    InvalidInputError
        A pattern matches nothing (also a ``ValueError``).
    SystemCallError
        The system refused (also an ``OSError``: ``FileNotFoundError``, …).
    """
    mapped = is_mapped(backend)
    wish = Wish(keys=keys, dtype=dtype, device=device, verify=verify, budget=budget, mapped=mapped)
    return loading.load(filename, FRAME, wish, handle)


def plan_load(
    filename: Source,
    device: str | int = "cpu",
    *,
    keys: Keys = None,
    dtype: Any = None,
    budget: int | str | None = None,
    handle: Handle | None = None,
) -> LoadPlan:
    """Say what a :func:`load_file` takes, from the headers alone.

    Parameters
    ----------
    filename, device, keys, dtype, budget, handle
        As for :func:`load_file`.

    Returns
    -------
    LoadPlan
        Files, tensors, bytes to read, memory at the peak and in the end. As a text, a sentence.

    Raises
    ------
    OutOfMemoryError
        It takes more than the budget, with the numbers (also a ``MemoryError``).
    """
    wish = Wish(keys=keys, dtype=dtype, device=device, budget=budget)
    return loading.plan(filename, FRAME, wish, handle)


def stream(
    filename: Source,
    device: str | int = "cpu",
    *,
    budget: int | str = DEFAULT_BUDGET,
    keys: Keys = None,
    dtype: Any = None,
    verify: bool = True,
    timeout: float | None = DEFAULT_TIMEOUT,
    handle: Handle | None = None,
) -> TensorStream:
    """Iterate over ``(name, tensor)`` within a budget of host memory, reading ahead.

    Parameters
    ----------
    filename, device, keys, dtype, verify, handle
        As for :func:`load_file`. The budget is shared with what is cast on the CPU.
    budget : int or str
        Most host memory for what is read ahead and what the consumer holds; of tensors that go to a
        CUDA device, the device's memory for what is read ahead.
    timeout : float, optional
        Seconds to wait for the consumer to let go of tensors when the budget is used up; ``None``
        is for ever.

    Returns
    -------
    TensorStream
        An iterator and context manager. A tensor is valid for as long as it is held.

    Raises
    ------
    OutOfMemoryError
        A tensor alone is larger than the budget, with the numbers (also a ``MemoryError``).
    WaitTimeoutError
        From ``next``: the consumer holds so much that the next tensor has no room (also a
        ``TimeoutError``). The stream goes on when some of that is let go of.
    """
    wish = Wish(keys=keys, dtype=dtype, device=device, verify=verify, budget=budget)
    return TensorStream(filename, FRAME, wish, handle, timeout)


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: Path,
    metadata: dict[str, str] | None = None,
    *,
    checksums: bool = True,
    durability: Durability = "full",
    handle: Handle | None = None,
) -> None:
    """Save tensors to a file that any reader of safetensors takes.

    The file is whole or as before, whatever happens: it is written under another name in the same
    directory, made durable, and renamed. An existing file's mode stays; that of a new one is what
    the umask leaves. Tensors must not change meanwhile. Those on CUDA devices pass through a few
    pieces of pinned memory, in order behind the current stream of their device.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        Dense, contiguous tensors that share no memory.
    filename : path
        Where to.
    metadata : dict of str to str, optional
        Text to save with them.
    checksums : bool
        Save a checksum of each tensor, which loads check.
    durability : {"none", "data", "full"}
        What to wait for before the file gets its name.
    handle : Handle, optional
        What to write with; by default, a handle of the process.

    Raises
    ------
    ValueError
        A tensor is sparse or not contiguous, has a type that the format hasn't, or is no tensor.
    RuntimeError
        Tensors share memory: use :func:`save_model`.
    SystemCallError
        The system refused (also an ``OSError``). The file is as before.
    """
    saving.write(_entries(tensors, _lent), filename, metadata, durability, checksums, handle)


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file of tensors: those of ``safetensors``, without checksums.

    Parameters
    ----------
    tensors, metadata
        As for :func:`save_file`.
    """
    return saving.serialize(_entries(tensors, _on_host), metadata)


def load(data: bytes, *, verify: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors in the bytes of a file.

    Parameters
    ----------
    data : bytes
        The contents of a file.
    verify : bool
        Check the checksums, if there are any.
    """
    return saving.deserialize(data, FRAME, verify)


def _entries(
    tensors: dict[str, torch.Tensor], place: Callable[[torch.Tensor], torch.Tensor]
) -> list[saving.Entry]:
    if not isinstance(tensors, dict):
        raise ValueError(f"a dict of tensors by name is needed, not {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name!r} is a sparse tensor, which the format hasn't: make it dense with "
                ".to_dense(), which may be much larger"
            )
    refuse_shared(tensors)
    return [_entry(name, tensor, place) for name, tensor in tensors.items()]


def _entry(
    name: str, tensor: torch.Tensor, place: Callable[[torch.Tensor], torch.Tensor]
) -> saving.Entry:
    code = dtype_code(tensor.dtype)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name!r} isn't contiguous: save .contiguous() of it, or the tensor that it is a part "
            "of, and slice when loading"
        )
    # What is marked as conjugate or negative only is so in a file as well.
    plain = place(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    shape = tuple(plain.shape)
    if code == "F4":
        if not shape:
            raise ValueError(f"{name!r} is one byte of F4, half of which the format can't have")
        shape = (*shape[:-1], shape[-1] * 2)
    memory = as_bytes(plain)
    return saving.parse_name(name), code, shape, memory.numpy() if memory.is_cpu else memory


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu")


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor where the core takes its bytes from."""
    return tensor if FRAME.reaches(tensor.device) else tensor.to("cpu")
