"""Models: saving and loading them whole, tied tensors included, and loading into what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._tensor_files.into import load_into as load_into_arrays
from forebay._tensor_files.load import Wish
from forebay._tensor_files.rooms import Room
from forebay.errors import InvalidInputError
from forebay.torch.frame import FRAME, find_dtype_code
from forebay.torch.safetensors import load_file, save_file
from forebay.torch.sharing import duplicate_names
from forebay.torch.tensors import as_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from forebay._tensor_files.select import Keys, Path, Source
    from forebay.handle import Durability, Handle

__all__ = ["load_into", "load_model", "save_model"]


def save_model(
    model: torch.nn.Module,
    filename: Path,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    checksums: bool = True,
    durability: Durability = "full",
    handle: Handle | None = None,
) -> None:
    """Save a model's tensors, tied ones once.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    filename : path
        Where to.
    metadata : dict of str to str, optional
        Text to save with them. The name that a tied tensor is saved under is added to it, under the
        tensor's own name.
    force_contiguous : bool
        Save contiguous copies of tensors that aren't.
    checksums, durability, handle
        As for :func:`save_file`.

    Raises
    ------
    RuntimeError
        Tensors are parts of a memory that none of them has whole.
    ValueError
        A tensor isn't contiguous, and ``force_contiguous`` is false.
    """
    tensors = model.state_dict()
    for kept, others in duplicate_names(tensors).items():
        for name in others:
            metadata = {} if metadata is None else metadata
            metadata.setdefault(name, kept)
            del tensors[name]
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(
        dict(tensors),
        filename,
        metadata,
        checksums=checksums,
        durability=durability,
        handle=handle,
    )


def load_model(
    model: torch.nn.Module,
    filename: Source,
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    verify: bool = True,
    handle: Handle | None = None,
) -> tuple[set[str], list[str]]:
    """Load a model's tensors as :func:`save_model` has saved them, or ``safetensors``.

    :func:`load_into` does so without loading them twice.

    Parameters
    ----------
    model : torch.nn.Module
        What to load into.
    filename : path or list of paths
        As for :func:`load_file`.
    strict : bool
        Refuse files that lack a tensor of the model, or have one that it hasn't.
    device : str or int
        Where tensors pass through on their way into the model, unless some of its own are on CUDA
        devices and no module of it has a way of its own to give or take tensors: they go straight
        into place then, and a failure on the way leaves the model partly loaded.
    backend, verify, handle
        As for :func:`load_file`.

    Returns
    -------
    missing : set of str
        Tensors of the model that the files don't have.
    unexpected : list of str
        Tensors of the files that the model doesn't have.

    Raises
    ------
    RuntimeError
        Tensors are missing or unexpected, and ``strict`` is true, or have another shape.
    """
    tensors = model.state_dict()
    if _goes_straight(model, tensors):
        return _load_straight(model, tensors, filename, strict, verify, handle)
    found = load_file(filename, device, backend=backend, verify=verify, handle=handle)
    duplicates = duplicate_names(tensors, found)
    lacking, unexpected = model.load_state_dict(found, strict=False)
    missing = set(lacking)
    for others in duplicates.values():
        # A tied tensor is there under one name; under two, the file is another model's.
        unexpected += [name for name in others if name not in missing]
        missing.difference_update(others)
    if strict and (missing or unexpected):
        raise RuntimeError(_complaint(model, missing, unexpected))
    return missing, unexpected


def _goes_straight(model: torch.nn.Module, tensors: Mapping[str, Any]) -> bool:
    """Whether a model's tensors can be loaded into place, and going elsewhere first would cost."""
    plain = torch.nn.Module
    return (
        any(
            isinstance(item, torch.Tensor) and FRAME.reaches(item.device)
            for item in tensors.values()
        )
        and all(isinstance(item, torch.Tensor) for item in tensors.values())
        and not _made_by(model, tensors)
        and type(model).load_state_dict is plain.load_state_dict
        and all(
            type(module)._load_from_state_dict is plain._load_from_state_dict  # noqa: SLF001
            and not module._load_state_dict_pre_hooks  # noqa: SLF001 (there is no other way to ask)
            and not module._load_state_dict_post_hooks  # noqa: SLF001
            for module in model.modules()
        )
    )


def _load_straight(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    filename: Source,
    strict: bool,
    verify: bool,
    handle: Handle | None,
) -> tuple[set[str], list[str]]:
    """Load a model's tensors into place, and say what is missing as :func:`load_model` does."""
    places = _Places(tensors)
    try:
        plan = load_into_arrays(places, filename, FRAME, Wish(verify=verify))
    except InvalidInputError as error:
        raise RuntimeError(str(error)) from error
    missing = set(places.without(plan.found))
    unexpected = list(plan.unexpected)
    for others in duplicate_names(tensors, plan.found).values():
        # A tied tensor is there under one name; under two, the file is another model's.
        unexpected += [name for name in others if name in plan.found]
    if strict and (missing or unexpected):
        raise RuntimeError(_complaint(model, missing, unexpected))
    with torch.no_grad():
        plan.run(handle)
    return missing, unexpected


