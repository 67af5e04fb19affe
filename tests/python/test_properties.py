"""Round trips of any length, offset and order, as hypothesis finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forebay
from conftest import pattern

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPTIONS: list[dict[str, Any]] = [
    {},
    {"direct": "never"},
    {"block_size": 4096, "queue_depth": 2, "intra_op_parallelism": 3},
    {"engine": "threads", "page_cache": False},
]
EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 65_536]

lengths = st.one_of(st.sampled_from(EDGES), st.integers(0, 200_000))
several = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def any_handle(request: pytest.FixtureRequest) -> Iterator[forebay.Handle]:
    with forebay.Handle(**request.param) as handle:
        yield handle


@several
@given(length=lengths, shift=st.integers(0, 5000), seed=st.integers(0, 9))
def test_what_is_stored_is_loaded(
    any_handle: forebay.Handle, path: Path, length: int, shift: int, seed: int
) -> None:
    data = pattern(length + shift, seed)[shift:]
    any_handle.store(data, path)
    assert path.read_bytes() == data.tobytes()
    back = np.full(length + shift, 0xAA, np.uint8)
    any_handle.load(back[shift:], path)
    assert np.array_equal(back[shift:], data)
    assert (back[:shift] == 0xAA).all()


@several
@given(
    size=lengths,
    writes=st.lists(st.tuples(lengths, lengths, st.integers(0, 9)), min_size=1, max_size=4),
)
def test_writes_in_place_are_those_of_a_byte_array(
    any_handle: forebay.Handle, path: Path, size: int, writes: list[tuple[int, int, int]]
) -> None:
    model = bytearray(pattern(size, 11).tobytes())
    path.write_bytes(model)
    for offset, length, seed in writes:
        data = pattern(length, seed).tobytes()
        any_handle.store(data, path, offset=offset)
        if length:
            model.extend(bytes(max(0, offset + length - len(model))))
            model[offset : offset + length] = data
    assert path.read_bytes() == model


@several
@given(size=lengths, reads=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5))
def test_many_loads_are_slices_of_the_file(
    any_handle: forebay.Handle, path: Path, size: int, reads: list[tuple[int, int]]
) -> None:
    content = pattern(size).tobytes()
    path.write_bytes(content)
    inside = [(offset, length) for offset, length in reads if offset + length <= size]
    backs = [bytearray(length) for _, length in inside]
    any_handle.load_many(
        [(back, path, offset) for back, (offset, _) in zip(backs, inside, strict=True)]
    )
    assert backs == [content[offset : offset + length] for offset, length in inside]
