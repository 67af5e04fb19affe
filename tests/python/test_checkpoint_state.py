"""What goes into a checkpoint comes out of it: every kind of value, exactly."""

from __future__ import annotations

import contextlib
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as reference_load_numpy
from safetensors.torch import load_file as reference_load

from forebay.checkpoint import Checkpointer
from forebay.checkpoint.arrays import Plain, framework_named
from forebay.checkpoint.decode import decode
from forebay.checkpoint.encode import encode
from forebay.errors import InvalidBufferError, InvalidInputError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUDGET = "64MiB"


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "checkpoints", budget=BUDGET) as checkpointer:
        yield checkpointer


def round_trip(checkpointer: Checkpointer, state: Any, step: int = 1) -> Any:
    checkpointer.save(step, state)
    return checkpointer.load(step)


def bits(value: Any) -> bytes:
    """Return the bytes of a tensor or array, so that NaNs compare."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes(np.ascontiguousarray(value).tobytes())


TORCH_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.uint1", "torch.int1", "torch.bits"))
        and dtype.itemsize > 0
    },
    key=str,
)


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return a tensor with every sort of bits in it; ``None`` if torch can't make one."""
    count = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    source = np.random.default_rng(count).integers(0, limit, count, dtype=np.uint8)
    try:
        tensor = torch.empty(shape, dtype=dtype)
        storage = torch.from_numpy(source.copy()).untyped_storage()
        return tensor.set_(storage, 0, shape) if count else tensor
    except (RuntimeError, TypeError, NotImplementedError):
        return None


@pytest.mark.filterwarnings("ignore:.* support is experimental")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_and_shape_of_torch_comes_back_bit_by_bit(
    checkpointer: Checkpointer, dtype: torch.dtype
) -> None:
    shapes = [(), (1,), (0,), (0, 5), (3, 5, 7), (4097,)]
    state = [filled(dtype, shape) for shape in shapes]
    if state[0] is None:
        pytest.skip("torch can't make one")
    back = round_trip(checkpointer, state)
    for wanted, found in zip(state, back, strict=True):
        assert wanted is not None
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        assert bytes(found.untyped_storage()) == bytes(wanted.untyped_storage())


@pytest.mark.parametrize(
    "dtype",
    [
        *("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8"),
        *("<c16", "<f16", ">f4", ">i8", "<M8[ns]", "<m8[s]", "<U7", "S5", "V3"),
        *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3", "int4"),
    ],
)
def test_every_dtype_and_shape_of_numpy_comes_back_bit_by_bit(
    checkpointer: Checkpointer, dtype: str
) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)
    random = np.random.default_rng(7)
    state = []
    for shape in [(), (1,), (0,), (0, 5), (3, 5, 7)]:
        count = math.prod(shape) * kind.itemsize
        raw = random.integers(0, 2 if kind.kind in "?bU" else 256, count, dtype=np.uint8)
        state.append(raw.view(kind).reshape(shape))
    back = round_trip(checkpointer, state)
    for wanted, found in zip(state, back, strict=True):
        assert type(found) is np.ndarray
        assert found.dtype == kind
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()
        assert found.flags.writeable


def test_views_that_are_not_contiguous_are_saved_by_their_values(
    checkpointer: Checkpointer,
) -> None:
    base = torch.arange(10_000, dtype=torch.float32).reshape(100, 100)
    array = np.arange(10_000.0).reshape(100, 100)
    state = {
        "column": base[:, 3],
        "transposed": base.T,
        "step": base[::7, ::3],
        "shifted": base.reshape(-1)[1:],
        "expanded": torch.ones(1).expand(5, 4),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "leaf": torch.nn.Parameter(base.clone()),
        "array column": array[:, 3],
        "array backwards": array[::-1, ::-2],
        "array in Fortran order": np.asfortranarray(array),
        "array read-only": np.frombuffer(b"abcdefgh", dtype="<i4"),
    }
    back = round_trip(checkpointer, state)
    for key, wanted in state.items():
        found = back[key]
        assert found.shape == wanted.shape, key
        assert (found == wanted).all(), key
        assert found.is_contiguous() if torch.is_tensor(found) else found.flags.c_contiguous
    assert type(back["leaf"]) is torch.Tensor


