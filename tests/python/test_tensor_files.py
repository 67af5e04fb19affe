"""Tensor files with torch: what ``safetensors`` does, ours does, bit by bit and error by error."""

from __future__ import annotations

import collections
import inspect
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forebay.torch
from forebay.errors import ForebayError, TensorFileError
from reference import (
    BITS,
    answer,
    assert_identical,
    assert_same_answer,
    random_tensor,
    raw,
    read_json,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

THEIRS = safetensors.torch
OURS = forebay.torch

TORCH_TYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "matrix": random_tensor((4, 6), torch.float32),
        "odd": random_tensor((3, 5, 7), torch.bfloat16, 1),
        "bytes": random_tensor((13,), torch.uint8, 2),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "flags": random_tensor((9,), torch.bool, 3),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Have the reference write a file."""
    path = tmp_path / "theirs.safetensors"
    THEIRS.save_file(some_tensors(), path, {"key": "value"})
    return path


def save_and_read(save: Callable[..., Any], path: Path, *arguments: Any) -> dict[str, Any]:
    """Save, and return what the reference reads."""
    path.unlink(missing_ok=True)
    tensors, *rest = arguments
    save(tensors, path, *rest)
    with safetensors.safe_open(path, "pt") as opened:
        metadata = opened.metadata()
        if metadata is not None:
            metadata.pop("forebay.crc32c", None)
        return {"tensors": opened.get_tensors(), "metadata": metadata or None}


# What is loaded


def test_a_file_of_the_reference_is_loaded_as_by_the_reference(file: Path) -> None:
    assert_identical(OURS.load_file(file), THEIRS.load_file(file))
    assert_identical(OURS.load_file(str(file), "cpu", backend="pread"), THEIRS.load_file(file))


@pytest.mark.parametrize("code", BITS)
@pytest.mark.parametrize("shape", [(2, 8), (), (0, 4), (4, 0), (1,), (16,), (8, 3)])
def test_every_type_of_the_format_is_loaded_as_by_the_reference(
    tmp_path: Path, code: str, shape: tuple[int, ...]
) -> None:
    bits = int(np.prod(shape)) * BITS[code]
    bits += -bits % 8
    data = bytes(range(1, 1 + bits // 8)) if code != "BOOL" else bytes(bits // 8)
    path = tmp_path / "typed.safetensors"
    entry = {"dtype": code, "shape": list(shape), "data_offsets": [0, len(data)]}
    write_file(path, {"x": entry}, data)
    assert_same_answer(lambda: OURS.load_file(path), lambda: THEIRS.load_file(path))
    assert_same_answer(
        lambda: OURS.safe_open(path, "pt").keys(), lambda: safetensors.safe_open(path, "pt").keys()
    )
    if not answer(lambda: OURS.safe_open(path, "pt"))[0]:
        return
    with OURS.safe_open(path, "pt") as ours, safetensors.safe_open(path, "pt") as theirs:
        assert_same_answer(lambda: ours.get_tensor("x"), lambda: theirs.get_tensor("x"))
        assert_same_answer(
            lambda: (ours.get_slice("x").get_shape(), ours.get_slice("x").get_dtype()),
            lambda: (theirs.get_slice("x").get_shape(), theirs.get_slice("x").get_dtype()),
        )
        if code != "F4" or shape == (2, 8):
            # Theirs takes slices of F4 if there is nothing in them.
            assert_same_answer(lambda: ours.get_slice("x")[...], lambda: theirs.get_slice("x")[...])


@pytest.mark.parametrize("padding", [0, 1, 2, 3, 5, 7, 8, 500, 4089])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.uint8])
def test_data_may_begin_at_any_offset(tmp_path: Path, padding: int, dtype: torch.dtype) -> None:
    tensor = random_tensor((1000, 3), dtype)
    path = tmp_path / "shifted.safetensors"
    code = {torch.float64: "F64", torch.bfloat16: "BF16", torch.complex64: "C64"}.get(dtype, "U8")
    length = tensor.numel() * dtype.itemsize
    header = {
        "first": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "x": {"dtype": code, "shape": [1000, 3], "data_offsets": [3, 3 + length]},
    }
    write_file(path, header, b"abc" + raw(tensor), padding)
    found = OURS.load_file(path)
    assert_identical(found["x"], tensor)
    assert bytes(found["first"].numpy()) == b"abc"
    # Torch's own operations want tensors at multiples of their items.
    assert found["x"].data_ptr() % dtype.itemsize == 0
    with OURS.safe_open(path, "pt") as opened:
        assert_identical(opened.get_slice("x")[17:905, 1], tensor[17:905, 1].contiguous())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    names=st.lists(st.text(max_size=20).filter("__metadata__".__ne__), unique=True, max_size=6),
    metadata=st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), min_size=1),
    data=st.data(),
)
def test_what_either_saves_the_other_loads(
    tmp_path: Path, names: list[str], metadata: dict[str, str] | None, data: st.DataObject
) -> None:
    path = tmp_path / "any.safetensors"
    types = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e5m2]
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    tensors = {
        name: random_tensor(data.draw(shapes), data.draw(st.sampled_from(types)), seed)
        for seed, name in enumerate(names)
    }
    OURS.save_file(tensors, path, metadata)
    by_theirs = THEIRS.load_file(path)
    assert_identical(by_theirs, {name: tensors[name] for name in by_theirs})
    assert_identical(OURS.load_file(path), by_theirs)
    with OURS.safe_open(path, "pt") as opened:
        assert opened.metadata() == metadata
    THEIRS.save_file(tensors, path, metadata)
    assert_identical(OURS.load_file(path), THEIRS.load_file(path))
    with OURS.safe_open(path, "pt") as ours, safetensors.safe_open(path, "pt") as theirs:
        assert ours.metadata() == theirs.metadata() == metadata
        assert ours.keys() == theirs.keys()
        solid = {name for name, tensor in tensors.items() if tensor.numel()}
        in_order = [name for name in theirs.offset_keys() if name in solid]
        assert [name for name in ours.offset_keys() if name in solid] == in_order


def test_a_tensor_has_memory_of_its_own_size_and_keeps_it(file: Path) -> None:
    found = OURS.load_file(file)
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert not tensor.requires_grad
    matrix = found.pop("matrix")
    found.clear()
    assert_identical(matrix, some_tensors()["matrix"])
    # It is the caller's to change, and to save again.
    matrix.zero_()
    assert_identical(OURS.load_file(file)["matrix"], some_tensors()["matrix"])


def test_loaded_tensors_can_be_saved_by_either(file: Path, tmp_path: Path) -> None:
    found = OURS.load_file(file)
    THEIRS.save_file(found, tmp_path / "a.safetensors")
    OURS.save_file(found, tmp_path / "b.safetensors")
    torch.save(found["matrix"], tmp_path / "c.pt")
    assert (tmp_path / "c.pt").stat().st_size < 4096
    for name in ("a", "b"):
        assert_identical(THEIRS.load_file(tmp_path / f"{name}.safetensors"), found)


def test_the_default_device_of_torch_changes_nothing(file: Path) -> None:
    with torch.device("meta"):
        found = OURS.load_file(file)
    assert_identical(found, THEIRS.load_file(file))


# What is refused


BAD_FILES: dict[str, bytes] = {
    "nothing": b"",
    "three bytes": b"abc",
    "a length alone": (100).to_bytes(8, "little"),
    "a header that is too long": (100_000_001).to_bytes(8, "little") + b"{}" + bytes(20),
    "the longest header, cut": (100_000_000).to_bytes(8, "little") + b"{}" + bytes(20),
    "the largest length": b"\xff" * 8 + b"{}",
    "no JSON": (8).to_bytes(8, "little") + b"notjson!",
    "a list": (8).to_bytes(8, "little") + b"[]      ",
    "no UTF-8": (8).to_bytes(8, "little") + b'{"\xff":1}',
    "an empty header": (8).to_bytes(8, "little") + b"{}      ",
    "an empty header, and data": (8).to_bytes(8, "little") + b"{}      xyz",
}


@pytest.mark.parametrize("contents", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused_where_the_reference_refuses_them(
    tmp_path: Path, contents: bytes
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(contents)
    assert_same_answer(lambda: OURS.load_file(path), lambda: THEIRS.load_file(path))
    assert_same_answer(lambda: OURS.load(contents), lambda: THEIRS.load(contents))
    well, error = answer(lambda: OURS.load_file(path))
    if not well:
        assert isinstance(error, ForebayError)
        assert str(path) in str(error)


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_HEADERS: dict[str, dict[str, Any]] = {
    "overlapping": {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)},
    "a hole": {"a": entry("U8", [2], 0, 2), "b": entry("U8", [4], 4, 8)},
    "beyond the end": {"a": entry("U8", [9], 0, 9)},
    "data to spare": {"a": entry("U8", [7], 0, 7)},
    "a wrong size": {"a": entry("F32", [3], 0, 8)},
    "an unknown type": {"a": entry("F128", [1], 0, 8)},
    "a negative extent": {"a": entry("U8", [-8], 0, 8)},
    "a fraction": {"a": entry("U8", [8.5], 0, 8)},
    "an extent beyond numbers": {"a": entry("U8", [2**64], 0, 8)},
    "a product beyond numbers": {"a": entry("U8", [2**32, 2**32], 0, 8)},
    "backwards": {"a": entry("U8", [8], 8, 0)},
    "no shape": {"a": {"dtype": "U8", "data_offsets": [0, 8]}},
    "a number as metadata": {"__metadata__": {"a": 1}, "b": entry("U8", [8], 0, 8)},
    "text as metadata": {"__metadata__": "a", "b": entry("U8", [8], 0, 8)},
    "no metadata": {"__metadata__": None, "b": entry("U8", [8], 0, 8)},
    "half a byte": {"a": entry("F4", [15], 0, 8)},
    "something more": {"a": {**entry("U8", [8], 0, 8), "more": 1}},
    "right": {"a": entry("U8", [8], 0, 8)},
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_bad_headers_are_refused_where_the_reference_refuses_them(
    tmp_path: Path, header: dict[str, Any]
) -> None:
    path = tmp_path / "bad.safetensors"
    write_file(path, header, bytes(8))
    assert_same_answer(lambda: OURS.load_file(path), lambda: THEIRS.load_file(path))
    assert_same_answer(lambda: OURS.load(path.read_bytes()), lambda: THEIRS.load(path.read_bytes()))


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.safetensors"
    one = b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    two = b'"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}'
    write_file(path, b"{" + one + b"," + two + b"}", bytes(8))
    with pytest.raises(TensorFileError, match=r"'a'|\"a\""):
        OURS.load_file(path)


@pytest.mark.parametrize("path", ["missing", "", b"bytes", 3, None, "null\0byte"], ids=repr)
def test_what_is_no_file_is_refused(tmp_path: Path, path: Any) -> None:
    where = str(tmp_path / path) if isinstance(path, str) and path else path
    assert_same_answer(lambda: OURS.load_file(where), lambda: THEIRS.load_file(where))
    assert_same_answer(
        lambda: OURS.safe_open(where, "pt"), lambda: safetensors.safe_open(where, "pt")
    )
    tensors = {"a": torch.ones(2)}
    if path != "missing":
        assert_same_answer(
            lambda: OURS.save_file(tensors, where), lambda: THEIRS.save_file(tensors, where)
        )


def test_errors_of_the_system_are_those_of_python(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        OURS.load_file(tmp_path / "missing.safetensors")
    assert caught.value.filename == str(tmp_path / "missing.safetensors")
    with pytest.raises(FileNotFoundError):
        OURS.safe_open(tmp_path / "missing.safetensors", "pt")
    with pytest.raises(IsADirectoryError):
        OURS.safe_open(tmp_path, "pt")
    with pytest.raises(OSError, match=str(tmp_path)):
        OURS.load_file(tmp_path)
    with pytest.raises(IsADirectoryError):
        OURS.save_file({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(FileNotFoundError):
        OURS.save_file({"a": torch.ones(2)}, tmp_path / "none" / "a.safetensors")


# What is saved


def cases_to_save() -> dict[str, tuple[Any, ...]]:
    base = torch.arange(12.0)
    square = torch.arange(16.0).reshape(4, 4)
    return {
        "a list": ([base],),
        "an ordered dict": (collections.OrderedDict(b=base, a=square),),
        "a name that is a number": ({1: base},),
        "a numpy array": ({"a": np.ones(3)},),
        "None": ({"a": None},),
        "sparse": ({"a": square.to_sparse()},),
        "not contiguous": ({"a": square.t()},),
        "a column": ({"a": square[:, 1]},),
        "twice the same": ({"a": base, "b": base},),
        "a part and the whole": ({"a": base, "b": base[:3]},),
        "other parts": ({"a": base[:6], "b": base[6:]},),
        "parts that overlap": ({"a": base[:6], "b": base[4:]},),
        "a part of a part": ({"a": base, "b": base[3:5], "c": base[8:]},),
        "a transposed twin": ({"a": square, "b": square.t()},),
        "a part alone": ({"a": base[2:5]},),
        "an empty part": ({"a": base[2:2], "b": base[1:5]},),
        "two empty ones": ({"a": torch.empty(0), "b": torch.empty(0, 3)},),
        "no memory": ({"a": torch.ones(2, device="meta")},),
        "with gradient": ({"a": torch.ones(2, requires_grad=True)},),
        "a parameter": ({"a": torch.nn.Parameter(torch.ones(2))},),
        "a scalar": ({"a": torch.tensor(3)},),
        "one item, expanded to one": ({"a": torch.ones(1).expand(1)},),
        "expanded": ({"a": torch.ones(1).expand(4)},),
        "nothing": ({},),
        "nothing but metadata": ({}, {"a": "b"}),
        "metadata": ({"a": base}, {"format": "pt"}),
        "metadata of any text": ({"a": base}, {"é\n": '"\\\0😀'}),
        "a number in metadata": ({"a": base}, {"a": 1}),
        "a number as a key of metadata": ({"a": base}, {1: "a"}),
        "metadata as a list": ({"a": base}, [("a", "b")]),
        "metadata as text": ({"a": base}, "a"),
        "an empty name": ({"": base},),
        "a name of any text": ({'ключ\n"\\😀\0': base},),
        "a lone surrogate": ({"\ud800": base},),
    }


@pytest.mark.parametrize("case", cases_to_save())
def test_what_is_saved_and_refused_is_as_with_the_reference(tmp_path: Path, case: str) -> None:
    arguments = cases_to_save()[case]
    well, theirs = answer(
        lambda: save_and_read(THEIRS.save_file, tmp_path / "theirs.safetensors", *arguments)
    )
    good, ours = answer(
        lambda: save_and_read(OURS.save_file, tmp_path / "ours.safetensors", *arguments)
    )
    assert good == well, f"ours: {ours!r}\ntheirs: {theirs!r}"
    if well:
        assert_identical(ours, theirs)
    else:
        # What catches theirs catches ours.
        for kind in (TypeError, ValueError, RuntimeError):
            assert isinstance(ours, kind) == isinstance(theirs, kind)
    assert_same_answer(lambda: OURS.save(*arguments), lambda: THEIRS.save(*arguments))


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4), (), (0, 4)])
def test_every_type_of_torch_is_saved_or_refused_as_by_the_reference(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    well, tensor = answer(lambda: random_tensor(shape, dtype))
    if not well:
        pytest.skip(f"torch makes no tensor of it: {tensor}")
    assert_same_answer(
        lambda: save_and_read(OURS.save_file, tmp_path / "ours.safetensors", {"x": tensor}),
        lambda: save_and_read(THEIRS.save_file, tmp_path / "theirs.safetensors", {"x": tensor}),
    )
    assert_same_answer(lambda: OURS.save({"x": tensor}), lambda: THEIRS.save({"x": tensor}))


def test_bytes_are_those_of_the_reference_in_the_order_of_the_reference() -> None:
    tensors = {
        str(dtype): random_tensor((3,), dtype)
        for dtype in TORCH_TYPES
        if answer(lambda dtype=dtype: THEIRS.save({"x": random_tensor((3,), dtype)}))[0]
    }
    assert len(tensors) > 15
    data = OURS.save(tensors, {"a": "b"})
    assert data == THEIRS.save(tensors, {"a": "b"})
    assert_identical(OURS.load(data), tensors_in_file_order(data, tensors))


def tensors_in_file_order(data: bytes, tensors: dict[str, Any]) -> dict[str, Any]:
    return dict(
        sorted(tensors.items(), key=lambda item: data.index(b'"' + item[0].encode() + b'"'))
    )


@pytest.mark.parametrize("mark", [torch.Tensor.conj, lambda tensor: tensor.conj().imag])
def test_lazily_conjugate_and_negative_tensors_are_saved_as_what_they_are(
    tmp_path: Path, mark: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = mark(torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)[:1])
    OURS.save_file({"x": tensor}, tmp_path / "x.safetensors")
    assert torch.equal(THEIRS.load_file(tmp_path / "x.safetensors")["x"], tensor)


def test_the_name_of_the_metadata_is_no_tensors_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        OURS.save_file({"__metadata__": torch.ones(2)}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(16), memoryview(b"a"), "text", None])
def test_only_bytes_of_a_file_are_loaded(data: Any) -> None:
    assert_same_answer(lambda: OURS.load(data), lambda: THEIRS.load(data))


def test_tensors_loaded_from_bytes_are_the_callers_to_change() -> None:
    data = THEIRS.save(some_tensors())
    OURS.load(data)["matrix"].zero_()
    assert_identical(OURS.load(data)["matrix"], some_tensors()["matrix"])


# The face


@pytest.mark.parametrize(
    "name", ["load_file", "save_file", "load", "save", "load_model", "save_model"]
)
def test_signatures_begin_as_those_of_the_reference(name: str) -> None:
    ours = inspect.signature(getattr(OURS, name)).parameters
    theirs = inspect.signature(getattr(THEIRS, name)).parameters
    for key, parameter in theirs.items():
        assert (ours[key].kind, ours[key].default) == (parameter.kind, parameter.default)
    more = [ours[key] for key in ours if key not in theirs]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in more)
    positional = [key for key in ours if ours[key].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [
        key for key in theirs if theirs[key].kind is not inspect.Parameter.KEYWORD_ONLY
    ]


@pytest.mark.parametrize(
    "framework",
    ["pt", "torch", "pytorch", "np", "numpy", "tf", "jax", "flax", "mlx", "PT", "", None, 3],
)
def test_frameworks_are_those_of_the_reference(tmp_path: Path, framework: Any) -> None:
    path = tmp_path / "x.safetensors"
    THEIRS.save_file({"x": torch.arange(6.0)}, path)
    assert_same_answer(
        lambda: OURS.safe_open(path, framework).get_tensor("x"),
        lambda: safetensors.safe_open(path, framework).get_tensor("x"),
    )


@pytest.mark.parametrize(
    "device",
    ["cpu", None, "meta", "cpu:0", "CPU", "disk", "auto", "", torch.device("cpu"), -1, 1.5],
)
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_devices_are_those_of_the_reference(tmp_path: Path, framework: str, device: Any) -> None:
    path = tmp_path / "x.safetensors"
    THEIRS.save_file({"x": torch.arange(6.0)}, path)
    assert_same_answer(
        lambda: OURS.safe_open(path, framework, device).get_tensor("x"),
        lambda: safetensors.safe_open(path, framework, device).get_tensor("x"),
    )
    if framework == "pt":
        assert_same_answer(
            lambda: OURS.load_file(path, device), lambda: THEIRS.load_file(path, device)
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [0, "cuda", "cuda:1"])
def test_a_gpu_that_isnt_there_is_an_error(file: Path, device: Any) -> None:
    assert_same_answer(lambda: OURS.load_file(file, device), lambda: THEIRS.load_file(file, device))


@pytest.mark.parametrize("backend", ["mmap", "pread", "x", None])
def test_backends_are_those_of_the_reference(file: Path, backend: Any) -> None:
    assert_same_answer(
        lambda: OURS.load_file(file, backend=backend),
        lambda: THEIRS.load_file(file, backend=backend),
    )


def test_an_open_file_answers_as_the_references(file: Path) -> None:
    with OURS.safe_open(file, "pt") as ours, safetensors.safe_open(file, "pt") as theirs:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == {"key": "value"}
        assert_identical(ours.get_tensors(), theirs.get_tensors())
        for name in theirs.keys():  # noqa: SIM118 (it isn't iterable)
            assert_identical(ours.get_tensor(name), theirs.get_tensor(name))
        for name in ("none", 3, None):
            assert_same_answer(
                lambda name=name: ours.get_tensor(name), lambda name=name: theirs.get_tensor(name)
            )
            assert_same_answer(
                lambda name=name: ours.get_slice(name)[0],
                lambda name=name: theirs.get_slice(name)[0],
            )
        with pytest.raises(TensorFileError, match="none"):
            ours.get_tensor("none")
        assert_same_answer(lambda: pickle.dumps(ours), lambda: pickle.dumps(theirs))


def test_a_closed_file_answers_as_the_references(file: Path) -> None:
    with OURS.safe_open(file, "pt") as ours:
        part = ours.get_slice("matrix")
        tensor = ours.get_tensor("matrix")
    with safetensors.safe_open(file, "pt") as theirs:
        pass
    for name in ("keys", "offset_keys", "metadata", "get_tensors"):
        assert_same_answer(getattr(ours, name), getattr(theirs, name))
    assert_same_answer(lambda: ours.get_tensor("matrix"), lambda: theirs.get_tensor("matrix"))
    assert_same_answer(
        lambda: ours.__exit__(None, None, None), lambda: theirs.__exit__(None, None, None)
    )
    # Slices and tensors outlive it, as the reference's do.
    assert_identical(part[1:3], some_tensors()["matrix"][1:3])
    assert_identical(tensor, some_tensors()["matrix"])


def test_an_open_file_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    first, second = torch.arange(5000.0), -torch.arange(7000.0)
    OURS.save_file({"x": first}, path)
    with OURS.safe_open(path, "pt") as opened:
        OURS.save_file({"y": second, "x": second.clone()}, path)
        assert_identical(opened.get_tensor("x"), first)
        assert_identical(opened.get_slice("x")[4000:4500], first[4000:4500])
        path.unlink()
        assert_identical(opened.get_tensors(), {"x": first})


def test_ours_hides_what_it_adds_to_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": torch.ones(3)}, path)
    assert "forebay.crc32c" in read_json(path)["__metadata__"]
    with OURS.safe_open(path, "pt") as opened:
        assert opened.metadata() is None
