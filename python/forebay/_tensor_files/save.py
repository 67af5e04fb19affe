"""What is checked of tensors and metadata before they are saved, and saving to bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay._tensor_files.frame import BITS, byte_count
from forebay._tensor_files.select import parse_path
from forebay._tensor_files.shared import core_of, given_or_shared, tell
from forebay.errors import InvalidInputError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay._tensor_files.frame import Frame
    from forebay._tensor_files.select import Path
    from forebay.handle import Durability, Handle

__all__ = ["Entry", "deserialize", "parse_metadata", "parse_name", "serialize", "write"]

Entry = tuple[str, str, tuple[int, ...], Any]
"""A tensor to save: its name, type, shape and bytes."""

CHECKSUMS = "forebay.crc32c"
"""The key of the metadata that has the checksums of a file that Forebay wrote."""

_ORDER = {code: place for place, code in enumerate(BITS)}


def parse_name(name: Any) -> str:
    """Return a tensor's name, or raise what is wrong with it."""
    if not isinstance(name, str):
        raise TypeError(f"the names of tensors must be texts, not {type(name).__name__}")
    if name == "__metadata__":
        raise InvalidInputError("'__metadata__' is what files call their metadata: rename it")
    # A lone surrogate has no UTF-8.
    name.encode()
    return name


def parse_metadata(metadata: Any) -> dict[str, str] | None:
    """Return metadata without what another file of Forebay's has brought along."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be texts by texts, not {value!r} by {key!r}")
    return {key: value for key, value in metadata.items() if key != CHECKSUMS}


def write(
    entries: list[Entry],
    filename: Path,
    metadata: Any,
    durability: Durability,
    checksums: bool,
    handle: Handle | None,
) -> None:
    """Write a file, which then replaces what has its name, or isn't there at all."""
    handle = given_or_shared(handle)
    _forebay.save_tensors(
        core_of(handle),
        parse_path(filename),
        entries,
        parse_metadata(metadata),
        durability,
        checksums,
    )
    tell(handle)


def serialize(entries: Iterable[Entry], metadata: Any) -> bytes:
    """Return what ``safetensors`` makes of tensors, byte for byte."""
    ordered = sorted(entries, key=lambda entry: (-_ORDER[entry[1]], entry[0]))
    header: dict[str, Any] = {}
    checked = parse_metadata(metadata)
    if checked is not None:
        header["__metadata__"] = checked
    end = 0
    for name, dtype, shape, _ in ordered:
        begin, end = end, end + byte_count(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(8, "little")
    return b"".join([length, text, *(memoryview(memory) for _, _, _, memory in ordered)])


def deserialize(data: Any, frame: Frame, verify: bool) -> dict[str, Any]:
    """Return the tensors in the bytes of a file, in memory of their own."""
    import numpy as np

    if not isinstance(data, bytes):
        raise TypeError(f"data must be bytes, not {type(data).__name__}")
    header = _forebay.parse_header(data)
    found = {}
    for name in header.names:
        entry = header.get(name)
        if entry is None:
            raise KeyError(name)
        dtype, extents, start, end = entry
        frame.check(dtype, tuple(extents))
        begin = header.data_start + start
        memory = np.frombuffer(data, np.uint8, end - start, begin).copy()
        expected = header.checksum(name) if verify else None
        if expected is not None and _forebay.crc32c(memory) != expected:
            raise MismatchError(f"the bytes of tensor {name!r} aren't those that were saved")
        found[name] = frame.over(memory, dtype, tuple(extents))
    return found
