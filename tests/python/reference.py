"""What both libraries are asked, and how their answers are compared."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import forebay.torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Every type of the format, and the bits of an item."""

NUMPY_ITSELF = {
    "BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
}  # fmt: skip
"""Those that numpy has without another package."""


def answer(ask: Callable[[], Any]) -> tuple[bool, Any]:
    """Return whether asking gave a result, and the result or the error."""
    try:
        return True, ask()
    except Exception as error:
        return False, error


def assert_same_answer(ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Both give equal results, or both an error."""
    well, wanted = answer(theirs)
    good, found = answer(ours)
    assert good == well, f"ours: {found!r}\ntheirs: {wanted!r}"
    if well:
        assert_identical(found, wanted)


def assert_identical(found: Any, wanted: Any) -> None:
    """Both are of one type and shape, bit by bit the same."""
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        # Where in the order what takes no room comes is by chance in the reference.
        solid = [name for name, value in wanted.items() if getattr(value, "nbytes", 1)]
        assert [name for name in found if name in solid] == solid
        for name, value in wanted.items():
            assert_identical(found[name], value)
    elif isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape, found.device) == (
            wanted.dtype, wanted.shape, wanted.device,
        )  # fmt: skip
        assert raw(found) == raw(wanted)
    elif isinstance(wanted, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    else:
        assert type(found) is type(wanted)
        assert found == wanted


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, NaN payloads and all."""
    # As strided: to torch, one item or none is contiguous with whatever stride.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def write_file(
    path: Path, header: dict[str, Any] | bytes, data: bytes, padding: int | None = None
) -> None:
    """Write a file of a header and data as they are, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if padding is None else padding)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's header as it is."""
    contents = path.read_bytes()
    (length,) = struct.unpack("<Q", contents[:8])
    found: dict[str, Any] = json.loads(contents[8 : 8 + length])
    return found


def data_start(path: Path) -> int:
    """Return where the tensors begin."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    return 8 + int(length)


def place_of(path: Path, name: str) -> int:
    """Return where the bytes of a tensor begin in a file."""
    begin: int = read_json(path)[name]["data_offsets"][0]
    return data_start(path) + begin


def flip_bit(path: Path, offset: int, mask: int = 0x10) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random bits: NaNs with payloads, subnormal numbers, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.zeros(shape, dtype=torch.uint8).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).to(torch.bool)
    bits = torch.randint(0, 256, (items * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def experts(count: int = 4) -> dict[str, torch.Tensor]:
    """Return tensors as a mixture of experts names them."""
    tensors = {"embed.weight": random_tensor((100, 16), torch.bfloat16)}
    for expert in range(count):
        for matrix in ("w1", "w2"):
            name = f"layers.0.experts.{expert}.{matrix}.weight"
            tensors[name] = random_tensor((32, 17), torch.float32, expert)
    tensors["norm.count"] = torch.tensor(3)
    return tensors


def save_shards(directory: Path, tensors: dict[str, torch.Tensor], count: int = 3) -> Path:
    """Save tensors over files in turns, with an index."""
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    weight_map = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        shard = position % count
        shards[shard][name] = tensor
        weight_map[name] = f"model-{shard + 1:05}-of-{count:05}.safetensors"
    for shard, contents in enumerate(shards):
        forebay.torch.save_file(
            contents, directory / f"model-{shard + 1:05}-of-{count:05}.safetensors"
        )
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def assert_holds(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_identical(found[name], tensor)
