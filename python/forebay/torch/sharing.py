"""Tensors that share memory: files have no way to say so, so that it must be seen before saving.

Which tensors count as shared, and which name of a group is kept, is as ``safetensors`` has it: a
model saved by one is loaded by the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["duplicate_names", "refuse_shared"]


def refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a ``RuntimeError`` if some of the tensors share memory."""
    groups = [sorted(group) for group in _groups(tensors) if len(group) > 1]
    if groups:
        raise RuntimeError(
            f"these tensors share memory, which a file can't say: {groups}. Save one of each group "
            "or clones, or use save_model for a model"
        )


def duplicate_names(
    tensors: Mapping[str, torch.Tensor], preferred: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Return which names need no place in a file, by the name that stands for them.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        A model's tensors.
    preferred : iterable of str
        Names to keep where there is a choice: those that a file has.

    Raises
    ------
    RuntimeError
        No tensor of a group has all the memory that they share.
    """
    wanted = set(preferred)
    duplicates: dict[str, list[str]] = {}
    for group in _groups(tensors):
        complete = sorted(name for name in group if _is_whole(tensors[name]))
        if not complete:
            raise RuntimeError(
                f"{sorted(group)} are parts of one memory that none of them has whole, so saving "
                "one of them loses the rest: save clones"
            )
        kept = min(wanted.intersection(complete), default=complete[0])
        others = sorted(group - {kept})
        if others:
            duplicates[kept] = others
    return duplicates


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Return the names of tensors by the memory that they have a part in."""
    storages: dict[tuple[torch.device, int, int], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            continue
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError as error:
            raise InvalidInputError(
                f"{name!r} ({type(tensor).__name__}) has no memory of its own: save what it is "
                "made of, such as the .to_local() of a distributed tensor"
            ) from error
        if address and storage.nbytes():
            key = (tensor.device, address, storage.nbytes())
            storages.setdefault(key, []).append(name)
    found: list[set[str]] = []
    for names in storages.values():
        found += _overlapping(names, tensors)
    return found


def _overlapping(names: list[str], tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    if len(names) == 1:
        return [set(names)]
    ranges = sorted((*_range(name, tensors[name]), name) for name in names)
    groups: list[set[str]] = []
    end_before = 0
    for begin, end, name in ranges:
        if groups and begin < end_before:
            groups[-1].add(name)
        else:
            groups.append({name})
        end_before = end
    return groups


def _range(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise RuntimeError(
            f"{name!r} isn't contiguous, and shares its memory with another tensor: save clones"
        )
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def _is_whole(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    length = tensor.numel() * tensor.element_size()
    return tensor.data_ptr() == storage.data_ptr() and length == storage.nbytes()