NAN = struct.unpack(">d", bytes.fromhex("7ff8dead0000beef"))[0]

VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**63),
    2**64,
    -(10**400),
    7**9000,
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    NAN,
    "",
    'läuft\0\n"$tensor" \U0001f40e \ud800',
    b"",
    bytes(range(256)),
    bytearray(b"xyz"),
    complex(-0.0, math.inf),
    [],
    (),
    {},
    [[], [[]], ()],
    ((1,), [2], (3, (4,))),
    {"a": {"b": [1, (2, {"c": None})]}, "a.b": 1},
    {0: "int", "0": "text", 0.5: "float", None: "none", (1, "x"): "tuple", b"k": "bytes"},
    {True: 1},
    {"$tensor": "not one", "$": {}, "of": 3},
    {"$pickle": "not one"},
    {"__metadata__": 1},
]


def same(one: Any, other: Any) -> bool:
    """Whether two values are, with their types, the signs of zeros and the bits of NaNs."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(left, right) for left, right in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_values_come_back_exactly(value: Any) -> None:
    encoded = encode(value, allow_pickle=False)
    assert encoded.tensors == []
    assert same(decode(encoded.rest, lambda _: None, allow_pickle=False), value)


def test_all_values_come_back_from_a_directory(checkpointer: Checkpointer) -> None:
    assert same(round_trip(checkpointer, VALUES), VALUES)


KEYS = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.floats(allow_nan=False)
)
STATES = st.recursive(
    st.one_of(KEYS, st.floats(), st.complex_numbers()),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
)


@given(STATES)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_nesting_comes_back_exactly(state: Any) -> None:
    encoded = encode(state, allow_pickle=False)
    assert same(decode(encoded.rest, lambda _: None, allow_pickle=False), state)


@given(st.binary())
def test_any_text_is_a_state_or_an_error(rest: bytes) -> None:
    with contextlib.suppress(MismatchError, InvalidInputError):
        decode(rest, lambda _: None, allow_pickle=False)


@pytest.mark.parametrize(
    "text",
    [
        '{"$int": "x"}',
        '{"$int": 3}',
        '{"$float": "00"}',
        '{"$bytes": "%"}',
        '{"$tuple": 3}',
        '{"$dict": [[1]]}',
        '{"$dict": [[[], 1]]}',
        '{"$later": 1}',
        '{"$tensor": "a"}',
        '{"$tuple": [], "more": 1}',
        '{"$scalar": ["O", ""]}',
        "[" * 100_000,
    ],
)
def test_text_that_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(MismatchError):
        decode(text.encode(), lambda _: None, allow_pickle=False)


def test_dictionaries_of_other_sorts_come_back_as_what_they_hold(
    checkpointer: Checkpointer,
) -> None:
    state = {
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "default": defaultdict(list, {3: [1]}),
        "counter": Counter({30: 1, 80: 2}),
        "size": torch.ones(2, 3).shape,
    }
    back = round_trip(checkpointer, state)
    assert list(back["ordered"]) == ["b", "a"]
    assert type(back["ordered"]) is dict
    assert back["default"] == {3: [1]}
    assert type(back["counter"]) is Counter
    assert back["counter"] == state["counter"]
    assert back["size"] == (2, 3)


def test_numbers_of_numpy_keep_their_types(checkpointer: Checkpointer) -> None:
    state = [np.float32(0.1), np.float64(-0.0), np.int64(-5), np.bool_(True), np.complex64(1j)]
    back = round_trip(checkpointer, state)
    assert [type(value) for value in back] == [type(value) for value in state]
    assert [value.tobytes() for value in back] == [value.tobytes() for value in state]


def test_tied_tensors_are_stored_once_and_tied_again(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    weight = torch.randn(1000, 100)
    array = np.arange(50_000.0)
    state = {
        "embedding": weight,
        "head": weight.view_as(weight),
        "transposed": weight.T,
        "again": [weight, array, array[:]],
        "empty": [torch.empty(0), torch.empty(0)],
    }
    back = round_trip(checkpointer, state)
    shard = tmp_path / "checkpoints" / "step-00000001" / "shard-00001.safetensors"
    payload = 2 * weight.nbytes + array.nbytes
    assert payload <= shard.stat().st_size <= payload + 8192
    back["embedding"][0, 0] = 42
    assert back["head"][0, 0] == 42
    assert back["again"][0][0, 0] == 42
    assert back["transposed"][0, 0] == weight[0, 0]
    back["again"][1][0] = -1
    assert back["again"][2][0] == -1


def test_views_of_one_storage_keep_their_own_values(checkpointer: Checkpointer) -> None:
    flat = torch.arange(1_000_000, dtype=torch.int32)
    state = {"parts": [flat[start : start + 10] for start in range(0, 1000, 5)]}
    back = round_trip(checkpointer, state)
    for wanted, found in zip(state["parts"], back["parts"], strict=True):
        assert torch.equal(found, wanted)


def test_keys_with_dots_and_of_any_type_make_no_two_tensors_one(
    checkpointer: Checkpointer,
) -> None:
    state: dict[Any, Any] = {
        "a.b": torch.full((2,), 1),
        "a": {"b": torch.full((2,), 2), "b~2": torch.full((2,), 3)},
        "a.b~2": torch.full((2,), 4),
        "__metadata__": torch.full((2,), 5),
        "": torch.full((2,), 6),
        "\ud800": torch.full((2,), 7),
        0: torch.full((2,), 8),
        "0": torch.full((2,), 9),
        "x" * 5000: torch.full((2,), 10),
    }
    back = round_trip(checkpointer, state)
    assert list(back) == list(state)
    assert back["a"]["b"][0] == 2
    assert back["a"]["b~2"][0] == 3
    for key in set(state) - {"a"}:
        assert torch.equal(back[key], state[key]), key


def test_a_tensor_can_be_the_whole_state(checkpointer: Checkpointer) -> None:
    assert torch.equal(round_trip(checkpointer, torch.arange(5)), torch.arange(5))
    assert round_trip(checkpointer, 5, step=2) == 5


def test_shards_are_files_that_the_reference_library_reads(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    state = {
        "model": {name: filled(torch.float32, (n, 7)) for n, name in enumerate("abcdef")},
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(33).bfloat16(),
    }
    checkpointer.save(1, state)
    found = reference_load(tmp_path / "checkpoints/step-00000001/shard-00001.safetensors")
    assert bits(found["half"]) == bits(state["half"])
    for name, tensor in state["model"].items():
        assert bits(found[f"model.{name}"]) == bits(tensor)


@pytest.mark.parametrize("shard_size", [1, 5000, "1MiB"])
def test_a_state_is_cut_into_shards(tmp_path: Path, shard_size: Any) -> None:
    state = {str(index): np.arange(1000.0) + index for index in range(20)}
    with Checkpointer(tmp_path, budget=BUDGET, shard_size=shard_size) as checkpointer:
        back = round_trip(checkpointer, state)
    shards = sorted((tmp_path / "step-00000001").glob("*.safetensors"))
    assert len(shards) == (1 if shard_size == "1MiB" else 20)
    names = [name for shard in shards for name in reference_load_numpy(shard)]
    assert sorted(names) == sorted(state)
    assert all((back[key] == state[key]).all() for key in state)


class Thing:
    """A Python object."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.value == self.value

    __hash__ = object.__hash__


