"""Pinned tensors as DeepSpeed uses them: one handle gives out, another knows, a third frees."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import forebay
from conftest import run_python
from forebay.deepspeed.pin_memory import pin_handle

torch: Any = pytest.importorskip("torch", exc_type=(ImportError, OSError, ValueError))


def used_bytes() -> int:
    return forebay._forebay.Pool.shared().stats()["used_bytes"]


def test_all_handles_know_of_all_pinned_tensors() -> None:
    giver, other, pins = forebay.aio_handle(), forebay.aio_handle(), pin_handle()
    for make, free in (
        (giver.new_cpu_locked_tensor, other.free_cpu_locked_tensor),
        (giver.new_cpu_locked_tensor, pins.free_cpu_locked_tensor),
        (pins.new_cpu_locked_tensor, other.free_cpu_locked_tensor),
    ):
        tensor = make(1003, torch.zeros(1, dtype=torch.bfloat16))
        assert tensor.dtype == torch.bfloat16
        assert tensor.shape == (1003,)
        for handle in (giver, other, pins):
            assert handle.is_pinned(tensor)
            assert not handle.is_pinned(torch.zeros(1003))
        assert free(tensor) is True
        assert free(tensor) is False
        assert tensor.numel() == 0


def test_a_part_of_a_pinned_tensor_is_pinned_and_what_goes_beyond_is_not() -> None:
    handle = forebay.aio_handle()
    tensor = handle.new_cpu_locked_tensor(1000, torch.zeros(1))
    assert handle.is_pinned(tensor[:10])
    assert handle.is_pinned(tensor[999:])
    assert handle.is_pinned(tensor.view(10, 100)[3])
    assert handle.is_pinned(tensor.numpy()[7:])
    memory = np.frombuffer(bytearray(8192), np.uint8)
    beyond = torch.from_numpy(memory)
    assert not handle.is_pinned(beyond)
    # Only the beginning frees, as in DeepNVMe.
    assert handle.free_cpu_locked_tensor(tensor[1:]) is False
    view = tensor[5:]
    view.fill_(3)
    assert handle.free_cpu_locked_tensor(tensor[:1]) is True
    assert not handle.is_pinned(view)
    assert (view == 3).all()
    assert tensor.numel() == 0


def test_memory_goes_back_with_its_last_view_and_is_not_pinned_when_used_again() -> None:
    handle = forebay.aio_handle()
    before = used_bytes()
    tensor = handle.new_cpu_locked_tensor(1 << 20, torch.zeros(1))
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert handle.is_pinned(view)
    assert used_bytes() == before + (4 << 20)
    address = view.data_ptr()
    del view
    gc.collect()
    assert used_bytes() == before
    assert pin_handle().free_cpu_locked_tensor_by_ptr(address - 40) is False
    array = handle.new_cpu_locked_tensor(5000, np.zeros(1))
    part = array[100:]
    del array
    gc.collect()
    assert handle.is_pinned(part)


def test_freeing_by_address_leaves_views_usable() -> None:
    pins = pin_handle()
    tensor = pins.new_cpu_locked_tensor(1000, torch.zeros(1, dtype=torch.float64))
    view = tensor.view(10, 100)
    view.fill_(2)
    address = tensor.data_ptr()
    assert pins.free_cpu_locked_tensor_by_ptr(address) is True
    assert pins.free_cpu_locked_tensor_by_ptr(address) is False
    assert not pins.is_pinned(view)
    assert (view == 2).all()
    with pytest.raises(TypeError, match="address"):
        pins.free_cpu_locked_tensor_by_ptr("0x1000")  # type: ignore[arg-type]


def test_a_view_refers_to_the_tensor_that_was_given_out() -> None:
    # DeepSpeed keeps a view and frees when the tensor under it is gone.
    tensor = pin_handle().new_cpu_locked_tensor(100, torch.zeros(1))
    assert tensor._base is None
    assert tensor[:50]._base is tensor
    assert tensor[:50].view(5, 10)._base is tensor


def test_many_tensors_are_told_apart() -> None:
    handle = forebay.aio_handle()
    tensors = [handle.new_cpu_locked_tensor(100 + index, torch.zeros(1)) for index in range(200)]
    for tensor in tensors[::2]:
        assert handle.free_cpu_locked_tensor(tensor) is True
    assert all(handle.is_pinned(tensor) for tensor in tensors[1::2])
    assert all(handle.free_cpu_locked_tensor(tensor) for tensor in tensors[1::2])


def test_a_forked_child_knows_of_none() -> None:
    run_python(
        """
        import forebay, os, torch, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        handle = forebay.aio_handle()
        tensor = handle.new_cpu_locked_tensor(100, torch.zeros(1))
        child = os.fork()
        if child == 0:
            known = handle.is_pinned(tensor)
            own = handle.new_cpu_locked_tensor(100, torch.zeros(1))
            os._exit(0 if handle.is_pinned(own) and not known else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert handle.is_pinned(tensor)
        """
    )


@pytest.mark.parametrize(
    ("on", "off"),
    [("true", "false"), ("TRUE", "False"), (True, False), (1, 0), (np.True_, np.False_)],
)
def test_switches_are_what_they_say(on: Any, off: Any) -> None:
    assert forebay.aio_handle(single_submit=on).get_single_submit() is True
    assert forebay.aio_handle(overlap_events=on).get_overlap_events() is True
    assert forebay.aio_handle(single_submit=off).get_single_submit() is False
    assert forebay.aio_handle(1 << 20, 8, off, off, 1).get_overlap_events() is False


def test_what_isnt_a_switch_or_a_number_is_named(tmp_path: Any) -> None:
    for wrong in ("yes", "auto", "", 2, None, [], np.zeros(1)):
        with pytest.raises(TypeError, match="single_submit must be True or False"):
            forebay.aio_handle(single_submit=wrong)
    for name in ("queue_depth", "intra_op_parallelism"):
        for wrong in ("auto", 1.5, None):
            with pytest.raises(TypeError, match=name):
                forebay.aio_handle(**{name: wrong})
    with pytest.raises(ValueError, match="block_size"):
        forebay.aio_handle(block_size="auto")  # type: ignore[arg-type]
    handle = forebay.aio_handle(block_size="1MiB")  # type: ignore[arg-type]
    assert handle.get_block_size() == 1 << 20
    assert handle.pwrite(np.zeros(10), tmp_path / "a", "false", "true") == 0  # type: ignore[arg-type]
    assert handle.wait() == 1
    with pytest.raises(TypeError, match="validate"):
        handle.read(np.zeros(10), tmp_path / "a", "no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="async"):
        handle.pread(np.zeros(10), tmp_path / "a", False, "no")  # type: ignore[arg-type]
