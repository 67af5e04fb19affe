"""Files of torch as the command ``forebay`` needs them: where each tensor's bytes are.

Only ``torch.load(weights_only=True)`` reads a file, so nothing in it is run, and it is mapped, so
that a tensor's bytes are read by whoever needs them, from the file itself. A tensor whose bytes
aren't one after the other there (a transposed view, a conjugate, an old format) is written to a
scratch file, a piece at a time.

Moving bytes is elsewhere: what is returned says where they are, or where they are to go.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from forebay.errors import (
    ForebayError,
    InvalidInputError,
    MismatchError,
    OutOfMemoryError,
    SystemCallError,
    UnsupportedError,
)
from forebay.torch import as_bytes
from forebay.torch.frame import packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["create", "describe"]

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
"""Dtypes by the names that safetensors gives them; older torch lacks some."""

_ZIP = b"PK\x03\x04"
_DESCRIPTOR = b"PK\x07\x08"
_ALIGNMENT = 64
_COMPARED_BYTES = 64
_OVERHEAD_BYTES = 1 << 20
"""What an archive has beside the tensors, for some thousands of them."""


@dataclass
class _Found:
    """What was found in a file's object."""

    path: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)


def describe(
    path: str, *, budget: int, scratch: str | None = None, name: str | None = None
) -> dict[str, Any]:
    """Say which tensors a file holds, and where their bytes are.

    Parameters
    ----------
    path : str
        What ``torch.save`` wrote.
    budget : int
        The most bytes to have in memory at once.
    scratch : str, optional
        A directory for the bytes of tensors that the file doesn't hold in one piece. Without it,
        these have no place.
    name : str, optional
        The one tensor that is wanted.

    Returns
    -------
    dict
        ``tensors``, each with ``name``, ``dtype``, ``shape``, ``bytes``, ``file`` and ``offset``
        (None without a place); ``left_out``: each with ``name`` and ``kind``; ``tied``: lists of
        names of the same tensor.

    Raises
    ------
    InvalidInputError
        It isn't such a file, or needs objects that aren't unpickled.
    """
    found = _Found(path)
    _collect(_load(path, budget), (), found, set())
    if name is not None:
        found.tensors = {key: found.tensors[key] for key in [name] if key in found.tensors}
    mapping = _Mapping(path)
    limit = max(budget // 4, 1)
    tensors = [
        {**_described(path, key, tensor), "file": path, "offset": mapping.offset_of(tensor)}
        for key, tensor in found.tensors.items()
    ]
    if scratch is not None:
        apart = [tensor for tensor in tensors if tensor["offset"] is None]
        spilled = os.path.join(scratch, "tensors.bin")
        with _told_where(spilled), open(spilled, "xb") as file:
            _check_room(scratch, sum(tensor["bytes"] for tensor in apart))
            spill = _Spill(file, limit)
            for tensor in apart:
                tensor["file"] = spilled
                tensor["offset"] = spill.write(found.tensors[tensor["name"]])
    return {"tensors": tensors, "left_out": found.left_out, "tied": _tied(found.tensors)}


def create(path: str, tensors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write a file with room for tensors; say where the bytes of each are to go.

    Parameters
    ----------
    path : str
        Where to write it; it must not be there. Its directory holds a scratch file meanwhile.
    tensors : sequence of mappings
        Each with ``name``, ``dtype`` as safetensors calls it, ``shape`` and ``bytes``.

    Returns
    -------
    list of dicts
        For each the ``offset`` of its bytes, and in ``zip_checksum_at`` those of their CRC-32: the
        file is a zip archive, in which the bytes are a member.

    Raises
    ------
    UnsupportedError
        This torch lacks a dtype, or can't leave room (older than 2.6).
    """
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is None:
        raise UnsupportedError(
            f"torch {torch.__version__} can't write a file piece by piece: 2.6 or later can"
        )
    length = sum(_aligned(tensor["bytes"]) for tensor in tensors)
    blank = f"{path}.blank"
    try:
        with _told_where(path):
            with open(blank, "xb") as file:
                file.truncate(length)
            state = _blank_state(blank, length, tensors)
            with skip_data():
                _save(state, path, length)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(blank)
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    mapping = _Mapping(path)
    checksums = _zip_checksums(path)
    rooms = []
    for tensor in tensors:
        offset = _place(mapping, saved[tensor["name"]], path)
        at = checksums.get(offset, []) if tensor["bytes"] else []
        rooms.append({"offset": offset, "zip_checksum_at": at})
    return rooms


def _save(state: dict[str, torch.Tensor], path: str, length: int) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:
        # torch's writer doesn't say what the system said: reserve what the file takes at least.
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, length + _OVERHEAD_BYTES)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ForebayError(f"torch can't write {path}: {reason}") from error


@contextlib.contextmanager
def _told_where(path: str) -> Iterator[None]:
    """Have what the system says name the file, and say what to do where there is no room."""
    try:
        yield
    except ForebayError:
        raise
    except OSError as error:
        text = f"cannot write {path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += "; free some space, or write to another file system"
        raise SystemCallError(text, error.errno, path) from error


def _check_room(folder: str, wanted: int) -> None:
    """Refuse what is more than the file system has before it is full."""
    free = shutil.disk_usage(folder).free
    if wanted > free:
        text = (
            f"tensors that aren't in one piece take {wanted} bytes in {folder}, which has {free} "
            "free; free some space, or write to another file system"
        )
        raise SystemCallError(text, errno.ENOSPC, folder)


def _place(mapping: _Mapping, tensor: torch.Tensor, path: str) -> int:
    offset = mapping.offset_of(tensor)
    if offset is None:
        raise UnsupportedError(f"torch {torch.__version__} doesn't map what it wrote: {path}")
    return offset


def _zip_checksums(path: str) -> dict[int, list[int]]:
    """Return where the checksums of an archive's members are, by where their bytes begin.

    A member's CRC-32 is in its entry of the central directory, and in the descriptor behind its
    bytes: sections 4.3.9 and 4.3.12 of PKWARE's APPNOTE.
    """
    places: dict[int, list[int]] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        file.seek(archive.start_dir)
        directory = file.read()
        entry = 0
        for member in archive.infolist():
            file.seek(member.header_offset + 26)
            name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
            start = member.header_offset + 30 + name_bytes + extra_bytes
            places[start] = [archive.start_dir + entry + 16]
            file.seek(start + member.file_size)
            if file.read(len(_DESCRIPTOR)) == _DESCRIPTOR:
                places[start].append(start + member.file_size + len(_DESCRIPTOR))
            entry += 46 + sum(struct.unpack_from("<HHH", directory, entry + 28))
    return places


def _blank_state(
    blank: str, length: int, tensors: Sequence[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """Return tensors over pages of a file without data, which take no memory."""
    whole = torch.UntypedStorage.from_file(blank, shared=False, nbytes=length) if length else None
    state: dict[str, torch.Tensor] = {}
    start = 0
    for tensor in tensors:
        dtype, shape = _torch_dtype(tensor), packed(tensor["dtype"], tuple(tensor["shape"]))
        if tensor["bytes"] == 0 or whole is None:
            state[tensor["name"]] = torch.empty(shape, dtype=dtype)
            continue
        storage = whole[start : start + tensor["bytes"]]
        empty = torch.empty(0, dtype=dtype)
        state[tensor["name"]] = empty.set_(storage, 0, shape)  # type: ignore[call-overload]
        start += _aligned(tensor["bytes"])
    return state


def _aligned(length: int) -> int:
    return -(-int(length) // _ALIGNMENT) * _ALIGNMENT


def _torch_dtype(tensor: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, _NAMES.get(tensor["dtype"], ""), None)
    if not isinstance(dtype, torch.dtype):
        name = tensor["name"]
        raise UnsupportedError(f"torch has no {tensor['dtype']}, the dtype of {name!r}")
    return dtype


def _load(path: str, budget: int) -> Any:
    """Return the object in a file; its tensors are pages of the file, where that can be."""
    unmapped = _unmapped(path)
    if unmapped is not None and unmapped[1] > budget:
        what, size = unmapped
        raise OutOfMemoryError(
            f"{path} is {what}, which takes all of its {size} bytes of memory, of which {budget} "
            "may be used; raise the budget"
        )
    try:
        with warnings.catch_warnings():
            # What torch would have its own callers change isn't in the hands of who has the file.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=unmapped is None)
    except pickle.UnpicklingError as error:
        text = str(error).strip().splitlines()
        reason = next((line.strip() for line in text if "GLOBAL" in line), text[0] if text else "")
        raise InvalidInputError(
            f"{path} can't be read as tensors alone, and Python objects are never unpickled: "
            f"{reason}"
        ) from error
    except (ForebayError, OSError, MemoryError):
        raise
    except Exception as error:
        # A damaged file leads torch's unpickler anywhere.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Behind its first sentence, torch explains itself at length.
        reason = lines[0].split(". ")[0]
        raise InvalidInputError(f"{path} can't be read by torch: {reason}") from error


def _unmapped(path: str) -> tuple[str, int] | None:
    """Return why a file's tensors aren't pages of it, and their bytes; None if they are.

    Mapped by torch, the members of a compressed archive are the compressed bytes.
    """
    with open(path, "rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return "in torch's format of before 1.6", os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise InvalidInputError(f"{path} can't be read by torch: {error}") from error
    if all(member.compress_type == zipfile.ZIP_STORED for member in members):
        return None
    return "a compressed archive", sum(member.file_size for member in members)


def _collect(value: Any, keys: tuple[str, ...], found: _Found, around: set[int]) -> None:
    """Take the tensors of nested mappings and sequences, by their keys joined with dots."""
    name = ".".join(keys)
    if isinstance(value, torch.Tensor):
        name = name if keys else "tensor"
        if name in found.tensors:
            raise InvalidInputError(f"two tensors would have the name {name!r}: {found.path}")
        found.tensors[name] = value.detach()
        return
    if isinstance(value, dict):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), inner) for index, inner in enumerate(value)]
    else:
        found.left_out.append({"name": name, "kind": type(value).__name__})
        return
    if id(value) in around:
        raise InvalidInputError(f"{name!r} contains itself: {found.path}")
    around.add(id(value))
    for key, inner in items:
        _collect(inner, (*keys, key), found, around)
    around.remove(id(value))


def _described(path: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise UnsupportedError(f"the tensor {name!r} has no plain bytes, it is {kind}: {path}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        text = f"the name {name!r} of a tensor isn't Unicode: rename it in {path}"
        raise UnsupportedError(text) from error
    torch_name = str(tensor.dtype).removeprefix("torch.")
    known = (ours for ours, theirs in _NAMES.items() if theirs == torch_name)
    dtype, shape = next(known, torch_name), list(tensor.shape)
    if dtype == "F4":
        if not shape:
            text = f"the tensor {name!r} is one byte of F4 without a shape: {path}"
            raise UnsupportedError(text)
        shape[-1] *= 2
    return {
        "name": name,
        "dtype": dtype,
        "shape": shape,
        "bytes": tensor.numel() * tensor.element_size(),
    }


def _tied(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of tensors that are the same bytes in the same shape."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            facts = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(facts, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


class _Mapping:
    """Where this process has the pages of a file, from ``/proc/self/maps``."""

    def __init__(self, path: str) -> None:
        self._path = path
        inode = str(os.stat(path).st_ino)
        self._ranges: list[tuple[int, int, int]] = []
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                addresses, _, offset, _, found, *_ = line.split(maxsplit=5)
                if found == inode:
                    start, end = (int(address, 16) for address in addresses.split("-"))
                    self._ranges.append((start, end, int(offset, 16)))
        self._is_checked = False

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where in the file a tensor's bytes are; None if they aren't in one piece."""
        length = tensor.numel() * tensor.element_size()
        if length == 0:
            return 0
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        address = tensor.data_ptr()
        for start, end, offset in self._ranges:
            if start <= address and address + length <= end:
                found = address - start + offset
                return found if self._is_so(tensor, found) else None
        return None

    def _is_so(self, tensor: torch.Tensor, offset: int) -> bool:
        """Compare the first bytes once: another file can have the number of this one."""
        if not self._is_checked:
            first = as_bytes(tensor)[:_COMPARED_BYTES].numpy().tobytes()
            with open(self._path, "rb") as file:
                file.seek(offset)
                self._is_checked = file.read(len(first)) == first
        return self._is_checked


class _Spill:
    """A file for the bytes of tensors that no file has in one piece."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.path = file.name
        self._limit = limit
        self._file = file

    def write(self, tensor: torch.Tensor) -> int:
        """Append a tensor, and return where it begins."""
        start = self._file.tell()
        length = 0
        for piece in _pieces(tensor, self._limit):
            length += self._file.write(as_bytes(piece).numpy().data)
        if length != tensor.numel() * tensor.element_size():
            raise MismatchError(f"{length} bytes of a tensor came to {self.path}")
        self._file.write(bytes(-length % _ALIGNMENT))
        return start


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Return a tensor's elements in order, as contiguous tensors of at most `limit` bytes."""
    length = tensor.numel() * tensor.element_size()
    if length <= limit or tensor.ndim == 0:
        yield tensor.resolve_conj().resolve_neg().contiguous()
    elif len(tensor) == 1:
        yield from _pieces(tensor[0], limit)
    else:
        rows = max(1, limit * len(tensor) // length)
        for piece in torch.split(tensor, rows):
            yield from _pieces(piece, limit)