@pytest.mark.parametrize("value", [Thing(3), Decimal("0.1"), {1, 2}, range(3), torch.float32])
def test_objects_take_allow_pickle_on_both_sides(
    tmp_path: Path, value: Any, checkpointer: Checkpointer
) -> None:
    with pytest.raises(InvalidInputError, match=r"state\['a'\]\[1\] is a .*allow_pickle"):
        checkpointer.save(1, {"a": [0, value]})
    assert checkpointer.steps() == []
    with Checkpointer(tmp_path / "p", budget=BUDGET, allow_pickle=True) as trusting:
        assert round_trip(trusting, {"a": [0, value]})["a"][1] == value
    with (
        Checkpointer(tmp_path / "p", budget=BUDGET) as careful,
        pytest.raises(InvalidInputError, match=r"state\['a'\]\[1\].*runs code"),
    ):
        careful.load()


def endless() -> list[Any]:
    value: list[Any] = []
    value.append({"deeper": value})
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (endless(), "contains itself"),
        (nested(100_000), "too deeply"),
        ({"t": torch.ones(3).to_sparse()}, r"state\['t'\].*sparse"),
        ({"t": torch.ones(3, device="meta")}, r"state\['t'\].*meta"),
        ({"t": np.array([object()])}, r"state\['t'\].*objects"),
        ({"t": np.zeros(2, dtype=[("a", "i4")])}, r"state\['t'\].*records"),
        ({"t": np.ma.masked_array([1, 2], [True, False])}, r"state\['t'\].*mask"),
        ({frozenset({1}): 2}, "frozenset"),
    ],
    ids=["endless", "nested", "sparse", "meta", "objects", "records", "masked", "key"],
)
def test_what_cannot_be_saved_is_refused_and_said_where(
    checkpointer: Checkpointer, state: Any, said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        checkpointer.save(1, state)
    assert checkpointer.steps() == []
    assert list(checkpointer.directory.iterdir()) == []


def test_loading_into_a_state_fills_its_tensors_and_returns_them(
    checkpointer: Checkpointer,
) -> None:
    state = {
        "model": {"w": torch.randn(100, 30), "b": torch.randn(30)},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "lr": 0.1},
        "array": np.arange(12.0).reshape(3, 4),
        "new": torch.randn(5),
    }
    checkpointer.save(3, state)
    module = torch.nn.Parameter(torch.zeros(100, 30))
    into = {
        "model": {"w": module, "b": torch.zeros(60)[::2]},
        "optimizer": {"state": {0: {"step": torch.tensor(0.0)}}, "lr": 99.0},
        "array": np.zeros((4, 3)).T,
    }
    back = checkpointer.load(into=into)
    assert back["model"]["w"] is module
    assert torch.equal(module, state["model"]["w"])
    assert module.requires_grad
    assert back["model"]["b"] is into["model"]["b"]
    assert torch.equal(into["model"]["b"], state["model"]["b"])
    assert into["optimizer"]["state"][0]["step"] == 7
    assert (into["array"] == state["array"]).all()
    assert back["optimizer"]["lr"] == 0.1
    assert torch.equal(back["new"], state["new"])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.zeros(3), "shape"),
        (torch.zeros(4, dtype=torch.float64), "F64"),
        (torch.zeros(1).expand(4), "expanded"),
        (np.frombuffer(bytes(16), dtype="<f4"), "read-only"),
    ],
    ids=["shape", "type", "expanded", "read-only"],
)
def test_a_state_that_cannot_be_filled_is_left_as_it_is(
    checkpointer: Checkpointer, target: Any, said: str
) -> None:
    checkpointer.save(1, {"a": torch.ones(4), "b": torch.ones(4)})
    first = torch.zeros(4)
    with pytest.raises(InvalidBufferError, match=rf"state\['b'\].*{said}"):
        checkpointer.load(into={"a": first, "b": target})
    assert first.sum() == 0


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_tensor_whose_elements_overlap_is_not_filled(
    checkpointer: Checkpointer, framework: str
) -> None:
    values = np.arange(6.0).reshape(3, 2)
    memory = np.zeros(12)

    def target(*strides: int) -> Any:
        if framework == "torch":
            return torch.from_numpy(memory).as_strided((3, 2), strides)
        bytes_of = [8 * stride for stride in strides]
        return np.lib.stride_tricks.as_strided(memory, (3, 2), bytes_of)

    checkpointer.save(1, [torch.from_numpy(values) if framework == "torch" else values])
    for strides in [(1, 1), (1, 2), (0, 1)]:
        with pytest.raises(InvalidBufferError, match="share memory"):
            checkpointer.load(into=[target(*strides)])
        assert not memory.any()
    # Elements in each other's gaps are elements apart.
    for strides in [(2, 1), (1, 3), (2, 3), (4, 1)]:
        into = [target(*strides)]
        checkpointer.load(into=into)
        assert into[0].tolist() == values.tolist()
        memory[:] = 0


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (np.array([1.5, 2.5], ">f8"), np.zeros(2, ">i8")),
        (np.array([3], "<M8[ns]"), np.zeros(1, "<M8[s]")),
        (np.zeros((3, 16), np.uint8), torch.ones(3, dtype=torch.complex128)),
        (np.ones(3, np.longdouble), torch.ones(3, dtype=torch.complex128)),
    ],
    ids=["float to integer", "units", "bytes to items", "frameworks"],
)
def test_a_type_that_files_lack_is_not_cast_to_another(
    checkpointer: Checkpointer, saved: Any, target: Any
) -> None:
    checkpointer.save(1, [np.ones(2), saved])
    before = bits(target)
    first = np.zeros(2)
    with pytest.raises(InvalidBufferError, match=r"state\[1\] has shape"):
        checkpointer.load(into=[first, target])
    assert bits(target) == before
    assert not first.any()


