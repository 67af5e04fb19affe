"""Tensor files with numpy: what ``safetensors`` does, ours does, where that isn't wrong bytes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

import forebay.numpy
import forebay.torch
from conftest import pattern, run_python
from forebay.errors import InvalidInputError, MismatchError, UnsupportedError
from reference import (
    BITS,
    NUMPY_ITSELF,
    answer,
    assert_identical,
    assert_same_answer,
    data_start,
    flip_bit,
    write_file,
)

if TYPE_CHECKING:
    from pathlib import Path

THEIRS = safetensors.numpy
OURS = forebay.numpy

ITSELF = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8"]
NONE = ["g", "c16", "G", "M8[s]", "m8[s]", "S3", "U3", "V4", "O"]
BIG = [">i4", ">f8", ">u2", ">c8"]
EXTENDED = [
    "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip


def random_array(dtype: Any, shape: tuple[int, ...] = (3, 4)) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.hasobject:
        return np.empty(shape, kind)
    if kind == np.bool_:
        return (pattern(int(np.prod(shape))) % 2).astype(bool).reshape(shape)
    return pattern(int(np.prod(shape)) * kind.itemsize).view(kind).reshape(shape)


@pytest.mark.parametrize("dtype", [*ITSELF, *NONE, *BIG])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5)])
def test_types_of_numpy_are_saved_or_refused_as_by_the_reference(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    array = random_array(dtype, shape)

    def saved(save: Any, path: Path) -> Any:
        save({"x": array}, path)
        return THEIRS.load_file(path)

    assert_same_answer(
        lambda: saved(OURS.save_file, tmp_path / "a"),
        lambda: saved(THEIRS.save_file, tmp_path / "b"),
    )
    assert_same_answer(lambda: OURS.save({"x": array}), lambda: THEIRS.save({"x": array}))


@pytest.mark.parametrize("name", EXTENDED)
def test_types_of_ml_dtypes_are_saved_as_by_the_reference_and_loaded(
    tmp_path: Path, name: str
) -> None:
    array = random_array(getattr(ml_dtypes, name))
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": array}, path)
    assert OURS.save({"x": array}) == THEIRS.save({"x": array})
    assert_identical(OURS.load_file(path)["x"], array)
    assert_identical(OURS.load(path.read_bytes())["x"], array)
    by_torch = safetensors.torch.load_file(path)["x"]
    assert str(by_torch.dtype) == f"torch.{name}"
    with OURS.safe_open(path, "np") as opened:
        assert_identical(opened.get_slice("x")[1:3, 2], array[1:3, 2])


@pytest.mark.parametrize("code", BITS)
def test_every_type_of_the_format_is_loaded_or_refused(tmp_path: Path, code: str) -> None:
    path = tmp_path / "x.safetensors"
    data = bytes(2 * 8 * BITS[code] // 8)
    entry = {"dtype": code, "shape": [2, 8], "data_offsets": [0, len(data)]}
    write_file(path, {"x": entry}, data)
    if code in NUMPY_ITSELF:
        assert_identical(OURS.load_file(path), THEIRS.load_file(path))
        assert_identical(OURS.load(path.read_bytes()), THEIRS.load(path.read_bytes()))
    elif code.startswith(("F4", "F6")):
        for load in (OURS.load_file, THEIRS.load_file):
            assert not answer(lambda load=load: load(path))[0]
    else:
        assert OURS.load_file(path)["x"].tobytes() == data


def test_a_type_that_numpy_lacks_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": np.zeros(3, ml_dtypes.bfloat16)}, path)
    run_python(
        f"""
        import sys
        sys.modules["ml_dtypes"] = None
        import forebay.numpy
        from forebay.errors import UnsupportedError
        assert "torch" not in sys.modules
        for ask in (
            lambda: forebay.numpy.load_file({str(path)!r}),
            lambda: forebay.numpy.load(open({str(path)!r}, "rb").read()),
            lambda: forebay.numpy.plan_load({str(path)!r}),
            lambda: list(forebay.numpy.stream({str(path)!r})),
            lambda: forebay.numpy.safe_open({str(path)!r}, "np").get_tensor("x"),
            lambda: forebay.numpy.safe_open({str(path)!r}, "np").get_slice("x")[0],
        ):
            try:
                ask()
            except UnsupportedError as error:
                assert "ml_dtypes" in str(error), error
            else:
                raise AssertionError("no error")
        """
    )


ORDERS: dict[str, np.ndarray[Any, Any]] = {
    "transposed": np.arange(6).reshape(2, 3).T,
    "every other": np.arange(6)[::2],
    "reversed": np.arange(5)[::-1],
    "of Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "a field": np.array([(1, 2.0), (3, 4.0)], dtype="i4, f8")["f1"],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "read-only": np.frombuffer(b"12345678", np.uint8),
    "big-endian and strided": np.arange(6, dtype=">i4")[::2],
    "masked": np.ma.array([1, 2], mask=[False, True]),
}


@pytest.mark.parametrize("array", ORDERS.values(), ids=ORDERS)
def test_arrays_in_any_order_are_saved_as_what_they_hold(
    tmp_path: Path, array: np.ndarray[Any, Any]
) -> None:
    # The reference saves the bytes in the order of memory, under a shape that they don't have.
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": array}, path)
    native = np.array(np.asarray(array), order="C")
    assert_identical(THEIRS.load_file(path)["x"], native.astype(array.dtype.newbyteorder("=")))


def test_arrays_may_share_memory_as_with_the_reference(tmp_path: Path) -> None:
    array = np.arange(5.0)
    OURS.save_file({"a": array, "b": array[1:]}, tmp_path / "x")
    THEIRS.save_file({"a": array, "b": array[1:].copy()}, tmp_path / "y")
    assert_identical(OURS.load_file(tmp_path / "x"), THEIRS.load_file(tmp_path / "y"))


@pytest.mark.parametrize(
    "arrays", [[np.ones(2)], {"x": [1]}, {"x": np.float32(3)}, {1: np.ones(2)}, {"x": None}, None]
)
def test_what_is_no_dict_of_arrays_is_refused(tmp_path: Path, arrays: Any) -> None:
    assert not answer(lambda: THEIRS.save_file(arrays, tmp_path / "x"))[0]
    with pytest.raises(TypeError):
        OURS.save_file(arrays, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_loaded_arrays_are_writable_as_the_references(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = {"a": random_array("f4"), "s": np.array(5.0), "e": np.empty((0, 5), "f4")}
    THEIRS.save_file(wanted, path)
    assert_identical(OURS.load_file(path), THEIRS.load_file(path))
    found = OURS.load_file(path)
    assert all(array.flags.writeable and array.flags.c_contiguous for array in found.values())
    array = found.pop("a")
    found.clear()
    assert_identical(array, wanted["a"])
    assert all(array.flags.writeable for array in OURS.load(path.read_bytes()).values())


def test_parts_can_be_loaded_cast_and_streamed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = {"a.0": np.linspace(-3, 3, 12, dtype="f4").reshape(3, 4), "b": np.arange(5)}
    OURS.save_file(wanted, path)
    half = {"b": wanted["b"], "a.0": wanted["a.0"].astype(ml_dtypes.bfloat16)}
    assert_identical(OURS.load_file(path, keys="a.*"), {"a.0": wanted["a.0"]})
    assert_identical(OURS.load_file(path, dtype="bfloat16"), half)
    assert_identical(dict(OURS.stream(path, dtype="bfloat16", budget="32MiB")), half)
    plan = OURS.plan_load(path, dtype="float16")
    assert (plan.tensors, plan.tensor_bytes) == (2, 12 * 2 + 5 * 8)


def test_files_are_loaded_into_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = {"a": random_array("f4", (30, 40)), "b": np.arange(5), "c": np.arange(6.0)}
    OURS.save_file(wanted, path)
    strided = np.zeros((30, 80), "f4")[:, ::2]
    target = {"a": strided, "b": np.zeros(5, "i4"), "c": np.zeros(6)}
    assert OURS.load_into(target, path) == ([], [])
    assert np.array_equal(target["a"], wanted["a"], equal_nan=True)
    assert_identical(target["b"], wanted["b"].astype("i4"))
    assert_identical(target["c"], wanted["c"])
    frozen = np.zeros(6)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        OURS.load_into({"c": frozen}, path, keys="c")
    with pytest.raises(RuntimeError, match="'b'"):
        OURS.load_into({"a": strided, "c": np.zeros(6)}, path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"weights": random_array("f4", (300, 40))}, path)
    flip_bit(path, data_start(path) + 40_001)
    with pytest.raises(MismatchError, match="weights") as caught:
        OURS.load_file(path)
    assert str(path) in str(caught.value)
    with pytest.raises(MismatchError, match="weights"):
        OURS.load(path.read_bytes())
    assert OURS.load_file(path, verify=False).keys() == {"weights"}
    assert OURS.load(path.read_bytes(), verify=False).keys() == {"weights"}


@pytest.mark.parametrize("name", ["load_file", "save_file", "load", "save"])
def test_signatures_begin_as_those_of_the_reference(name: str) -> None:
    ours = inspect.signature(getattr(OURS, name)).parameters
    theirs = inspect.signature(getattr(THEIRS, name)).parameters
    for key, parameter in theirs.items():
        assert (ours[key].kind, ours[key].default) == (parameter.kind, parameter.default)
    more = [ours[key] for key in ours if key not in theirs]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in more)


def test_numpy_alone_is_enough(tmp_path: Path) -> None:
    run_python(
        f"""
        import sys
        for name in ("torch", "safetensors", "ml_dtypes", "transformers"):
            sys.modules[name] = None
        import numpy, forebay.numpy
        path = {str(tmp_path / "x.safetensors")!r}
        forebay.numpy.save_file({{"x": numpy.arange(7)}}, path, {{"a": "b"}})
        assert forebay.numpy.load_file(path)["x"].tolist() == list(range(7))
        with forebay.numpy.safe_open(path, "np") as opened:
            assert opened.get_slice("x")[2:4].tolist() == [2, 3]
            assert opened.metadata() == {{"a": "b"}}
        """
    )


@pytest.mark.parametrize("code", ["F4", "F6_E2M3"])
def test_a_slice_of_a_type_that_numpy_lacks_is_refused_as_the_tensor_is(
    tmp_path: Path, code: str
) -> None:
    path = tmp_path / "x.safetensors"
    header = {"x": {"dtype": code, "shape": [4], "data_offsets": [0, BITS[code] // 2]}}
    write_file(path, header, b"\1" * (BITS[code] // 2))
    with OURS.safe_open(path, "np") as file:
        for ask in (lambda: file.get_tensor("x"), lambda: file.get_slice("x")[:]):
            with pytest.raises(UnsupportedError, match=code):
                ask()


def test_what_is_no_array_isnt_loaded_into(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"x": np.ones(2)}, path)
    with pytest.raises(InvalidInputError, match="'y' is a list"):
        OURS.load_into({"x": np.ones(2), "y": [1]}, path)