def load_into(
    target: torch.nn.Module | Mapping[str, torch.Tensor],
    filename: Source,
    *,
    strict: bool = True,
    keys: Keys = None,
    budget: int | str | None = None,
    verify: bool = True,
    handle: Handle | None = None,
) -> tuple[list[str], list[str]]:
    """Load tensors of files into the memory of tensors that are there.

    What has the same type and is contiguous, on the CPU or a CUDA device, is read straight into
    place, with no memory beside it. The rest goes through memory of bounded size: on a CUDA device
    if the tensor is on one, else on the CPU, through a budget. All shapes are compared before the
    first byte is read; what fails later leaves tensors partly loaded.

    Parameters
    ----------
    target : torch.nn.Module or mapping of str to torch.Tensor
        A model, or tensors by name. Tied tensors need to be in the files once.
    filename : path or list of paths
        As for :func:`load_file`.
    strict : bool
        Refuse files that lack a tensor of the target, or have one that it hasn't.
    keys : str, iterable of str or callable, optional
        As for :func:`load_file`: load these, and leave the rest of the target as it is.
    budget : int or str, optional
        Most host memory for what can't be read straight into place; 1 GiB if not given.
    verify, handle
        As for :func:`load_file`.

    Returns
    -------
    missing : list of str
        Tensors of the target that the files don't have; with ``keys``, none.
    unexpected : list of str
        Tensors of the files, among those asked for, that the target doesn't have.

    Raises
    ------
    RuntimeError
        Tensors are missing or unexpected, and ``strict`` is true.
    InvalidInputError
        Shapes differ, a tensor of the target has no memory or is a copy that the model makes for
        its ``state_dict()``, or what is there is no tensor (also a ``ValueError``).
    TensorFileError
        As for :func:`load_file`.
    """
    if isinstance(target, torch.nn.Module):
        tensors = target.state_dict()
        places = _Places(tensors, _made_by(target, tensors))
    else:
        places = _Places(target)
    wish = Wish(keys=keys, verify=verify, budget=budget)
    plan = load_into_arrays(places, filename, FRAME, wish)
    missing = [] if keys is not None else places.without(plan.found)
    if strict and (missing or plan.unexpected):
        raise RuntimeError(_complaint(target, missing, plan.unexpected))
    with torch.no_grad():
        plan.run(handle)
    return missing, plan.unexpected


class _Places:
    """Tensors that are loaded into, but for some that a model has made to be saved."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], made: Collection[torch.Tensor] = ()
    ) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidInputError(
                    f"{name!r} is a {type(tensor).__name__}, not a tensor: load into a dict of the "
                    "tensors"
                )
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        identities = set(map(id, made))
        self._made = {name for name, tensor in tensors.items() if id(tensor) in identities}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that a tensor has in a file, or None if it isn't there."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        shape = tuple(tensor.shape)
        packed = tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None) and shape
        return (*shape[:-1], shape[-1] * 2) if packed else shape

    def problem(self, name: str, dtype: str) -> str | None:  # noqa: ARG002 (all are converted)
        """Return why a tensor can't be loaded into, if it can't."""
        tensor = self._tensors[name]
        if tensor.device.type == "meta":
            return "has no memory (it is on the device meta): call .to_empty(device=...) first"
        if hasattr(tensor, "to_local"):
            return "is a distributed tensor: load into its .to_local()"
        if name in self._made:
            return (
                "is no memory of a parameter or a buffer, but what the model makes to be saved: "
                "use load_model, or leave it out (keys)"
            )
        return None

    def room(self, name: str, dtype: str) -> Room | None:
        """Return a tensor's memory, if the bytes of the file can go there as they are."""
        tensor = self._tensors[name]
        on_host = tensor.device.type == "cpu"
        straight = (
            (on_host or FRAME.reaches(tensor.device))
            and _has_memory(tensor)
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
            and find_dtype_code(tensor.dtype) == dtype
        )
        if not straight:
            return None
        memory = as_bytes(tensor)
        return Room(memory.numpy() if on_host else memory, tensor.data_ptr(), memory.numel())

    def device(self, name: str) -> torch.device | None:
        """Return the device that a tensor is on, if the core reaches it."""
        device = self._tensors[name].device
        return device if FRAME.reaches(device) else None

    def copy(self, name: str, array: torch.Tensor) -> None:
        """Copy what was read into a tensor, as its type and to its device."""
        self._tensors[name].copy_(array)

    def without(self, found: set[str]) -> list[str]:
        """Return which tensors aren't among the found ones, nor tied to one of them."""
        loaded = {_identity(self._tensors[name]) for name in found}
        return [
            name
            for name, tensor in self._tensors.items()
            if name not in found and (tensor.numel() == 0 or _identity(tensor) not in loaded)
        ]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are in memory of its own, as those of wrappers of others aren't."""
    return tensor.layout is torch.strided and (tensor.numel() == 0 or tensor.data_ptr() != 0)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what is the same for all tensors in one memory; None if it has none."""
    if tensor.numel() == 0 or not _has_memory(tensor):
        return None
    return (tensor.device, tensor.untyped_storage().data_ptr())


def _made_by(model: torch.nn.Module, tensors: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a model's state that lie in no parameter or buffer of its own.

    What is loaded into them doesn't get into the model.
    """
    own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [
        tensor
        for tensor in tensors.values()
        if isinstance(tensor, torch.Tensor) and tensor.numel() and _memory(tensor) not in own
    ]


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _complaint(target: Any, missing: Any, unexpected: Any) -> str:
    lines = [f"the files don't fit {type(target).__name__}"]
    if missing:
        lines.append("they have no " + ", ".join(map(repr, sorted(missing))))
    if unexpected:
        lines.append("it has no " + ", ".join(map(repr, sorted(unexpected))))
    return "; ".join(lines)