@pytest.mark.parametrize(
    "dtype", ["complex128", "float32", "quint8", "<c16", "|O", "i4,i4", "(1,)i8"]
)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_tensor_of_bytes_that_are_no_items_of_its_type_is_refused(
    framework: str, dtype: str
) -> None:
    memory = np.zeros(32, np.uint8)
    for plain in [Plain("U8", (2, 9), dtype), Plain("F64", (4,), dtype), Plain("U8", (), dtype)]:
        with pytest.raises((MismatchError, InvalidInputError), match=r"type|of |objects"):
            framework_named(framework).build(memory, plain)


def test_complex_numbers_fill_tensors_of_the_other_framework(checkpointer: Checkpointer) -> None:
    values = np.arange(3) * (1 + 2j)
    checkpointer.save(1, [values, torch.from_numpy(values)])
    into = [torch.zeros(3, dtype=torch.complex128), np.zeros(3, np.complex128)]
    checkpointer.load(into=into)
    assert into[0].tolist() == values.tolist()
    assert into[1].tolist() == values.tolist()


@pytest.mark.parametrize("wrap", [lambda inner: (inner,), lambda inner: [inner]])
def test_what_is_nested_too_deeply_to_be_loaded_is_not_saved(wrap: Any) -> None:
    state: Any = 1
    depth = 0
    with pytest.raises(InvalidInputError, match="nested too deeply to be saved"):  # noqa: PT012
        while depth < 10_000:
            state = wrap(state)
            encoded = encode(state, allow_pickle=False)
            back = decode(encoded.rest, lambda _: None, allow_pickle=False)
            depth += 1
    assert depth > 100
    for _ in range(depth):
        (back,) = back
    assert back == 1


def test_two_surrogates_in_a_row_stay_two(checkpointer: Checkpointer) -> None:
    state = {"\ud83d\ude00": "\ud83d\ude00", "\U0001f600": "\U0001f600", "\ude00": "\ude00\ud83d"}
    assert round_trip(checkpointer, state) == state


def test_items_without_bytes_come_back(checkpointer: Checkpointer) -> None:
    (back,) = round_trip(checkpointer, [np.empty((2, 3), "V0")])
    assert (back.shape, back.dtype) == ((2, 3), np.dtype("V0"))


def test_a_tensor_to_fill_that_the_checkpoint_lacks_is_named(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, {"a": torch.ones(4)})
    first = torch.zeros(4)
    with pytest.raises(InvalidInputError, match=r"state\['c'\]"):
        checkpointer.load(into={"a": first, "c": torch.zeros(2)})
    assert first.sum() == 0


def test_a_state_in_numpy_fills_tensors_of_torch(checkpointer: Checkpointer) -> None:
    checkpointer.save(1, [np.arange(5.0)])
    into = [torch.zeros(5, dtype=torch.float64)]
    assert checkpointer.load(into=into)[0] is into[0]
    assert into[0].tolist() == [0, 1, 2, 3, 4]
